"""Exact prefix caching: the KV of prompts' starts, kept in blocks and found again by their tokens.

Source: vLLM's "Automatic Prefix Caching" (docs.vllm.ai, v1 design) over blocks as in PagedAttention (arXiv:2309.06180):
whole blocks only, each hash chained on its parent's, reference counts, least recently used eviction from a prompt's
tail. Departures: blocks are copied into a contiguous cache, because transformers' attention takes contiguous KV; the
whole SHA-256 is compared, then the tokens and the parent too, so that a collision is a miss; no block is stored twice.

Keys are kept after RoPE: the same tokens behind the same prefix always sit at the same positions. What is inserted must
be what a plain prefill computes, so after an approximate method only the exact start may be.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import ConfigurationError
from ..runtime.transformers.cache import FusedCache

__all__ = ["Match", "PrefixCache", "PrefixStats"]


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What a prefix cache holds and how it has served, since it was made."""

    blocks: int
    """Blocks that a match can find, or soon can: those being copied count."""
    bytes: int
    """Bytes they take, and those of cleared blocks that a match still holds."""
    max_bytes: int
    hit_tokens: int
    """Tokens found, of the ``lookup_tokens`` asked for."""
    lookup_tokens: int
    evictions: int
    """Blocks dropped to make room."""


@dataclass(eq=False, repr=False, slots=True)
class _Block:
    digest: bytes
    parent: _Block | None
    ids: bytes
    num_bytes: int
    refs: int = 1
    """Matches and inserts that need it; those of a parent are never fewer than its child's."""
    kv: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """Per group of layers that are alike, keys and values by turns: ``(2 * num_layers, num_kv_heads, block_tokens,
    head_dim)``, keys after RoPE. Empty while they are being copied."""


class Match:
    """The longest stored start of a prompt. Its blocks are held, safe from eviction, until the ``with`` block ends."""

    def __init__(self, blocks: Sequence[_Block], num_tokens: int, release: Callable[[Sequence[_Block]], None]) -> None:
        self._blocks: Sequence[_Block] | None = blocks
        self._release = release
        self._lock = threading.Lock()
        self.num_tokens = num_tokens

    def write_to(self, cache: FusedCache) -> None:
        """Copy the KV of all blocks into slots 0 to ``num_tokens - 1`` of ``cache``."""
        blocks = self._blocks
        assert blocks is not None, "a released match holds nothing: its blocks may be gone"
        with torch.inference_mode():
            for group in blocks[0].kv if blocks else ():
                pieces = zip(*(block.kv[group].unbind() for block in blocks), strict=True)
                # joined one by one, so that no second copy of the whole start is held; keys and values by turns
                rows = (torch.cat(of_blocks, dim=1) for of_blocks in pieces)
                for index, keys, values in zip(group, rows, rows, strict=True):
                    cache.layers[index].write(0, keys, values)  # (num_kv_heads, num_tokens, head_dim)

    def release(self) -> None:
        """Let go of the blocks; again does nothing."""
        with self._lock:
            blocks, self._blocks = self._blocks, None
        if blocks:
            self._release(blocks)

    def __enter__(self) -> Match:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PrefixCache:
    """Blocks of KV of one model, up to ``max_bytes`` of them; 0 keeps none. Safe to share between threads.

    Two things keep eviction simple. Whoever holds a block holds those before it, and lets go of the last first: so the
    order in which blocks became free has every child before its parent. And room for a new block is taken before its KV
    is copied, outside the lock: so not even for a moment is the limit exceeded.

    Args:
        extra_keys: what else must be equal for KV to be (model, tenant); goes into every hash.
        block_tokens: tokens of a block; a start shorter than one is never stored.

    Raises:
        ConfigurationError: ``max_bytes`` is negative or ``block_tokens`` less than 1.
    """

    def __init__(self, max_bytes: int, *, extra_keys: Sequence[str] = (), block_tokens: int = 16) -> None:
        if max_bytes < 0:
            raise ConfigurationError(f"max_bytes must be 0 or more, got {max_bytes}. Give 0 to keep no prefix blocks.")
        if block_tokens < 1:
            raise ConfigurationError(f"block_tokens must be 1 or more, got {block_tokens}. The usual number is 16.")
        self._max_bytes, self._block_tokens = max_bytes, block_tokens
        self._extra = b"".join(_with_length(key.encode("utf-8", "surrogatepass")) for key in extra_keys)
        self._blocks: dict[bytes, _Block] = {}
        self._free: OrderedDict[bytes, _Block] = OrderedDict()
        """Blocks that nobody holds, the next to evict first."""
        self._bytes = self._hit_tokens = self._lookup_tokens = self._evictions = 0
        self._lock = threading.Lock()

    def match(self, ids: Sequence[int], *, at_most: int | None = None) -> Match:
        """The longest stored start of ``ids`` in whole blocks; use it in a ``with`` block, or release it.

        Args:
            at_most: never more tokens than this. A caller that needs logits leaves the last token to be computed.
        """
        chain = self._chain(ids, len(ids) if at_most is None else min(at_most, len(ids)))
        with self._lock:
            found = self._hold(chain)
            num_tokens = len(found) * self._block_tokens
            self._hit_tokens += num_tokens
            self._lookup_tokens += len(ids)
        return Match(found, num_tokens, self._release)

    def insert(self, ids: Sequence[int], cache: FusedCache) -> int:
        """Keep all whole blocks of ``ids`` that are new and fit; their KV is copied from slots 0 to ``len(ids) - 1``.

        Evicts what nobody holds, but no block of ``ids`` itself. A block that another thread is just storing ends the
        chain here: the next insert goes on from it.

        Returns:
            Number of new blocks.
        """
        chain = self._chain(ids, len(ids))
        if not chain:
            return 0
        size, length = self._block_tokens, cache.get_seq_length()
        assert length >= len(ids), f"the cache must hold the KV of all {len(ids)} tokens, it holds {length}"
        num_bytes = sum(kv[0, :, :size].nbytes for layer in cache.layers for kv in (layer.keys, layer.values))
        with self._lock:
            held = self._hold(chain)
            new = self._reserve(chain[len(held) :], held[-1] if held else None, num_bytes)
        try:
            with torch.inference_mode():
                for block, kv in zip(new, _cut(cache, len(held), len(new), size), strict=True):
                    block.kv = kv
        finally:
            self._release([*held, *new])
        return len(new)

    @property
    def stats(self) -> PrefixStats:
        """Sizes and counters."""
        with self._lock:
            sizes = len(self._blocks), self._bytes, self._max_bytes
            return PrefixStats(*sizes, self._hit_tokens, self._lookup_tokens, self._evictions)

    def clear(self) -> None:
        """Forget all blocks. Matches in use stay whole; the memory of theirs is freed when they are released."""
        with self._lock:
            self._bytes -= sum(block.num_bytes for block in self._free.values())
            self._blocks.clear()
            self._free.clear()

    def _chain(self, ids: Sequence[int], num_tokens: int) -> list[tuple[bytes, bytes]]:
        """Digest and ids, as bytes, of each whole block among the first ``num_tokens``."""
        chain, digest, size = [], bytes(32), self._block_tokens  # zeros: the parent of a first block
        for start in range(0, num_tokens - size + 1, size):
            content = array("q", ids[start : start + size]).tobytes()
            digest = block_digest(digest, self._extra, content)
            chain.append((digest, content))
        return chain

    # -- with the lock held, but for the last, which takes it ---------------------------------------------------------

    def _hold(self, chain: Sequence[tuple[bytes, bytes]]) -> list[_Block]:
        """The stored blocks that ``chain`` starts with, each held once more."""
        found: list[_Block] = []
        parent = None
        for digest, ids in chain:
            block = self._blocks.get(digest)
            # The parent was compared likewise, so equality reaches back to the first token whatever the hash does.
            if block is None or not block.kv or block.ids != ids or block.parent is not parent:
                break
            block.refs += 1
            self._free.pop(digest, None)
            found.append(block)
            parent = block
        return found

    def _reserve(self, chain: Sequence[tuple[bytes, bytes]], parent: _Block | None, num_bytes: int) -> list[_Block]:
        """New blocks behind ``parent``, held and without KV yet, as many as there can be room for."""
        new: list[_Block] = []
        for digest, ids in chain:
            if digest in self._blocks or not self._make_room(num_bytes):
                break
            parent = self._blocks[digest] = _Block(digest, parent, ids, num_bytes)
            self._bytes += num_bytes
            new.append(parent)
        return new

    def _make_room(self, num_bytes: int) -> bool:
        while self._bytes + num_bytes > self._max_bytes and self._free:
            digest, block = self._free.popitem(last=False)
            del self._blocks[digest]
            self._bytes -= block.num_bytes
            self._evictions += 1
        return self._bytes + num_bytes <= self._max_bytes

    def _release(self, blocks: Sequence[_Block]) -> None:
        """Hold each block once less, the last first: a prompt's tail is the least likely to be asked for again."""
        with self._lock:
            for block in reversed(blocks):
                block.refs -= 1
                if block.refs:
                    continue
                known = self._blocks.get(block.digest) is block
                if known and block.kv:
                    self._free[block.digest] = block
                    continue
                if known:  # its copy failed; nobody could build on it
                    del self._blocks[block.digest]
                self._bytes -= block.num_bytes  # of a failed or cleared block


def block_digest(parent: bytes, extra: bytes, ids: bytes) -> bytes:
    """Hash of a block; every field goes in with its length before it, as in :mod:`~cacheclip_rag.store.keys`."""
    return hashlib.sha256(b"".join(map(_with_length, (parent, extra, ids)))).digest()


def _with_length(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def _cut(cache: FusedCache, first: int, count: int, size: int) -> Iterator[dict[tuple[int, ...], torch.Tensor]]:
    """KV of ``count`` blocks of ``size`` tokens from block ``first`` on, copied: one tensor a group, not two a layer,
    because the time goes into the number of copies."""
    groups: dict[object, list[int]] = {}
    for index, layer in enumerate(cache.layers):
        groups.setdefault((layer.device, layer.dtype, layer.keys.shape[1], layer.keys.shape[3]), []).append(index)
    pieces = {}
    for group in groups.values():
        sources = [kv for index in group for kv in (cache.layers[index].keys, cache.layers[index].values)]
        pieces[tuple(group)] = [kv[0, :, first * size : (first + count) * size].split(size, dim=1) for kv in sources]
    for number in range(count):
        yield {group: torch.stack([piece[number] for piece in of_group]) for group, of_group in pieces.items()}
