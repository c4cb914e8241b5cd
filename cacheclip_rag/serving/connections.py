"""Connections to the server. One that sends no request in time is closed, so that those who only hold connections keep
nobody else out."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

_HEAD_S = 15.0
"""Seconds for the line and the headers of a request."""
_MOST_EXPECTING = 1024
"""Most connections that have sent no whole head yet; of more, the oldest one is closed."""
_MOST_FILES = 2**16


def timed(kind: Any) -> Any:
    """Connections of one of uvicorn's kinds whose requests must come in time. uvicorn itself limits only the silence
    between two requests."""

    class Connection(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._expecting: dict[Connection, None] = self.server_state.__dict__.setdefault("expecting", {})
            self._timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_expecting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._answers:
                self._stop_expecting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._answers:
                self._expect()

        @property
        def _answers(self) -> bool:
            """Whether the head of a request has come that is not answered."""
            return self.cycle is not None and not self.cycle.response_complete

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

    return Connection


def allow_many_files() -> None:
    """Let this process have as many connections as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft not in (resource.RLIM_INFINITY,) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
