"""Nearness to the start of its chunk: what EPIC recomputes.

Source: EPIC, LegoLink (arXiv:2410.15332): a chunk encoded apart begins with an attention sink of its own; recomputed in
context, its first tokens lose it. Static, and hard to beat per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...checks import check_whole_number
from ..views import PromptView
from .base import PromptScorer

__all__ = ["ChunkStart"]


@dataclass(frozen=True, slots=True)
class ChunkStart(PromptScorer):
    """First tokens of all chunks before second ones."""

    within: int = 0
    """Tokens from the start of a chunk within which the place counts; tokens further on score alike. 0: to the end. It
    is for :class:`~cacheclip_rag.selection.scorers.rank_mix.RankMix`, where another scorer tells those apart."""

    def __post_init__(self) -> None:
        check_whole_number("within", self.within, of="tokens")

    def score(self, view: PromptView) -> list[torch.Tensor]:
        places = [torch.arange(len(span.tokens), dtype=torch.float32) for span in view.spans]
        return [-place.clamp(max=self.within) if self.within else -place for place in places]
