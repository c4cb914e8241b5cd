"""Direct reuse: chunk caches are concatenated and nothing is recomputed.

Source: the "full KV reuse" baseline of CacheBlend (arXiv:2405.16444) and "direct precomputation" of CacheClip
(arXiv:2510.10129v1, section 2.3). Departure: chunks are encoded after a chunk context, as for every method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..selection.views import PromptView, per_span
from .base import Method


@dataclass(frozen=True, slots=True)
class Direct(Method):
    """The fastest method and the lower baseline; exact only for a single chunk right after its own prefix."""

    name: str = field(default="direct", kw_only=True)

    exact_at_one: ClassVar[bool] = False

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return per_span(view.spans, False)
