"""Plain prefill: ``full`` computes every token; ``prefix`` reuses the exact KV of a prefix shared with earlier prompts.

Source of ``prefix``: vLLM's automatic prefix caching over PagedAttention's blocks (arXiv:2309.06180). It helps
conversations, and prompts with the same chunks in the same order; chunks in another order are computed again.
Departures: see :mod:`cacheclip_rag.runtime.prompt_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..selection.views import PromptView
from .base import Method


@dataclass(frozen=True, slots=True)
class Full(Method):
    """Full prefill, the baseline of speed and the reference of quality. It runs on the same token ids as every other
    method."""

    name: str = field(default="full", kw_only=True)

    reuses_chunks: ClassVar[bool] = False
    reuses_prefixes: ClassVar[bool] = False

    @property
    def nominal_ratio(self) -> float:
        return 1.0

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.ones(len(span.tokens), dtype=torch.bool) for span in view.spans]


@dataclass(frozen=True, slots=True)
class Prefix(Full):
    """Always exact: plain prefill after the longest prefix that the prefix cache holds.

    The nominal ratio is 1.0, because a prompt with a new prefix is computed in full.
    """

    name: str = field(default="prefix", kw_only=True)

    reuses_prefixes: ClassVar[bool] = True
    learns: ClassVar[bool] = True
