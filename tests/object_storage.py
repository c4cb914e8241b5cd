"""An S3 server in this process, for the tests of shared stores."""

from __future__ import annotations

import importlib
import logging
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_NEEDED = ("obstore", "deltalake", "pyarrow", "moto.server")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """Address of the server. Skips loudly without the extra; ``make test`` installs it."""
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name} is not installed: pip install -e '.[shared]' --group test")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


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
