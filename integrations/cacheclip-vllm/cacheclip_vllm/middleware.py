"""What stands before vLLM's server: ``--middleware cacheclip_vllm.middleware.CacheClip``.

vLLM calls it before everything of its own, its check of API keys included, which looks at some paths only. So keys are
checked here, on every path but those for load balancers. vLLM itself needs none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from cacheclip_serve import (
    EMBEDDINGS,
    KEEP_S,
    Bodies,
    CacheClipField,
    Caller,
    Counters,
    EmbeddingService,
    MessagesReply,
    Queue,
    RequestError,
    as_json,
    check_counts,
    check_host,
    drop_optional_tools,
    error_body,
    in_background,
    read_json,
    timed,
    unsupported,
)
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheclip_rag import FusionStats
from cacheclip_rag.guards import record_spans

from .exchange import Replay, ReplySender, appending, as_text, changing, with_length
from .idle import IdlePrefills
from .inspecting import Inspecting
from .internals import PROBE_TOKENS, check_probe, probe
from .other_apis import MESSAGES, RESPONSES, add_system, as_counted, read_messages, read_response
from .parameters import EXACT, PARAMETER, carried_with, request_parameters
from .planners import Planning, Route, note
from .replies import EventsReply, ReplyText, Result, StreamReply
from .requests import (
    NotPlanned,
    PlannablePrompt,
    add_system_prompt,
    check_carried,
    in_vllms_words,
    keep_apart,
    read_chat,
    read_completion,
    take_field,
)
from .settings import ServerSettings
from .shadow_checks import ShadowChecks, ask_itself

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_READERS: dict[str, Callable[[Mapping[str, Any], str], PlannablePrompt]] = {
    _CHAT: read_chat,
    _COMPLETION: read_completion,
    MESSAGES: read_messages,
    RESPONSES: read_response,
}
_OPEN = frozenset({"/health", "/ping"})
"""Paths for load balancers, which need no key."""
_OF_TENANTS = frozenset({*_READERS, EMBEDDINGS, "/v1/models"})
"""Paths that a tenant's key may use. vLLM has many others, whose requests would share its prefix cache."""
_NAMED = (*_OF_TENANTS, *_OPEN, "/metrics")
"""Paths that are counted apart."""
_CLOSING_S = 5
"""Seconds after the engine's end in which the last bytes of answers must be sent. vLLM gives up answers that the engine
did not end, and would wait for their connections forever."""
_KEEP_ALIVE_VARIABLE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
"""vLLM's own setting of the seconds for which an idle connection is kept."""
_MOST_KEPT = 2**16
"""Bytes of a stream that are kept for a shadow check, which compares the beginning of its answer."""
_MOST_SEQUENCES, _MOST_WAITING = 256, 512
"""Of vLLM at once, if it does not say; and requests of one of several tenants that wait."""
_SWITCH = TypeAdapter(bool)


class CacheClip:
    """An ASGI middleware: checks keys, plans prompts, and adds statistics to responses and metrics."""

    def __init__(self, app: ASGIApp, settings: ServerSettings | None = None) -> None:
        """``settings``: default those that ``cacheclip serve`` left in the environment. Raises ConfigurationError:
        there are none."""
        self._app = app
        self._settings = settings or ServerSettings.of_environment()
        self._access = self._settings.access
        self.planning = Planning(self._settings)
        self._checks = ShadowChecks(app, self.planning, self._settings.config.shadow_rate)
        self._idle = IdlePrefills(app, self.planning)
        self._inspecting = Inspecting(self._settings, self.planning) if self._settings.inspects else None
        self._counters = Counters()
        self._bodies = Bodies(self._settings.body_bytes)
        self._embeddings = EmbeddingService(self._settings.embedding)
        self._running = 0
        self._places: Queue | None = None
        """Of vLLM's sequences, if there are several tenants: vLLM serves first who came first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._live(scope, receive, send)
            case "http":
                await self._http(scope, receive, send)
            case _:  # no websocket of vLLM's is planned, and each could use the prefix cache
                await send({"type": "websocket.close", "code": 1008})

    # -- life -----------------------------------------------------------------------------------------------------

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def heard() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self._checks.close()
                self._idle.close()
            return message

        async def answered(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    await asyncio.to_thread(self.planning.start)
                    if self._settings.is_untried:
                        await self._check_version(scope)
                except Exception as error:  # the one who started the server is told
                    logger.exception("the planner cannot start")
                    message = {"type": "lifespan.startup.failed", "message": str(error)}
                else:
                    _limit_connections(scope)
                    if self._access.tenants:
                        most = _most_sequences(scope)
                        self._places = Queue(most, _MOST_WAITING, is_shared=True, most_starting=most)
                        self._places.most_bytes = most
                    self._tell_ready()
            elif message["type"] == "lifespan.shutdown.complete":
                await asyncio.to_thread(self.planning.close)
            await send(message)

        await self._app(scope, heard, answered)

    async def _check_version(self, scope: Scope) -> None:
        """Raise ConfigurationError unless a recomputed prompt has the answer of plain prefill."""
        config = self._settings.config
        plan = probe(self.planning.planner(config.namespace).primary, config.namespace)
        body = {"model": self._settings.name, "prompt": list(plan.token_ids), "max_tokens": PROBE_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        carried = {"kv_transfer_params": request_parameters(plan, key=self._settings.seal)}
        asked: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": _COMPLETION,
        }
        asked |= {"query_string": b"", "headers": [], "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 80)}
        asked |= {name: scope[name] for name in ("asgi", "app", "state") if name in scope}
        answers = [json.loads(await ask_itself(self._app, asked, {**body, **more})) for more in (carried, {})]
        told = (answers[0].get("kv_transfer_params") or {}).get(PARAMETER, {})
        check_probe(told.get("outcome"), *(answer["choices"][0]["token_ids"] for answer in answers))

    def _tell_ready(self) -> None:
        settings = self._settings
        if self._inspecting is not None:
            self._inspecting.tell(settings.address)
        if settings.json_to is None:
            sys.stderr.write(f"{settings.name} is ready at {settings.address}/v1\n")
            return
        ready = {"address": settings.address, "model": settings.name, "backend": "vllm"}
        os.write(settings.json_to, json.dumps(ready, ensure_ascii=False).encode() + b"\n")

    # -- paths ----------------------------------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path") or "")
        label = path if path in _NAMED else "other"
        began = False

        async def counted(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._counters.count(label, message["status"])
            await send(message)

        try:
            with self._idle.asking() if scope["method"] == "POST" else nullcontext():
                await self._guarded(path, scope, receive, counted)
        except ClientDisconnect:
            self._counters.disconnects += 1
            self._counters.count(label, 499)
        except RequestError as error:
            if began:
                raise
            await _refuse(error, MessagesReply.refused if path == MESSAGES else error_body)(scope, receive, counted)

    async def _guarded(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS" and not path.startswith("/metrics"):
            return await self._app(scope, receive, send)
        request = Request(scope, receive)
        if self._access.is_open:
            check_host(request)
        if path in _OPEN:
            return await self._app(scope, receive, send)
        if self._inspecting is not None and self._inspecting.has(path):
            return await self._inspecting.pages(scope, receive, send)
        caller = self._access.identify(request.headers.get("authorization"), request.headers.get("x-api-key"))
        if path == "/metrics" or path.startswith("/metrics/"):
            caller.check_metrics()
            return await self._app(as_text(scope), receive, appending(send, self._metrics))
        if caller.may_choose and path not in _OF_TENANTS:
            raise RequestError(
                "the key of a tenant may use chat completions, completions, responses, messages, embeddings and models "
                "only.",
                status=403,
                kind="permission_error",
            )
        if path == "/v1/models" and scope["method"] == "GET":
            return await self._app(as_text(scope), receive, changing(send, self._with_cards))
        if path == EMBEDDINGS and scope["method"] == "POST":
            body = await self._bodies.parsed(request, caller.tenants[0], self._embeddings.read)
            vectors = as_json(await self._embeddings.answer(body, caller.tenants[0]))
            return await Response(vectors, media_type="application/json")(scope, receive, send)
        if path in _READERS and scope["method"] == "POST":
            return await self._asked(path, request, caller, scope, receive, send)
        if path == "/reset_prefix_cache":
            self._idle.forget()
        return await self._app(scope, receive, send)

    def _metrics(self) -> bytes:
        waiting = self.planning.waiting + (0 if self._places is None else self._places.waiting)
        counters = self._counters.text(running=self._running, waiting=waiting)
        return (self.planning.text() + counters).encode()

    def _with_cards(self, body: bytes) -> bytes:
        """The list of models, of which ours says what clients ask of it, and not in which folder it is."""
        found = json.loads(body)
        for card in found.get("data", ()):
            if card.get("id") in (self._settings.name, *self._settings.aliases):
                card["root"] = self._settings.name
                card["cacheclip"] = {"uses_tools": self.planning.uses_tools(), "can_constrain": True}
        return as_json(found)

    # -- prompts --------------------------------------------------------------------------------------------------

    async def _asked(
        self, path: str, request: Request, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        body = await self._bodies.parsed(request, caller.tenants[0], read_json)
        is_other = path in (MESSAGES, RESPONSES)
        check_counts(as_counted(path, body) if is_other else body, self.planning.context_tokens())
        check_carried(body)
        if caller.may_choose and body.get("previous_response_id") is not None:
            raise unsupported("previous_response_id", "a tenant's key cannot name earlier answers. Give the items.")
        body = self._as_asked_of_vllm(dict(body) if is_other else in_vllms_words(body, is_chat=path == _CHAT), path)
        leaving = asyncio.ensure_future(receive())
        try:
            await self._answered(path, body, caller, leaving, scope, receive, send)
        finally:
            leaving.cancel()

    async def _answered(
        self,
        path: str,
        body: dict[str, Any],
        caller: Caller,
        leaving: asyncio.Future[Message],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """``leaving``: what comes after the body, which is that the client has left."""
        field = take_field(body, moves=self._settings.prompt_bytes > 0)
        tenant = caller.tenant(field.tenant)
        is_other = path in (MESSAGES, RESPONSES)
        page = None if self._inspecting is None else self._inspecting.page(field, tenant)
        way = await self._planned(path, body, field, tenant, leaving)
        async with AsyncExitStack() as held:
            behind = in_background(field.background, body.get("messages"))
            completes = self._settings.completes(field.finish) and not behind
            if self._places is not None:
                came = time.perf_counter()
                place = self._places.place(tenant, _sequences(body), in_background=behind)
                await _unless_left(held.enter_async_context(place), leaving)
                way = replace(way, queued_s=way.queued_s + time.perf_counter() - came)
            result = Result(way, self._record, self._settings.shows_metrics)
            result.began -= way.queued_s + way.planning_s
            said = ReplyText() if completes or page else None
            kept = _MOST_KEPT if self._checks.rate else 0
            stream = EventsReply(result) if is_other else StreamReply(result, _count_usage(body))
            reply = ReplySender(result, send, stream, kept=kept, said=said)
            replay = Replay(as_json(body), leaving, receive)
            self._running += 1
            try:
                await self._app(with_length(scope, replay.body), replay, reply)
            finally:
                self._running -= 1
                if replay.client_left and not reply.is_done:
                    self._counters.disconnects += 1
                    if result.outcome is None:
                        self.planning.count("aborted", None)
            if result.may_be_damaged:
                self.planning.check(way, tenant)
            if reply.is_done:
                shown = None
                if page and said and result.stats:
                    shown = await page.add(way, result.stats, said)
                if not is_other:
                    self._checks.offer(scope, body, result, reply.body, shown)
                note(self.planning, way.planned, tenant, result)
                if result.stats is not None:
                    self._idle.count(result.stats.prompt_tokens + result.stats.generated_tokens)
                if way.reason == EXACT and result.outcome == "plain":
                    self._idle.forget(body)
                if completes and said and result.outcome in ("fused", "cached"):
                    self._idle.offer(scope, body, way, tenant, said.text)

    async def _planned(
        self, path: str, body: dict[str, Any], field: CacheClipField, tenant: str, leaving: asyncio.Future[Message]
    ) -> Route:
        """How the body goes to vLLM, which is changed to go so."""
        if path == _CHAT:
            add_system_prompt(body, self._settings.config.system_prompt)
        elif path != _COMPLETION:
            add_system(path, body, self._settings.config.system_prompt)
        is_apart = body.get("cache_salt") is not None  # a client that shares nothing
        if self._access.tenants:
            keep_apart(body, tenant, self._settings.seal)
        try:
            asked = _READERS[path](body, self._settings.name)
            known = partial(self._idle.known, body)
            way = await _unless_left(self.planning.plan(asked, field, tenant, known), leaving)
            if is_apart and way.planned is not None:
                way = replace(way, planned=replace(way.planned, kept_about=None))
        except NotPlanned as error:
            way = Route(reason=str(error))
        self._give_plan(path, body, way, tenant)
        return way

    def _as_asked_of_vllm(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        """The body with the model's own name, and without tools that the server cannot call and need not."""
        if body.get("model") in self._settings.aliases:
            body["model"] = self._settings.name
        if path == _CHAT and self._settings.drops_tools and body.get("tools") and not self.planning.uses_tools():
            kept = drop_optional_tools(body)
            self._counters.ignored["tools"] += kept is not body
            return kept
        return body

    def _give_plan(self, path: str, body: dict[str, Any], way: Route, tenant: str) -> None:
        """The plan, and the token ids that it was made for."""
        planned = way.planned
        carried = {} if planned is None else carried_with(planned, tenant, key=self._settings.seal)
        if planned is None or not carried:
            return
        if planned.fusion is not None and path == _COMPLETION:
            body["prompt"] = list(planned.token_ids)
        elif planned.fusion is not None:
            carried["prompt_token_ids"] = list(planned.token_ids)
        body["kv_transfer_params"] = carried

    def _record(self, stats: FusionStats, outcome: str, reason: str | None) -> None:
        self.planning.metrics.record_answer(stats)
        self.planning.count(outcome, reason)
        record_spans(stats, self._settings.config.primary)


def _limit_connections(scope: Scope) -> None:
    """Limit how long vLLM's HTTP server waits for requests of open connections, and for their ends when it closes. It
    opens its sockets after this. By itself it closes idle connections after 5 seconds."""
    server = getattr(getattr(scope.get("app"), "state", None), "server", None)
    if server is None:
        return
    if server.config.timeout_graceful_shutdown is None:
        server.config.timeout_graceful_shutdown = _CLOSING_S
    if _KEEP_ALIVE_VARIABLE not in os.environ:
        server.config.timeout_keep_alive = KEEP_S
    server.config.http_protocol_class = timed(server.config.http_protocol_class)


def _most_sequences(scope: Scope) -> int:
    """How many sequences vLLM computes side by side."""
    config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
    return int(getattr(getattr(config, "scheduler_config", None), "max_num_seqs", None) or _MOST_SEQUENCES)


def _sequences(body: Mapping[str, Any]) -> int:
    """How many of them a request takes."""
    prompt, count = body.get("prompt"), body.get("n")
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(next(iter(prompt), 0), int) else 1
    return prompts * (count if isinstance(count, int) and count > 0 else 1)


def _count_usage(body: dict[str, Any]) -> bool:
    """Let a stream end with token counts, which show what became of the plan. Returns whether the client asked."""
    options = body.get("stream_options")
    if not _is_on(body.get("stream")) or not isinstance(options, Mapping | None):
        return True
    asked = _is_on((options or {}).get("include_usage"))
    if not asked:
        kept = {name: value for name, value in (options or {}).items() if name != "continuous_usage_stats"}
        body["stream_options"] = {**kept, "include_usage": True}
    return asked


def _is_on(given: Any) -> bool:
    """Whether vLLM reads a switch of a body as on: it takes 1 and ``"true"`` too, and refuses what is neither."""
    try:
        return _SWITCH.validate_python(given)
    except ValidationError:
        return False


async def _unless_left(work: Coroutine[Any, Any, T], leaving: asyncio.Future[Message]) -> T:
    """What comes of some work, unless the client leaves before it is there."""
    task = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {task, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and leaving.result()["type"] == "http.disconnect":
            raise ClientDisconnect
        return await task
    finally:
        task.cancel()


def _refuse(
    error: RequestError, said: Callable[[RequestError], Any]
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    return Response(as_json(said(error)), error.status, error.headers, media_type="application/json")
