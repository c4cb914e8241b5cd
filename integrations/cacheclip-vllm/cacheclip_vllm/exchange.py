"""The messages of one request and its response: bodies that are sent again, or changed on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from .replies import EventsReply, ReplyText, Result, StreamReply, WholeReply, with_code


class Replay:
    """Receives the body again, then what the client sends after it: that it has left."""

    def __init__(self, body: bytes, leaving: asyncio.Future[Message], receive: Receive) -> None:
        """``leaving``: the first message after the body."""
        self.body, self._leaving, self._receive = body, leaving, receive
        self._is_sent = self._is_next_read = False
        self.client_left = False

    async def __call__(self) -> Message:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        if self._is_next_read:
            message = await self._receive()
        else:
            message = await asyncio.shield(self._leaving)
            self._is_next_read = True
        self.client_left |= message["type"] == "http.disconnect"
        return message


class ReplySender:
    """Sends vLLM's response with our field, and the error of a long prompt with its code. Other errors and other
    content pass as they are."""

    def __init__(
        self, result: Result, send: Send, stream: StreamReply | EventsReply, *, kept: int, said: ReplyText | None
    ) -> None:
        """``stream``: what reads a stream; ``kept``: bytes of it that :attr:`body` keeps; ``said`` reads the answer."""
        self._send, self._kept, self._said = send, kept, said
        self._whole, self._stream = WholeReply(result), stream
        self._start: Message | None = None
        self._kind = ""
        self.body = bytearray()
        """What vLLM sent."""
        self.is_done = False
        """Whether the end of the response was sent."""

    async def __call__(self, message: Message) -> None:
        await self._take(message)
        self.is_done |= message["type"] == "http.response.body" and not message.get("more_body", False)

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = _header(message, b"content-type").partition(b";")[0].strip().lower()
            is_read = message["status"] == 200 or (message["status"] == 400 and kind == b"application/json")
            self._kind = kind.decode("latin-1") if is_read else ""
            self._start = message
            if self._kind != "application/json":
                await self._send(_without_length(message) if self._kind == "text/event-stream" else message)
        elif message["type"] != "http.response.body" or self._kind not in ("application/json", "text/event-stream"):
            await self._send(message)
        elif self._kind == "application/json":
            await self._collect(message)
        else:
            await self._pass_on(message)

    def _listen(self, data: bytes, more: bool) -> None:
        """Read the answer, if it can be: the client has it in any case."""
        if self._said is not None:
            with suppress(ValueError, TypeError, AttributeError):
                self._said.feed(data)
                if not more:
                    self._said.finish()

    async def _collect(self, message: Message) -> None:
        self.body += message.get("body", b"")
        if message.get("more_body", False):
            return
        self._listen(bytes(self.body), False)
        assert self._start is not None, "a body has a start before it"
        finish = self._whole.finish if self._start["status"] == 200 else with_code
        await _send_whole(self._send, self._start, finish(bytes(self.body)))

    async def _pass_on(self, message: Message) -> None:
        more = message.get("more_body", False)
        came = message.get("body", b"")
        if len(self.body) < self._kept:
            self.body += came
        self._listen(came, more)
        data = self._stream.feed(came)
        if not more:
            data += self._stream.finish()
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


def changing(send: Send, change: Callable[[bytes], bytes]) -> Send:
    """Sends a response of status 200 with another body."""
    start: Message = {}
    body = bytearray()

    async def changed(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            start = message
            if message["status"] != 200:
                await send(message)
        elif start.get("status") != 200 or message["type"] != "http.response.body":
            await send(message)
        else:
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                await _send_whole(send, start, change(bytes(body)))

    return changed


async def _send_whole(send: Send, start: Message, body: bytes) -> None:
    headers = [*_without_length(start)["headers"], (b"content-length", str(len(body)).encode())]
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def appending(send: Send, more: Callable[[], bytes]) -> Send:
    return changing(send, lambda body: body.rstrip(b"\n") + b"\n" + more())


def _header(message: MutableMapping[str, Any], name: bytes) -> bytes:
    return next((value for key, value in message.get("headers", ()) if key.lower() == name), b"")


def _without_length(message: Message) -> Message:
    headers = [(key, value) for key, value in message.get("headers", ()) if key.lower() != b"content-length"]
    return {**message, "headers": headers}


def with_length(scope: Scope, body: bytes) -> Scope:
    dropped = (b"content-length", b"transfer-encoding")
    headers = [(key, value) for key, value in scope["headers"] if key.lower() not in dropped]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}


def as_text(scope: Scope) -> Scope:
    """The scope of a request for an uncompressed body of the usual kind."""
    dropped = (b"accept", b"accept-encoding")
    return {**scope, "headers": [(key, value) for key, value in scope["headers"] if key.lower() not in dropped]}
