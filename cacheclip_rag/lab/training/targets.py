"""What an auxiliary model should find: the tokens of a prompt that the primary both attends to and holds stale; and
what a method chooses of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from ...chunks.context import ChunkContext
from ...engine import CacheClipEngine
from ...methods import preset
from ...methods.base import CacheView, Method, PromptView
from ...methods.recompute import Recompute
from ...progress import progress_bar
from ...selection.sentences import Offsets
from .families import Sample
from .features import spread_over
from .folder import Kept
from .prompts import segments_of

__all__ = ["attended_and_stale", "attended_when_stale", "after_sinks", "chosen_by", "targets_of"]

_RATIO = 0.5
"""At any but 0 and 1 the method scores."""


def attended_and_stale(engine: CacheClipEngine, sample: Sample) -> torch.Tensor | None:
    """Per token of the auxiliary, over all chunks side by side: the share of the primary's attention to stale values
    that falls on it. ``(num_tokens,)`` float32, sum 1; None where nothing is stale.

    ``u(t)`` is the mean over layers of ``A(t) * |dV(t)| / mean |V|`` (:mod:`cacheclip_rag.selection.scorers.oracle`),
    carried over to the auxiliary's tokens by the characters they share. Costs two prefills of the primary and more.
    ``engine`` keeps its chunk caches in memory: those of the sample are released.
    """
    found = _rated(engine, sample, preset("oracle"))
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


def after_sinks(target: torch.Tensor | None, lengths: Sequence[int], sinks: int) -> torch.Tensor | None:
    """The target without the first ``sinks`` tokens of every chunk, which nobody scores; None where nothing is left."""
    if target is None:
        return None
    scored = torch.cat([torch.arange(length) >= sinks for length in lengths])
    left = target * scored
    return left / left.sum() if bool(left.any()) else None


def attended_when_stale(engine: CacheClipEngine, sample: Sample, method: Method) -> torch.Tensor:
    """The scores of a method that looks at the primary's cache as it is, handed over likewise; 0 throughout where
    there is nothing to choose."""
    found = _rated(engine, sample, method)
    if found is None:
        return torch.zeros(sum(len(engine.parts.auxiliary_caches.tokenize(chunk)) for chunk in sample.chunks))
    return found


def _rated(engine: CacheClipEngine, sample: Sample, method: Method) -> torch.Tensor | None:
    """``(num_tokens,)`` in the auxiliary's tokens: what a method scores; None where it scores nothing."""
    assert engine.config.store is None, "an engine to train with, not a user's own"
    by_text = _recorded(engine, sample, method, _RATIO, scores=True)
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


def chosen_by(
    engine: CacheClipEngine, sample: Sample, method: Method, ratio: float
) -> list[tuple[torch.Tensor, Offsets]]:
    """Per chunk what a method recomputes: ``(num_tokens,)`` bool in the primary's tokens, and where these stand in the
    text. What is exact already, or computed with the prompt, counts as recomputed."""
    by_text = _recorded(engine, sample, method, ratio, scores=False)
    found = []
    for chunk in sample.chunks:
        offsets = engine.primary.tokenize(chunk).offsets
        found.append(by_text.get(chunk, (torch.ones(len(offsets), dtype=torch.bool), offsets)))
    return found


def _recorded(
    engine: CacheClipEngine, sample: Sample, method: Method, ratio: float, *, scores: bool
) -> dict[str, tuple[torch.Tensor, Offsets]]:
    """By text of the chunk the scores of a method or what it selects, and the offsets of the chunk's tokens; empty
    where there is nothing to choose. What comes after it is not computed; chunks that were not there are released."""
    assert isinstance(method, Recompute), "a method that scores tokens"
    recording = _Recording(method.at(ratio), scores, name=method.name)
    missing = [chunk for chunk in sample.chunks if not engine.is_stored(chunk)]
    engine.precompute(sample.chunks, method=recording)
    engine.prefixes.clear()
    try:
        with suppress(_Recorded):
            engine.prefill(segments_of(engine, sample), method=recording, question=sample.question)
    finally:
        engine.release(missing)
        engine.prefixes.clear()
    return recording.found


class _Recorded(Exception):
    """Nothing went wrong: what was to be seen was seen."""


@dataclass(frozen=True, slots=True)
class _Recording(Method):
    """Keeps what another method scores or selects, and ends there."""

    inner: Recompute
    scores: bool
    """True keeps scores, False masks."""
    found: dict[str, tuple[torch.Tensor, Offsets]] = field(default_factory=dict, compare=False)

    @property
    def needs_auxiliary(self) -> bool:
        return self.inner.needs_auxiliary

    @property
    def head_sets(self) -> tuple[str, ...]:
        return self.inner.head_sets

    @property
    def context(self) -> ChunkContext | None:
        return self.inner.context

    def score(self, view: PromptView) -> list[torch.Tensor]:
        return self.inner.score(view)

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.scores and not self.inner.budget.is_open(view):
            raise _Recorded
        kept = self.inner.scorer.late(view, scores) if self.scores else self.inner.select(view, scores)
        spans = zip(view.spans, kept, strict=True)
        self.found.update({span.segment.text: (tensor, span.tokens.offsets) for span, tensor in spans})
        raise _Recorded
