"""Selection of the chunk tokens to recompute: scores, their mapping between tokenizers, budgets and groupings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .budget import Budget, FixedStarts
    from .grouping import AlignedWindows, Tokens, Windows
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
    from .views import PromptView

__all__ = [
    "AlignedWindows",
    "AuxiliaryAttention",
    "Budget",
    "CacheScorer",
    "ChunkStart",
    "FixedStarts",
    "Oracle",
    "PromptScorer",
    "PromptView",
    "QueryAttention",
    "Random",
    "RankMix",
    "Tokens",
    "Windows",
]

__getattr__ = late_names(
    __name__,
    {
        "AlignedWindows": "grouping",
        "AuxiliaryAttention": "scorers",
        "Budget": "budget",
        "CacheScorer": "scorers",
        "ChunkStart": "scorers",
        "FixedStarts": "budget",
        "Oracle": "scorers",
        "PromptScorer": "scorers",
        "PromptView": "views",
        "QueryAttention": "scorers",
        "Random": "scorers",
        "RankMix": "scorers",
        "Tokens": "grouping",
        "Windows": "grouping",
    },
)
