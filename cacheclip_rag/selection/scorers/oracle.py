"""Oracle: scores tokens that are both attended to and stale, from a full prefill. An upper bound for other scorers.

Source: the first-order effect of a stale token on the output of a question row is attention times the change of the
token's value. The oracle costs more than a full prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...runtime.transformers.cache import FusedCache
from ..views import CacheView, split_by_span
from .base import CacheScorer, pick_layers
from .query_attention import attention_to_tokens


@dataclass(frozen=True, slots=True)
class Oracle(CacheScorer):
    """Score of token t: mean over layers of ``A(t) * |dV(t)| / mean |V|``."""

    def score(self, view: CacheView) -> list[torch.Tensor]:
        runtime, layout = view.runtime, view.layout
        full = view.full_prefill()
        staleness = _staleness(full, view.cache, layout.num_tokens)  # (num_layers, num_tokens)
        start = int(view.question[0])
        full.cut(start)
        rows = torch.arange(start, layout.num_tokens)
        layers = pick_layers("all", runtime.num_layers, runtime.without_attention)
        attended = attention_to_tokens(runtime, full, layout.ids, rows, view.question, layers, per_layer=True)
        return split_by_span((attended * staleness[layers]).mean(0), view.spans)


def _staleness(full: FusedCache, stale: FusedCache, num_tokens: int) -> torch.Tensor:
    """``(num_layers, num_tokens)``: norm of each value's change, divided by the layer's mean norm."""
    found = []
    for fresh, old in zip(full.layers, stale.layers, strict=True):
        length = min(fresh.length, old.length)
        change = (fresh.values[0, :, :length] - old.values[0, :, :length]).float().norm(dim=-1)
        size = fresh.values[0].float().norm(dim=-1)
        relative = torch.zeros(num_tokens)
        relative[:length] = (change / size.mean(-1, keepdim=True)).mean(0).cpu()
        found.append(relative)
    return torch.stack(found)
