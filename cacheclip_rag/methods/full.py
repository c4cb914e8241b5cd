"""Plain prefill: every token of the prompt computed, or all but what earlier prompts began alike.

Source of ``prefix``: vLLM's automatic prefix caching over PagedAttention's blocks (arXiv:2309.06180), the usual serving
engine's answer to repeated context. It helps conversations and prompts with the same chunks in the same order; chunks
in another order are computed anew. Departures are those of :mod:`cacheclip_rag.chunks.prefix_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .base import CacheView, Method

__all__ = ["Full", "Prefix"]


@dataclass(frozen=True, slots=True)
class Full(Method):
    """The baseline of speed and the reference of quality: runs transformers' stock attention on the same token ids as
    every other method."""

    name: str = field(default="full", kw_only=True)

    reuses_chunks: ClassVar[bool] = False
    reuses_prefixes: ClassVar[bool] = False

    @property
    def nominal_ratio(self) -> float:
        return 1.0

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.ones(len(span.tokens), dtype=torch.bool) for span in view.spans]


@dataclass(frozen=True, slots=True)
class Prefix(Full):
    """Exact always: plain prefill behind the longest start that the prefix cache holds.

    The nominal ratio is 1.0, as of plain prefill: nothing is promised of a prompt whose start is new.
    """

    name: str = field(default="prefix", kw_only=True)

    reuses_prefixes: ClassVar[bool] = True
    learns: ClassVar[bool] = True
