"""The paths of the server: from an HTTP request to questions for the backend, and from their events to a response."""

from __future__ import annotations

import asyncio
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

from cacheclip_rag import Answer, Event

from .access import API_KEY, Access, Caller
from .backend import ModelCard, ServedQuestion, ServingBackend
from .background import in_background
from .bodies import Bodies, check_host
from .bounds import check_counts
from .counters import Counters
from .embeddings import EMBEDDINGS, EmbeddingService
from .errors import RequestError
from .inspection import CANCELLED, AnswerPages, Inspection
from .messages_api import MessagesReply, messages_as_chat
from .queue import Queue
from .reading import read_json
from .replies import ChatReply, CompletionReply, Reply
from .responses_api import ResponsesReply, responses_as_chat
from .schema import Body, ChatBody, CompletionBody, parse
from .sending import AnswerResponse, json_response, known, refusal
from .translating import Translated, without_optional_tools

logger = logging.getLogger(__name__)

_MESSAGES = "/v1/messages"
_TOOLS = "tools"
"""Name under which tools are counted that were left out."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How requests and responses of one path are written."""

    body: type[Body]
    reply: type[Reply]
    as_body: Callable[[dict[str, Any]], Translated] = Translated
    """Writes a request as such a body."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, checked."""

    stated: Mapping[str, Any]
    """The body as it came."""
    body: Body
    questions: list[ServedQuestion]
    ignored: Sequence[str]
    """Fields that are no part of such a body."""


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
    aliases: tuple[str, ...] = ()
    """Other names by which requests may ask for the model."""
    drops_tools: bool = False
    """Whether tools that need not be called are left out if the chat template has no place for them."""
    embeddings: EmbeddingService = field(default_factory=EmbeddingService)
    """Answers ``/v1/embeddings``."""
    temperature: float = 1.0
    """Of requests that state none; 1 is OpenAI's."""
    max_tokens: int | None = None
    """Most tokens of a chat answer whose request states none; None: the model's context."""
    inspection: Inspection | None = None
    """Keeps the last answers for the page ``/inspect``; None: there is none."""
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
        answered = {
            "/v1/chat/completions": Dialect(ChatBody, ChatReply),
            "/v1/completions": Dialect(CompletionBody, CompletionReply),
            "/v1/responses": Dialect(ChatBody, ResponsesReply, responses_as_chat),
            _MESSAGES: Dialect(ChatBody, MessagesReply, messages_as_chat),
        }
        paths: list[tuple[str, str, Callable[[Request], Awaitable[Any]], type[Reply]]] = [
            *(("POST", path, partial(self._answer, dialect), dialect.reply) for path, dialect in answered.items()),
            ("POST", f"{_MESSAGES}/count_tokens", partial(self._count_tokens, answered[_MESSAGES]), MessagesReply),
            ("POST", EMBEDDINGS, self._embed, Reply),
            ("GET", "/v1/models", self._models, Reply),
            ("GET", "/v1/models/{name:path}", self._model, Reply),
            ("GET", "/health", self._health, Reply),
            ("GET", "/metrics", self._metrics, Reply),
        ]
        if self.inspection is not None:
            pages_of_answers = AnswerPages(self.inspection, self.backend, self.name)
            paths += [(*each, Reply) for each in pages_of_answers.paths()]
        exposed = ["retry-after", "x-request-id"]
        pages = Middleware(
            CORSMiddleware,
            allow_origins=self.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
        self.asgi = Starlette(
            routes=[
                Route(path, self._guarded(path, handle, reply), methods=[method])
                for method, path, handle, reply in paths
            ],
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

    def _guarded(
        self, path: str, handle: Callable[[Request], Awaitable[Any]], reply: type[Reply]
    ) -> Callable[[Request], Awaitable[Any]]:
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
                response = refusal(known(error), reply)
            if isinstance(response, AnswerResponse):
                response.done = done
            else:
                done(response.status_code)
            return response

        return guarded

    async def _health(self, request: Request) -> Response:
        self._ready()
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        self._identify(request).check_metrics()
        return Response(self.backend.metrics() + self._own_metrics(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        self._identify(request)
        return json_response({"object": "list", "data": [self._card(name) for name in (self.name, *self.aliases)]})

    async def _model(self, request: Request) -> Response:
        self._identify(request)
        name = request.path_params["name"]
        self._check_model(name)
        return json_response(self._card(name))

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        asked = await self._asked(dialect, request)
        replying = dialect.reply(self.name, asked.body.include_usage, asked.body.n or 1, asked=asked.stated)
        return AnswerResponse(
            partial(self.events, asked.questions),
            len(asked.questions),
            replying,
            is_stream=bool(asked.body.stream),
            request_s=self.limits.request_s,
            on_disconnect=self.count_disconnect,
        )

    async def _count_tokens(self, dialect: Dialect, request: Request) -> Response:
        (question,) = (await self._asked(dialect, request)).questions
        async with asyncio.timeout(self.limits.request_s):
            return json_response({"input_tokens": await asyncio.to_thread(self.backend.count_tokens, question)})

    async def _embed(self, request: Request) -> Response:
        client = self._identify(request).tenants[0]
        body = await self._bodies.parsed(request, client, self.embeddings.read)
        async with asyncio.timeout(self.limits.request_s):
            return json_response(await self.embeddings.answer(body, client))

    async def _asked(self, dialect: Dialect, request: Request) -> _Asked:
        caller = self._identify(request)
        card = self._ready()
        read = partial(self._read, dialect=dialect, caller=caller, card=card)
        asked = await self._bodies.parsed(request, caller.tenants[0], read)
        if _TOOLS in asked.ignored and not self._counters.ignored[_TOOLS]:
            logger.warning(
                "tools of a request are left out, because the model's chat template has none (drop_tools). "
                "Later ones are counted."
            )
        self._counters.ignored.update([*asked.body.ignored(card.variables), *asked.ignored])
        return asked

    def _read(self, came: bytes, dialect: Dialect, caller: Caller, card: ModelCard) -> _Asked:
        """A body and its questions, checked: for each prompt as many as it has answers."""
        stated = read_json(came)
        written = dialect.as_body(stated)
        if self.drops_tools and not card.uses_tools and dialect.body is ChatBody:
            written = without_optional_tools(written)
        with written.naming_errors():
            check_counts(written.body, card.context_tokens)
            body = parse(dialect.body, written.body)
            self._check_model(body.model)
            tenant = caller.tenant(body.field.tenant)
            defaults = {"temperature": self.temperature, "max_tokens": self.max_tokens or card.context_tokens}
            options = body.field.call_options().with_options({**defaults, **body.sampling()})
        least = body.field.min_confidence
        seeded = [options.with_options({"seed": seed}) for seed in body.seeds]
        questions = [
            ServedQuestion(prompt, tenant, each, least, body.one_call, in_background(body.field.background, prompt))
            for prompt in body.prompts
            for each in seeded
        ]
        return _Asked(stated, body, questions, written.ignored)

    # -- parts of them --------------------------------------------------------------------------------------------

    def _identify(self, request: Request) -> Caller:
        return self.access.identify(request.headers.get("authorization"), request.headers.get(API_KEY))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in (self.name, *self.aliases):
            raise RequestError(
                f"there is no model {name[:200]!r}. This server has {self.name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "cacheclip"}
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
        forgets = [self.inspection.forgets(each.tenant) if self.inspection else 0 for each in questions]
        for number, question in enumerate(questions):
            async with self._queue.place(
                question.tenant,
                self.backend.kv_bytes(question),
                num_tokens=self.backend.work_tokens(question),
                goes_on=number > 0,
                in_background=question.in_background,
            ) as started:
                waited_s = time.perf_counter() - began
                finished = partial(self._finished, question, forgets[number], waited_s)
                CANCELLED.set(finished)
                async with aclosing(self.backend.answer(self._traced(question))) as events:
                    async for event in events:
                        started()
                        if event.answer is not None:
                            event = replace(event, answer=finished(event.answer))
                        yield event

    def _traced(self, question: ServedQuestion) -> ServedQuestion:
        return replace(question, options=replace(question.options, trace=True)) if self.inspection else question

    def _finished(self, question: ServedQuestion, forgets: int, waited_s: float, answer: Answer) -> Answer:
        """An answer as its client gets it, once it is kept for the page."""
        answer = _waited(answer, waited_s)
        if self.inspection is None:
            return answer
        self.inspection.add(question, answer, forgets)
        return answer if question.options.trace else replace(answer, trace=None)

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


def _waited(answer: Answer, seconds: float) -> Answer:
    stats = answer.stats
    stats = replace(stats, ttft_s=stats.ttft_s + seconds, queued_s=stats.queued_s + seconds)
    return replace(answer, stats=stats)


async def _not_found(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    found = RequestError(
        f"{request.method} {request.url.path[:200]}: {error.detail}.", status=error.status_code, headers=error.headers
    )
    return refusal(found, MessagesReply if request.url.path.startswith(_MESSAGES) else Reply)
