"""KV of prompts as tensors for the store, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..base import KVPart, KVRun, KVSource
from .cache import FusedCache

Arrays = tuple[int, ...]
"""Numbers of a cache's arrays (:meth:`~.cache.FusedCache.groups`)."""


class LayerTensors:
    """See :class:`~cacheclip_rag.runtime.base.PromptTensors`. Keys are after RoPE. A tensor has two arrays of a group
    side by side, or two halves of each if their number is odd."""

    def __init__(self, new_cache: Callable[[int], FusedCache]) -> None:
        """``new_cache``: an empty cache of the model, with room for so many tokens."""
        self._new_cache = new_cache

    def shapes(self, num_tokens: int) -> list[tuple[int, ...]]:
        cache = self._new_cache(0)
        firsts = [(len(group), cache.arrays[group[0]].shape) for group in cache.groups()]
        each = [torch.empty(count, heads, num_tokens, width, device="meta") for count, (_, heads, _, width) in firsts]
        return [tuple(_paired(arrays).shape) for arrays in each]

    def join(self, blocks: Sequence[Mapping[Arrays, torch.Tensor]]) -> list[torch.Tensor]:
        return [_paired(torch.cat([block[group] for block in blocks], 2)).cpu() for group in blocks[0]]

    def state(self, start: int, pieces: Sequence[Sequence[torch.Tensor]]) -> FusedCache:
        cache = self._new_cache(start + sum(piece[0].shape[3] for piece in pieces))
        for piece in pieces:
            pairs = zip(cache.groups(), piece, strict=True)
            block = {group: _unpaired(kv, len(group)) for group, kv in pairs}
            run = KVRun(KVSource.CACHED, start, start + piece[0].shape[3])
            cache.write_blocks(KVPart(run, [block]))
            start = run.stop
        return cache


def _paired(arrays: torch.Tensor) -> torch.Tensor:
    """``(num_arrays, num_kv_heads, num_tokens, width)`` as a tensor for the store."""
    kv: torch.Tensor = arrays.unflatten(-1, (2, -1)).movedim(-2, 1) if len(arrays) % 2 else arrays.unflatten(0, (-1, 2))
    return kv


def _unpaired(kv: torch.Tensor, num_arrays: int) -> torch.Tensor:
    """The inverse of :func:`_paired`."""
    return kv.movedim(1, -2).flatten(-2) if num_arrays % 2 else kv.flatten(0, 1)
