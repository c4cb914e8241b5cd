"""Two selectors mixed by rank: a token is good if both put it high, whatever their scores are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigurationError
from . import create
from .base import SelectionRequest
from .selective import Selective

__all__ = ["Mixed"]

_PARTS = ("query_attention", "prophetkv", "qcfuse", "infoflow", "cacheclip", "random", "oracle")


@dataclass(frozen=True, slots=True)
class Mixed(Selective):
    """Exact at ``recompute_ratio`` 1.0; at 0.0 it equals direct reuse."""

    name: ClassVar[str] = "mixed"
    needs_auxiliary: ClassVar[bool] = True

    first: str = "cacheclip"
    """Name of a method that scores tokens."""
    second: str = "query_attention"
    """Another."""
    weight: float = 0.5
    """Weight of the first; the second has the rest."""

    def __post_init__(self) -> None:
        super(Mixed, self).__post_init__()
        for name in ("first", "second"):
            if getattr(self, name) not in _PARTS:
                raise ConfigurationError(f"{name} must be one of {', '.join(_PARTS)}, got {getattr(self, name)!r}.")
        if not 0.0 <= self.weight <= 1.0:
            raise ConfigurationError(f"weight must be between 0 and 1, got {self.weight!r}.")

    def _parts(self) -> tuple[Selective, Selective]:
        first, second = (create(name, {"recompute_ratio": self.recompute_ratio}) for name in (self.first, self.second))
        assert isinstance(first, Selective) and isinstance(second, Selective)
        return first, second

    def score(self, request: SelectionRequest) -> list[torch.Tensor]:
        if not self.is_open(request):
            return [torch.zeros(2, len(span.tokens)) for span in request.spans]
        scored = [part.score(request) for part in self._parts()]
        return [torch.stack(pair) for pair in zip(*scored, strict=True)]  # (2, num_tokens) a span

    def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        lengths = [len(span.tokens) for span in request.spans]
        ranks = []
        for number, part in enumerate(self._parts()):
            rated = torch.cat(part.rate(request, [s[number] for s in scores]))
            rank = torch.empty(len(rated))
            rank[rated.argsort(stable=True)] = torch.arange(len(rated), dtype=torch.float32)
            ranks.append(rank / max(1, len(rated) - 1))
        mixed = self.weight * ranks[0] + (1 - self.weight) * ranks[1]
        return list(mixed.split(lengths))
