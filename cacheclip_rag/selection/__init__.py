"""Selection of the chunk tokens to recompute: scores, their mapping between tokenizers, budgets and groupings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .budget import (
        AlignedWindows as AlignedWindows,
        Budget as Budget,
        FixedStarts as FixedStarts,
        Tokens as Tokens,
        Windows as Windows,
    )
    from .heads import HeadSet as HeadSet, head_set_path as head_set_path, load_named as load_named
    from .scorers import (
        AuxiliaryAttention as AuxiliaryAttention,
        CacheScorer as CacheScorer,
        ChunkStart as ChunkStart,
        Oracle as Oracle,
        PromptScorer as PromptScorer,
        QueryAttention as QueryAttention,
        Random as Random,
        RankMix as RankMix,
    )
    from .views import CacheView as CacheView, PromptView as PromptView


__getattr__, __all__ = late_names(
    __name__,
    {
        "budget": "AlignedWindows Budget FixedStarts Tokens Windows",
        "heads": "HeadSet head_set_path load_named",
        "scorers": "AuxiliaryAttention CacheScorer ChunkStart Oracle PromptScorer QueryAttention Random RankMix",
        "views": "CacheView PromptView",
    },
)
