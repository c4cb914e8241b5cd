"""Servers on real sockets, with tiny models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from cacheclip_serve.access import Access
from cacheclip_serve.server import Server
from cacheclip_serve.transformers import TransformersBackend

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.config import EngineConfig
from tests.conftest import CACHECLIP

NAME = "tiny"


class Served:
    """A running server, and the engine in it."""

    def __init__(self, server: Server, backend: TransformersBackend) -> None:
        self.server, self.backend = server, backend
        self.url = f"{server.address}/v1"
        self.client = httpx.Client(base_url=server.address, timeout=60)

    @property
    def engine(self) -> CacheClipEngine:
        return self.backend.engine("default")

    def chat(self, content: str = "What is it?", **fields: Any) -> httpx.Response:
        """Ask; greedy, and a short answer."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body)


@contextmanager
def running(config: EngineConfig, *, hide_hits: bool = False, **settings: Any) -> Iterator[Served]:
    """A server in a thread, ready to answer."""
    ready, failures = threading.Event(), []
    backend = TransformersBackend(config, hide_hits=hide_hits)
    settings = {"name": NAME, "access": Access(config.namespace), "port": 0, **settings}
    server = Server(backend, on_ready=lambda address: ready.set(), **settings)

    def run() -> None:
        try:
            server.run()
        except Exception as error:
            failures.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        assert not failures, failures
        served = Served(server, backend)
        with served.client:
            yield served
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def config(tool_model: str, tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Settings of the server's engine: a model that knows tools, and a store."""
    store = str(tmp_path_factory.mktemp("serving") / "store")
    return EngineConfig(primary=tool_model, auxiliary=tiny_models["auxiliary"], store=store, **CACHECLIP)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(config: EngineConfig) -> Iterator[Served]:
    """A server without keys."""
    with running(config) as found:
        yield found
