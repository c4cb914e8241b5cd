"""Connections to the server. One that sends no request in time is closed, and of too many one of the client that has
most, so that those who only hold connections keep nobody else out."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any

KEEP_S = 3660
"""Seconds for which a connection is kept for its next request: longer than any proxy keeps it, which would lose a
request that it sends while the connection is closed. nginx and AWS keep theirs for 60 seconds, Go's clients for 90,
Google for 600, and Envoy for an hour."""
_HEAD_S = 15.0
"""Seconds for the line and the headers of a request."""
_MOST_EXPECTING = 1024
"""Most connections that have sent no whole head of their next request; of more, the oldest one of the client that has
most is closed."""
_MOST_FILES = 2**16


class _TimedRequests(asyncio.Protocol):
    """What a connection that limits requests in time does before one of uvicorn's kinds does it."""

    client: tuple[str, int] | None
    conn: Any
    cycle: Any
    loop: asyncio.AbstractEventLoop
    server_state: Any
    transport: asyncio.Transport

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._expecting: dict[_TimedRequests, None] = self.server_state.__dict__.setdefault("expecting", {})
        self._timer: asyncio.TimerHandle | None = None
        """Until a head must be there, or the body of a request that was refused; None: nothing of it has come, or
        all."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect()
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._answers and self._timer is None:
            data = data.lstrip(b"\r\n")  # RFC 9112, 2.2: blank lines before a request are none
            if not data:
                return
        super().data_received(data)
        if self._answers:
            self._stop_expecting()
        elif self._timer is None:
            self._limit_head()

    def on_response_complete(self) -> None:
        self._drop_blank_lines()
        super().on_response_complete()  # type: ignore[misc]
        if not self._answers:
            self._expect()
            if self.cycle.more_body or self._has_begun:
                self._limit_head()

    @property
    def _answers(self) -> bool:
        """Whether the head of a request has come that is not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_begun(self) -> bool:
        """Whether a part of the next head came with the last request. httptools does not tell."""
        return hasattr(self, "conn") and bool(self.conn.trailing_data[0])

    def _drop_blank_lines(self) -> None:
        """Those that came with the last request: h11 would refuse them as the next one. httptools does not."""
        if not hasattr(self, "conn"):
            return
        import h11  # this connection's

        if self.conn.their_state is h11.DONE:
            rest = self.conn.trailing_data[0]
            self.conn._receive_buffer.maybe_extract_at_most(len(rest) - len(rest.lstrip(b"\r\n")))

    def _expect(self) -> None:
        self._stop_expecting()
        self._expecting[self] = None
        if len(self._expecting) > _MOST_EXPECTING:
            ((busiest, _),) = Counter(each._host for each in self._expecting).most_common(1)
            next(each for each in self._expecting if each._host == busiest)._close()

    @property
    def _host(self) -> str | None:
        return self.client[0] if self.client else None

    def _limit_head(self) -> None:
        self._timer = self.loop.call_later(_HEAD_S, self._close)

    def _stop_expecting(self) -> None:
        self._expecting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._stop_expecting()
        self.transport.close()


def timed(kind: Any) -> Any:
    """Connections of one of uvicorn's kinds whose requests must come in time. uvicorn itself limits only the silence
    between two requests (to :data:`KEEP_S`, which it must be told)."""
    return type("Connection", (_TimedRequests, kind), {})


def allow_many_files() -> None:
    """Let this process have as many connections as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft not in (resource.RLIM_INFINITY,) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
