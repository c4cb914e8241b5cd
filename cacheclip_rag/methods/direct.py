"""Direct reuse: chunk caches put end to end, nothing recomputed. The lower baseline.

Source: the "full KV reuse" baseline of CacheBlend (arXiv:2405.16444) and "direct precomputation" of CacheClip
(arXiv:2510.10129v1, section 2.3); with gaps, Prompt Cache (arXiv:2311.04934), a union of modules per place.
Departure: chunks are encoded behind the shared prefix, as for every method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import check_whole_number
from ..prompt.layout import Layout, Span
from ..runtime.transformers.attention import Geometry
from .base import ReusingMethod, SelectionRequest, recompute_nothing

__all__ = ["Direct", "DirectGapped"]


@dataclass(frozen=True, slots=True)
class Direct(ReusingMethod):
    """Fastest; exact only for a single chunk right behind its own prefix."""

    name: ClassVar[str] = "direct"
    exact_at_one: ClassVar[bool] = False

    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return recompute_nothing(request)


@dataclass(frozen=True, slots=True)
class DirectGapped(Direct):
    """Every chunk has a place of fixed length, and what follows it begins where the place ends.

    A chunk's positions then depend on its number alone, as in a schema of Prompt Cache, at the price of gaps. The
    last chunk leaves none, so that a single chunk is placed as by ``direct``.
    """

    name: ClassVar[str] = "direct_gapped"

    place_tokens: int = 0
    """Length of a place in tokens; 0 takes the longest chunk of the prompt. Longer chunks take what they need."""

    def __post_init__(self) -> None:
        super(DirectGapped, self).__post_init__()
        check_whole_number("place_tokens", self.place_tokens, of="tokens")

    def place(self, layout: Layout, reused: Sequence[Span]) -> Geometry:
        length = self.place_tokens or max(len(span.tokens) for span in reused)
        positions = torch.arange(layout.num_tokens)
        for span in reused[:-1]:
            positions[span.stop :] += max(0, length - len(span.tokens))
        return Geometry(positions)
