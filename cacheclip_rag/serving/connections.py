"""Connections to the server. One that sends no request in time is closed, so that those who only hold connections keep
nobody else out."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD_S = 15.0
"""Seconds for the line and the headers of a request."""
_MOST_EXPECTING = 1024
"""Most connections that have sent no whole head yet; of more, the oldest one is closed."""
_MOST_FILES = 2**16


class Connection(H11Protocol):
    """A connection of uvicorn's whose request must come in time. uvicorn itself limits only the silence between two
    requests."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._expecting: dict[Connection, None] = vars(self.server_state).setdefault("expecting", {})
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self._stop_expecting()

    def on_response_complete(self) -> None:
        self._expect()
        super().on_response_complete()

    def _expect(self) -> None:
        self._stop_expecting()
        self._timer = self.loop.call_later(_HEAD_S, self._close)
        self._expecting[self] = None
        if len(self._expecting) > _MOST_EXPECTING:
            next(iter(self._expecting))._close()

    def _stop_expecting(self) -> None:
        self._expecting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _close(self) -> None:
        self._stop_expecting()
        self.transport.close()


def allow_many_files() -> None:
    """Let this process have as many connections as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft not in (resource.RLIM_INFINITY,) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
