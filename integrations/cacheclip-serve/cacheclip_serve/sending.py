"""Answers on their way to a client: computed while they are sent, and stopped when the client hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cacheclip_rag import Answer, Event

from .errors import RequestError, error_of
from .replies import Reply, as_json

logger = logging.getLogger(__name__)

_SEND_S = 30.0
"""Seconds in which a client must take what it is sent."""
_PING_S = 10.0
"""Seconds of silence after which a stream says that it is alive, before proxies cut it off."""
_PING = b": waiting\n\n"


class AnswerResponse(Response):
    """A response that is computed while it is sent. It stops when the client hangs up."""

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[Event, None]],
        count: int,
        reply: Reply,
        *,
        is_stream: bool,
        request_s: float,
        on_disconnect: Callable[[], None],
    ) -> None:
        """``events``: of ``count`` answers, one after the other; of one, if it is a stream. ``request_s``: seconds for
        all of them. ``on_disconnect``: called if the client hangs up before the end."""
        super().__init__()
        self._events, self._count, self._reply, self._is_stream = events, count, reply, is_stream
        self._request_s, self._count_disconnect = request_s, on_disconnect
        self._answers: list[Answer] = []
        self.done: Callable[..., None] = lambda status, answers=(): None
        self._sending = asyncio.Lock()
        self._sent_at = time.monotonic()
        self._began = False
        """Whether the beginning of the response was sent."""
        self._opened = False
        """Whether the first chunk was sent."""
        self._has_ended = False
        """Whether the end of the response was sent, or is being sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = _in_time(send)
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_left(receive))
        pinging = asyncio.create_task(self._ping(send))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if self._has_ended:
                await answering
            elif not answering.done():
                self._count_disconnect()
                self.done(499)
        finally:
            for task in (answering, leaving, pinging):
                task.cancel()
            await asyncio.gather(answering, leaving, pinging, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        give = self._chunks if self._is_stream else self._whole
        try:
            async with (
                asyncio.timeout(self._request_s),
                aclosing(self._events()) as events,
            ):
                async for event in events:  # also after the last: what was missing is stored then
                    if event.answer is not None:
                        self._answers.append(event.answer)
                        self._has_ended = len(self._answers) == self._count
                        if self._has_ended:
                            self.done(200, self._answers)
                    await give(event, scope, receive, send)
        except ClientDisconnect:
            self._has_ended = True
            self._count_disconnect()
            self.done(499)
        except Exception as error:
            await self._refuse(error, scope, receive, send)

    async def _whole(self, event: Event, scope: Scope, receive: Receive, send: Send) -> None:
        if event.answer is not None and self._has_ended:
            response = json_response(self._reply.whole(self._answers), {"x-request-id": self._reply.id})
            await response(scope, receive, send)

    async def _chunks(self, event: Event, scope: Scope, receive: Receive, send: Send) -> None:
        chunks = [*(() if self._opened else self._reply.opening()), *self._reply.chunks(event)]
        self._opened = True
        text = b"".join(map(self._reply.sent, chunks))
        if event.answer is not None:
            await self._write(send, text + self._reply.ended, more=False)
        elif text:
            await self._write(send, text)

    async def _ping(self, send: Send) -> None:
        """Say now and then that a stream is alive. After the first time, an error can have no status any more."""
        while self._is_stream and not self._has_ended:
            silent_s = time.monotonic() - self._sent_at
            if silent_s >= _PING_S:
                await self._write(send, _PING)
            else:
                await asyncio.sleep(_PING_S - silent_s)

    async def _write(self, send: Send, text: bytes, *, more: bool = True) -> None:
        """Send a part of a stream, and before the first one its headers."""
        async with self._sending:
            if not self._began:  # not before: an error has a status as long as nothing was sent
                self._began = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                headers += [(b"x-accel-buffering", b"no"), (b"x-request-id", self._reply.id.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": text, "more_body": more})
            self._sent_at = time.monotonic()

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        found = known(error)
        if self._has_ended:
            return  # the client has its answer
        self._has_ended = True
        if self._began:
            await self._write(send, self._reply.sent(self._reply.broken_off(found)), more=False)
        else:
            await refusal(found, type(self._reply))(scope, receive, send)
        self.done(found.status)


def _in_time(send: Send) -> Send:
    """Sends as long as the client takes what it is sent: who reads nothing must not keep a place."""

    async def sent(message: Any) -> None:
        try:
            async with asyncio.timeout(_SEND_S):
                await send(message)
        except TimeoutError:
            raise ClientDisconnect from None

    return sent


async def _left(receive: Receive) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


def json_response(value: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    return Response(as_json(value), status, headers, media_type="application/json")


def known(error: Exception) -> RequestError:
    """The error for the client; the log has those that are nobody's fault but ours, without texts of requests."""
    found = error_of(error)
    if found.status >= 500 and found.code is None:
        logger.error("a request failed: %s", type(error).__name__, exc_info=None if found is error else error)
    return found


def refusal(error: RequestError, reply: type[Reply]) -> Response:
    """A response with an error, in the form of an API."""
    return json_response(reply.refused(error), error.headers, error.status)
