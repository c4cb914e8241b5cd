"""Starts the server, and stops it."""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import expanded

from .access import Access, check_origins
from .app import App, Limits
from .backend import ServingBackend
from .connections import KEEP_S, allow_many_files, timed
from .embeddings import EmbeddingService
from .inspection import Inspection


class Server:
    """The server of one backend, on one address.

    SIGTERM and SIGINT stop it: it takes no new questions, finishes those it has, and returns. A second signal stops at
    once.
    """

    def __init__(
        self,
        backend: ServingBackend,
        *,
        name: str,
        access: Access,
        limits: Limits | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        origins: Sequence[str] = (),
        aliases: Sequence[str] = (),
        drops_tools: bool = False,
        embeddings: EmbeddingService | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        inspection: Inspection | None = None,
        on_ready: Callable[[str], None] = lambda address: None,
    ) -> None:
        """
        Args:
            name: served name of the model.
            port: 0 takes a free one.
            origins: web pages that may ask through a browser.
            aliases: other names of the model.
            drops_tools: leave tools out that need not be called, if the chat template has no place for them.
            embeddings: answers ``/v1/embeddings``; None: nobody does.
            temperature: of requests that state none; 1 is OpenAI's.
            max_tokens: most tokens of a chat answer whose request states none; None: the model's context.
            inspection: keeps the last answers for the page ``/inspect``; None: there is none.
            on_ready: called with the address when the model is loaded.

        Raises:
            ConfigurationError: other machines could reach the address, and no API key is set, or there is a page.
        """
        check_reachable(host, access, inspects=inspection is not None)
        check_origins(origins, access)
        self._failure: Exception | None = None
        self.app = App(
            backend,
            name,
            access,
            limits or Limits(),
            any_host=not access.is_open,
            origins=tuple(origins),
            aliases=tuple(aliases),
            drops_tools=drops_tools,
            embeddings=embeddings or EmbeddingService(),
            temperature=temperature,
            max_tokens=max_tokens,
            inspection=inspection,
            on_ready=lambda: on_ready(self.address),
            on_failure=self._fail,
        )
        config = _config(self.app, host, port)
        self._host, self._port, self._config = host, port, config
        self._uvicorn = _Uvicorn(config, self._stopping)
        self.address = ""
        """``http://host:port``, once it listens."""

    def run(self) -> None:
        """Serve until a signal comes, or :meth:`stop`. Raises ConfigurationError: the address is taken; the errors of
        the backend's start."""
        allow_many_files()
        listening = _listen(self._host, self._port)
        port = listening.getsockname()[1]
        self.address = address_of(self._host, port)
        before = None
        if threading.current_thread() is threading.main_thread():
            # uvicorn raises the signal again when it has stopped, and by then it has done its work
            before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            self._uvicorn.run(sockets=[listening])
        finally:
            listening.close()
            if before is not None:
                signal.signal(signal.SIGTERM, before)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop like a signal: what runs is finished first."""
        self._stopping()
        self._uvicorn.should_exit = True

    def _stopping(self) -> None:
        self.app.is_stopping = True

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Tells when a signal comes, before it waits for running answers."""

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stopping()
        super().handle_exit(sig, frame)


def _config(app: App, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        app.asgi,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=round(app.limits.request_s) + 1,
        timeout_keep_alive=KEEP_S,
        h11_max_incomplete_event_size=2**16,
        http=timed(H11Protocol),
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4][:2], family=found[0][0], backlog=1024)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {host}:{port}: {error.strerror or error}. Choose another --port."
        ) from error


def check_reachable(host: str, access: Access, *, inspects: bool = False) -> None:
    """Raise ConfigurationError if other machines could reach the address, and no API key is set, or if it has pages
    that show prompts."""
    if inspects and not _is_loopback(host):
        raise ConfigurationError(
            f"--inspect shows prompts and answers, at local addresses only, got --host {host}. Leave --host out."
        )
    if access.is_open and not _is_loopback(host):
        raise ConfigurationError(
            f"host {host!r} can be reached from other machines, and no API key is set, so anybody could ask. Set "
            "--api-key or --tenants, or leave --host out."
        )


def address_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def served_name(primary: str) -> str:
    """The name under which a model is served if none is given: its own, or the last part of its path."""
    path = expanded(primary)
    return path.resolve().name if path.exists() else primary
