"""Query attention: the primary's own attention from the question, over the stale cache.

It runs the question's few rows through the model once more than other methods do, and computes no chunk tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..question import attention_to_tokens
from ..views import CacheView, split_by_span
from .base import CacheScorer, pick_layers


@dataclass(frozen=True, slots=True)
class QueryAttention(CacheScorer):
    """Attention of the question's tokens, in the primary model, on each chunk token: mean over heads, question tokens
    and layers."""

    layers: str = "last"
    """Layers whose attention scores: ``all``, ``last``, ``upper`` (half), ``middle`` (third), or layer numbers joined
    by ``+``."""

    def __post_init__(self) -> None:
        pick_layers(self.layers, 1024)

    def score(self, view: CacheView) -> list[torch.Tensor]:
        layers = pick_layers(self.layers, view.runtime.num_layers)
        found = attention_to_tokens(view.runtime, view.cache, view.layout.ids, view.fresh, view.question, layers)
        return split_by_span(found, view.spans)
