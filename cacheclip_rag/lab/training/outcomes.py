"""Results of the primary on samples: whether full prefill answers rightly, and a method's distance from full prefill.

Results are saved in the working folder at once, so that an interrupted run can continue.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from ...engine import CacheClipEngine
from ...methods import preset
from ...methods.base import Method
from ...methods.settings import describe
from ...progress import progress_bar
from ...selection.heads import HeadSet
from ..evaluation.reference import Reference
from .families import Sample
from .folder import Kept
from .prompts import segments_of

__all__ = ["RATIO", "SELECTOR", "Asked", "answered_rightly", "capped_mean", "downstream"]

RATIO = 0.2
"""Recompute ratio of the methods, and share of chosen tokens when heads are ranked."""
SELECTOR = "cacheclip"
"""The method that uses a head set."""
_ANSWER_TOKENS = 16
_WHOLE_ANSWER_TOKENS = 40
"""Enough tokens for the longest right answer of the synthetic questions, a UUID."""
_MOST_KL = 1.0
"""Largest KL that a prompt counts with, nats, so that no single prompt decides."""


def capped_mean(kl: Sequence[float]) -> float:
    """Mean KL, with at most one nat per prompt."""
    return statistics.fmean(min(each, _MOST_KL) for each in kl)


class Asked(NamedTuple):
    """Samples that the primary answers for measurements."""

    samples: list[Sample]
    num_right: int
    """Number of samples that full prefill answers rightly."""
    num_open: int
    """Number of samples without a short right answer."""

    @property
    def summary(self) -> str:
        """Numbers of rightly answered and of all samples."""
        said = f"{self.num_right} of {len(self.samples)}"
        return f"{said}, and {self.num_open} have no short right answer" if self.num_open else said


def answered_rightly(
    engine: CacheClipEngine, samples: Sequence[Sample], count: int, *, kept: Kept | None = None
) -> Asked:
    """The first ``count`` samples that full prefill answers rightly (with every part, in one of its wordings). If there
    are fewer, other samples fill up. The distance from a wrong answer says little, because small changes alter it.

    Samples without parts (questions about documents) are included without being asked, because no model repeats their
    answer, a whole sentence, word for word.
    """
    if not count:
        return Asked([], 0, 0)
    right: list[Sample] = []
    others: list[Sample] = []
    with progress_bar("what the primary knows", count, "prompts") as advance, torch.inference_mode():
        for sample in samples:
            if len(right) == count:
                break
            (right if not sample.parts or _is_answered(engine, sample, kept) else others).append(sample)
            advance(len(right))
    num_open = sum(not sample.parts for sample in right)
    return Asked([*right, *others][:count], len(right) - num_open, num_open)


def _is_answered(engine: CacheClipEngine, sample: Sample, kept: Kept | None) -> bool:
    about = {"sample": asdict(sample), "right in": _WHOLE_ANSWER_TOKENS}
    known = kept.outcome(about) if kept else None
    if known is None:
        engine.prefixes.clear()
        full = engine.prefill(segments_of(engine, sample), method=preset("full"))
        answer = Reference.of(engine, full, _WHOLE_ANSWER_TOKENS).answer.lower()
        known = (float(all(any(each.lower() in answer for each in wordings) for wordings in sample.parts)),)
        if kept:
            kept.keep_outcome(about, known)
    return bool(known[0])


def downstream(
    engine: CacheClipEngine,
    samples: Sequence[Sample],
    sets: Sequence[HeadSet | Method],
    ratio: float = RATIO,
    *,
    kept: Kept | None = None,
) -> list[list[tuple[float, float]]]:
    """First-token KL and mean KL along full prefill's answer, for each set of heads and each sample.

    Args:
        engine: must keep chunk caches in memory; the samples' chunks are released.
        sets: head sets that score for :data:`SELECTOR`, or methods; those with a ratio are measured at ``ratio``.
        kept: folder of saved results.
    """
    assert engine.config.store is None, "training needs an engine in memory, not a user's store"
    found: list[list[tuple[float, float]]] = [[] for _ in sets]
    if not samples:
        return found
    before = engine.head_set
    try:
        with progress_bar("asking the primary", len(samples), "prompts") as advance, torch.inference_mode():
            for number, sample in enumerate(samples, 1):
                abouts = [_about(engine, sample, heads, ratio) for heads in sets]
                known = [kept.outcome(about) if kept else None for about in abouts]
                measure = _measure(engine, sample, ratio) if None in known else None
                for outcomes, heads, about, outcome in zip(found, sets, abouts, known, strict=True):
                    if outcome is None:
                        assert measure is not None, "measure is set if a result is missing"
                        outcome = measure(heads)
                        if kept:
                            kept.keep_outcome(about, outcome)
                    outcomes.append((outcome[0], outcome[1]))
                if measure is not None:
                    engine.release(sample.chunks)
                advance(number)
    finally:
        engine.parts.use_heads(before)
        engine.release([chunk for sample in samples for chunk in sample.chunks])
    return found


def _about(engine: CacheClipEngine, sample: Sample, heads: HeadSet | Method, ratio: float) -> dict[str, Any]:
    """Everything on which a result depends, except the engine's models."""
    return {
        "sample": sample.as_read(),
        "method": describe(_method(heads, ratio)),
        "heads": heads.digest() if isinstance(heads, HeadSet) else None,
        "ratio": ratio,
        "answer_tokens": _ANSWER_TOKENS,
    }


def _method(heads: HeadSet | Method, ratio: float) -> Method:
    method = preset(SELECTOR) if isinstance(heads, HeadSet) else heads
    return method.at(ratio) if method.has_ratio else method


def _measure(engine: CacheClipEngine, sample: Sample, ratio: float) -> Callable[[HeadSet | Method], tuple[float, ...]]:
    """Answer the sample by full prefill; returns a function that measures the distance of a method's answer."""
    segments = segments_of(engine, sample)
    engine.prefixes.clear()
    full = engine.prefill(segments, method=preset("full"))
    reference = Reference.of(engine, full, _ANSWER_TOKENS)

    def measure(heads: HeadSet | Method) -> tuple[float, ...]:
        method = _method(heads, ratio)
        engine.parts.use_heads(heads if isinstance(heads, HeadSet) else None)
        engine.precompute(sample.chunks, method=method)
        engine.prefixes.clear()
        prefilled = engine.prefill(segments, method=method, question=sample.question)
        fidelity = reference.follow(prefilled, answers=False).fidelity
        return fidelity.first_token_kl, fidelity.answer_kl

    return measure
