"""Base classes of scorers.

A :class:`PromptScorer` runs while the primary's KV is read. A :class:`CacheScorer` reads the assembled cache. Both have
one abstract method, ``score``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..views import CacheView, PromptView, per_span


@dataclass(frozen=True, slots=True)
class Scorer(ABC):
    """Gives every token of every span a score; tokens with higher scores are recomputed first. Scorers are frozen, so
    that they can be compared, hashed and serialised."""

    @property
    def needs_auxiliary(self) -> bool:
        """Whether chunks must be stored for the auxiliary model too."""
        return False

    @property
    def reads_cache(self) -> bool:
        """Whether :meth:`after_read` looks at the KV in the assembled cache."""
        return True

    @property
    def head_sets(self) -> tuple[str, ...]:
        """Names or files of auxiliary head sets that the scorer needs, besides the engine's own head set."""
        return ()

    @abstractmethod
    def before_read(self, view: PromptView) -> list[torch.Tensor]:
        """Scores that need no KV of the primary: one tensor per span; the last dimension is the span's tokens."""

    @abstractmethod
    def after_read(self, view: CacheView, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Final scores, ``(num_tokens,)`` float per span; ``before`` holds the results of :meth:`before_read`."""


@dataclass(frozen=True, slots=True)
class PromptScorer(Scorer):
    """Base of scorers that need no KV of the primary."""

    @property
    def reads_cache(self) -> bool:
        return False

    @abstractmethod
    def score(self, view: PromptView) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` float scores."""

    def before_read(self, view: PromptView) -> list[torch.Tensor]:
        return self.score(view)

    def after_read(self, view: CacheView, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(before)


@dataclass(frozen=True, slots=True)
class CacheScorer(Scorer):
    """Base of scorers that read the primary's assembled cache."""

    @abstractmethod
    def score(self, view: CacheView) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` float scores."""

    def before_read(self, view: PromptView) -> list[torch.Tensor]:
        return per_span(view.spans, 0.0)

    def after_read(self, view: CacheView, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.score(view)
