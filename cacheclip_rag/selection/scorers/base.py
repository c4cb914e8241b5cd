"""What a scorer is, and when it works.

A :class:`PromptScorer` works before the primary's KV is read, so that the KV of both models never lies side by side; a
:class:`CacheScorer` looks at the assembled cache. Each has one method to write, ``score``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..views import CacheView, PromptView

__all__ = ["CacheScorer", "PromptScorer", "Scorer"]


@dataclass(frozen=True, slots=True)
class Scorer(ABC):
    """Gives every token of every span a score; higher is more worth recomputing. Frozen, so that it can be compared,
    hashed and written down."""

    @property
    def needs_auxiliary(self) -> bool:
        """True: chunks must be stored for the auxiliary model too."""
        return False

    @property
    def head_sets(self) -> tuple[str, ...]:
        """Head sets of the auxiliary that it asks for by name or file, beside the engine's own."""
        return ()

    @abstractmethod
    def early(self, view: PromptView) -> list[torch.Tensor]:
        """What can be said before the primary's KV is read: one tensor per span, whose last dimension is its tokens."""

    @abstractmethod
    def late(self, view: CacheView, early: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Final scores, ``(num_tokens,)`` float per span; ``early`` is what :meth:`early` gave for these spans."""


@dataclass(frozen=True, slots=True)
class PromptScorer(Scorer):
    """Base of scorers that need no KV of the primary."""

    @abstractmethod
    def score(self, view: PromptView) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` float scores."""

    def early(self, view: PromptView) -> list[torch.Tensor]:
        return self.score(view)

    def late(self, view: CacheView, early: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(early)


@dataclass(frozen=True, slots=True)
class CacheScorer(Scorer):
    """Base of scorers that look at the primary's assembled cache."""

    @abstractmethod
    def score(self, view: CacheView) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` float scores."""

    def early(self, view: PromptView) -> list[torch.Tensor]:
        return [torch.zeros(len(span.tokens)) for span in view.spans]

    def late(self, view: CacheView, early: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.score(view)
