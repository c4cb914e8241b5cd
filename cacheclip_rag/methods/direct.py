"""Direct reuse: chunk caches are concatenated and nothing is recomputed. The lower baseline.

Source: the "full KV reuse" baseline of CacheBlend (arXiv:2405.16444) and "direct precomputation" of CacheClip
(arXiv:2510.10129v1, section 2.3). With gaps: Prompt Cache (arXiv:2311.04934), whose schema gives every module fixed
positions. Departure: chunks are encoded after a chunk context, as for every method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..checks import check_whole_number
from ..prompt.layout import Layout, Span
from ..runtime.transformers.attention_plan import Geometry
from .base import CacheView, Method, recompute_nothing

__all__ = ["Direct", "DirectGapped"]


@dataclass(frozen=True, slots=True)
class Direct(Method):
    """The fastest method; exact only for a single chunk right after its own prefix."""

    name: str = field(default="direct", kw_only=True)

    exact_at_one: ClassVar[bool] = False

    @property
    def reads_cache(self) -> bool:
        return False

    @property
    def plans_ahead(self) -> bool:
        return True

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return recompute_nothing(view)


@dataclass(frozen=True, slots=True)
class DirectGapped(Direct):
    """Every chunk gets an interval of positions of fixed length; the next segment begins after the interval.

    A chunk's positions then depend only on its number, as in a schema of Prompt Cache. Shorter chunks leave gaps. The
    last chunk leaves no gap, so that a prompt with one chunk equals ``direct``.
    """

    name: str = field(default="direct_gapped", kw_only=True)

    slot_tokens: int = 0
    """Length of the interval in tokens; 0: the length of the prompt's longest chunk. Longer chunks extend it."""

    def __post_init__(self) -> None:
        super(DirectGapped, self).__post_init__()
        check_whole_number("slot_tokens", self.slot_tokens, of="tokens")

    def positions(self, layout: Layout, reused: Sequence[Span]) -> Geometry:
        length = self.slot_tokens or max(len(span.tokens) for span in reused)
        positions = torch.arange(layout.num_tokens)
        for span in reused[:-1]:
            positions[span.stop :] += max(0, length - len(span.tokens))
        return Geometry(positions)
