"""KV of earlier prompts and of their answers: one tree of blocks by token ids, of one model and one tenant.

A prompt finds three kinds of KV here, in this order:

- *cached*: exact KV of its first tokens. It equals plain prefill's.
- *continued*: approximate KV that a fused answer left, of a prompt that begins like this one. The next question on the
  same documents, the next turn of a chat, or the next step of an agent continues from it. Only prompts of the same
  method at the same ratio do.
- *moved*: KV of equal tokens at another position, or behind other text: what is left of a prompt after an edit. Keys
  are turned by the distance. Approximate, the nearer to exact the more of its own past still stands before it.

A model that keeps more than KV, the states of recurrent layers, goes on from the end of an earlier prompt alone. The
block that ends there has its states too, and a key of its own.

Approximate KV never becomes exact: a branch of the tree that holds it is marked by its method, and the exact walk
passes no mark. Keys are kept after RoPE, because the same tokens after the same prefix always have the same positions.

Sources: the radix tree of SGLang's RadixAttention (arXiv:2312.07104) over blocks as in PagedAttention
(arXiv:2309.06180): reference counts, least recently used eviction from the end of a prompt. Departures: blocks are
copied, because transformers' attention needs contiguous KV; tokens are compared, not hashes of them. Moved KV is that
of ``--cache-reuse`` in llama.cpp's server. Departures: any number of earlier prompts serve as sources, and tokens
before which too little of their past is left are computed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ..base.errors import ConfigurationError
from .base import KeptKV, KVMatch, KVSource
from .kv_blocks import END, EXACT, Array, KVBlock, Places, end_of, num_equal, part_of_prompt

_MOST_ENDS = 3
"""Ends of one conversation from which the next prompt may go on. Each has all states of a model."""


@dataclass(frozen=True, slots=True)
class PromptCacheStats:
    """Contents of a cache, and counters since it was made."""

    blocks: int
    """Blocks that a match can find, including blocks that are still being copied."""
    bytes: int
    """Bytes of these blocks, and of cleared blocks that a match still holds."""
    max_bytes: int
    evictions: int
    """Blocks evicted to make room."""
    continued_bytes: int
    """Those of ``bytes`` whose KV is approximate."""


class Approximate(NamedTuple):
    """What is known of the KV of a fused prompt and its answer."""

    method: object
    """By which it was computed, at its ratio."""
    stale: Array
    """``(num_tokens,)`` bool, as in :class:`~cacheclip_rag.runtime.base.KVRun`; tokens after them are not stale."""
    past: Array
    """``(num_tokens,)``, 0 to 1, as in :class:`~cacheclip_rag.runtime.base.KVRun`; that of tokens after them is 1."""
    turns: int
    """Answers whose approximate KV it is, one after the other."""


class PromptCache:
    """Blocks of KV of one model, up to ``max_bytes`` in all; 0 stores no block. Safe to share between threads.

    Two rules keep eviction simple. A reference to a block is also a reference to all blocks before it, and the last
    block is released first; so every child becomes free before its parent. Room for a new block is reserved before its
    KV is copied, and the copy needs no lock; so the limit is never exceeded.

    Args:
        block_tokens: tokens per block. Exact KV is kept in whole blocks.

    Raises:
        ConfigurationError: ``max_bytes`` is negative or ``block_tokens`` less than 1.
    """

    def __init__(self, max_bytes: int, *, block_tokens: int = 16) -> None:
        if max_bytes < 0:
            raise ConfigurationError(f"max_bytes must be 0 or more, got {max_bytes}. Give 0 to keep no KV of prompts.")
        if block_tokens < 1:
            raise ConfigurationError(f"block_tokens must be 1 or more, got {block_tokens}. The usual number is 16.")
        self._max_bytes, self.block_tokens = max_bytes, block_tokens
        self._root = KVBlock.root()
        self._free: OrderedDict[KVBlock, None] = OrderedDict()
        """Blocks without references, the next to be evicted first."""
        self._places = Places()
        self._blocks = self._bytes = self._approximate_bytes = self._evictions = 0
        self.generation = 0
        """How often :meth:`clear` was called."""
        self._has_ends = False
        """Whether its model goes on from the ends of prompts alone."""
        self._lock = threading.Lock()
        self._sharing = [self]
        """Caches that have one limit together, and one lock."""

    def share_limit(self, other: PromptCache) -> None:
        """Have one limit together with ``other`` and all that share its limit. If there is no room, a block of the
        largest of them goes. Call it before the first use."""
        assert not self._blocks, "a cache shares its limit before it has blocks"
        self._lock, self._sharing = other._lock, other._sharing
        self._sharing.append(self)

    def match(self, ids: Sequence[int], method: object = None, *, moves: range = range(0)) -> KVMatch:
        """The KV of ``ids`` that earlier prompts left. Use it in a ``with`` block, or release it. A caller that needs
        logits leaves out the last token, which must be computed.

        Args:
            method: continued KV of this method is found, too; None: exact KV only.
            moves: tokens whose KV may be moved KV.
        """
        tokens = np.asarray(ids, np.int64)
        with self._lock:
            exact = self._root.walk(tokens, None, self.block_tokens)
            if self._has_ends:
                exact = KVBlock.last_end([self._root, *exact], tokens)
            parts = [part_of_prompt(KVSource.CACHED, exact, 0, 0, end_of(exact), [1.0])] if exact else []
            ends = exact[-1:]
            if method is not None:
                blocks, stop = self._continued(exact, tokens, _key(method))
                if stop > (first := end_of(exact)):
                    pasts = [block.past for block in blocks]
                    parts.append(part_of_prompt(KVSource.CONTINUED, blocks, first, first, stop, pasts))
                    ends.append(blocks[-1])
            first = max(moves.start, parts[-1].run.stop if parts else 0)
            for run in self._places.runs(tokens[: moves.stop], first):
                parts.append(run.as_part())
                ends.append(run.blocks[-1])
            held = [block for end in ends for block in end.path()]
            self._hold(held)
        return KVMatch(parts, partial(self._release, held)) if parts else KVMatch()

    def known(self, ids: Sequence[int]) -> int:
        """Number of first tokens whose exact KV :meth:`match` would find now."""
        with self._lock:
            exact = self._root.walk(tokens := np.asarray(ids, np.int64), None, self.block_tokens)
            return end_of(KVBlock.last_end([self._root, *exact], tokens) if self._has_ends else exact)

    def insert(
        self,
        ids: Sequence[int],
        cache: KeptKV,
        approximate: Approximate | None = None,
        *,
        generation: int | None = None,
    ) -> int:
        """Keep the KV of a prompt and its answer, as much as there is room for; returns the number of new blocks. It is
        copied from slots 0 to ``len(ids) - 1``. Evicts blocks without references, but no block of ``ids``.

        Args:
            cache: if it has more than KV, its ``ends_at`` is its number of tokens, or 0 if they are not exact, and its
                ``state_bytes`` those of what its last block has beside KV.
            approximate: not all KV is exact. What follows the exact KV that is kept already goes into a branch of its
                own, to the last token. Where it is kept already, the KV with fewer stale tokens stays.
            generation: what :attr:`generation` was when the prompt was answered: if it is another number now, nothing
                is kept.
        """
        tokens, length = np.asarray(ids, np.int64), cache.get_seq_length()
        assert length >= len(ids), f"the cache must hold the KV of all {len(ids)} tokens, it holds {length}"
        ends_at: int | None = getattr(cache, "ends_at", None)
        if ends_at is not None and (ends_at != len(ids) or approximate is not None):
            return 0
        with self._lock:
            if generation not in (None, self.generation):
                return 0
            held = self._root.walk(tokens[: ends_at and ends_at - 1], None, self.block_tokens)
            exact, method = end_of(held), None
            if approximate is not None:
                method = _key(approximate.method)
                held += (held[-1] if held else self._root).walk(tokens, method, self.block_tokens)
            self._hold(held)
            new = self._reserve(held[-1] if held else self._root, tokens, method, cache)
            self._places.add(tokens, [*held, *new], held[-1].stop if held else 0)
        stale, past = np.zeros(len(tokens), np.bool_), np.ones(len(tokens), np.float32)
        if approximate is not None:
            stale[: len(approximate.stale)] = approximate.stale[: len(tokens)]
            past[: len(approximate.past)] = approximate.past[: len(tokens)]
        fewer = [
            block for block in held if block.start >= exact and block.num_stale > stale[block.start : block.stop].sum()
        ]
        try:
            for blocks in (new, *([block] for block in fewer)):
                self._copy(blocks, cache, stale, past, 0 if approximate is None else approximate.turns)
        finally:
            self._release([*held, *new])
        return len(new)

    @property
    def stats(self) -> PromptCacheStats:
        with self._lock:
            return PromptCacheStats(
                self._blocks, self._bytes, self._max_bytes, self._evictions, self._approximate_bytes
            )

    def clear(self) -> None:
        """Drop all blocks. Matches in use stay valid; their memory is freed when they are released."""
        with self._lock:
            self.generation += 1
            ahead = [*self._root.children.values()]
            while ahead:
                block = ahead.pop()
                ahead += block.children.values()
                block.is_known = False
                if not block.refs:
                    self._count(block, -1)
            self._root, self._blocks = KVBlock.root(), 0
            self._free.clear()
            self._places = Places()

    # -- the caller holds the lock, except for _copy and _release, which take it ---------------------------------------

    def _continued(self, exact: Sequence[KVBlock], tokens: Array, method: Hashable) -> tuple[list[KVBlock], int]:
        """The blocks of a method's approximate KV that go on the furthest, and where. They begin where the exact ones
        end, or before."""
        first, best, furthest = end_of(exact), list[KVBlock](), 0
        for block in (*reversed(exact), self._root):
            if all(key[0] != method for key in block.children):
                continue
            blocks = block.walk(tokens, method, self.block_tokens)
            end = blocks[-1] if blocks else block
            last = end.most_equal_child(tokens[end.stop :], lambda child: child.method == method)
            stop = end.stop
            if last is not None:
                blocks.append(last)
                stop += num_equal(last.ids, tokens[end.stop :])
            if stop > furthest:
                best, furthest = [each for each in blocks if each.stop > first], stop
        return best, furthest

    def _reserve(self, parent: KVBlock, tokens: Array, method: Hashable, cache: KeptKV) -> list[KVBlock]:
        """New blocks after ``parent``, with one reference and no KV yet, as many as fit."""
        new, size, state_bytes = list[KVBlock](), self.block_tokens, getattr(cache, "state_bytes", 0)
        if state_bytes:
            self._has_ends = True
            path = (self._root, *parent.path())
            ends = [end for block in path for end in block.ends(tokens[block.stop :]) if end in self._free]
            for end in ends[: 1 - _MOST_ENDS]:
                del self._free[end]
                self._remove(end)
        while parent.parent is None or len(parent.ids) == size:
            ids = tokens[parent.stop : parent.stop + size]
            ends_here = state_bytes and parent.stop + len(ids) == len(tokens)
            key = KVBlock.key_of(END if ends_here else method, ids)
            num_bytes = len(ids) * cache.token_bytes + (state_bytes if ends_here else 0)
            if not len(ids) or (key[0] is None and len(ids) < size) or key in parent.children:
                break
            if not self._make_room(num_bytes):
                break
            block = parent.children[key] = KVBlock(parent, key, ids, parent.stop, num_bytes)
            self._count(block, 1)
            self._blocks += 1
            new.append(block)
            parent = block
        return new

    def _make_room(self, num_bytes: int) -> bool:
        while (excess := sum(each._bytes for each in self._sharing) + num_bytes - self._max_bytes) > 0:
            largest = max((each for each in self._sharing if each._free), key=lambda each: each._bytes, default=None)
            if largest is None:
                break
            block, _ = largest._free.popitem(last=False)
            largest._remove(block)
            largest._evictions += 1
        return excess <= 0

    def _remove(self, block: KVBlock) -> None:
        assert block.parent is not None and not block.children
        del block.parent.children[block.key]
        block.is_known = False
        self._count(block, -1)
        self._blocks -= 1
        self._places.remove(block)

    def _count(self, block: KVBlock, sign: int) -> None:
        self._bytes += sign * block.num_bytes
        if block.method not in EXACT:
            self._approximate_bytes += sign * block.num_bytes

    def _hold(self, blocks: Sequence[KVBlock]) -> None:
        for block in blocks:
            block.refs += 1
            self._free.pop(block, None)

    def _copy(self, blocks: Sequence[KVBlock], cache: KeptKV, stale: Array, past: Array, turns: int) -> None:
        """Copy the KV of neighbouring blocks."""
        if not blocks:
            return
        copies = cache.blocks(blocks[0].start, blocks[-1].stop, self.block_tokens)
        for block, kv in zip(blocks, copies, strict=True):
            with self._lock:  # KV, and what is said of it, change at once
                if block.method not in EXACT:
                    part = slice(block.start, block.stop)
                    block.stale, block.past, block.turns = stale[part], float(past[part].min()), turns
                block.kv = kv

    def _release(self, blocks: Sequence[KVBlock]) -> None:
        """Drop one reference to each block, the last block first: a prompt's end is the least likely to be reused."""
        with self._lock:
            for block in reversed(blocks):
                block.refs -= 1
                if block.refs:
                    continue
                if not block.is_known:
                    self._count(block, -1)
                elif block.kv is None:  # its copy failed, so no other block refers to it
                    self._remove(block)
                else:
                    self._free[block] = None


def _key(method: object) -> Hashable:
    """Type and settings: a method of another package may have a name like one of ours, and need not be hashable."""
    return type(method), repr(method)
