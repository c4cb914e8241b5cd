"""What an auxiliary model should find: the tokens of a prompt that the primary both attends to and holds stale."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields

import torch

from ..engine import CacheClipEngine
from ..methods import create
from ..methods.base import SelectionRequest
from ..methods.selective import Selective
from .families import Sample
from .features import spread_over
from .prompts import segments_of

__all__ = ["attended_and_stale", "attended_when_stale", "behind_sinks"]

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
        return torch.zeros(sum(len(engine.auxiliary_caches.tokenize(chunk)) for chunk in sample.chunks))
    return found


def _rated(engine: CacheClipEngine, sample: Sample, spec: str) -> torch.Tensor | None:
    """``(num_tokens,)`` in the auxiliary's tokens: what a method rates; None where it rates nothing."""
    assert engine.config.store is None, "an engine to train with, not a user's own"
    method = create(spec, {"recompute_ratio": _RATIO, "behind": engine.config.behind})
    assert isinstance(method, Selective), "a method that rates tokens"
    recording = _Recording(method)
    engine.precompute(sample.chunks, method=method)
    engine.prefixes.clear()
    try:
        with suppress(_Recorded):  # what comes after is not asked for
            engine.prefill(segments_of(engine, sample), method=recording.method, question=sample.question)
    finally:
        engine.release(sample.chunks)
        engine.prefixes.clear()
    if recording.request is None:
        return None
    spans = zip(recording.request.spans, recording.rated, strict=True)
    by_text = {span.segment.text: (score, span.tokens.offsets) for span, score in spans}
    parts = []
    for chunk in sample.chunks:
        offsets = engine.auxiliary_caches.tokenize(chunk).offsets
        if chunk in by_text:
            score, source = by_text[chunk]
            parts.append(spread_over(score.float(), source, offsets))
        else:  # exact already, or so short that it is computed with the prompt
            parts.append(torch.zeros(len(offsets)))
    return torch.cat(parts)


class _Recorded(Exception):
    """Nothing went wrong: what was to be seen was seen."""


class _Recording:
    """A method of the same settings that keeps what it rates."""

    def __init__(self, method: Selective) -> None:
        self.request: SelectionRequest | None = None
        self.rated: list[torch.Tensor] = []
        recording = self

        class Recording(type(method)):  # type: ignore[misc]
            __slots__ = ()

            def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                rated: list[torch.Tensor] = super().rate(request, scores)
                recording.request, recording.rated = request, rated
                raise _Recorded

        settings = {each.name: getattr(method, each.name) for each in fields(method)}
        self.method: Selective = Recording(**settings)
