"""Presets: named methods, each with a one-line description and its source.

Most published methods are instances of :class:`~cacheclip_rag.methods.recompute.Recompute`: a scorer, a budget and a
correction. A row states only settings that differ from the field's default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..selection.budget import AlignedWindows, Budget, Tokens
from ..selection.scorers import AuxiliaryAttention, ChunkStart
from .base import Method
from .direct import Direct
from .full import Full, Prefix
from .recompute import Recompute


@dataclass(frozen=True, slots=True)
class PresetNote:
    """One line of documentation about a preset."""

    summary: str
    source: str
    """Paper, or ``ours``."""


_TOKENS = Budget(grouping=Tokens())
_CACHECLIP = Recompute(AuxiliaryAttention(), Budget(chunk_starts=0.5), correction=0.5)
_CACHECLIP_PAPER = Recompute(
    AuxiliaryAttention(layers="last"), Budget(grouping=AlignedWindows(8, threshold=5)), chunk_context="prefix"
)
_OF_CACHECLIP, _OF_CACHEBLEND = "CacheClip, arXiv:2510.10129v1", "CacheBlend, arXiv:2405.16444"
_OF_EPIC = "EPIC, arXiv:2410.15332"

_ROWS: dict[str, tuple[Method, str, str]] = {
    "full": (Full(), "Full prefill: every token is computed.", "baseline"),
    "prefix": (
        Prefix(),
        "Full prefill after the longest prefix that an earlier prompt shares.",
        "vLLM's prefix caching, arXiv:2309.06180",
    ),
    "direct": (Direct(), "Chunk caches are concatenated; nothing is recomputed.", _OF_CACHEBLEND),
    "epic": (
        Recompute(ChunkStart(), _TOKENS),
        "The first tokens of every chunk, as many as the ratio allows.",
        _OF_EPIC,
    ),
    "epic-corrected": (
        Recompute(ChunkStart(), _TOKENS, correction=0.5),
        "The same, and a correction of the other tokens.",
        f"{_OF_EPIC}; the correction is ours",
    ),
    "cacheclip": (
        _CACHECLIP,
        "Spans that an auxiliary model attends to; half of the budget for chunk starts; a correction.",
        f"{_OF_CACHECLIP}; chunk starts and correction are ours",
    ),
    "cacheclip-gated": (
        replace(_CACHECLIP.at(0.05), min_confidence=0.2),
        "`cacheclip` at ratio 0.05; where a token is unsure, full prefill after all.",
        "ours",
    ),
    "cacheclip-paper": (
        _CACHECLIP_PAPER,
        "Spans that an auxiliary model's last layer attends to, as published.",
        _OF_CACHECLIP,
    ),
}

PRESETS: dict[str, Method] = {name: replace(method, name=name) for name, (method, _, _) in _ROWS.items()}
"""Methods by name; :data:`cacheclip_rag.methods.PRESET_NAMES` are its keys."""

PRESET_NOTES: dict[str, PresetNote] = {
    name: PresetNote(summary, source) for name, (_, summary, source) in _ROWS.items()
}
"""Description and source of each preset, for documentation.

Departures from the published methods:

- ``epic``: chunks are encoded after a chunk context (the released script keeps a BOS before each chunk). An exact first
  chunk is left out. The number of tokens follows the ratio, so that methods are compared at equal cost.
- ``cacheclip``: the paper fine-tunes its auxiliary model and drops windows. Here a head set scores, and the budget is
  spent exactly. Half of it goes to chunk starts, because missing context changes a chunk's first tokens most (EPIC).
  Tokens that are not recomputed get half of the mean change (AgentKVShift, arXiv:2607.21604). Only the abstract of the
  paper's version 2 could be checked; nothing here claims to implement it.
"""
