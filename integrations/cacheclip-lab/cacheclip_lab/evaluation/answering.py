"""One method's answer to one question: answered, compared with full prefill, scored, or refused with a reason."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import transformers

from cacheclip_rag import (
    CacheClipEngine,
    CacheClipError,
    ConfigurationError,
    FusionStats,
    MissingExtraError,
    ModelError,
    PromptTooLongError,
    StoreError,
)
from cacheclip_rag.measuring import Prefilled
from cacheclip_rag.methods import Method

from ..machine import unit_name
from ..models import extending_model
from .questions import QuestionPrompt
from .reference import Reference, ReferenceComparison
from .results import ItemResult
from .scores import METRICS

FULL = "full"
"""The method with which the others are compared."""
NOT_THE_QUESTIONS = (MissingExtraError, ModelError, StoreError, AssertionError)
"""Errors that do not depend on a single question."""


class UnusableQuestion(Exception):
    """A question is left out for every method; the message gives the reason."""


@contextmanager
def answering(label: str, asked: QuestionPrompt) -> Iterator[None]:
    """Add the method and the question to errors. A prompt that is too long leaves the question out; other errors stop
    the run."""
    where = f"method {label!r} at question {asked.record.id!r}"
    try:
        yield
    except PromptTooLongError as error:
        raise UnusableQuestion(
            reason_of(error) if label == FULL else f"{reason_of(error)} (method {label!r})"
        ) from error
    except CacheClipError as error:
        kind = ConfigurationError if isinstance(error, ConfigurationError) else CacheClipError
        raise kind(
            f"{where} failed: {reason_of(error)} Mend the method or leave it out, and run again: answers in a folder "
            "are kept."
        ) from error
    except Exception as error:
        error.add_note(f"while running {where}")
        raise


def reason_of(error: Exception) -> str:
    """An error's message in one line."""
    kind = "" if isinstance(error, CacheClipError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())


@dataclass(frozen=True, slots=True)
class MethodAnswer:
    """A method's answer and its distance from full prefill's."""

    text: str
    fidelity: dict[str, float]
    stats: FusionStats
    followed: ReferenceComparison


def answer_of(
    engine: CacheClipEngine,
    asked: QuestionPrompt,
    method: Method,
    reference: Reference,
) -> MethodAnswer:
    return followed(reference, engine.prefill(asked.segments, method=method, question=asked.record.question))


def in_two_pieces(engine: CacheClipEngine, full: Prefilled, max_tokens: int) -> Prefilled:
    """Full prefill of the same prompt, which reads its second half in a pass of its own. The terms of every sum are
    the same.

    Args:
        full: the prompt in one piece; its cache is not used.
        max_tokens: most tokens of an answer.
    """
    runtime, ids, start = extending_model(engine.primary), full.layout.ids, time.perf_counter()
    half = len(ids) // 2
    state, logits = runtime.prefill(ids[:half], len(ids) + max_tokens)
    if (last := runtime.extend(state, ids[half:], half)) is not None:
        logits = last
    stats = replace(full.stats, ttft_s=time.perf_counter() - start, phases_s={})
    return replace(full, cache=state, logits=logits, stats=stats)


def followed(reference: Reference, prefilled: Prefilled) -> MethodAnswer:
    followed = reference.follow(prefilled)
    assert followed.answer is not None, "it was asked for"
    fidelity = {
        "first_token_kl": followed.fidelity.first_token_kl,
        "answer_kl": followed.fidelity.answer_kl,
        "agreement": followed.fidelity.agreement,
        "first_token_agreement": float(followed.fidelity.first_agrees),
        "equal_answer": float(followed.answer == reference.answer),
    }
    return MethodAnswer(followed.answer, fidelity, prefilled.stats, followed)


def measured_on(engine: CacheClipEngine) -> str:
    """Processor, threads and library version on which times depend."""
    unit = unit_name(engine.primary.device)
    library = engine.primary.backend or f"transformers {transformers.__version__}"
    return f"{unit}, {torch.get_num_threads()} threads, {library}"


def item_of(asked: QuestionPrompt, label: str, answered: MethodAnswer, where: str) -> ItemResult:
    for name, value in answered.fidelity.items():
        if not math.isfinite(value):
            raise UnusableQuestion(f"{name} of method {label!r} is {value}.")
    stats, followed, judged = answered.stats, answered.followed, asked.judged(answered.text)
    return ItemResult(
        id=asked.record.id,
        label=label,
        answer=answered.text,
        scores={name: METRICS[name](judged, asked.record.answers) for name in asked.metrics},
        fidelity=answered.fidelity,
        nominal_ratio=stats.nominal_ratio,
        effective_ratio=stats.effective_ratio,
        charged_ratio=stats.charged_ratio,
        ttft_s=stats.ttft_s,
        phases_s=dict(stats.phases_s),
        fallback=stats.fallback,
        measured_on=where,
        effective_ratio_of_stale=stats.effective_ratio_of_stale,
        confidence=stats.confidence if stats.fallback is None and stats.exact_tokens < stats.chunk_tokens else None,
        later_confidence=followed.later_confidence,
        confidence_to_difference=followed.confidence_to_difference,
        prompt_tokens=stats.prompt_tokens,
        chunks=len(asked.chunks),
        answer_tokens=len(followed.confidences),
    )
