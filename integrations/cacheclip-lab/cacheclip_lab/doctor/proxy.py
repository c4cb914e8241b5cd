"""A proxy that writes the bodies of requests to a file, and passes everything on."""

from __future__ import annotations

import http.client
import json
import logging
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cacheclip_rag import ConfigurationError

logger = logging.getLogger(__name__)

_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
"""Headers that concern one connection (RFC 9110, section 7.6.1)."""
_QUESTIONS = ("/completions", "/messages", "/responses")
"""Ends of paths whose requests are recorded."""
_MOST_BYTES = 1 << 28
_TIMEOUT_S = 3600


def proxy(file: Path, target: str, port: int = 8900) -> RecordingProxy:
    """A server on this machine that passes requests on to ``target``, such as ``http://localhost:8000``, and appends
    JSON bodies to a file that only its owner may read. Headers, and so keys, are not written. If ``port`` is taken, it
    listens on any free one.

    Raises:
        ConfigurationError: a wrong URL, or the file cannot be written.
    """
    url = urlsplit(target)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError(f"--record must be a URL such as http://localhost:8000, got {target!r}.")
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.fchmod(opened, 0o600)
        finally:
            os.close(opened)
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error}. Name another file.") from error
    try:
        return RecordingProxy(port, file, target)
    except OSError:
        return RecordingProxy(0, file, target)


class RecordingProxy(ThreadingHTTPServer):
    """See :func:`proxy`."""

    def __init__(self, port: int, file: Path, target: str) -> None:
        self.url, self._file, self._lock = urlsplit(target), file, threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        return connection(str(self.url.hostname), self.url.port, timeout=_TIMEOUT_S)

    def write(self, path: str, body: bytes) -> None:
        """Record the body of a question. A request is passed on, whatever happens here."""
        if not path.partition("?")[0].rstrip("/").endswith(_QUESTIONS):
            return
        try:
            line = json.dumps(json.loads(body)) + "\n"
            with self._lock, self._file.open("a", encoding="utf-8") as target:
                target.write(line)
        except (ValueError, RecursionError, OSError) as error:
            logger.warning("a request to %s is not recorded: %s", path, error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RecordingProxy

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def pass_on(self) -> None:
        self.close_connection = True
        stated = self.headers.get("Content-Length") or "0"
        length = int(stated) if stated.isdecimal() else _MOST_BYTES + 1
        if length > _MOST_BYTES or "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.send_error(413, "The proxy takes bodies of a stated length, up to 256 MiB")
            return
        body = self.rfile.read(length)
        self.server.write(self.path, body)
        upstream = self.server.connect()
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            upstream.request(self.command, self.server.url.path.rstrip("/") + self.path, body, headers)
            answer = upstream.getresponse()
        except (OSError, http.client.HTTPException):
            self.send_error(502, "The server behind the proxy does not answer")
        else:
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while part := answer.read1(1 << 16):
                self.wfile.write(part)
                self.wfile.flush()
        finally:
            upstream.close()

    do_GET = do_POST = do_DELETE = do_PUT = do_OPTIONS = pass_on
