"""What users of a server are not told: where its files are, and with ``hide_hits`` (under ``[serve]`` of the settings
file) which chunks are stored, because others of the same tenant stored them. Metrics still count hits. The time to the
first token shows them too, and so does the text of an answer that was to be revised."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheclip_rag import CacheClipError, EngineConfig, Event, FusionStats

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


def names_of(config: EngineConfig) -> dict[str, str]:
    """Paths of the server's folders, the longest first, each with what users read in its place."""
    paths = [str(each) for each in (config.store, config.primary, config.auxiliary) if each]
    return {each: Path(each).name for each in sorted(paths, key=len, reverse=True) if os.path.isabs(each)}


def without_paths(events: Callable[[], Iterator[Event]], names: Mapping[str, str]) -> Iterator[Event]:
    """The events, whose statistics and errors say ``names`` in place of the server's paths."""
    try:
        for event in events():
            answer = event.answer
            if answer is not None and answer.stats.fallback:
                stats = replace(answer.stats, fallback=renamed(answer.stats.fallback, names))
                event = replace(event, answer=replace(answer, stats=stats))
            yield event
    except CacheClipError as error:
        error.args = tuple(renamed(each, names) if isinstance(each, str) else each for each in error.args)
        raise


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A text with ``names`` in place of the server's paths."""
    for path, name in names.items():
        text = text.replace(path, name)
    return text


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
