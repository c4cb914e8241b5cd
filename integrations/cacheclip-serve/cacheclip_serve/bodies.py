"""What every request passes before its body is understood: the host that it names, and the size of its body."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from .bounds import LARGE_BODY
from .errors import RequestError
from .queue import Queue

_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_READ_AT_MOST = 4
"""Times the limit of a body, after which the connection is cut."""
_FIRST_S, _PACE = 30.0, 2**15
"""Seconds in which a body must begin to come, and bytes a second from then on."""
_MOST_AT_ONCE = 256
_MOST_HELD = 2**28
"""Bytes of all bodies that are being read."""
_MOST_LARGE = 256
"""Large bodies of one client that wait to be parsed."""

T = TypeVar("T")


def check_host(request: Request) -> None:
    """Raise RequestError unless the request names this machine, so that no web page can ask through a browser."""
    host = request.headers.get("host", "")
    name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0].lower()
    if name not in _LOCAL:
        raise RequestError(
            "this server answers requests to localhost only, because it has no API key.",
            status=403,
            kind="permission_error",
        )


class Bodies:
    """The bodies that are being read. Whoever sends one too slowly is cut off. If there are too many, so is the first
    one of the client that sends the most of them. Used by one event loop."""

    def __init__(self, most: int) -> None:
        """``most``: bytes of one body."""
        self._most = most
        self._most_held = max(_MOST_HELD, 4 * most)
        self._reading: dict[asyncio.Timeout, tuple[str, int]] = {}
        """Whose body each one is and how much of it has come, the oldest first."""
        self._large = Queue(1, _MOST_LARGE)
        """Large bodies, which are parsed one by one."""

    async def parsed(self, request: Request, client: str, parse: Callable[[bytes], T]) -> T:
        """What ``parse`` makes of the body of a request; a large body is parsed in a thread. Raises RequestError: as of
        :meth:`read`, or too many large bodies of the client wait (429)."""
        came = await self.read(request, client)
        if len(came) < LARGE_BODY:
            return parse(came)
        async with self._large.place(client):
            return await asyncio.to_thread(parse, came)

    async def read(self, request: Request, client: str) -> bytes:
        """The body of a request. Raises RequestError: it is no JSON by its header (415), too large (413), or does not
        come in time (408)."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                f"the body must be JSON with 'Content-Type: application/json', got {kind[:80]!r}.", status=415
            )
        began = asyncio.get_running_loop().time()
        limit = asyncio.timeout_at(began + _FIRST_S)
        try:
            async with limit:
                found = await self._pieces(request, client, limit, began)
        except TimeoutError as error:
            raise RequestError(
                "the body did not come in time.", status=408, code="timeout", headers={"connection": "close"}
            ) from error
        finally:
            self._reading.pop(limit, None)
        if found is None:
            raise RequestError(
                f"the body is larger than {self._most} bytes, the most that this server takes (max_body_bytes).",
                status=413,
                code="body_too_large",
                headers={"connection": "close"},
            )
        return bytes(found)

    async def _pieces(self, request: Request, client: str, limit: asyncio.Timeout, began: float) -> bytearray | None:
        found, read = bytearray(), 0
        self._reading[limit] = client, 0
        # what is too much is read and dropped, because many clients read no response before they have sent all
        async for piece in request.stream():
            read += len(piece)
            if read > _READ_AT_MOST * self._most:
                break
            if read > self._most:
                found.clear()
            else:
                found += piece
            if limit in self._reading:  # else it was cut off, and is about to be told
                limit.reschedule(began + _FIRST_S + read / _PACE)
                self._reading[limit] = client, len(found)
                self._make_room()
        return found if read <= self._most else None

    def _make_room(self) -> None:
        while len(self._reading) > _MOST_AT_ONCE or sum(size for _, size in self._reading.values()) > self._most_held:
            (most, _), *_ = Counter(client for client, _ in self._reading.values()).most_common(1)
            first = next(limit for limit, (client, _) in self._reading.items() if client == most)
            del self._reading[first]
            first.reschedule(0.0)
