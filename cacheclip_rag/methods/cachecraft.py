"""Cache-Craft: chunk caches captured from answered prompts, recomputed as far as their old surroundings are missing.

Source: Cache-Craft (arXiv:2502.15734), section 4: how much a chunk owed to the chunks before it, times how much of
them is missing now, is the share of its tokens to recompute; those that looked at other chunks most come first.
Departures: caches are captured from plain prefills alone and kept in memory (:mod:`cacheclip_rag.chunks.captured`); a
prompt with a chunk that was never captured is answered by plain prefill, which captures it. There is no early stop by
focused chunks.
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
    """Exact where a prompt comes again from its start; otherwise it recomputes what its statistics say, which look at
    chunks alone: other text between the same chunks counts for nothing."""

    name: str = field(default="cachecraft", kw_only=True)

    captures: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    reuses_prefixes: ClassVar[bool] = False

    alpha: float = 1.0
    """Scales the share of a chunk that is recomputed; the paper tunes it per model."""

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
            mask[variant.token_owed.argsort(descending=True, stable=True)[:count]] = True
            masks.append(mask)
        return masks
