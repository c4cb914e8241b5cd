"""What is done while vLLM computes nothing else: conversations with a fused answer are prefilled plainly
(``finish="idle"``).

vLLM's own prefix cache then holds their exact KV, from which the next turn goes on. A conversation goes to vLLM's own
application in slices that are short enough for a request to wait for one; each finds those before it in that cache.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Scope

from cacheclip_rag.planning import Waiter

from .once import WarnOnce
from .planners import Planning, Route
from .shadow_checks import ask_itself

logger = logging.getLogger(__name__)

_SLICE_S = 0.15
"""Seconds that a slice should take: the longest that a request waits for it."""
_MOST_ROWS = 1024
"""Most tokens that a slice computes."""
_MOST_CONVERSATIONS = 4
"""Most that wait; above it, the oldest is left as it is. A busy server could never catch up."""
_MOST_KNOWN = 64
"""Most conversations whose exact KV is known."""
_BLOCK_TOKENS, _NUM_BLOCKS = 16, 0
"""Of vLLM's cache, if it does not say."""


@dataclass(eq=False, slots=True)
class _Conversation:
    """A prompt and its answer, whose exact KV is to be computed."""

    scope: Scope
    """Of a request for a completion."""
    fields: Mapping[str, Any]
    """Of its body, beside the prompt."""
    ids: list[int]
    answer: str
    """Text whose token ids are not in ``ids`` yet."""
    tenant: str
    erasures: object
    """What :meth:`~cacheclip_vllm.planner.Planner.erasures` was before the prompt was planned."""
    done: int = 0
    """First tokens whose exact KV vLLM holds."""
    until: int = 0
    """Tokens of all answers after which vLLM may have evicted it."""

    def takes_place_of(self, other: _Conversation) -> bool:
        """Whether it is the next turn: half of the other's tokens or more are equal."""
        return self.fields == other.fields and 2 * _num_equal(self.ids, other.ids) >= len(other.ids)

    def covers(self, other: _Conversation) -> bool:
        """Whether exact KV of both is that of this one."""
        return self.fields == other.fields and min(_num_equal(self.ids, other.ids), self.done) >= other.done


class IdlePrefills:
    """Prefills conversations, the latest first. What goes wrong is logged, and never raised. Used by one event loop."""

    def __init__(self, app: ASGIApp, planning: Planning) -> None:
        """``app`` is vLLM's. ``planning`` has the tokenizer, and knows what was erased."""
        self._app, self._planning = app, planning
        self._conversations: list[_Conversation] = []
        """The latest last."""
        self._running = 0
        """Requests of clients that are under way."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._worker: asyncio.Task[None] | None = None
        """Runs while conversations wait."""
        self._rows = 0
        """Tokens that the next slice computes; 0: as few as vLLM's cache takes."""
        self._known: list[_Conversation] = []
        """Those whose exact KV vLLM may hold, the latest last."""
        self._tokens = 0
        """Of all prompts and answers so far."""
        self._warn_once = WarnOnce(logger)

    def count(self, num_tokens: int) -> None:
        """Note that vLLM has answered: so many tokens may have taken the place of others in its cache."""
        self._tokens += num_tokens

    def known(self, body: Mapping[str, Any], ids: Sequence[int]) -> int:
        """Of how many first tokens of a prompt vLLM holds exact KV that was computed here. ``body``: as it goes to
        vLLM. Safe to call from any thread."""
        same = (
            min(_num_equal(each.ids, ids), each.done)
            for each in [*self._known]
            if each.fields == _fields(body) and self._tokens < each.until
        )
        return max(same, default=0)

    def forget(self, body: Mapping[str, Any] | None = None) -> None:
        """vLLM's cache was emptied, or held less than was known of a prompt like ``body``."""
        self._known = [each for each in self._known if body is not None and each.fields != _fields(body)]

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Within the block, a client's request is under way."""
        self._running += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    def offer(self, scope: Scope, body: Mapping[str, Any], way: Route, tenant: str, answer: str) -> None:
        """Prefill a prompt with a fused answer later. Takes the place of the turn before. Returns at once.

        Args:
            scope: of the client's request; ``body``: as it went to vLLM.
            answer: its text, without reasoning.
        """
        assert way.planned is not None, "a fused answer had a plan"
        asked = {**scope, "path": scope.get("root_path", "") + "/v1/completions"}
        new = _Conversation(asked, _fields(body), [*way.planned.token_ids], answer, tenant, way.erasures)
        others = [each for each in self._conversations if not new.takes_place_of(each)]
        self._conversations = [*others, new][-_MOST_CONVERSATIONS:]
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())

    def close(self) -> None:
        """Leave all conversations as they are."""
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        while self._conversations:
            latest = self._conversations[-1]
            try:
                is_over = await self._extend(latest)
            except Exception as error:
                is_over = True
                self._warn_once("the exact KV of a conversation was not computed: %s", error)
            if is_over:
                self._conversations = [each for each in self._conversations if each is not latest]
                others = [each for each in self._known if not latest.covers(each)]
                self._known = [*others, latest][-_MOST_KNOWN:]

    async def _extend(self, each: _Conversation) -> bool:
        """Prefill the next slice. Returns whether it was the last one."""
        if each.answer:
            answer, each.answer = each.answer, ""
            each.ids += (await self._planning.token_ids(answer))[0]
        size, num_blocks = _cache_of(each.scope)
        stop = min(each.done + max(self._rows - self._rows % size, size), len(each.ids) - len(each.ids) % size)
        await self._is_idle.wait()
        if stop == each.done or await asyncio.to_thread(self._erasures, each.tenant) != each.erasures:
            return True
        began = time.perf_counter()
        cached = await self._prefill(each, each.ids[:stop])
        rows = (stop - cached) * _SLICE_S / max(time.perf_counter() - began, 1e-6)
        self._rows = min(int(rows), _MOST_ROWS)
        has_room = cached >= each.done
        self.count(stop - each.done)
        each.done, each.until = stop, self._tokens + size * num_blocks // 2
        return not has_room

    def _erasures(self, tenant: str) -> object:
        planner = self._planning.planner(tenant)
        with planner.asking(Waiter()):
            return planner.erasures()

    async def _prefill(self, each: _Conversation, ids: Sequence[int]) -> int:
        """Returns of how many of the tokens vLLM held exact KV."""
        body = {**each.fields, "prompt": ids, "max_tokens": 1, "temperature": 0}
        usage = json.loads(await ask_itself(self._app, each.scope, body))["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Those under which vLLM's cache finds a prompt's KV."""
    return {name: body[name] for name in ("model", "cache_salt") if name in body}


def _num_equal(ids: Sequence[int], others: Sequence[int]) -> int:
    """First elements that are equal. Whole slices are compared: tens of thousands one by one would hold up requests."""
    ids, others = [*ids], [*others]  # no list equals a tuple
    low, high = 0, min(len(ids), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cache_of(scope: Scope) -> tuple[int, int]:
    """Tokens of a block of vLLM's cache, and its number of blocks."""
    config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
    cache = getattr(config, "cache_config", None)
    sizes = ("block_size", _BLOCK_TOKENS), ("num_gpu_blocks", _NUM_BLOCKS)
    size, number = (int(getattr(cache, name, None) or default) for name, default in sizes)
    return size, number
