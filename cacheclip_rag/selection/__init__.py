"""Selection of the chunk tokens to recompute: scores, their mapping between tokenizers, budgets and groupings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.names import late_names

if TYPE_CHECKING:
    from .budget import (
        AlignedWindows as AlignedWindows,
        Budget as Budget,
        TokenBudget as TokenBudget,
        Tokens as Tokens,
        Windows as Windows,
    )
    from .heads import HeadSet as HeadSet, head_set_path as head_set_path, load_named as load_named
    from .scorers import (
        AuxiliaryAttention as AuxiliaryAttention,
        CacheScorer as CacheScorer,
        ChunkStart as ChunkStart,
        PromptScorer as PromptScorer,
        QueryAttention as QueryAttention,
        RankMix as RankMix,
        attention_to_tokens as attention_to_tokens,
        pick_layers as pick_layers,
    )
    from .views import CacheView as CacheView, PromptView as PromptView, split_by_span as split_by_span


__getattr__, __all__ = late_names(
    __name__,
    {
        "budget": "AlignedWindows Budget TokenBudget Tokens Windows",
        "heads": "HeadSet head_set_path load_named",
        "scorers": (
            "AuxiliaryAttention CacheScorer ChunkStart PromptScorer QueryAttention RankMix attention_to_tokens "
            "pick_layers"
        ),
        "views": "CacheView PromptView split_by_span",
    },
)
