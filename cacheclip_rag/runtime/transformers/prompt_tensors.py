"""KV of prompts as tensors for the store, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..base import KVPart, KVRun, KVSource
from .cache import FusedCache

Layers = tuple[int, ...]


class LayerTensors:
    """See :class:`~cacheclip_rag.runtime.base.PromptTensors`. Keys are after RoPE."""

    def __init__(self, new_cache: Callable[[int], FusedCache]) -> None:
        """``new_cache``: an empty cache of the model, with room for so many tokens."""
        self._new_cache = new_cache

    def shapes(self, num_tokens: int) -> list[tuple[int, ...]]:
        cache = self._new_cache(0)
        first = [(len(layers), cache.layers[layers[0]].keys) for layers in cache.groups()]
        return [(count, 2, keys.shape[1], num_tokens, keys.shape[3]) for count, keys in first]

    def join(self, blocks: Sequence[Mapping[Layers, torch.Tensor]]) -> list[torch.Tensor]:
        joined = [torch.cat([block[layers] for block in blocks], 2) for layers in blocks[0]]
        return [kv.unflatten(0, (-1, 2)).cpu() for kv in joined]

    def state(self, start: int, pieces: Sequence[Sequence[torch.Tensor]]) -> FusedCache:
        cache = self._new_cache(start + sum(piece[0].shape[3] for piece in pieces))
        for piece in pieces:
            block = {layers: kv.flatten(0, 1) for layers, kv in zip(cache.groups(), piece, strict=True)}
            run = KVRun(KVSource.CACHED, start, start + piece[0].shape[3])
            cache.write_blocks(KVPart(run, [block]))
            start = run.stop
        return cache
