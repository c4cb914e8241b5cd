"""Servers on real sockets, and what tests of servers do to them."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cacheclip_serve import Access, Queue, Server, TransformersBackend

from cacheclip_rag import CacheClipEngine, EngineConfig

NAME = "tiny"
REPOSITORY = Path(__file__).parents[3]


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
    backend = TransformersBackend(config, hide_hits=hide_hits, inspection=settings.get("inspection"))
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


def until(condition: Callable[[], object]) -> None:
    """Wait for it, 30 seconds at most."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came to this"
        time.sleep(0.005)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Questions:
    """Questions of tenants: who runs, in the order in which they got their place."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.started, self.ended = queue, list[str](), set[str]()
        self._begun = dict[str, Callable[[], None]]()
        self._ends = dict[str, asyncio.Event]()
        self._tasks = dict[str, asyncio.Task[None]]()

    async def ask(self, *names: str, num_bytes: int = 0, **how: Any) -> None:
        """``a1`` is a question of tenant ``a``."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._run(name, num_bytes, how))
        await settle()

    async def _run(self, name: str, num_bytes: int, how: dict[str, Any]) -> None:
        async with self.queue.place(name[0], num_bytes, **how) as begun:
            self.started.append(name)
            self._begun[name] = begun
            await self._ends[name].wait()

    async def first_token(self, name: str) -> None:
        self._begun[name]()
        await settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self.ended.add(name)
            self._ends[name].set()
            await self._tasks[name]
            await settle()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()


HALVES = {
    "nothing": b"",
    "half a line": b"POST /v1/chat/comp",
    "half a head": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ",
    "half a second request": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nG",
    "refused before its body": b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n",
}


def wait_for_the_end(address: str, sent: bytes) -> None:
    """Send something, and wait until the server closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent)
        while connection.recv(4096):
            pass


class Broken(Exception):
    """A planted failure."""


def fail_at(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Let one call of a function fail; the calls before and after it are as always."""
    calls, called = 0, getattr(owner, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Broken(f"{name} failed at call {at}")
        return called(*arguments, **options)

    patch.setattr(owner, name, failing)


def _of_benchmarks() -> Any:
    """``benchmarks/applications.py``, which plays the requests of applications."""
    spec = importlib.util.spec_from_file_location("benchmark_applications", REPOSITORY / "benchmarks/applications.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


_applications = _of_benchmarks()
play, Unexpected = _applications.play, _applications.Unexpected
