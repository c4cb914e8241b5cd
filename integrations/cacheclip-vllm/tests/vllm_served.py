"""The middleware before an application in vLLM's place, on a socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from cacheclip_testing.plugin import CACHECLIP, CHUNKS, rag_prompt
from cacheclip_vllm.middleware import CacheClip
from cacheclip_vllm.settings import ServerSettings
from vllm_inner import Inner

from cacheclip_rag import CacheClipEngine, EngineConfig

PROMPT = rag_prompt(CHUNKS)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SEAL, OWN, NORTH, BOTH = "seal-of-the-server", "server-key-1", "north-key-11", "both-key-111"
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


class Served:
    """The middleware before an inner application, on a socket."""

    def __init__(self, address: str, middleware: CacheClip, inner: Inner) -> None:
        self.address, self.middleware, self.inner = address, middleware, inner
        self.client = httpx.Client(base_url=address, timeout=60)

    def ask(self, content: Any = PROMPT, key: str | None = None, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.client.post(CHAT, json={"messages": messages, **body}, headers=headers)

    def complete(self, prompt: Any = PROMPT, **body: Any) -> httpx.Response:
        return self.client.post(COMPLETION, json={"prompt": prompt, **body})

    def events(self, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
        prompt = {"prompt": PROMPT} if path == COMPLETION else {"messages": [{"role": "user", "content": PROMPT}]}
        text = self.client.post(path, json={**prompt, "stream": True, **body}).text
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@contextmanager
def running(settings: ServerSettings, sequences: int | None = None) -> Iterator[Served]:
    """``sequences``: that vLLM computes at once."""
    inner = Inner()
    if sequences:
        inner.app.state.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=sequences))
    middleware = CacheClip(inner.app, settings)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await middleware({**scope, "app": inner.app}, receive, send)  # as Starlette calls its middleware

    config = uvicorn.Config(application, port=0, log_config=None, lifespan="on", ws="none")
    server = inner.app.state.server = uvicorn.Server(config)  # as vLLM has it
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        served = Served(f"http://127.0.0.1:{port}", middleware, inner)
        with served.client:
            yield served
    finally:
        inner.gate.set()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def config(tool_model: str, tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A model that knows tools, and the chunks of two tenants. The second has one, of which another holds a part."""
    store = str(tmp_path_factory.mktemp("vllm") / "store")
    options = {"primary": tool_model, "auxiliary": tiny_models["auxiliary"], "store": store, **CACHECLIP}
    engine = CacheClipEngine(**options)
    engine.precompute(CHUNKS)
    CacheClipEngine(**options, namespace="north").precompute(CHUNKS[:1])
    return engine.config
