"""Answers for users who must not learn which chunks are stored, because others of the same tenant stored them
(``hide_hits`` under ``[serve]`` of the settings file). Metrics still count hits. The time to the first token shows
them too, and so does the text of an answer that was to be revised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..fusion.answer import Event, FusionStats

SEEN = ("prompt_tokens", "ttft_s", "queued_s", "generated_tokens", "decode_s")
"""Statistics that users may see. All others are as for a prompt without a stored chunk."""


def without_hits(events: Iterator[Event], *, method: str, nominal_ratio: float, finish: str) -> Iterator[Event]:
    """The events without anything that tells which chunks were stored: with the requested method and ratio in place of
    those that answered. Only an answer from reused chunks can be revised: with ``finish`` ``revise``, every event but
    the last is said to be open."""
    for event in events:
        if event.answer is None:
            yield replace(event, is_final=event.is_final and finish != "revise")
            continue
        stats = _hidden(event.answer.stats, method, nominal_ratio)
        yield replace(event, answer=replace(event.answer, stats=stats, trace=None))


def _hidden(stats: FusionStats, method: str, nominal_ratio: float) -> FusionStats:
    zero = ("prefix_tokens", "chunk_tokens", "exact_tokens", "recomputed_tokens", "hits", "misses")
    known: dict[str, Any] = {**dict.fromkeys(zero, 0), **{name: getattr(stats, name) for name in SEEN}}
    return FusionStats(
        method=method,
        fallback=None,
        nominal_ratio=nominal_ratio,
        fresh_tokens=stats.prompt_tokens,
        phases_s={},
        **known,
    )
