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

import numpy as np

from .gating import Gated, gate
from .results import ItemResult

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
    bound: float
    """Share that goes wrong, at most (Clopper and Pearson)."""


@dataclass(frozen=True, slots=True)
class BrokenShare:
    """What became of the promises that were made on halves of the questions."""

    made: float
    """Share of the halves on which one was made."""
    broken: float
    """Share of those with which more questions go wrong, of all of them, than was promised."""
    broken_on_others: float
    """The same of the other half alone, whose share is off by its own chance: too strict by that."""


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
    return next(iter(held_gates(runs, most, risk)), None)


def held_gates(runs: Mapping[str, Pairs], most: float, risk: str = "differs") -> list[Promise]:
    """Of each run, the cheapest gate with which at most the share ``most`` goes wrong, if it costs less than full
    prefill; the cheapest first. All of them hold together. Arguments as of :func:`promise_of`."""
    return _held(_tried(runs, risk), np.arange(max(map(len, runs.values()))), most)


def broken_share(
    runs: Mapping[str, Pairs], most: float, risk: str = "differs", *, resamplings: int = 1000, seed: int = 0
) -> BrokenShare:
    """How often a promise is made on a random half of the questions, and how often it is broken where it is made."""
    generator, made, broken, on_others = random.Random(seed), 0, 0, 0
    count = len(next(iter(runs.values())))
    if any(len(pairs) != count for pairs in runs.values()):
        raise ValueError("expected every run over the same questions, in the same order")
    tried = _tried(runs, risk)
    for _ in range(resamplings):
        order = np.array(generator.sample(range(count), count))
        half, others = order[: count // 2], order[count // 2 :]
        if found := _held(tried, half, most):
            made += 1
            wrong = next(each.wrong for each in tried[found[0].label] if each.least == found[0].min_confidence)
            broken += bool(wrong.sum() > most * count)
            on_others += bool(wrong[others].sum() > most * len(others))
    return BrokenShare(made / resamplings, broken / made if made else 0.0, on_others / made if made else 0.0)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A gate, and what it does with each question."""

    least: float
    wrong: np.ndarray
    cost: np.ndarray
    seconds: np.ndarray


def _tried(runs: Mapping[str, Pairs], risk: str) -> dict[str, list[_Tried]]:
    """By label, every gate from the strictest down."""
    return {label: [_with_gate(pairs, least, RISKS[risk]) for least in _GATES] for label, pairs in runs.items()}


def _with_gate(pairs: Pairs, least: float, risk: Callable[[ItemResult, ItemResult], bool]) -> _Tried:
    each = [gate(own, full, least) for own, full in pairs]
    wrong = [not one.is_full and risk(own, full) for one, (own, full) in zip(each, pairs, strict=True)]
    costs, seconds = map(_cost, each), (one.seconds for one in each)
    return _Tried(least, np.array(wrong), np.array(list(costs)), np.array(list(seconds)))


def _held(tried: Mapping[str, Sequence[_Tried]], rows: np.ndarray, most: float) -> list[Promise]:
    """What :func:`held_gates` finds on these questions."""
    error, count, held = (1.0 - CONFIDENCE) / len(tried), len(rows), []
    for label, gates in tried.items():
        cheapest: _Tried | None = None
        for each in gates:
            if not _shows(int(each.wrong[rows].sum()), count, most, error):
                break
            if cheapest is None or each.cost[rows].mean() < cheapest.cost[rows].mean() - 1e-12:
                cheapest = each
        if cheapest is not None and (cost := float(cheapest.cost[rows].mean())) < 1.0:
            wrong, seconds = int(cheapest.wrong[rows].sum()), float(cheapest.seconds[rows].mean())
            held.append((label, cheapest.least, wrong, cost, seconds))
    promises = [
        Promise(label, least, count, wrong, cost, seconds, _upper_bound(wrong, count, error))
        for label, least, wrong, cost, seconds in held
    ]
    return sorted(promises, key=lambda promise: promise.cost)


def _shows(wrong: int, count: int, most: float, error: float) -> bool:
    """Whether so few that go wrong show that at most the share ``most`` does."""
    return _tail(wrong, count, most) <= error


def _tail(wrong: int, count: int, share: float) -> float:
    """Probability that at most ``wrong`` of ``count`` go wrong if each does with probability ``share``."""
    return math.fsum(
        math.comb(count, each) * share**each * (1.0 - share) ** (count - each) for each in range(wrong + 1)
    )


def _upper_bound(wrong: int, count: int, error: float) -> float:
    """The largest share with which at most ``wrong`` of ``count`` go wrong with probability ``error``."""
    least, most = wrong / count, 1.0
    for _ in range(30):
        middle = (least + most) / 2
        least, most = (least, middle) if _shows(wrong, count, middle, error) else (middle, most)
    return most


def _cost(gated: Gated) -> float:
    """A completion later computes what is left of the prompt; it is counted as a whole prefill."""
    return gated.charged_ratio + gated.completed
