"""Cache-Craft: chunk caches captured from answered prompts, partly recomputed if the chunks before them changed.

Source: Cache-Craft (arXiv:2502.15734), section 4. The share of a chunk's tokens to recompute is a product: how much the
chunk attended to earlier chunks, times how many of those are missing now. Tokens that attended most to other chunks
come first. Departures: caches are captured from plain prefills only and kept in memory
(:mod:`cacheclip_rag.chunks.captured`); if a chunk was never captured, the prompt is answered by plain prefill, which
captures it; decoding does not stop early for focused chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..checks import check_number
from ..chunks.captured import digest_before
from .base import CacheView, Method

__all__ = ["CacheCraft"]


@dataclass(frozen=True, slots=True)
class CacheCraft(Method):
    """Exact if the same tokens came before the chunk when it was captured. Otherwise attention statistics choose the
    tokens; they consider chunks only, so that changed text between the chunks has no effect."""

    name: str = field(default="cachecraft", kw_only=True)

    captures: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    reuses_prefixes: ClassVar[bool] = False

    alpha: float = 1.0
    """Scales the recomputed share of a chunk; the paper tunes it per model."""

    def __post_init__(self) -> None:
        super(CacheCraft, self).__post_init__()
        check_number("alpha", self.alpha, "a number from 0 to 100", most=100.0)

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        chunks = [span.segment.text for span in view.layout.chunks]
        masks = []
        for span in view.spans:
            variant = view.captured[span.start]
            before = chunks[: view.layout.chunks.index(span)]
            share = variant.overhead(before, digest_before(view.layout, span), self.alpha)
            mask = torch.zeros(len(span.tokens), dtype=torch.bool)
            count = math.ceil(share * len(span.tokens))
            mask[variant.token_attention.argsort(descending=True, stable=True)[:count]] = True
            masks.append(mask)
        return masks
