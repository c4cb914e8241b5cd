"""Scorers and budgets that others are compared with: chance, an upper bound, and EPIC as published.

A variants file names them with their module: ``scorer = {type = "cacheclip_lab.comparators.Oracle"}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheclip_rag.plugins import check_whole_number
from cacheclip_rag.selection import (
    CacheScorer,
    CacheView,
    PromptScorer,
    PromptView,
    TokenBudget,
    attention_to_tokens,
    pick_layers,
    split_by_span,
)


@dataclass(frozen=True, slots=True)
class Random(PromptScorer):
    """Uniform random scores; the same prompt and seed give the same scores."""

    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number("seed", self.seed, least=-(2**63), most=2**63 - 1)

    def score(self, view: PromptView) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(len(span.tokens), generator=generator) for span in view.spans]


@dataclass(frozen=True, slots=True)
class Oracle(CacheScorer):
    """Scores tokens that are both attended to and stale, from a full prefill, which it computes: an upper bound.

    Score of token t: mean over layers of ``A(t) * |dV(t)| / mean |V|``, the first-order effect of a stale token on the
    output of a question row.
    """

    def score(self, view: CacheView) -> list[torch.Tensor]:
        runtime, layout = view.runtime, view.layout
        full, _ = runtime.prefill(layout.ids, layout.num_tokens)
        staleness = _staleness(full, view.cache, layout.num_tokens)  # (num_layers, num_tokens)
        start = int(view.question[0])
        full.cut(start)
        rows = torch.arange(start, layout.num_tokens)
        layers = pick_layers("all", runtime.num_layers, runtime.without_attention)
        attended = attention_to_tokens(runtime, full, layout.ids, rows, view.question, layers, per_layer=True)
        return split_by_span((attended * staleness[layers]).mean(0), view.spans)


def _staleness(full: Any, stale: Any, num_tokens: int) -> torch.Tensor:
    """``(num_layers, num_tokens)``: norm of each value's change, divided by the layer's mean norm."""
    changes = torch.zeros(len(full.layers), num_tokens)
    for row, fresh, old in zip(changes, full.layers, stale.layers, strict=True):
        length = min(fresh.length, old.length)
        change = (fresh.values[0, :, :length] - old.values[0, :, :length]).float().norm(dim=-1)
        size = fresh.values[0].float().norm(dim=-1)
        row[:length] = (change / size.mean(-1, keepdim=True)).mean(0).cpu()
    return changes


@dataclass(frozen=True, slots=True)
class FixedStarts(TokenBudget):
    """A fixed number of first tokens of every chunk, independent of scores: EPIC as published (``k_init``,
    arXiv:2410.15332). There is no ratio."""

    first: int = 16

    def __post_init__(self) -> None:
        check_whole_number("first", self.first, of="tokens")

    def is_open(self, view: PromptView) -> bool:
        return False

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [(torch.arange(len(span.tokens)) < self.first) & (not span.continues) for span in view.spans]
