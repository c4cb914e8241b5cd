"""An S3 server, for the tests of shared stores. A process of its own: vLLM looks at every module of its process, and
some of the server's may not be looked at."""

from __future__ import annotations

import importlib.util
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_NEEDED = ("obstore", "deltalake", "pyarrow", "moto")
_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), sep=":", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """Address of the server. Skips loudly without the extra; ``make test`` installs it."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[shared]' --group test")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        yield f"http://{server.stdout.readline().strip()}"
        server.stdin.close()  # it ends


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
