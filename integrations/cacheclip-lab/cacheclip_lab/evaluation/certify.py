"""Certifies a pair of models: checks that reuse is exact, and measures how close to full prefill each ratio is.

The verdict at a ratio is ``exact`` if the answers equal full prefill's, ``faithful`` if the means over the bundled
prompts stay within :data:`~cacheclip_lab.certificates.THRESHOLDS`, and otherwise ``not faithful``. If an
exactness check fails, every verdict is ``not faithful``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig, FusionStats
from cacheclip_rag.methods import Method, preset
from cacheclip_rag.models import concrete
from cacheclip_rag.plugins import progress_bar

from ..certificates import THRESHOLDS
from ..certificates.identity import Identity, identity_of
from .certificate import Certificate, EditFigures, GateFigures, RatioFigures, TurnFigures, check_writable
from .conversations import TurnOutcome, converse, questions_of
from .edits import EditOutcome, edits, measured_edits
from .exactness import DIRECT, check_exactness, check_reuse
from .fidelity import Fidelity
from .gating import CONFIDENCES
from .guarantee import asked_answers, check_max_differ, guarantee_of, kept_answers
from .prompts import EvaluationPrompt, bundled_prompts
from .reference import Reference

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5)
_EXACT_KL = 1e-4
"""Largest KL on any prompt for ``exact``, nats; in half precision, twice the noise floor if larger. Float32: 1e-7."""
_PROMPTS, _QUICK_PROMPTS = 20, 4
ANSWER_TOKENS = 32
_SAME = Fidelity(first_token_kl=0.0, answer_kl=0.0, agreement=1.0, first_agrees=True)
"""Distance of full prefill from itself."""


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """Result for one prompt at one ratio."""

    fidelity: Fidelity
    effective_ratio: float
    charged_ratio: float
    finds_needle: bool | None
    confidence: float
    """Of the first token."""


def certify(
    config: EngineConfig,
    *,
    method: Method | None = None,
    quick: bool = False,
    max_differ: float | None = None,
    answers: Path | None = None,
    turns: int = 1,
) -> Certificate:
    """Measure the pair of models of ``config`` with its method, and return the certificate (not saved yet).

    Args:
        config: the verdict is for its ``recompute_ratio`` (None: the method's own), which is measured besides
            :data:`RATIOS`. Its store is not used.
        method: an instance, instead of the method that ``config`` names.
        quick: use 4 of the 20 prompts. The verdict may change with more prompts. If engines require a certificate, only
            the verdict ``exact`` of a quick certificate counts.
        max_differ: also look for the cheapest recompute ratio and gate with which at most this share of answers differs
            from full prefill's, with 95 % confidence (:mod:`.promise`).
        answers: a folder of ``cacheclip eval`` whose answers show it; None: 10 / ``max_differ`` prompts are asked.
        turns: of a conversation about the passages of each prompt with a needle. With 1, none is measured, and no
            edited prompt.

    Raises:
        ConfigurationError: the method reuses nothing, or reuses KV of earlier answers; it needs an auxiliary model and
            none is set; no prompt has a needle; or the models' contexts are too short for the prompts.
        UnsupportedModelError: a model's KV cannot be reused.
        CertificateError: the certificate could not be saved later.
    """
    started = time.perf_counter()
    check_writable()
    if max_differ is not None:
        check_max_differ(max_differ)
    config = replace(concrete(config), store=None, shadow_rate=0.0, min_confidence=0.0)
    given = replace(CacheClipEngine(config).make_method(method), min_confidence=0.0)
    check_method(given)
    config = replace(config, auxiliary=config.auxiliary if given.needs_auxiliary else None)
    engine = CacheClipEngine(config)
    engine.observers.clear()  # they would warn that there is no certificate
    prompts = prompts_of(quick)
    methods = at_ratios(given)
    identity = identity_of(engine, methods[max(methods)])
    kept = None if answers is None else kept_answers(answers, config, identity, methods)
    exactness, found_by_full, outcomes, conversations, edited = _measured(engine, prompts, given, methods, turns)
    guarantee = None
    if max_differ is not None and exactness["passed"]:
        guarantee = guarantee_of(kept or asked_answers(config, methods, max_differ), max_differ)
    certificate = certificate_of(
        config,
        given,
        identity,
        exactness,
        found_by_full,
        outcomes,
        gates={ratio: _gate(ratio, found, found_by_full, exactness) for ratio, found in outcomes.items()},
        turns=[_turn(number, found, exactness) for number, found in enumerate(zip(*conversations, strict=True), 1)],
        quick=quick,
        seconds=time.perf_counter() - started,
    )
    return replace(certificate, guarantee=guarantee, edits=_edits(edited, exactness))


def _measured(
    engine: CacheClipEngine,
    prompts: Sequence[EvaluationPrompt],
    given: Method,
    methods: Mapping[float, Method],
    turns: int,
) -> tuple[
    dict[str, Any],
    list[bool | None],
    dict[float, list[PromptOutcome]],
    list[list[TurnOutcome]],
    list[list[EditOutcome]],
]:
    """Exactness; whether full prefill finds each prompt's needle; outcomes of each ratio by prompt; conversations;
    edits of each prompt."""
    outcomes: dict[float, list[PromptOutcome]] = {ratio: [] for ratio in methods}
    found_by_full: list[bool | None] = []
    conversations: list[list[TurnOutcome]] = []
    edited: list[list[EditOutcome]] = []
    if turns > 1:  # before chunks are stored, which would be taken
        for prompt, other in zip(prompts, [*prompts[1:], prompts[0]], strict=True):
            pairs = edits(prompt.chunks, other.chunks[0], prompt.question)
            edited.append([*measured_edits(engine, pairs, given, ANSWER_TOKENS)])
    with progress_bar("certifying", len(prompts) + 1, "prompts") as advance:
        # the checks are of reuse itself, whatever the method
        engine.precompute(prompts[0].chunks, method=DIRECT)
        exactness = check_exactness(engine, prompts[0])
        advance(1)
        for number, prompt in enumerate(prompts, 2):
            engine.precompute(prompt.chunks, method=given)
            reference = Reference.of(engine, engine.prefill(prompt.text, method=preset("full")), ANSWER_TOKENS)
            found_by_full.append(prompt.finds(reference.answer))
            for ratio, at_ratio in methods.items():
                outcomes[ratio].append(_measure(engine, prompt, at_ratio, reference))
            if turns > 1 and prompt.needle is not None:
                asked = questions_of(prompt, turns, len(conversations))
                conversations.append(converse(engine, asked, given, ANSWER_TOKENS))
            engine.release(set(prompt.chunks) - {text for later in prompts[number - 1 :] for text in later.chunks})
            advance(number)
    return exactness, found_by_full, outcomes, conversations, edited


def certificate_of(
    config: EngineConfig,
    method: Method,
    identity: Identity,
    exactness: dict[str, Any],
    found_by_full: Sequence[bool | None],
    outcomes: Mapping[float, Sequence[PromptOutcome]],
    *,
    gates: Mapping[float, Sequence[GateFigures]] | None = None,
    turns: Sequence[TurnFigures] = (),
    quick: bool,
    seconds: float,
) -> Certificate:
    """The certificate, with its verdict.

    Args:
        found_by_full: per prompt, whether full prefill found the needle; None for a prompt without one.
        outcomes: per ratio, one of each prompt.
        gates: per ratio, what a confidence gate would have done; None where there can be no gate.
        turns: of conversations, at the ratio of the verdict.
    """
    needles = statistics.mean(found for found in found_by_full if found is not None)
    certificate = Certificate(
        primary=config.primary,
        auxiliary=config.auxiliary,
        identity=identity,
        verdict="not faithful",
        ratio=method.nominal_ratio,
        exactness=exactness,
        needle_accuracy_of_full=needles,
        ratios=[
            replace(figures_of(ratio, outcomes[ratio], needles, exactness), gate=tuple((gates or {}).get(ratio, ())))
            for ratio in sorted(outcomes)
        ],
        turns=turns,
        thresholds=dict(THRESHOLDS),
        prompts=len(found_by_full),
        quick=quick,
        seconds=seconds,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return replace(certificate, verdict=certificate.verdicts.at(certificate.ratio))


def prompts_of(quick: bool) -> list[EvaluationPrompt]:
    """The prompts of a certificate."""
    prompts = bundled_prompts(_QUICK_PROMPTS if quick else _PROMPTS)
    if all(prompt.needle is None for prompt in prompts):
        raise ConfigurationError(
            f"a certificate counts found needles, and none of the {len(prompts)} prompts hides one. Use prompts of "
            "which at least one has a needle."
        )
    return prompts


def check_method(method: Method) -> None:
    """Raise ConfigurationError for methods that cannot be certified."""
    if not method.reuses_chunks:
        raise ConfigurationError(f"method {method.name!r} reuses nothing inexactly, so there is nothing to certify.")


def at_ratios(given: Method) -> dict[float, Method]:
    """The method at each ratio, including 0 (direct reuse); one entry for a method without a ratio."""
    if not given.has_ratio:
        return {given.nominal_ratio: given}
    ratios = sorted({0.0, *RATIOS, given.nominal_ratio})
    return {ratio: given.at(ratio) for ratio in ratios}


def _measure(engine: CacheClipEngine, prompt: EvaluationPrompt, method: Method, reference: Reference) -> PromptOutcome:
    prefilled = check_reuse(engine.prefill(prompt.text, method=method, question=prompt.question))
    followed = reference.follow(prefilled, answers=prompt.needle is not None)
    stats, found = prefilled.stats, prompt.finds(followed.answer or "")
    assert stats.confidence is not None, "every prefill says how sure it is"
    return PromptOutcome(followed.fidelity, stats.effective_ratio, stats.charged_ratio, found, stats.confidence)


def figures_of(
    ratio: float, outcomes: Sequence[PromptOutcome], needles_of_full: float, exactness: Mapping[str, Any]
) -> RatioFigures:
    """Figures of one ratio and its verdict. ``needles_of_full``: share that full prefill finds."""
    first_token_kl = _spread(outcomes, lambda f: f.first_token_kl)
    answer_kl = _spread(outcomes, lambda f: f.answer_kl)
    agreement = statistics.mean(outcome.fidelity.agreement for outcome in outcomes)
    found = [outcome.finds_needle for outcome in outcomes if outcome.finds_needle is not None]
    needles = statistics.mean(found) if found else needles_of_full  # a turn need not ask for one
    same = max(_EXACT_KL, 2 * exactness["noise_floor"]["kl"])
    if not exactness["passed"]:
        verdict = "not faithful"
    elif answer_kl["max"] <= same and agreement == 1.0:
        verdict = "exact"
    else:
        kept = (
            first_token_kl["mean"] <= THRESHOLDS["first_token_kl"],
            answer_kl["mean"] <= THRESHOLDS["answer_kl"],
            agreement >= THRESHOLDS["agreement"],
            needles >= THRESHOLDS["needle_accuracy_of_full"] * needles_of_full,
        )
        verdict = "faithful" if all(kept) else "not faithful"
    return RatioFigures(
        ratio=ratio,
        effective_ratio=statistics.mean(outcome.effective_ratio for outcome in outcomes),
        charged_ratio=statistics.mean(outcome.charged_ratio for outcome in outcomes),
        first_token_kl=first_token_kl,
        answer_kl=answer_kl,
        agreement=agreement,
        needle_accuracy=needles,
        verdict=verdict,
    )


def _turn(number: int, found: Sequence[TurnOutcome], exactness: Mapping[str, Any]) -> TurnFigures:
    """Figures of one turn over all conversations."""
    outcomes = [
        PromptOutcome(each.fidelity, each.stats.effective_ratio, each.stats.charged_ratio, each.finds_needle, 0.0)
        for each in found
    ]
    full = [each.full_finds_needle for each in found if each.full_finds_needle is not None]
    of_full = statistics.mean(full) if full else 0.0
    figures = figures_of(0.0, outcomes, of_full, exactness)
    stats = [each.stats for each in found]
    return TurnFigures(
        turn=number,
        continued_tokens=statistics.mean(each.continued_tokens for each in stats),
        needle_accuracy=figures.needle_accuracy,
        needle_accuracy_of_full=of_full,
        **_of_history(stats, figures),
    )


def _of_history(stats: Sequence[FusionStats], figures: RatioFigures) -> dict[str, Any]:
    """The fields of :class:`~.certificate.HistoryFigures`."""
    return {
        "prompt_tokens": statistics.mean(each.prompt_tokens for each in stats),
        "computed_tokens": statistics.mean(each.fresh_tokens + each.recomputed_tokens for each in stats),
        **{name: getattr(figures, name) for name in ("first_token_kl", "answer_kl", "agreement", "verdict")},
    }


def _edits(prompts: Sequence[Sequence[EditOutcome]], exactness: Mapping[str, Any]) -> tuple[EditFigures, ...]:
    """Figures by edit; none if the method moves nothing."""
    figures = tuple(_edit(found, exactness) for found in zip(*prompts, strict=True))
    return figures if any(each.moved_tokens for each in figures) else ()


def _edit(found: Sequence[EditOutcome], exactness: Mapping[str, Any]) -> EditFigures:
    """Figures of one edit over all prompts."""
    outcomes = [PromptOutcome(each.fidelity, 0.0, 0.0, None, 0.0) for each in found]
    figures, stats = figures_of(0.0, outcomes, 0.0, exactness), [each.stats for each in found]
    return EditFigures(
        edit=found[0].edit,
        moved_tokens=statistics.mean(each.moved_tokens for each in stats),
        **_of_history(stats, figures),
    )


def _gate(
    ratio: float, outcomes: Sequence[PromptOutcome], found_by_full: Sequence[bool | None], exactness: Mapping[str, Any]
) -> list[GateFigures]:
    """What each value of ``min_confidence`` would have done."""
    needles = statistics.mean(found for found in found_by_full if found is not None)
    gates = []
    for least in CONFIDENCES:
        gated = [
            _in_full(each, found) if each.confidence < least else each
            for each, found in zip(outcomes, found_by_full, strict=True)
        ]
        figures = figures_of(ratio, gated, needles, exactness)
        assert figures.charged_ratio is not None
        gates.append(
            GateFigures(
                least,
                statistics.mean(each.fidelity.first_agrees for each in gated),
                figures.charged_ratio,
                statistics.mean(each.confidence < least for each in outcomes),
                figures.verdict,
            )
        )
    return gates


def _in_full(outcome: PromptOutcome, finds_needle: bool | None) -> PromptOutcome:
    """The outcome of a prompt that is prefilled in full after all."""
    return replace(outcome, fidelity=_SAME, charged_ratio=outcome.charged_ratio + 1.0, finds_needle=finds_needle)


def _spread(outcomes: Sequence[PromptOutcome], of: Callable[[Fidelity], float]) -> dict[str, float]:
    values = [of(outcome.fidelity) for outcome in outcomes]
    return {"mean": statistics.mean(values), "median": statistics.median(values), "max": max(values)}
