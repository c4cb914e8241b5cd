"""A confidence gate with a guarantee: the cheapest one of which the questions show, with 95 % confidence, that at most
a given share of answers goes wrong.

Learn then test (Angelopoulos et al., arXiv:2110.01052), as CALM (arXiv:2207.07061) uses it for early exits. At each
recompute ratio, gates are tested from the strictest down, each by the exact binomial test (Clopper and Pearson, 1934),
until one fails: a fixed sequence, so that no test costs another one confidence. Ratios share the error (Bonferroni).
It holds for questions like those that were asked: drawn from the same ones, prompts and answers as long.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .gating import Gated, gate
from .results import ItemResult

__all__ = ["CONFIDENCE", "RISKS", "Pairs", "Promise", "broken_share", "promise_of"]

CONFIDENCE = 0.95
"""How sure the promise is."""
_GATES = tuple(step / 20 for step in range(20, -1, -1))
"""Values of ``min_confidence`` from the strictest down."""
Pairs = Sequence[tuple[ItemResult, ItemResult]]
"""A method's items, each with full prefill's of the same question."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The cheapest gate that keeps a promise."""

    label: str
    """Of the run: a method at a ratio."""
    min_confidence: float
    n: int
    """Questions."""
    wrong: int
    """Those of them that went wrong."""
    cost: float
    """Mean share of full prefill's computation, both passes counted."""
    seconds: float
    """Mean time to the first token."""


def _differs(own: ItemResult, full: ItemResult) -> bool:
    return own.answer != full.answer


def _loses(own: ItemResult, full: ItemResult) -> bool:
    return own.own is not None and own.scores[own.own] < full.scores[own.own]


RISKS: dict[str, Callable[[ItemResult, ItemResult], bool]] = {"differs": _differs, "loses": _loses}
"""What may go wrong with an answer: it is not full prefill's, or its own score is below that of full prefill's."""


def promise_of(runs: Mapping[str, Pairs], most: float, risk: str = "differs") -> Promise | None:
    """The cheapest gate with which at most the share ``most`` of answers goes wrong; None if the questions do not show
    it of any that costs less than full prefill.

    Args:
        runs: by label, one method at several recompute ratios.
        most: above 0 and below 1.
        risk: a name of :data:`RISKS`.
    """
    error, found = (1.0 - CONFIDENCE) / len(runs), []
    for label, pairs in runs.items():
        for least in _GATES:
            tried = _at(label, pairs, least, RISKS[risk])
            if _tail(tried.wrong, tried.n, most) > error:
                break
            found.append(tried)
    cheapest = min(found, key=lambda promise: promise.cost, default=None)
    return cheapest if cheapest and cheapest.cost < 1.0 else None


def broken_share(
    runs: Mapping[str, Pairs], most: float, risk: str = "differs", *, resamplings: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """How often a promise is made on a random half of the questions, and how often it is broken where it is made: the
    share of all questions that go wrong is above ``most``."""
    generator, made, broken = random.Random(seed), 0, 0
    count = len(next(iter(runs.values())))
    if any(len(pairs) != count for pairs in runs.values()):
        raise ValueError("expected every run over the same questions, in the same order")
    for _ in range(resamplings):
        half = generator.sample(range(count), count // 2)
        promise = promise_of({label: [pairs[i] for i in half] for label, pairs in runs.items()}, most, risk)
        if promise is not None:
            made += 1
            whole = _at(promise.label, runs[promise.label], promise.min_confidence, RISKS[risk])
            broken += whole.wrong > most * whole.n
    return made / resamplings, broken / made if made else 0.0


def _tail(wrong: int, count: int, share: float) -> float:
    """Probability that at most ``wrong`` of ``count`` go wrong if each does with probability ``share``."""
    return math.fsum(
        math.comb(count, each) * share**each * (1.0 - share) ** (count - each) for each in range(wrong + 1)
    )


def _at(label: str, pairs: Pairs, least: float, risk: Callable[[ItemResult, ItemResult], bool]) -> Promise:
    each = [gate(own, full, least) for own, full in pairs]
    wrong = sum(not one.is_full and risk(own, full) for one, (own, full) in zip(each, pairs, strict=True))
    return Promise(label, least, len(pairs), wrong, fmean(map(_cost, each)), fmean(one.seconds for one in each))


def _cost(gated: Gated) -> float:
    """A completion later computes what is left of the prompt; it is counted as a whole prefill."""
    return gated.charged_ratio + gated.completed
