"""Random tokens: what a budget buys without knowing anything. The baseline of every selector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import check_whole_number
from .base import SelectionRequest
from .selective import Selective

__all__ = ["Random"]


@dataclass(frozen=True, slots=True)
class Random(Selective):
    """Random windows (single tokens with ``window=1``), the same for the same prompt and seed."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        super(Random, self).__post_init__()
        check_whole_number("seed", self.seed, least=-(2**63), most=2**63 - 1)

    def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(len(span.tokens), generator=generator) for span in request.spans]
