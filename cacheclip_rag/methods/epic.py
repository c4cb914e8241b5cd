"""EPIC: the first tokens of every chunk are recomputed, whatever is asked. Static, and hard to beat per token.

Source: EPIC, LegoLink (arXiv:2410.15332): a chunk encoded apart begins with an attention sink of its own; recomputed
in context, its first tokens lose it. Departures: chunks are encoded behind the shared prefix (the released script
keeps a BOS before each); the first chunk is left out where it is exact; and by default the number of tokens follows
the recompute ratio, so that methods can be compared at equal cost. ``k_init=16`` is the paper's own setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigurationError
from . import check_ratio
from .base import Method, SelectionRequest

__all__ = ["Epic"]


@dataclass(frozen=True, slots=True)
class Epic(Method):
    """Exact where ``k_init`` reaches the longest chunk, or at ``recompute_ratio`` 1.0."""

    name: ClassVar[str] = "epic"

    recompute_ratio: float = 0.2
    """Share of all reused chunk tokens to recompute; used while ``k_init`` and ``k_final`` are 0."""
    k_init: int = 0
    """First tokens of every chunk; 0 takes as many as the ratio allows."""
    k_final: int = 0
    """Last tokens of every chunk."""

    def __post_init__(self) -> None:
        check_ratio(self.recompute_ratio)
        for name in ("k_init", "k_final"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"{name} must be a number of tokens, 0 or more, got {value!r}.")

    @property
    def nominal_ratio(self) -> float:
        return self.recompute_ratio

    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        places = [torch.arange(len(span.tokens)) for span in request.spans]
        if self.k_init or self.k_final:
            return [(p < self.k_init) | (p >= len(p) - self.k_final) for p in places]
        budget = round(self.recompute_ratio * request.num_chunk_tokens)
        if not places:
            return []
        # first tokens of all chunks, then second ones, until the budget is used up
        order = torch.cat(places).argsort(stable=True)
        mask = torch.zeros(len(order), dtype=torch.bool)
        mask[order[:budget]] = True
        return list(mask.split([len(p) for p in places]))
