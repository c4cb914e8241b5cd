"""Scores tokens by nearness to the start of their chunk, as EPIC does.

Source: EPIC, LegoLink (arXiv:2410.15332). A chunk encoded separately begins with a false attention sink; its first
tokens lose it when they are recomputed in context. The score depends on positions only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...base.checks import check_whole_number
from ..views import PromptView
from .base import PromptScorer


@dataclass(frozen=True, slots=True)
class ChunkStart(PromptScorer):
    """First tokens of all chunks before second ones."""

    within: int = 0
    """First tokens of a chunk whose scores differ; all later tokens get the same score. 0: all scores differ. Use it in
    a :class:`~cacheclip_rag.selection.scorers.rank_mix.RankMix`, in which another scorer ranks the later tokens."""

    def __post_init__(self) -> None:
        check_whole_number("within", self.within, of="tokens")

    def score(self, view: PromptView) -> list[torch.Tensor]:
        places: list[torch.Tensor] = []
        begin = 0
        for span in view.spans:
            begin = begin if span.continues else 0
            places.append(torch.arange(begin, begin + len(span.tokens), dtype=torch.float32))
            begin += len(span.tokens)
        return [-place.clamp(max=self.within) if self.within else -place for place in places]
