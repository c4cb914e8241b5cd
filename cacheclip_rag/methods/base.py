"""What a method is: a named recipe for choosing the tokens to recompute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..fusion.layout import Span

__all__ = ["Method", "SelectionRequest"]


@dataclass(frozen=True, slots=True)
class SelectionRequest:
    """What a method may look at when it chooses."""

    spans: Sequence[Span]
    """Reused chunks in prompt order, those that are exact already left out."""
    num_chunk_tokens: int
    """Tokens of all reused chunks, exact ones included: what a recompute ratio is a share of."""
    auxiliary_scores: Callable[[], list[torch.Tensor]]
    """Scores per span from the auxiliary model, ``(num_tokens,)`` in the primary's tokens. Costs a forward pass."""


@dataclass(frozen=True, slots=True)
class Method(ABC):
    """Base of all methods. The engine reads the class attributes; it never asks which method it holds."""

    name: ClassVar[str]
    reuses_chunks: ClassVar[bool] = True
    """False: plain prefill, the store is not asked."""
    needs_auxiliary: ClassVar[bool] = False
    """True: chunks must be stored for the auxiliary model too."""

    @property
    def nominal_ratio(self) -> float:
        """Share of chunk tokens that the user asked to recompute."""
        return 0.0

    def score(self, request: SelectionRequest) -> list[torch.Tensor]:
        """Scores per span, taken before the primary's KV is read (so that both models' KV never lie side by side)."""
        return [torch.zeros(len(span.tokens)) for span in request.spans]

    @abstractmethod
    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per span a ``(num_tokens,)`` bool mask of the tokens to recompute."""
