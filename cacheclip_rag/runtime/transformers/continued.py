"""Continued KV: the KV that answers leave behind, for prompts that begin like theirs.

A fused prompt's KV is approximate, so it never enters the exact prefix cache. The next question on the same documents,
the next turn of a chat, or the next step of an agent begins with the same tokens: it continues from that KV instead of
assembling and recomputing it again. Only prompts of the same method at the same ratio do.

Source: the slots of llama.cpp's server, which keep a conversation's KV and compare token ids. Departure: the KV is
copied, so that several prompts at the same time can continue from it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..kept_kv import KeptKV, KVMatch, KVRun, KVSource

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False, slots=True)
class _Conversation:
    """KV of one prompt and its answer."""

    method: tuple[type, str]
    """Type and settings: a method of another package may have a name like one of ours, and need not be hashable."""
    ids: _Array
    stale: _Array
    turns: int
    num_bytes: int
    kv: Any = field(repr=False)
    """What the runtime's cache gives of all tokens (:class:`KeptKV`)."""

    def equal(self, ids: _Array) -> int:
        most = min(len(self.ids), len(ids))
        same = self.ids[:most] == ids[:most]
        return most if same.all() else int(same.argmin())


class ContinuedCache:
    """KV of earlier prompts and their answers; the least recently used is evicted first. Safe to share between threads.

    Args:
        max_bytes: says how many bytes all KV may have now.
        claim: takes bytes from a limit that others share, and returns whether there was room. A negative number gives
            them back.
    """

    def __init__(self, max_bytes: Callable[[], int], claim: Callable[[int], bool]) -> None:
        self._max_bytes, self._claim = max_bytes, claim
        self._held: OrderedDict[_Conversation, None] = OrderedDict()
        self._bytes = 0
        self.generation = 0
        """How often :meth:`clear` was called."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def match(self, method: object, ids: Sequence[int], exact: KVMatch | None = None) -> KVMatch:
        """The longest beginning of ``ids`` that a prompt of this method, or its answer, has. A caller that needs logits
        leaves out the last token, which must be computed. The first tokens' ``exact`` KV is taken instead, and released
        with the match."""
        exact = exact or KVMatch()
        with self._lock:
            nearest, length = self._nearest(method, np.asarray(ids, np.int64))
        first = exact.num_tokens
        if nearest is None or length <= first:
            return exact
        run = KVRun(KVSource.CONTINUED, first, length, nearest.turns, nearest.stale[first:length])
        return KVMatch([*(exact.parts or ()), (run, partial(self._use, nearest))], exact.release)

    def insert(
        self,
        method: object,
        ids: Sequence[int],
        cache: KeptKV,
        *,
        stale: _Array,
        turns: int,
        generation: int | None = None,
    ) -> None:
        """Keep the KV of a prompt and its answer, or of as many first tokens as there is room for. It is copied from
        slots 0 on, after ``turns`` answers. ``stale``: ``(num_tokens,)`` bool, as in :class:`KVRun`; the
        tokens after them are not. Of a prompt from before the last :meth:`clear` nothing is kept: ``generation`` is
        what :attr:`generation` was then.

        It takes the place of a conversation of which it has all but an eighth: the one before it, or another question
        on the same documents. Two chats on them keep a place each, or each turn would compute the chat so far again."""
        count = min(len(ids), self._max_bytes() // cache.token_bytes)
        num_bytes = count * cache.token_bytes
        wanted = np.asarray(ids[:count], np.int64)
        with self._lock:
            generation = self.generation if generation is None else generation
            if generation != self.generation:
                return
            near, length = self._nearest(method, wanted)
            if near is not None and length >= 7 / 8 * len(near.ids):
                self._drop(near)
            self._make_room(num_bytes)
            if not count or self._bytes + num_bytes > self._max_bytes() or not self._claim(num_bytes):
                return
            self._bytes += num_bytes
        try:
            (kv,) = cache.blocks(0, 1, count)
        except BaseException:
            with self._lock:
                self._give_back(num_bytes)
            raise
        marks = np.zeros(count, np.bool_)
        marks[: len(stale)] = stale[:count]
        with self._lock:
            if generation != self.generation:
                self._give_back(num_bytes)
                return
            self._held[_Conversation((type(method), repr(method)), wanted, marks, turns, num_bytes, kv)] = None

    def _use(self, conversation: _Conversation) -> list[Any]:
        """The KV of a conversation, which is the last one to be evicted now."""
        with self._lock:
            if conversation in self._held:
                self._held.move_to_end(conversation)
        return [conversation.kv]

    def shrink(self) -> None:
        with self._lock:
            self._make_room(0)

    def clear(self) -> None:
        with self._lock:
            self.generation += 1
            for conversation in list(self._held):
                self._drop(conversation)

    # -- the caller holds the lock -----------------------------------------------------------------------------------

    def _nearest(self, method: object, ids: _Array) -> tuple[_Conversation | None, int]:
        """The conversation with the longest equal beginning, and its number of tokens."""
        nearest, most, wanted = None, 0, (type(method), repr(method))
        for conversation in self._held:
            if conversation.method == wanted and (length := conversation.equal(ids)) > most:
                nearest, most = conversation, length
        return nearest, most

    def _make_room(self, num_bytes: int) -> None:
        while self._held and self._bytes + num_bytes > self._max_bytes():
            self._drop(next(iter(self._held)))

    def _drop(self, conversation: _Conversation) -> None:
        del self._held[conversation]
        self._give_back(conversation.num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._bytes -= num_bytes
        self._claim(-num_bytes)
