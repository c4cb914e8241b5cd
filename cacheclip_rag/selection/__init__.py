"""Selection of the chunk tokens to recompute: scores, their mapping between tokenizers, budgets and groupings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .budget import Budget, FixedStarts
    from .grouping import AlignedWindows, Tokens, Windows
    from .heads import HeadSet, head_set_path, load_named
    from .scorers import (
        AuxiliaryAttention,
        CacheScorer,
        ChunkStart,
        Oracle,
        PromptScorer,
        QueryAttention,
        Random,
        RankMix,
    )
    from .views import CacheView, PromptView

__all__ = [
    "AlignedWindows",
    "AuxiliaryAttention",
    "Budget",
    "CacheScorer",
    "CacheView",
    "ChunkStart",
    "FixedStarts",
    "HeadSet",
    "Oracle",
    "PromptScorer",
    "PromptView",
    "QueryAttention",
    "Random",
    "RankMix",
    "Tokens",
    "Windows",
    "head_set_path",
    "load_named",
]

__getattr__ = late_names(
    __name__,
    {
        "AlignedWindows": "grouping",
        "AuxiliaryAttention": "scorers",
        "Budget": "budget",
        "CacheScorer": "scorers",
        "CacheView": "views",
        "ChunkStart": "scorers",
        "FixedStarts": "budget",
        "HeadSet": "heads",
        "Oracle": "scorers",
        "PromptScorer": "scorers",
        "PromptView": "views",
        "QueryAttention": "scorers",
        "Random": "scorers",
        "RankMix": "scorers",
        "Tokens": "grouping",
        "Windows": "grouping",
        "head_set_path": "heads",
        "load_named": "heads",
    },
)
