"""A confidence gate with a guarantee: the cheapest one of which the questions show, with 95 % confidence, that at most
a given share of answers goes wrong.

Learn then test (Angelopoulos et al., arXiv:2110.01052), as CALM (arXiv:2207.07061) uses it for early exits. At each
recompute ratio, gates are tested from the strictest down, each by the exact binomial test (Clopper and Pearson, 1934),
until one fails: a fixed sequence, so that no test costs another one confidence. Ratios share the error (Bonferroni).
It holds for questions like those that were asked: drawn from the same ones, prompts and answers as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

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
    error, held = (1.0 - CONFIDENCE) / len(runs), list[Promise]()
    for label, pairs in runs.items():
        cheapest: _Tried | None = None
        for each in (_with_gate(pairs, least, RISKS[risk]) for least in _GATES):
            if not _shows(each.wrong, len(pairs), most, error):
                break
            if cheapest is None or each.cost < cheapest.cost - 1e-12:
                cheapest = each
        if cheapest is not None and cheapest.cost < 1.0:
            bound = _upper_bound(cheapest.wrong, len(pairs), error)
            held.append(
                Promise(label, cheapest.least, len(pairs), cheapest.wrong, cheapest.cost, cheapest.seconds, bound)
            )
    return sorted(held, key=lambda promise: promise.cost)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A gate, how many questions go wrong with it, and its means."""

    least: float
    wrong: int
    cost: float
    seconds: float


def _with_gate(pairs: Pairs, least: float, risk: Callable[[ItemResult, ItemResult], bool]) -> _Tried:
    each = [gate(own, full, least) for own, full in pairs]
    wrong = sum(not one.is_full and risk(own, full) for one, (own, full) in zip(each, pairs, strict=True))
    return _Tried(least, wrong, fmean(map(_cost, each)), fmean(one.seconds for one in each))


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
