"""Oracle: recompute the tokens that are both attended to and stale, known from a full prefill. A ceiling, no method.

Source: the first-order effect of a stale token on the output of a question row, attention times the change of its
value. Costs a full prefill and more; it says how good a selection by single tokens can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..selection.question import attention_to_tokens
from .base import SelectionRequest, split_by_span
from .selective import Selective

__all__ = ["Oracle"]


@dataclass(frozen=True, slots=True)
class Oracle(Selective):
    """Exact at ``recompute_ratio`` 1.0. Score of token t: mean over layers of ``A(t) * |dV(t)| / mean |V|``."""

    name: ClassVar[str] = "oracle"

    def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert request.cache is not None and request.full_prefill is not None
        runtime, layout = request.runtime, request.layout
        full = request.full_prefill()
        staleness = []
        for fresh, stale in zip(full.layers, request.cache.layers, strict=True):
            length = min(fresh.length, stale.length)
            change = (fresh.values[0, :, :length] - stale.values[0, :, :length]).float().norm(dim=-1)
            size = fresh.values[0].float().norm(dim=-1)
            relative = torch.zeros(layout.num_tokens)
            relative[:length] = (change / size.mean(-1, keepdim=True)).mean(0).cpu()
            staleness.append(relative)
        start = int(request.question[0])
        full.cut(start)
        rows = torch.arange(start, layout.num_tokens)
        attended = attention_to_tokens(
            runtime, full, layout.ids, rows, request.question, range(runtime.num_layers), per_layer=True
        )
        return split_by_span((attended * torch.stack(staleness)).mean(0), request.spans)
