"""What every request passes before its body is understood: the host that it names, and the size of its body."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from .errors import RequestError

__all__ = ["check_host", "read_body"]

_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_READ_AT_MOST = 4
"""Times the limit of a body, after which the connection is cut."""


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


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """The body of a request, of at most ``most`` bytes.

    Raises:
        RequestError: it is no JSON by its header (415), or too large (413).
        TimeoutError: it did not come within ``seconds``.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            f"the body must be JSON with 'Content-Type: application/json', got {kind[:80]!r}.", status=415
        )
    found, read = bytearray(), 0
    async with asyncio.timeout(seconds):
        # what is too much is read and dropped, because many clients read no response before they have sent all
        async for piece in request.stream():
            read += len(piece)
            if read <= most:
                found += piece
            elif read > _READ_AT_MOST * most:
                break
    if read <= most:
        return bytes(found)
    raise RequestError(
        f"the body is larger than {most} bytes, the most that this server takes (max_body_bytes).",
        status=413,
        code="body_too_large",
        headers={"connection": "close"},
    )
