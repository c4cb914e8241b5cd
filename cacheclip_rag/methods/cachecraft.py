"""Cache-Craft: chunk caches captured from answered prompts, recomputed as far as their old surroundings are missing.

Source: Cache-Craft (arXiv:2502.15734), section 4: how much a chunk owed to the chunks before it, times how much of
them is missing now, is the share of its tokens to recompute; those that looked at other chunks most come first.
Departures: caches are captured from plain prefills alone and kept in memory; a prompt with a chunk that was never
captured is answered by plain prefill, which captures it. There is no early stop by focused chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigurationError
from ..fusion.capture import digest_before
from .base import Method, SelectionRequest

__all__ = ["CacheCraft"]


@dataclass(frozen=True, slots=True)
class CacheCraft(Method):
    """Exact where a prompt comes again from its start; otherwise it recomputes what its statistics say, which look at
    chunks alone: other text between the same chunks counts for nothing."""

    name: ClassVar[str] = "cachecraft"
    captures: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    reuses_prefixes: ClassVar[bool] = False

    alpha: float = 1.0
    """Scales the share of a chunk that is recomputed; the paper tunes it per model."""

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, int | float) or not 0.0 <= self.alpha <= 100.0:
            raise ConfigurationError(f"alpha must be a number from 0 to 100, got {self.alpha!r}.")

    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        chunks = [span.segment.text for span in request.layout.chunks]
        masks = []
        for span in request.spans:
            variant = request.captured[span.start]
            before = chunks[: request.layout.chunks.index(span)]
            count = math.ceil(
                variant.overhead(before, digest_before(request.layout, span), self.alpha) * len(span.tokens)
            )
            mask = torch.zeros(len(span.tokens), dtype=torch.bool)
            mask[variant.token_owed.argsort(descending=True, stable=True)[:count]] = True
            masks.append(mask)
        return masks
