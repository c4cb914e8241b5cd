"""An S3 server for tests of shared stores: moto's, in a process of its own, because vLLM looks at every module of its
process, and some of moto's may not be looked at."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from cacheclip_rag.plugins import python_command, python_environment

_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), sep=":", flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Address and process of a server without buckets. It takes any key. Needs ``moto[server]``."""
    pipe = subprocess.PIPE
    command, environment = python_command("-c", _SERVER), python_environment()
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://{server.stdout.readline().strip()}", server
        finally:
            server.kill()  # also one that was stopped
