"""CacheClip: a small auxiliary model picks the tokens that restore attention between chunks; these are recomputed.

Source: CacheClip (arXiv:2510.10129v1). Departures: the auxiliary is used as it comes (the paper fine-tunes it and
does not say how); scores are mapped to the primary's tokens before grouping, so that the ratio counts what costs time;
the default grouping fills its budget; nothing is spent on a chunk that is exact already; of a long question the last
96 tokens score.
``grouping="v1_literal"`` is the paper's own rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..selection.grouping import group
from ..selection.modes import check_grouping
from . import check_ratio
from .base import Method, SelectionRequest

__all__ = ["CacheClip"]


@dataclass(frozen=True, slots=True)
class CacheClip(Method):
    """Exact at ``recompute_ratio`` 1.0; at 0.0 it equals direct reuse."""

    name: ClassVar[str] = "cacheclip"
    needs_auxiliary: ClassVar[bool] = True

    recompute_ratio: float = 0.2
    """Share of all reused chunk tokens to recompute."""
    grouping: str = "window_score"
    """``window_score``, ``vote_sliding`` or ``v1_literal``, see :mod:`cacheclip_rag.selection.grouping`."""
    window: int = 8
    """Tokens in a window."""
    threshold: int = 5
    """A window counts if more than this many of its tokens are selected (not used by ``window_score``)."""

    def __post_init__(self) -> None:
        check_ratio(self.recompute_ratio)
        check_grouping(self.grouping, self.window, self.threshold)

    @property
    def nominal_ratio(self) -> float:
        return self.recompute_ratio

    def score(self, request: SelectionRequest) -> list[torch.Tensor]:
        budget = self._budget(request)
        if budget == 0 or budget >= sum(len(span.tokens) for span in request.spans):
            return [
                torch.zeros(len(span.tokens)) for span in request.spans
            ]  # nothing to choose: spare the forward pass
        return request.auxiliary_scores()

    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        budget = self._budget(request)
        if budget >= sum(map(len, scores)):
            return [torch.ones(len(s), dtype=torch.bool) for s in scores]
        return group(scores, budget, mode=self.grouping, window=self.window, threshold=self.threshold)

    def _budget(self, request: SelectionRequest) -> int:
        return round(self.recompute_ratio * request.num_chunk_tokens)
