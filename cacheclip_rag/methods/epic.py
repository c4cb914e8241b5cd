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

from ..checks import check_whole_number
from ..errors import ConfigurationError
from .base import SelectionRequest
from .selective import Selective

__all__ = ["Epic"]


@dataclass(frozen=True, slots=True)
class Epic(Selective):
    """Exact where ``k_init`` reaches the longest chunk, or at ``recompute_ratio`` 1.0."""

    name: ClassVar[str] = "epic"
    chooses_by: ClassVar[tuple[str, ...]] = ("k_init", "k_final")

    window: int = 1
    threshold: int = 0
    k_init: int = 0
    """First tokens of every chunk, whatever the ratio; 0 takes as many as the ratio allows. With numbers of tokens
    there is no budget to share out: ``probes``, ``anchor``, ``always_include_first`` and ``rounds`` are refused."""
    k_final: int = 0
    """Last tokens of every chunk, likewise."""
    reach: int = 0
    """How far from the start of its chunk a token's place still counts, in tokens; those further on are rated alike. 0:
    to the end. It is for :class:`~cacheclip_rag.methods.mixed.Mixed`, where another selector tells these apart."""

    def __post_init__(self) -> None:
        super(Epic, self).__post_init__()
        for name in ("k_init", "k_final", "reach"):
            check_whole_number(name, getattr(self, name), of="tokens")
        defaults = {"always_include_first": 0, "anchor": 0.0, "probes": 0.0, "rounds": 1}
        for name, default in defaults.items():
            if (self.k_init or self.k_final) and getattr(self, name) != default:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)} shares out a budget, and k_init={self.k_init} with "
                    f"k_final={self.k_final} leaves none. Leave {name} out, or both numbers."
                )

    @property
    def nominal_ratio(self) -> float:
        """0 where the numbers of tokens decide, not the ratio."""
        return 0.0 if self._by_number else self.recompute_ratio

    @property
    def _by_number(self) -> bool:
        return bool(self.k_init or self.k_final) and self.recompute_ratio < 1.0

    def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """First tokens of all chunks before second ones."""
        places = [torch.arange(len(span.tokens), dtype=torch.float32) for span in request.spans]
        return [-place.clamp(max=self.reach) if self.reach else -place for place in places]

    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self._by_number:
            return super(Epic, self).select(request, scores)
        places = [torch.arange(len(span.tokens)) for span in request.spans]
        masks = [(p < self.k_init) | (p >= len(p) - self.k_final) for p in places]
        skipped = self.num_skipped(request)
        return [mask & (number >= skipped) for number, mask in enumerate(masks)]
