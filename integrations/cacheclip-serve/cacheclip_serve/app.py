"""The paths of the server: from an HTTP request to questions for the backend, and from their events to a response."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cacheclip_rag import Answer, Event

from .access import Access, Caller
from .backend import ModelCard, ServedQuestion, ServingBackend
from .bodies import Bodies, check_host
from .bounds import check_counts
from .counters import Counters
from .errors import RequestError, error_body, error_of
from .queue import Queue
from .replies import ChatReply, CompletionReply, Reply, as_json, server_sent
from .schema import Body, ChatBody, CompletionBody, parse, read_json

logger = logging.getLogger(__name__)

_SEND_S = 30.0
"""Seconds in which a client must take what it is sent."""
_PING_S = 10.0
"""Seconds of silence after which a stream says that it is alive, before proxies cut it off."""
_PING = b": waiting\n\n"
_ENDED = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes."""

    running: int = 32
    """Most answers at once, as far as their KV fits (:class:`~.queue.Queue`)."""
    waiting: int = 64
    """Most questions of one tenant that wait for them; more are refused (429)."""
    request_s: float = 600.0
    """Seconds for one request, waiting included."""
    body_bytes: int = 2**23
    """Largest body of a request."""


@dataclass
class App:
    """The server as an ASGI application (:attr:`asgi`)."""

    backend: ServingBackend
    name: str
    """Served name of the model."""
    access: Access
    limits: Limits = field(default_factory=Limits)
    any_host: bool = True
    """False: refuse requests whose ``Host`` is not this machine's, so that no web page can ask through a browser."""
    origins: tuple[str, ...] = ()
    """Web pages that may ask through a browser, see :func:`~cacheclip_serve.access.check_origins`."""
    temperature: float = 1.0
    """Of requests that state none; 1 is OpenAI's."""
    max_tokens: int | None = None
    """Most tokens of a chat answer whose request states none; None: the model's context."""
    on_ready: Callable[[], None] = lambda: None
    """Called when the backend has started."""
    on_failure: Callable[[Exception], None] = lambda error: None
    """Called if the backend cannot start."""

    card: ModelCard | None = field(default=None, init=False)
    """Set when the backend has started."""
    is_stopping: bool = field(default=False, init=False)
    """Set when no new question is taken."""

    def __post_init__(self) -> None:
        tenants = {self.access.tenant, *(name for names in self.access.tenants.values() for name in names)}
        self._queue = Queue(self.limits.running, self.limits.waiting, is_shared=len(tenants) > 1)
        self._bodies = Bodies(self.limits.body_bytes)
        self._created = int(time.time())
        self._counters = Counters()
        paths: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._completion),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
        ]
        exposed = ["retry-after", "x-request-id"]
        pages = Middleware(
            CORSMiddleware,
            allow_origins=self.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
        self.asgi = Starlette(
            routes=[Route(path, self._guarded(path, handle), methods=[method]) for method, path, handle in paths],
            exception_handlers={HTTPException: _not_found},
            middleware=[pages] if self.origins else [],
            lifespan=self._lifespan,
        )

    # -- life -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            await starting
            await asyncio.to_thread(self.backend.close)

    async def _start(self) -> None:
        try:
            self.card = await asyncio.to_thread(self.backend.start)
            self._queue.most_bytes = self.card.most_kv_bytes
        except Exception as error:  # the one who started the server is told
            self.is_stopping = True
            self.on_failure(error)
        else:
            self.on_ready()

    def _ready(self) -> ModelCard:
        if self.card is None or self.is_stopping:
            what = "is shutting down" if self.is_stopping else "is loading its model"
            raise RequestError(
                f"the server {what}.",
                status=503,
                kind="server_error",
                code="not_ready",
                headers={"retry-after": "5"},
            )
        return self.card

    # -- paths ----------------------------------------------------------------------------------------------------

    def _guarded(self, path: str, handle: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """The handler of a path, with errors as responses, and every request counted and logged without its text."""

        async def guarded(request: Request) -> Any:
            done = _Done(self, path, time.perf_counter())
            try:
                if not self.any_host:
                    check_host(request)
                response = await handle(request)
            except ClientDisconnect:
                self.count_disconnect()
                response = Response(status_code=499)
            except Exception as error:
                response = _refusal(error)
            if isinstance(response, _AnswerResponse):
                response.done = done
            else:
                done(response.status_code)
            return response

        return guarded

    async def _health(self, request: Request) -> Response:
        self._ready()
        return _json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        self._identify(request).check_metrics()
        return Response(self.backend.metrics() + self._own_metrics(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        self._identify(request)
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._identify(request)
        self._check_model(request.path_params["name"])
        return _json(self._card())

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, ChatReply)

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, CompletionReply)

    async def _answer(self, request: Request, kind: type[Body], reply: type[Reply]) -> Response:
        caller = self._identify(request)
        card = self._ready()
        read = partial(self._read, kind=kind, caller=caller, card=card)
        body, questions = await self._bodies.parsed(request, caller.tenants[0], read)
        self._counters.ignored.update(body.ignored(card.variables))
        replying = reply(self.name, body.include_usage, body.n or 1)
        return _AnswerResponse(self, questions, replying, is_stream=bool(body.stream))

    def _read(
        self, came: bytes, kind: type[Body], caller: Caller, card: ModelCard
    ) -> tuple[Body, list[ServedQuestion]]:
        """A body and its questions, checked: for each prompt as many as it has answers."""
        given = read_json(came)
        check_counts(given, card.context_tokens)
        body = parse(kind, given)
        self._check_model(body.model)
        tenant = caller.tenant(body.field.tenant)
        defaults = {"temperature": self.temperature, "max_tokens": self.max_tokens or card.context_tokens}
        options = body.field.call_options().with_options({**defaults, **body.sampling()})
        least = body.field.min_confidence
        seeded = [options.with_options({"seed": seed}) for seed in body.seeds]
        return body, [
            ServedQuestion(prompt, tenant, each, least, body.one_call) for prompt in body.prompts for each in seeded
        ]

    # -- parts of them --------------------------------------------------------------------------------------------

    def _identify(self, request: Request) -> Caller:
        return self.access.identify(request.headers.get("authorization"))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise RequestError(
                f"there is no model {name[:200]!r}. This server has {self.name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self._created, "owned_by": "cacheclip"}
        if self.card is not None:
            own = {"uses_tools": self.card.uses_tools, "can_constrain": self.card.can_constrain}
            card |= {"max_model_len": self.card.context_tokens, "cacheclip": own}
        return card

    def _own_metrics(self) -> str:
        return self._counters.text(running=self._queue.running, waiting=self._queue.waiting)

    async def events(self, questions: Sequence[ServedQuestion]) -> AsyncGenerator[Event, None]:
        """Events of the answers to one request, one answer after the other, each when it is its turn: others come in
        between. The seconds that each waited are in its statistics."""
        began = time.perf_counter()
        for number, question in enumerate(questions):
            needed = self.backend.kv_bytes(question)
            async with self._queue.place(question.tenant, needed, goes_on=number > 0) as started:
                waited_s = time.perf_counter() - began
                async with aclosing(self.backend.answer(question)) as events:
                    async for event in events:
                        started()
                        yield event if event.answer is None else replace(event, answer=_waited(event.answer, waited_s))

    def count(self, path: str, status: int) -> None:
        self._counters.count(path, status)

    def count_disconnect(self) -> None:
        """Count a request whose client hung up."""
        self._counters.disconnects += 1


@dataclass
class _Done:
    """Counts and logs a request when it is done. The log has no text of prompts or answers."""

    app: App
    path: str
    began: float

    def __call__(self, status: int, answers: Sequence[Answer] = ()) -> None:
        self.app.count(self.path, status)
        tokens = ""
        if answers:
            prompt = sum(answer.stats.prompt_tokens for answer in answers)
            reused = sum(answer.stats.reused_tokens for answer in answers)
            new = sum(len(answer.token_ids) for answer in answers)
            tokens = f", {prompt} prompt tokens ({reused} reused), {new} new"
        is_probe = self.path in ("/health", "/metrics") and status in (200, 503)  # 503 while the model is loaded
        level, seconds = logging.DEBUG if is_probe else logging.INFO, time.perf_counter() - self.began
        logger.log(level, "%s %d in %.3f s%s", self.path, status, seconds, tokens)


class _AnswerResponse(Response):
    """A response that is computed while it is sent. It stops when the client hangs up."""

    def __init__(self, app: App, questions: Sequence[ServedQuestion], reply: Reply, *, is_stream: bool) -> None:
        """``questions``: one, if it is a stream."""
        super().__init__()
        self._app, self._questions, self._reply, self._is_stream = app, questions, reply, is_stream
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
                self._app.count_disconnect()
                self.done(499)
        finally:
            for task in (answering, leaving, pinging):
                task.cancel()
            await asyncio.gather(answering, leaving, pinging, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        give = self._chunks if self._is_stream else self._whole
        try:
            async with (
                asyncio.timeout(self._app.limits.request_s),
                aclosing(self._app.events(self._questions)) as events,
            ):
                async for event in events:  # also after the last: what was missing is stored then
                    if event.answer is not None:
                        self._answers.append(event.answer)
                        self._has_ended = len(self._answers) == len(self._questions)
                        if self._has_ended:
                            self.done(200, self._answers)
                    await give(event, scope, receive, send)
        except ClientDisconnect:
            self._has_ended = True
            self._app.count_disconnect()
            self.done(499)
        except Exception as error:
            await self._refuse(error, scope, receive, send)

    async def _whole(self, event: Event, scope: Scope, receive: Receive, send: Send) -> None:
        if event.answer is not None and self._has_ended:
            response = _json(self._reply.whole(self._answers), {"x-request-id": self._reply.id})
            await response(scope, receive, send)

    async def _chunks(self, event: Event, scope: Scope, receive: Receive, send: Send) -> None:
        chunks = [*(() if self._opened else self._reply.opening()), *self._reply.chunks(event)]
        self._opened = True
        text = b"".join(map(server_sent, chunks))
        if event.answer is not None:
            await self._write(send, text + _ENDED, more=False)
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
        found = _known(error)
        if self._has_ended:
            return  # the client has its answer
        self._has_ended = True
        if self._began:
            await self._write(send, server_sent(error_body(found)), more=False)
        else:
            await _json(error_body(found), found.headers, found.status)(scope, receive, send)
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


def _waited(answer: Answer, seconds: float) -> Answer:
    stats = answer.stats
    stats = replace(stats, ttft_s=stats.ttft_s + seconds, queued_s=stats.queued_s + seconds)
    return replace(answer, stats=stats)


def _json(value: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    return Response(as_json(value), status, headers, media_type="application/json")


def _known(error: Exception) -> RequestError:
    """The error for the client; the log has those that are nobody's fault but ours, without texts of requests."""
    found = error_of(error)
    if found.status >= 500 and found.code is None:
        logger.error("a request failed: %s", type(error).__name__, exc_info=None if found is error else error)
    return found


def _refusal(error: Exception) -> Response:
    found = _known(error)
    return _json(error_body(found), found.headers, found.status)


async def _not_found(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    found = RequestError(f"{request.method} {request.url.path[:200]}: {error.detail}.", status=error.status_code)
    return _json(error_body(found), error.headers, error.status_code)
