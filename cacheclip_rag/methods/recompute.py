"""Selective recompute: a scorer, a budget and a correction. Most published methods are instances of :class:`Recompute`.

Source: CacheBlend (arXiv:2405.16444) introduced selective recompute. The chosen tokens are computed exactly at their
true positions. The other tokens keep their stored KV, or are corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from ..base.checks import check_share
from ..base.errors import ConfigurationError
from ..selection.budget import Budget, TokenBudget
from ..selection.scorers import Scorer
from ..selection.views import CacheView, PromptView
from .base import Method
from .correction import install_correction


@dataclass(frozen=True, slots=True)
class Recompute(Method):
    """Recomputes the best-scored tokens, exactly as many as the budget allows.

    Equals full prefill at ratio 1.0 and direct reuse at 0.0.

    >>> Recompute(ChunkStart(), Budget(ratio=0.1), name="starts")
    """

    scorer: Scorer
    """Gives every chunk token a score."""
    budget: TokenBudget = field(default_factory=Budget)
    """How many tokens are recomputed, and how scores become spans."""
    correction: float = 0.0
    """Share of the recomputed tokens' mean change that is added to the other tokens, per chunk and layer (AgentKVShift,
    arXiv:2607.21604). 0: no correction."""

    def __post_init__(self) -> None:
        super(Recompute, self).__post_init__()
        if not isinstance(self.scorer, Scorer):
            raise ConfigurationError(f"scorer must be a Scorer such as ChunkStart(), got {self.scorer!r}.")
        if not isinstance(self.budget, TokenBudget):
            raise ConfigurationError(f"budget must be a Budget or FixedStarts, got {self.budget!r}.")
        check_share("correction", self.correction, "the mean change")

    @property
    def needs_auxiliary(self) -> bool:
        return self.scorer.needs_auxiliary

    @property
    def reads_cache(self) -> bool:
        # a subclass with a hook of its own may look at the cache or change it
        hooks = ("select", "row_filter", "prepare")
        return self.scorer.reads_cache or any(getattr(type(self), h) is not getattr(Recompute, h) for h in hooks)

    @property
    def plans_ahead(self) -> bool:
        return not self.scorer.reads_cache

    @property
    def mean_change(self) -> float:
        return self.correction

    @property
    def head_sets(self) -> tuple[str, ...]:
        return self.scorer.head_sets

    @property
    def has_ratio(self) -> bool:
        return isinstance(self.budget, Budget)

    @property
    def nominal_ratio(self) -> float:
        return self.budget.ratio if isinstance(self.budget, Budget) else 0.0

    def at(self, ratio: float) -> Self:
        if not isinstance(self.budget, Budget):
            return super(Recompute, self).at(ratio)
        return replace(self, budget=replace(self.budget, ratio=ratio))

    def score(self, view: PromptView) -> list[torch.Tensor]:
        if self.budget.is_open(view):
            return self.scorer.before_read(view)
        return super(Recompute, self).score(view)

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.budget.is_open(view):
            scores = self.scorer.after_read(view, scores)
        return self.budget.select(view, scores)

    def prepare(self, view: CacheView, masks: Sequence[torch.Tensor]) -> None:
        if self.correction:
            # continued KV was corrected when it was assembled
            spans = [span for span in view.spans if not view.known.is_held(span)]
            install_correction(view.runtime, view.cache, spans, self.correction)
