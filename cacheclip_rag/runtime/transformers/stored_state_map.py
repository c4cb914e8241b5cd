"""What is stored of a chunk by a model with recurrent layers, as bytes that nobody else looks into.

Token ids, and of the tokens between the chunk's edges: the keys before RoPE and the values of each layer that attends,
and the state map of each recurrent layer, in the model's dtype. The edges are computed in every prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..base import KVMatch
from .state_map import Mixers, StateMap

_FIRST, _LAST = 16, 4
"""Tokens of a chunk's edges. The first ones see what convolutions keep of the text before, and mend the state and the
keys that were computed behind other text (HYPIC recomputes 8, arXiv:2607.01299). The last ones may have other ids in a
prompt, because of the text after the chunk."""


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """The tokens of a chunk between its edges, in a prompt."""

    start: int
    stop: int
    """Their positions."""
    kv: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Of each layer that attends, keys before RoPE and values, ``(num_kv_heads, num_tokens, width)``."""
    maps: Sequence[StateMap]
    """Of each recurrent layer."""


class StoredSpans(list[StoredSpan]):
    """Those of a prompt, in order."""

    match = KVMatch()
    """KV and states that an earlier prompt left, of tokens before them all."""

    def computed(self, rows: torch.Tensor) -> torch.Tensor:
        """The tokens that are computed, if those at ``rows`` must be: all after the match, but for the spans of which
        none or only some are chosen. Both ``(num_rows,)`` int64, ascending."""
        last = int(rows[-1]) + 1
        chosen, computed = torch.zeros(last, dtype=torch.bool), torch.ones(last, dtype=torch.bool)
        chosen[rows] = True
        computed[: self.match.num_tokens] = False
        for span in self:
            computed[span.start : span.stop] = bool(chosen[span.start : span.stop].all())
        return computed.nonzero()[:, 0]

    def without_factors(self) -> StoredSpans:
        """The same with maps whose A is 0: a mistake that a proof must see."""
        return StoredSpans(
            replace(span, maps=[each._replace(factor=torch.zeros_like(each.factor)) for each in span.maps])
            for span in self
        )


@dataclass(frozen=True, slots=True)
class StateMapLayout:
    """Which arrays are stored."""

    widths: Sequence[tuple[int, int, int]]
    """Of each layer that attends its number of KV heads and the widths of its keys and values."""
    mixers: Mixers
    dtype: torch.dtype
    """The model's."""
    edges = (_FIRST, _LAST)

    def between(self, num_tokens: int) -> range:
        """The tokens between the edges of a chunk of so many."""
        first, last = self.edges
        return range(first, num_tokens - last) if num_tokens > first + last else range(0)

    def kv_shape(self, num_tokens: int) -> tuple[int, ...]:
        num_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._arrays(num_tokens))
        return 1, 2, 1, num_tokens, -(-num_bytes // max(1, 2 * num_tokens))

    def _arrays(self, num_tokens: int) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
        yield torch.int32, (num_tokens,)
        if count := len(self.between(num_tokens)):
            for heads, *widths in self.widths:
                yield from ((self.dtype, (heads, count, width)) for width in widths)
            for mixer in self.mixers.values():
                yield from ((self.dtype, shape) for shape in mixer.shapes)

    def written(self, ids: Sequence[int], kv: Sequence[torch.Tensor], maps: Sequence[StateMap]) -> torch.Tensor:
        """The bytes of a chunk, in the shape of :meth:`kv_shape`. ``kv``: keys and values, one after the other."""
        numbers = [*kv, *(each for state_map in maps for each in (*state_map[:2], *state_map.tails))]
        arrays = [torch.tensor(ids, dtype=torch.int32), *(each.to("cpu", self.dtype) for each in numbers)]
        data = torch.cat([each.contiguous().flatten().view(torch.uint8) for each in arrays])
        stored = torch.zeros(self.kv_shape(len(ids)), dtype=torch.uint8)
        stored.view(-1)[: len(data)] = data
        return stored

    def read(self, data: torch.Tensor, num_tokens: int, start: int) -> tuple[torch.Tensor, StoredSpans]:
        """Token ids ``(num_tokens,)`` of a chunk, and what is stored of it, if it begins at ``start`` of a prompt.
        ``data``: its bytes."""
        arrays, at = list[torch.Tensor](), 0
        for dtype, shape in self._arrays(num_tokens):
            size = dtype.itemsize * math.prod(shape)
            arrays.append(data[at : at + size].clone().view(dtype).view(shape))
            at += size
        ids, *others = arrays
        if not (own := self.between(num_tokens)):
            return ids, StoredSpans()
        kv, rest = others[: 2 * len(self.widths)], iter(others[2 * len(self.widths) :])
        maps = []
        for mixer in self.mixers.values():
            factor, offset, *tails = (next(rest) for _ in mixer.shapes)
            maps.append(StateMap(factor, offset, tuple(tails)))
        pairs = [*zip(kv[::2], kv[1::2], strict=True)]
        return ids, StoredSpans([StoredSpan(start + own.start, start + own.stop, pairs, maps)])
