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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

_Array = np.ndarray[Any, Any]


class KeptKV(Protocol):
    """A state whose exact KV the prefix cache can keep, and continued KV too. The cache does not look into blocks."""

    token_bytes: int
    """Bytes of the KV of one token."""

    def get_seq_length(self) -> int:
        """Number of tokens."""

    def blocks(self, first: int, count: int, size: int) -> Iterable[Any]:
        """Copies of the KV of ``count`` blocks of ``size`` tokens, from block ``first`` on."""

    def write_blocks(self, blocks: Sequence[Any], num_tokens: int, *, first: int = 0) -> None:
        """Take tokens ``first`` to ``num_tokens - 1`` of blocks that follow one another. Those before are there; if
        there are some, it is one block."""


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


class _Exact(Protocol):
    """A match of the prefix cache."""

    num_tokens: int

    def write_to(self, cache: KeptKV) -> None: ...

    def release(self) -> None: ...


class ContinuedMatch:
    """The first tokens of a prompt that an earlier prompt, or its answer, has too. Its KV can be read until the
    ``with`` block ends, even if it is evicted."""

    def __init__(
        self, conversation: _Conversation | None = None, num_tokens: int = 0, exact: _Exact | None = None
    ) -> None:
        self._kv = conversation.kv if conversation else None
        self._exact = exact
        self.num_tokens = num_tokens
        self.num_exact = 0 if exact is None else min(exact.num_tokens, num_tokens)
        """Leading tokens that are taken from the prefix cache, and exact."""
        self.turns = conversation.turns if conversation else 0
        """Answers whose KV it is."""
        self.stale: _Array = conversation.stale[:num_tokens].copy() if conversation else np.zeros(0, np.bool_)
        """``(num_tokens,)`` bool: tokens whose KV is a chunk's as it was stored, never computed in a prompt."""
        self.stale[: self.num_exact] = False

    def write_to(self, cache: KeptKV) -> None:
        """Copy the KV into slots 0 to ``num_tokens - 1`` of ``cache``."""
        if self._exact is not None:
            self._exact.write_to(cache)
        if self._kv is not None and self.num_exact < self.num_tokens:
            cache.write_blocks([self._kv], self.num_tokens, first=self.num_exact)

    def __enter__(self) -> ContinuedMatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._kv = None
        if self._exact is not None:
            self._exact.release()


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
        self.cleared = 0
        """How often :meth:`clear` was called."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def match(self, method: object, ids: Sequence[int], exact: _Exact | None = None) -> ContinuedMatch:
        """The longest beginning of ``ids`` that a prompt of this method, or its answer, has. A caller that needs logits
        leaves out the last token, which must be computed. The first tokens' ``exact`` KV is taken instead, and released
        with the match."""
        with self._lock:
            found, length = self._nearest(method, np.asarray(ids, np.int64))
            if found is not None:
                self._held.move_to_end(found)
        return ContinuedMatch(found, length, exact)

    def known(self, method: object, ids: Sequence[int]) -> int:
        """Number of tokens that :meth:`match` would match now."""
        with self._lock:
            return self._nearest(method, np.asarray(ids, np.int64))[1]

    def insert(
        self,
        method: object,
        ids: Sequence[int],
        cache: KeptKV,
        *,
        stale: _Array,
        turns: int,
        cleared: int | None = None,
    ) -> None:
        """Keep the KV of a prompt and its answer, or of as many first tokens as there is room for. It is copied from
        slots 0 on, after ``turns`` answers. ``stale``: ``(num_tokens,)`` bool, see :attr:`ContinuedMatch.stale`; the
        tokens after them are not. Of a prompt from before the last :meth:`clear` nothing is kept: ``cleared`` is what
        :attr:`cleared` was then.

        It takes the place of a conversation of which it has all but an eighth: the one before it, or another question
        on the same documents. Two chats on them keep a place each, or each turn would compute the chat so far again."""
        count = min(len(ids), self._max_bytes() // cache.token_bytes)
        num_bytes = count * cache.token_bytes
        wanted = np.asarray(ids[:count], np.int64)
        with self._lock:
            cleared = self.cleared if cleared is None else cleared
            if cleared != self.cleared:
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
            if cleared != self.cleared:
                self._give_back(num_bytes)
                return
            self._held[_Conversation((type(method), repr(method)), wanted, marks, turns, num_bytes, kv)] = None

    def shrink(self) -> None:
        with self._lock:
            self._make_room(0)

    def clear(self) -> None:
        with self._lock:
            self.cleared += 1
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
