"""Results of the primary on samples: whether full prefill answers rightly, and how near to full prefill a method is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...base.progress import progress_bar
from ...engine import CacheClipEngine
from ...methods import preset
from ...methods.base import Method
from ...prompt.segments import Segment
from ...selection.heads import HeadSet
from ..evaluation.questions import ask
from ..evaluation.records import Record, RecordChunk
from ..evaluation.reference import Reference
from ..evaluation.scores import token_f1
from .families import Sample

RATIO = 0.2
"""Recompute ratio of the methods."""
SELECTOR = "cacheclip"
"""The method that uses a head set."""
_ANSWER_TOKENS = 16
_WHOLE_ANSWER_TOKENS = 40
"""Enough tokens for the longest right answer of the synthetic questions, a UUID."""
_MOST_KL = 1.0
"""Largest KL that a prompt counts with, nats, so that no single prompt decides."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How near to full prefill's answer a method comes on one sample."""

    first_token_kl: float
    """KL at the first token of the answer, nats."""
    answer_kl: float
    """Mean KL along full prefill's answer, nats."""
    first_agrees: bool
    """Whether the first token equals full prefill's."""
    equal_answer: bool
    """Whether the greedy answer equals full prefill's, as far as that is read (16 tokens)."""
    f1: float
    """F1 (0 to 1) of its own greedy answer, of at most 16 tokens, with the right one."""
    full_f1: float
    """The same of full prefill's answer."""


def capped_mean(outcomes: Sequence[Outcome]) -> float:
    """Mean KL along the answer, with at most one nat per prompt."""
    return statistics.fmean(min(each.answer_kl, _MOST_KL) for each in outcomes)


def same_first(outcomes: Sequence[Outcome]) -> int:
    """Number of first tokens that equal full prefill's."""
    return sum(each.first_agrees for each in outcomes)


def same_answers(outcomes: Sequence[Outcome]) -> int:
    """Number of answers that equal full prefill's."""
    return sum(each.equal_answer for each in outcomes)


def f1_share(outcomes: Sequence[Outcome]) -> float | None:
    """Mean F1 divided by full prefill's; None if that is 0."""
    full = sum(each.full_f1 for each in outcomes)
    return sum(each.f1 for each in outcomes) / full if full else None


def may_replace(new: Sequence[Outcome], old: Sequence[Outcome]) -> bool:
    """Whether a head set may replace another by their outcomes on the same prompts: answers are not farther from full
    prefill by KL, and no fewer first tokens equal full prefill's.

    KL comes first, because a dozen prompts tell head sets apart by KL and hardly by counts. The count of first tokens
    only refuses.
    """
    return capped_mean(new) <= capped_mean(old) and same_first(new) >= same_first(old)


def segments_of(engine: CacheClipEngine, sample: Sample) -> list[Segment]:
    """The segments of the sample's prompt."""
    chunks = tuple(RecordChunk("", chunk) for chunk in sample.chunks)
    record = Record(f"{sample.family}/0", sample.family, sample.question, (sample.answer,), chunks, {})
    return ask(engine, record).segments


class AnsweredSamples(NamedTuple):
    """Samples that the primary answers for measurements."""

    samples: list[Sample]
    num_right: int
    """Number of samples that full prefill answers rightly."""

    @property
    def summary(self) -> str:
        """Numbers of rightly answered and of all samples."""
        return f"{self.num_right} of {len(self.samples)}"


def answered_rightly(engine: CacheClipEngine, samples: Sequence[Sample], count: int) -> AnsweredSamples:
    """The first ``count`` samples that full prefill answers rightly (with every part). If there are fewer, others fill
    up. The distance from a wrong answer says little, because small changes alter it."""
    if not count:
        return AnsweredSamples([], 0)
    right: list[Sample] = []
    others: list[Sample] = []
    with progress_bar("what the primary knows", count, "prompts") as advance, torch.inference_mode():
        for sample in samples:
            if len(right) == count:
                break
            (right if _is_answered(engine, sample) else others).append(sample)
            advance(len(right))
    return AnsweredSamples([*right, *others][:count], len(right))


def _is_answered(engine: CacheClipEngine, sample: Sample) -> bool:
    engine.prefixes.clear()
    full = engine.prefill(segments_of(engine, sample), method=preset("full"))
    answer = Reference.of(engine, full, _WHOLE_ANSWER_TOKENS).answer.lower()
    return all(part.lower() in answer for part in sample.parts)


def downstream(
    engine: CacheClipEngine,
    samples: Sequence[Sample],
    sets: Sequence[HeadSet | Method],
    ratio: float = RATIO,
) -> list[list[Outcome]]:
    """Outcomes of each set of heads (outer list) on each sample.

    Args:
        engine: must keep chunk caches in memory; the samples' chunks are released.
        sets: head sets that score for :data:`SELECTOR`, or methods; those with a ratio are measured at ``ratio``.
    """
    assert engine.config.store is None, "training needs an engine in memory, not a user's store"
    found: list[list[Outcome]] = [[] for _ in sets]
    if not samples:
        return found
    before = engine.head_set
    try:
        with progress_bar("asking the primary", len(samples), "prompts") as advance, torch.inference_mode():
            for number, sample in enumerate(samples, 1):
                measure = _measure(engine, sample, ratio)
                for outcomes, heads in zip(found, sets, strict=True):
                    outcomes.append(measure(heads))
                engine.release(sample.chunks)
                advance(number)
    finally:
        engine.parts.use_heads(before)
        engine.release([chunk for sample in samples for chunk in sample.chunks])
    return found


def _method(heads: HeadSet | Method, ratio: float) -> Method:
    method = preset(SELECTOR) if isinstance(heads, HeadSet) else heads
    return method.at(ratio) if method.has_ratio else method


def _measure(engine: CacheClipEngine, sample: Sample, ratio: float) -> Callable[[HeadSet | Method], Outcome]:
    """Answer the sample by full prefill; returns a function that compares a method with this answer."""
    segments = segments_of(engine, sample)
    engine.prefixes.clear()
    full = engine.prefill(segments, method=preset("full"))
    reference = Reference.of(engine, full, _ANSWER_TOKENS)
    full_f1 = token_f1(reference.answer, [sample.answer])

    def measure(heads: HeadSet | Method) -> Outcome:
        method = _method(heads, ratio)
        engine.parts.use_heads(heads if isinstance(heads, HeadSet) else None)
        engine.precompute(sample.chunks, method=method)
        engine.prefixes.clear()
        prefilled = engine.prefill(segments, method=method, question=sample.question)
        followed = reference.follow(prefilled)
        assert followed.answer is not None
        fidelity = followed.fidelity
        return Outcome(
            fidelity.first_token_kl,
            fidelity.answer_kl,
            fidelity.first_agrees,
            equal_answer=fidelity.agreement == 1.0,
            f1=token_f1(followed.answer, [sample.answer]),
            full_f1=full_f1,
        )

    return measure
