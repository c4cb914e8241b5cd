"""Random scores, the baseline for every scorer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...base.checks import check_whole_number
from ..views import PromptView
from .base import PromptScorer


@dataclass(frozen=True, slots=True)
class Random(PromptScorer):
    """Uniform random scores; the same prompt and seed give the same scores."""

    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number("seed", self.seed, least=-(2**63), most=2**63 - 1)

    def score(self, view: PromptView) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(len(span.tokens), generator=generator) for span in view.spans]
