"""Direct reuse: chunk caches put end to end at true positions, nothing recomputed. The lower baseline.

Source: the "full KV reuse" baseline of CacheBlend (arXiv:2405.16444) and "direct precomputation" of CacheClip
(arXiv:2510.10129v1, section 2.3). Departure: chunks are encoded behind the shared prefix, as for every method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Method, SelectionRequest

__all__ = ["Direct"]


@dataclass(frozen=True, slots=True)
class Direct(Method):
    """Fastest; exact only for a single chunk right behind its own prefix."""

    name: ClassVar[str] = "direct"

    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros(len(span.tokens), dtype=torch.bool) for span in request.spans]
