"""KV of earlier prompts, in two caches with one limit: the exact prefix cache, and continued KV, which is approximate.

The prefix cache has KV of the first tokens of prompts, in blocks found by their token ids.

Source: vLLM's "Automatic Prefix Caching" (docs.vllm.ai, v1 design) over blocks as in PagedAttention (arXiv:2309.06180):
whole blocks only, each hash chained to the parent's hash, reference counts, least recently used eviction from the end
of a prompt. Departures: blocks are copied, because transformers' attention needs contiguous KV;
the whole SHA-256, the tokens and the parent are compared, so that a collision is a miss; no block is stored twice.

Keys are stored after RoPE, because the same tokens after the same prefix always have the same positions. Inserted KV
must equal plain prefill's: after an approximate method, only the exact first tokens may be inserted.

Continued KV is what answers leave behind, for prompts that begin like theirs. A fused prompt's KV is approximate, so it
never enters the exact prefix cache. The next question on the same documents, the next turn of a chat, or the next step
of an agent begins with the same tokens: it continues from that KV instead of assembling and recomputing it again. Only
prompts of the same method at the same ratio do.

Source: the slots of llama.cpp's server, which keep a conversation's KV and compare token ids. Departure: the KV is
copied, so that several prompts at the same time can continue from it.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ...base.errors import ConfigurationError
from ..base import KeptKV, KVMatch, KVRun, KVSource


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Contents of a prefix cache, and counters since it was made."""

    blocks: int
    """Blocks that a match can find, including blocks that are still being copied."""
    bytes: int
    """Bytes of these blocks, and of cleared blocks that a match still holds."""
    max_bytes: int
    evictions: int
    """Blocks evicted to make room."""
    continued_bytes: int
    """Bytes of the approximate KV that shares ``max_bytes``."""


@dataclass(eq=False, repr=False, slots=True)
class _PrefixBlock:
    digest: bytes
    parent: _PrefixBlock | None
    ids: bytes
    num_bytes: int
    refs: int = 1
    """References by matches and inserts. A parent never has fewer references than its child."""
    kv: Any = field(default=None)
    """What the runtime's state gives of these tokens (:class:`KeptKV`). None while it is being copied."""


class PrefixCache:
    """Blocks of KV of one model, up to ``max_bytes`` in all; 0 stores no block. Safe to share between threads.

    Two rules keep eviction simple. A reference to a block is also a reference to all blocks before it, and the last
    block is released first; so every child becomes free before its parent. Room for a new block is reserved before its
    KV is copied, and the copy needs no lock; so the limit is never exceeded.

    Args:
        extra_keys: other inputs on which the KV depends (model, tenant); part of every hash.
        block_tokens: tokens per block. A shorter prefix is never stored.

    Raises:
        ConfigurationError: ``max_bytes`` is negative or ``block_tokens`` less than 1.
    """

    def __init__(self, max_bytes: int, *, extra_keys: Sequence[str] = (), block_tokens: int = 16) -> None:
        if max_bytes < 0:
            raise ConfigurationError(f"max_bytes must be 0 or more, got {max_bytes}. Give 0 to keep no prefix blocks.")
        if block_tokens < 1:
            raise ConfigurationError(f"block_tokens must be 1 or more, got {block_tokens}. The usual number is 16.")
        self._max_bytes, self.block_tokens = max_bytes, block_tokens
        extra = b"".join(_with_length(key.encode("utf-8", "surrogatepass")) for key in extra_keys)
        self._chain = lru_cache(maxsize=1)(partial(_chain, extra, block_tokens))
        """Hashes of a prompt's blocks, kept until another prompt comes: the controller looks a prompt up, then the
        fused prefill, then plain prefill if the first token is unsure."""
        self._blocks: dict[bytes, _PrefixBlock] = {}
        self._free: OrderedDict[bytes, _PrefixBlock] = OrderedDict()
        """Blocks without references, the next to be evicted first."""
        self._bytes = self._evictions = 0
        self.generation = 0
        """How often :meth:`clear` was called."""
        self._lock = threading.Lock()
        self._sharing = [self]
        """Caches that have one limit together, and one lock."""
        self.continued = ContinuedCache(lambda: max_bytes // 2 // len(self._sharing), self._claim)
        """Approximate KV of earlier prompts, up to half of the bytes: a cache of its own, in which no :meth:`match` of
        this one looks."""

    def share_limit(self, other: PrefixCache) -> None:
        """Have one limit together with ``other`` and all that share its limit. If there is no room, a block of the
        largest of them goes. Call it before the first use."""
        assert not self._blocks, "a cache shares its limit before it has blocks"
        self._lock, self._sharing = other._lock, other._sharing
        self._sharing.append(self)
        for each in self._sharing:
            each.continued.shrink()

    def match(self, ids: Sequence[int]) -> KVMatch:
        """The longest stored prefix of ``ids`` in whole blocks. Use it in a ``with`` block, or release it.

        A caller that needs logits leaves out the last token, which must be computed.
        """
        chain = self._chain(tuple(ids))
        with self._lock:
            blocks = self._hold(chain)
        if not blocks:
            return KVMatch()
        run = KVRun(KVSource.CACHED, 0, len(blocks) * self.block_tokens)
        return KVMatch([(run, lambda: [block.kv for block in blocks])], partial(self._release, blocks))

    def known(self, ids: Sequence[int]) -> int:
        """Number of tokens that :meth:`match` would match now."""
        chain = self._chain(tuple(ids))
        with self._lock:
            found = self._hold(chain)
        self._release(found)
        return len(found) * self.block_tokens

    def insert(self, ids: Sequence[int], cache: KeptKV, *, generation: int | None = None) -> int:
        """Store all new whole blocks of ``ids`` that fit; returns their number. Their KV is copied from slots 0 to
        ``len(ids) - 1``.

        Evicts blocks without references, but no block of ``ids``. The chain ends at a block that another thread is
        storing; the next insert continues after it. ``generation`` is what :attr:`generation` was when the prompt was
        answered: if it is another number now, nothing is stored."""
        chain = self._chain(tuple(ids))
        if not chain:
            return 0
        size, length = self.block_tokens, cache.get_seq_length()
        assert length >= len(ids), f"the cache must hold the KV of all {len(ids)} tokens, it holds {length}"
        num_bytes = size * cache.token_bytes
        with self._lock:
            if generation not in (None, self.generation):
                return 0
            held = self._hold(chain)
            new = self._reserve(chain[len(held) :], held[-1] if held else None, num_bytes)
        try:
            for block, kv in zip(new, cache.blocks(len(held), len(new), size), strict=True):
                block.kv = kv
        finally:
            self._release([*held, *new])
        return len(new)

    @property
    def stats(self) -> PrefixStats:
        with self._lock:
            continued = self.continued.num_bytes
            sizes = len(self._blocks), self._bytes - continued, self._max_bytes
            return PrefixStats(*sizes, self._evictions, continued)

    def clear(self) -> None:
        """Drop all blocks, and the continued KV. Matches in use stay valid; their memory is freed when they are
        released."""
        self.continued.clear()
        with self._lock:
            self.generation += 1
            self._bytes -= sum(block.num_bytes for block in self._free.values())
            self._blocks.clear()
            self._free.clear()

    def _claim(self, num_bytes: int) -> bool:
        """Take bytes for other KV, or give them back."""
        with self._lock:
            if num_bytes > 0 and not self._make_room(num_bytes):
                return False
            self._bytes += num_bytes
            return True

    # -- the caller holds the lock, except for _release, which takes it ----------------------------------------------

    def _hold(self, chain: Sequence[tuple[bytes, bytes]]) -> list[_PrefixBlock]:
        """The stored blocks at the start of ``chain``, each with one more reference."""
        found: list[_PrefixBlock] = []
        parent = None
        for digest, ids in chain:
            block = self._blocks.get(digest)
            # the parent was compared in the same way, so all tokens are equal even if hashes collide
            if block is None or not block.kv or block.ids != ids or block.parent is not parent:
                break
            block.refs += 1
            self._free.pop(digest, None)
            found.append(block)
            parent = block
        return found

    def _reserve(
        self, chain: Sequence[tuple[bytes, bytes]], parent: _PrefixBlock | None, num_bytes: int
    ) -> list[_PrefixBlock]:
        """New blocks after ``parent``, with one reference and no KV yet, as many as fit."""
        new: list[_PrefixBlock] = []
        for digest, ids in chain:
            if digest in self._blocks or not self._make_room(num_bytes):
                break
            parent = self._blocks[digest] = _PrefixBlock(digest, parent, ids, num_bytes)
            self._bytes += num_bytes
            new.append(parent)
        return new

    def _make_room(self, num_bytes: int) -> bool:
        while (excess := sum(each._bytes for each in self._sharing) + num_bytes - self._max_bytes) > 0:
            largest = max((each for each in self._sharing if each._free), key=lambda each: each._bytes, default=None)
            if largest is None:
                break
            digest, block = largest._free.popitem(last=False)
            del largest._blocks[digest]
            largest._bytes -= block.num_bytes
            largest._evictions += 1
        return excess <= 0

    def _release(self, blocks: Sequence[_PrefixBlock]) -> None:
        """Drop one reference to each block, the last block first: a prompt's end is the least likely to be reused."""
        with self._lock:
            for block in reversed(blocks):
                block.refs -= 1
                if block.refs:
                    continue
                known = self._blocks.get(block.digest) is block
                if known and block.kv:
                    self._free[block.digest] = block
                    continue
                if known:  # its copy failed, so no other block refers to it
                    del self._blocks[block.digest]
                self._bytes -= block.num_bytes  # of a failed or cleared block


def _chain(extra: bytes, size: int, ids: tuple[int, ...]) -> list[tuple[bytes, bytes]]:
    """Hash and token ids, as bytes, of each whole block of ``size`` tokens."""
    chain, digest = [], bytes(32)  # zeros stand for the parent of a first block
    for start in range(0, len(ids) - size + 1, size):
        content = array("q", ids[start : start + size]).tobytes()
        digest = block_digest(digest, extra, content)
        chain.append((digest, content))
    return chain


def block_digest(parent: bytes, extra: bytes, ids: bytes) -> bytes:
    """Hash of a block. Every field is preceded by its length, as in :mod:`~cacheclip_rag.base.keys`."""
    return hashlib.sha256(b"".join(map(_with_length, (parent, extra, ids)))).digest()


def _with_length(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


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
