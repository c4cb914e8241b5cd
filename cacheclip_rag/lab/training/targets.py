"""What an auxiliary model should find: the tokens of a prompt that the primary both attends to and holds stale; and
what a method chooses of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial

import torch

from ...engine import CacheClipEngine
from ...methods import create
from ...methods.base import SelectionRequest
from ...methods.selective import Selective
from ...progress import progress_bar
from ...selection.mapping import Offsets
from .families import Sample
from .features import spread_over
from .folder import Kept
from .prompts import segments_of

__all__ = ["attended_and_stale", "attended_when_stale", "behind_sinks", "chosen_by", "targets_of"]

_RATIO = 0.5
"""Any but 0 and 1 has the method rate."""


def attended_and_stale(engine: CacheClipEngine, sample: Sample) -> torch.Tensor | None:
    """Per token of the auxiliary, over all chunks side by side: the share of the primary's attention to stale values
    that falls on it. ``(num_tokens,)`` float32, sum 1; None where nothing is stale.

    ``u(t)`` is the mean over layers of ``A(t) * |dV(t)| / mean |V|`` (:mod:`cacheclip_rag.methods.oracle`), carried
    over to the auxiliary's tokens by the characters they share. Costs two prefills of the primary and more. ``engine``
    keeps its chunk caches in memory: those of the sample are released.
    """
    found = _rated(engine, sample, "oracle")
    return found / found.sum() if found is not None and bool(found.any()) else None


def targets_of(
    engine: CacheClipEngine, samples: Sequence[Sample], asked: Sequence[int], kept: Kept
) -> dict[int, torch.Tensor | None]:
    """:func:`attended_and_stale` of those ``samples`` whose numbers are ``asked``, by number; from the folder where it
    is there."""
    found: dict[int, torch.Tensor | None] = {}
    if not asked:
        return found

    def ask(sample: Sample) -> dict[str, torch.Tensor]:
        target = attended_and_stale(engine, sample)
        return {} if target is None else {"target": target}

    with progress_bar("asking the primary", len(asked), "samples") as advance:
        for done, number in enumerate(asked, 1):
            sample = samples[number]
            found[number] = kept.tensors("target", {"target": sample.as_read()}, partial(ask, sample)).get("target")
            advance(done)
    return found


def behind_sinks(target: torch.Tensor | None, lengths: Sequence[int], sinks: int) -> torch.Tensor | None:
    """The target without the first ``sinks`` tokens of every chunk, which nobody scores; None where nothing is left."""
    if target is None:
        return None
    scored = torch.cat([torch.arange(length) >= sinks for length in lengths])
    left = target * scored
    return left / left.sum() if bool(left.any()) else None


def attended_when_stale(engine: CacheClipEngine, sample: Sample, spec: str) -> torch.Tensor:
    """The scores of a method that looks at the primary's cache as it is, handed over likewise; 0 throughout where
    there is nothing to choose."""
    found = _rated(engine, sample, spec)
    if found is None:
        return torch.zeros(sum(len(engine.parts.auxiliary_caches.tokenize(chunk)) for chunk in sample.chunks))
    return found


def _rated(engine: CacheClipEngine, sample: Sample, spec: str) -> torch.Tensor | None:
    """``(num_tokens,)`` in the auxiliary's tokens: what a method rates; None where it rates nothing."""
    assert engine.config.store is None, "an engine to train with, not a user's own"
    by_text = _recorded(engine, sample, spec, _RATIO, "rate")
    if not by_text:
        return None
    parts = []
    for chunk in sample.chunks:
        offsets = engine.parts.auxiliary_caches.tokenize(chunk).offsets
        if chunk in by_text:
            score, source = by_text[chunk]
            parts.append(spread_over(score.float(), source, offsets))
        else:  # exact already, or so short that it is computed with the prompt
            parts.append(torch.zeros(len(offsets)))
    return torch.cat(parts)


def chosen_by(engine: CacheClipEngine, sample: Sample, spec: str, ratio: float) -> list[tuple[torch.Tensor, Offsets]]:
    """Per chunk what a method recomputes: ``(num_tokens,)`` bool in the primary's tokens, and where these stand in the
    text. What is exact already, or computed with the prompt, counts as recomputed."""
    by_text = _recorded(engine, sample, spec, ratio, "select")
    found = []
    for chunk in sample.chunks:
        offsets = engine.primary.tokenize(chunk).offsets
        found.append(by_text.get(chunk, (torch.ones(len(offsets), dtype=torch.bool), offsets)))
    return found


def _recorded(
    engine: CacheClipEngine, sample: Sample, spec: str, ratio: float, hook: str
) -> dict[str, tuple[torch.Tensor, Offsets]]:
    """By text of the chunk what a method's ``hook`` (``rate`` or ``select``) returns for it, and the offsets of its
    tokens; empty where the hook is not asked. What comes after it is not computed; chunks that were not there are
    released."""
    method = create(spec, {"recompute_ratio": ratio, "behind": engine.config.behind})
    assert isinstance(method, Selective), "a method that rates tokens"
    recording = _Recording(method, hook)
    missing = [chunk for chunk in sample.chunks if not engine.is_stored(chunk)]
    engine.precompute(sample.chunks, method=method)
    engine.prefixes.clear()
    try:
        with suppress(_Recorded):
            engine.prefill(segments_of(engine, sample), method=recording.method, question=sample.question)
    finally:
        engine.release(missing)
        engine.prefixes.clear()
    if recording.request is None:
        return {}
    spans = zip(recording.request.spans, recording.returned, strict=True)
    return {span.segment.text: (tensor, span.tokens.offsets) for span, tensor in spans}


class _Recorded(Exception):
    """Nothing went wrong: what was to be seen was seen."""


class _Recording:
    """A method of the same settings that keeps what one of its hooks returns, and ends there."""

    def __init__(self, method: Selective, hook: str) -> None:
        self.request: SelectionRequest | None = None
        self.returned: list[torch.Tensor] = []

        def record(of: Selective, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            self.returned = list(getattr(type(method), hook)(of, request, scores))
            self.request = request
            raise _Recorded

        Recording = type("Recording", (type(method),), {"__slots__": (), hook: record})
        settings = {each.name: getattr(method, each.name) for each in fields(method)}
        self.method: Selective = Recording(**settings)
