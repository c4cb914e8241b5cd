"""Exact prefix caching: what earlier prompts and answers share with the start of this one is not computed again.

Source: vLLM's automatic prefix caching over PagedAttention's blocks (arXiv:2309.06180), the usual serving engine's
answer to repeated context. It helps conversations and prompts with the same chunks in the same order; chunks in another
order are computed anew. Departures are those of :mod:`cacheclip_rag.chunks.prefix_cache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .full import Full

__all__ = ["Prefix"]


@dataclass(frozen=True, slots=True)
class Prefix(Full):
    """Exact always: plain prefill behind the longest start that the prefix cache holds.

    The nominal ratio is 1.0, as of plain prefill: nothing is promised of a prompt whose start is new.
    """

    name: ClassVar[str] = "prefix"
    reuses_prefixes: ClassVar[bool] = True
    learns: ClassVar[bool] = True
