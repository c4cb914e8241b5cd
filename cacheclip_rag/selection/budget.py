"""Budgets: how many tokens are recomputed, and how scores become spans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..base.checks import check_ratio, check_share, check_whole_number
from ..base.errors import ConfigurationError
from .grouping import Grouping, Windows
from .views import PromptView, per_span

_MOST_START_TOKENS = 16
"""Most first tokens of a chunk that the share for chunk starts pays for: later positions say little."""


@dataclass(frozen=True, slots=True)
class TokenBudget(ABC):
    """Base of the two kinds of budget: a share of the chunk tokens, or fixed numbers of tokens per chunk."""

    @abstractmethod
    def is_open(self, view: PromptView) -> bool:
        """Whether scores have an influence on this prompt; if not, nothing is scored."""

    @abstractmethod
    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per span a ``(num_tokens,)`` bool mask of the tokens to recompute. Ignores ``scores`` unless
        :meth:`is_open`."""


@dataclass(frozen=True, slots=True)
class Budget(TokenBudget):
    """A share of the chunk tokens, spent exactly: 0.0 is direct reuse, 1.0 is full prefill."""

    ratio: float = 0.2
    """Share of all reused chunk tokens to recompute."""
    grouping: Grouping = field(default_factory=Windows)
    """How scores become spans; see :mod:`cacheclip_rag.selection.grouping`."""
    chunk_starts: float = 0.0
    """Share of the budget that is spent first, on chunk starts: the same number of first tokens of each chunk, at most
    16."""

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not isinstance(self.grouping, Grouping):
            raise ConfigurationError(f"grouping must be a Grouping such as Windows(8), got {self.grouping!r}.")
        check_share("chunk_starts", self.chunk_starts, "the budget")

    def num_tokens(self, view: PromptView) -> int:
        return round(self.ratio * view.num_chunk_tokens)

    def takes_all(self, view: PromptView) -> bool:
        """Whether the budget covers every token."""
        return self.num_tokens(view) >= sum(len(span.tokens) for span in view.spans)

    def is_open(self, view: PromptView) -> bool:
        return self.num_tokens(view) > 0 and not self.takes_all(view)

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.is_open(view):
            return self.choose(view, scores, self.num_tokens(view), view.candidates)
        return per_span(view.spans, self.takes_all(view))

    def choose(
        self,
        view: PromptView,
        scores: Sequence[torch.Tensor],
        count: int,
        among: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The best ``count`` tokens of all spans, or all candidates if there are fewer.

        Args:
            among: per span a bool mask of candidates; default every token.
        """
        lengths = [len(s) for s in scores]
        most = sum(lengths) if among is None else int(torch.cat([*among]).sum())
        starts = [not span.continues for span in view.spans]
        # what the share for chunk starts pays for
        num_first = min(_MOST_START_TOKENS, int(self.chunk_starts * self.num_tokens(view) / max(1, sum(starts))))
        first = None
        if num_first and any(starts):
            places = [np.arange(n) < num_first * begins for n, begins in zip(lengths, starts, strict=True)]
            first = list(torch.from_numpy(np.concatenate(places)).split(lengths))
        return self.grouping.take(scores, min(count, most), first=first, among=among)


@dataclass(frozen=True, slots=True)
class FixedStarts(TokenBudget):
    """A fixed number of first tokens of every chunk, independent of scores: EPIC as published (``k_init``). There is no
    ratio."""

    first: int = 16

    def __post_init__(self) -> None:
        check_whole_number("first", self.first, of="tokens")

    def is_open(self, view: PromptView) -> bool:
        return False

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [(torch.arange(len(span.tokens)) < self.first) & (not span.continues) for span in view.spans]
