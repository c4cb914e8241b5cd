"""Plain prefill: every token of the prompt computed. The baseline of speed and the reference of quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Method, SelectionRequest

__all__ = ["Full"]


@dataclass(frozen=True, slots=True)
class Full(Method):
    """Exact by definition; runs transformers' stock attention on the same token ids as every other method."""

    name: ClassVar[str] = "full"
    reuses_chunks: ClassVar[bool] = False
    reuses_prefixes: ClassVar[bool] = False

    @property
    def nominal_ratio(self) -> float:
        return 1.0

    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.ones(len(span.tokens), dtype=torch.bool) for span in request.spans]
