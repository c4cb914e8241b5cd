"""A scorer and a budget that others are compared with: chance, and EPIC as published.

A variants file names them with their module: ``scorer = {type = "cacheclip_lab.comparators.Random"}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheclip_rag.plugins import check_whole_number
from cacheclip_rag.selection import PromptView, Scorer, TokenBudget


@dataclass(frozen=True, slots=True)
class Random(Scorer):
    """Uniform random scores; the same prompt and seed give the same scores."""

    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number("seed", self.seed, least=-(2**63), most=2**63 - 1)

    def score(self, view: PromptView) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(len(span.tokens), generator=generator) for span in view.spans]


@dataclass(frozen=True, slots=True)
class FixedStarts(TokenBudget):
    """A fixed number of first tokens of every chunk, independent of scores: EPIC as published (``k_init``,
    arXiv:2410.15332). There is no ratio."""

    first: int = 16

    def __post_init__(self) -> None:
        check_whole_number("first", self.first, of="tokens")

    def is_open(self, view: PromptView) -> bool:
        return False

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [(torch.arange(len(span.tokens)) < self.first) & (not span.continues) for span in view.spans]
