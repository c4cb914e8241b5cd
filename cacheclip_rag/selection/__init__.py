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
        ChunkStart as ChunkStart,
        Scorer as Scorer,
        pick_layers as pick_layers,
    )
    from .views import PromptView as PromptView


__getattr__, __all__ = late_names(
    __name__,
    {
        "budget": "AlignedWindows Budget TokenBudget Tokens Windows",
        "heads": "HeadSet head_set_path load_named",
        "scorers": "AuxiliaryAttention ChunkStart Scorer pick_layers",
        "views": "PromptView",
    },
)
