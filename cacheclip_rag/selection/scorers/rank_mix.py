"""Mixes two scorers by rank, so that the scales of their scores do not matter. Our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...base.checks import check_share
from ...base.errors import ConfigurationError
from ..views import CacheView, PromptView
from .base import Scorer


@dataclass(frozen=True, slots=True)
class RankMix(Scorer):
    """Weighted mean of two rankings. It costs as much as both scorers together."""

    first: Scorer
    second: Scorer
    weight: float = 0.5
    """Weight of the first ranking, 0 to 1; the second ranking has the remaining weight."""

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            part = getattr(self, name)
            if not isinstance(part, Scorer) or isinstance(part, RankMix):
                raise ConfigurationError(f"{name} must be a scorer other than RankMix, got {part!r}.")
        check_share("weight", self.weight, "the ranking")

    @property
    def needs_auxiliary(self) -> bool:  # type: ignore[override]
        return self.first.needs_auxiliary or self.second.needs_auxiliary

    @property
    def reads_cache(self) -> bool:  # type: ignore[override]
        return self.first.reads_cache or self.second.reads_cache

    @property
    def head_sets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.first.head_sets, *self.second.head_sets)))

    def before_read(self, view: PromptView) -> list[torch.Tensor]:
        pairs = zip(self.first.before_read(view), self.second.before_read(view), strict=True)
        return [torch.stack(pair) for pair in pairs]  # (2, num_tokens) per span

    def after_read(self, view: CacheView, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        lengths = [len(span.tokens) for span in view.spans]
        first, second = (
            _ranks(torch.cat(part.after_read(view, [pair[number] for pair in before])))
            for number, part in enumerate((self.first, self.second))
        )
        return list((self.weight * first + (1 - self.weight) * second).split(lengths))


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """``(num_tokens,)``, from 0 (lowest score) to 1; equal scores share the mean of their ranks."""
    _, number, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks: torch.Tensor = counts.cumsum(0) - (counts + 1) / 2
    return ranks[number] / max(1, len(scores) - 1)
