"""The page ``/inspect`` of a server: how its last answers came about. Nothing of them leaves the process's memory.

A browser sends no key of its own, so the address that the server prints has one, which becomes a cookie. Each tenant
has a key of its own for the pages, and sees its own answers.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cacheclip_rag import Answer

from .backend import ServedQuestion, ServingBackend
from .bodies import check_host
from .errors import RequestError
from .pages import ComparedAnswer, answer_page, fresh_texts, list_page, note_page

if TYPE_CHECKING:
    from cacheclip_rag.store import TieredStore

MOST_ANSWERS = 50
"""Of a tenant."""
_MOST_BYTES = 2**26
"""Of all tenants, about."""
_TOKEN_BYTES = 200
"""About what a token of a traced prompt takes."""
_COOKIE = "cacheclip-inspect"
CANCELLED: ContextVar[Callable[[Answer], object]] = ContextVar("cancelled", default=lambda answer: None)
"""What is told of the running question's answer if its client leaves."""
_HEADERS = {"cache-control": "no-store", "referrer-policy": "no-referrer", "x-frame-options": "DENY"}


@dataclass(eq=False, slots=True)
class InspectedAnswer:
    """An answer with its question."""

    number: int
    question: ServedQuestion
    answer: Answer
    compared: ComparedAnswer | None = None

    num_bytes: int = field(init=False)
    """About what it takes in memory."""

    def __post_init__(self) -> None:
        prompt, trace = self.question.prompt, self.answer.trace
        texts = [prompt] if isinstance(prompt, str) else [str(message) for message in prompt]
        texts += [*self.question.options.documents, self.answer.text, self.answer.reasoning]
        texts += [each.text for each in (() if trace is None else trace.texts)]
        self.num_bytes = 2 * sum(map(len, texts)) + _TOKEN_BYTES * self.answer.stats.prompt_tokens

    def compare(self, token_ids: Sequence[int], choices: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        """Note what full prefill chooses along its tokens."""
        pairs = zip(token_ids, choices, strict=False)
        at = next((n for n, (token, choice) in enumerate(pairs) if token != choice), None)
        same = list(token_ids[:at])
        choice = "" if at is None else decode([*same, choices[at]]).removeprefix(decode(same))
        self.compared = ComparedAnswer(decode(same), at, choice or "(end)")

    @property
    def heading(self) -> str:
        """The end of what was asked: a question stands behind its texts. If no user waits for it, its beginning."""
        prompt = self.question.prompt
        if self.question.options.question:
            return self.question.options.question[:200]
        users = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if m["role"] == "user"]
        lines = (users[-1] if users else "").strip().splitlines() or ["(no question)"]
        if self.question.in_background:
            task = next((line for line in lines if not line.startswith("#")), lines[-1])
            return f"In the background: {task[:200]}"
        return lines[-1][-200:]


@dataclass(eq=False)
class Inspection:
    """The last answers of each tenant, and who may see them."""

    tenants: Iterable[str]
    most_bytes: int = _MOST_BYTES
    keys: dict[str, str] = field(init=False, repr=False)
    """Tenants by the keys of their pages."""

    def __post_init__(self) -> None:
        self.keys = {secrets.token_urlsafe(18): tenant for tenant in dict.fromkeys(self.tenants)}
        self._answers: list[InspectedAnswer] = []
        self._forgets: Counter[str] = Counter()
        self._watching = [_OfTenant(self, tenant) for tenant in self.keys.values()]
        self._count, self._lock = 0, threading.Lock()

    def watch(self, store: TieredStore) -> None:
        """From now on, forget a tenant's answers when one of its texts is erased. Call it before the first question."""
        for each in self._watching:
            store.erasures.watch(each.tenant, each)

    def addresses(self, address: str) -> list[tuple[str, str]]:
        """Each tenant, and where it finds its page on the server at this address."""
        return [(tenant, f"{address}/inspect?key={key}") for key, tenant in self.keys.items()]

    def forgets(self, tenant: str) -> int:
        """How often a tenant's answers were forgotten: for :meth:`add`, asked before the prompt is read."""
        return self._forgets[tenant]

    def add(self, question: ServedQuestion, answer: Answer, forgets: int) -> InspectedAnswer | None:
        """Keep an answer. Returns None, and keeps nothing, if answers were forgotten since ``forgets``: its prompt may
        have the erased text."""
        with self._lock:
            if forgets != self._forgets[question.tenant]:
                return None
            self._count += 1
            self._answers.append(added := InspectedAnswer(self._count, question, answer))
            own = [each for each in self._answers if each.question.tenant == question.tenant]
            if len(own) > MOST_ANSWERS:
                self._answers.remove(own[0])
            while sum(each.num_bytes for each in self._answers) > self.most_bytes and len(self._answers) > 1:
                del self._answers[0]
            return added

    def forget(self, tenant: str) -> None:
        with self._lock:
            self._forgets[tenant] += 1
            self._answers = [each for each in self._answers if each.question.tenant != tenant]

    def of(self, tenant: str) -> list[InspectedAnswer]:
        """A tenant's answers, the latest first."""
        with self._lock:
            return [each for each in reversed(self._answers) if each.question.tenant == tenant]

    def compare(self, token_ids: Sequence[int], choices: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        """Note what full prefill chooses along an answer (:meth:`Observer.on_compared`)."""
        with self._lock:
            own = [each for each in self._answers if each.answer.token_ids is token_ids]
        for each in own:
            each.compare(token_ids, choices, decode)

    def tenant(self, key: str) -> str:
        """Whose key it is. Raises RequestError."""
        known = [tenant for own, tenant in self.keys.items() if hmac.compare_digest(own.encode(), key.encode())]
        if not known:
            raise RequestError(
                "this page needs its own key: open the address that the server printed when it started.",
                status=401,
                kind="authentication_error",
                code="invalid_key",
            )
        return known[0]


@dataclass(eq=False, slots=True, weakref_slot=True)
class _OfTenant:
    """Forgets a tenant's answers, whose prompts may have an erased text."""

    inspection: Inspection
    tenant: str

    def drop_kv(self) -> None:
        self.inspection.forget(self.tenant)


@dataclass(frozen=True, slots=True)
class AnswerPages:
    """The paths of the pages."""

    inspection: Inspection
    backend: ServingBackend | None
    """Says why a text was not found, and stores it; None: nobody does."""
    model: str

    def paths(self) -> list[tuple[str, str, Callable[[Request], Any]]]:
        opened: list[tuple[str, str, Callable[[Request], Any]]] = [
            ("GET", "/inspect", partial(self._opened, self._list)),
            ("GET", "/inspect/{number:int}", partial(self._opened, self._answer)),
        ]
        if self.backend is None:
            return opened
        of_texts = partial(self._why, self.backend), partial(self._learn, self.backend)
        return [
            *opened,
            ("GET", "/inspect/{number:int}/why", of_texts[0]),
            ("POST", "/inspect/{number:int}/learn", of_texts[1]),
        ]

    def _tenant(self, request: Request) -> str:
        check_host(request)
        return self.inspection.tenant(request.cookies.get(f"{_COOKIE}-{request.url.port}", ""))

    def _one(self, request: Request) -> InspectedAnswer:
        number = request.path_params["number"]
        for each in self.inspection.of(self._tenant(request)):
            if each.number == number:
                return each
        raise RequestError(f"there is no answer {number}, or not any more.", status=404)

    async def _opened(self, show: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        """A page, by a cookie. A key in its address becomes one: it does not stay there."""
        key = request.query_params.get("key")
        if key is None:
            return await show(request)
        check_host(request)
        self.inspection.tenant(key)
        response = RedirectResponse(request.url.path, status_code=303, headers=_HEADERS)
        response.set_cookie(f"{_COOKIE}-{request.url.port}", key, path="/inspect", httponly=True, samesite="lax")
        return response

    async def _list(self, request: Request) -> Response:
        answers = self.inspection.of(self._tenant(request))
        return _page(list_page([(each.number, each.heading, each.answer) for each in answers], MOST_ANSWERS))

    async def _answer(self, request: Request) -> Response:
        one = self._one(request)
        place = f"/inspect/{one.number}"
        asks = self.backend is not None
        page = answer_page(one.heading, one.answer, model=self.model, compared=one.compared, place=place, asks=asks)
        return _page(page)

    async def _why(self, backend: ServingBackend, request: Request) -> Response:
        one, text = self._text(request)
        says = await asyncio.to_thread(backend.why, one.question, text)
        return _page(note_page("Why was it not found?", says, f"/inspect/{one.number}"))

    async def _learn(self, backend: ServingBackend, request: Request) -> Response:
        one, text = self._text(request)
        await asyncio.to_thread(backend.learn, one.question.tenant, text)
        says = "It is stored: the next prompt that has it reuses it."
        return _page(note_page("Learned", says, f"/inspect/{one.number}"))

    def _text(self, request: Request) -> tuple[InspectedAnswer, str]:
        """The text of an answer that a link names by its first token."""
        one = self._one(request)
        texts = (
            {} if one.answer.trace is None else {str(each.start): each.text for each in fresh_texts(one.answer.trace)}
        )
        text = texts.get(request.query_params.get("start", ""))
        if text is None:
            raise RequestError("there is no such text in this prompt.", status=404)
        return one, text


def _page(text: str) -> Response:
    return Response(text, media_type="text/html; charset=utf-8", headers=_HEADERS)
