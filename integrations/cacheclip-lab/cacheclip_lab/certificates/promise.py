"""A certificate's promise that few answers differ from full prefill's, and what contradicts it in production."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheclip_rag.methods import Method

logger = logging.getLogger(__name__)

_ALTERNATIVES = (1.5, 2.0, 4.0)
"""Rates of differing answers, as multiples of the promised one, for which the watch looks."""
FALSE_ALARM = 0.01
"""Largest probability that a promise which is kept is ever called broken."""


@dataclass(frozen=True, slots=True)
class PromisedGate:
    """The cheapest gate at one recompute ratio that keeps a promise."""

    ratio: float
    min_confidence: float
    """A larger one at this ratio keeps the promise, too."""
    differing: int
    """Answers that differed from full prefill's."""
    bound: float
    """Share of answers that differ, at most (Clopper and Pearson)."""
    cost: float
    """Mean share of full prefill's computation, passes that were thrown away and completed KV included."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """With this confidence, at most this share of the answers to such prompts is not full prefill's."""

    most: float
    confidence: float
    n: int
    """Prompts that show it."""
    gates: Sequence[PromisedGate]
    """The cheapest first; none if the prompts do not show it of any that costs less than full prefill."""
    prompt_tokens: Sequence[int] | None
    """Least and most of the prompts; None: not recorded, as the two below."""
    chunks: Sequence[int] | None
    answer_tokens: Sequence[int] | None

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Guarantee:
        ranges = {name: value[name] and tuple(value[name]) for name in ("prompt_tokens", "chunks", "answer_tokens")}
        return cls(**{**value, **ranges, "gates": tuple(PromisedGate(**gate) for gate in value["gates"])})

    def gate_at(self, ratio: float) -> PromisedGate | None:
        """The gate of exactly this ratio."""
        return next((gate for gate in self.gates if math.isclose(gate.ratio, ratio, abs_tol=1e-9)), None)

    def covers(self, ratio: float, min_confidence: float) -> bool:
        gate = self.gate_at(ratio)
        return gate is not None and min_confidence >= gate.min_confidence


class PromiseWatch:
    """Counts how many compared answers differ, for each method with a promise. Safe to share between threads.

    The test is sequential, so that it may be looked at after every answer: a likelihood ratio of the rates
    :data:`_ALTERNATIVES` against the promised one (Wald, 1945), averaged over them. If the promise is kept, it ever
    reaches 1 / :data:`FALSE_ALARM` with at most that probability (Ville's inequality). It starts anew with the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: dict[str, float] = {}
        self._evidence: dict[str, list[float]] = {}
        """By method, logarithms of the likelihood ratios."""
        self._broken: set[str] = set()

    def begin(self, method: Method, guarantee: Guarantee | None) -> None:
        """Watch a method if it has a promise."""
        if guarantee is not None and guarantee.covers(method.nominal_ratio, method.min_confidence):
            with self._lock:
                self._promised.setdefault(repr(method), guarantee.most)

    def record(self, method: Method, differs: bool) -> bool | None:
        """See :meth:`cacheclip_rag.measuring.Certificates.record`."""
        name = repr(method)
        with self._lock:
            most = self._promised.get(name)
            if most is None:
                return None
            rates = [min(times * most, (1.0 + most) / 2) for times in _ALTERNATIVES]
            before = self._evidence.get(name, [0.0] * len(rates))
            self._evidence[name] = after = [
                logarithm + (math.log(rate / most) if differs else math.log((1.0 - rate) / (1.0 - most)))
                for logarithm, rate in zip(before, rates, strict=True)
            ]
            # of a large sum its size is enough
            breaks = name not in self._broken and fmean(math.exp(min(each, 50.0)) for each in after) >= 1 / FALSE_ALARM
            if breaks:
                self._broken.add(name)
        if breaks:
            logger.warning(
                "more answers of method %r at recompute ratio %g differ from full prefill's than its certificate "
                "promises (at most %.0f %%): prompts or answers are of another kind. Certify with prompts like these "
                "(cacheclip certify --max-differ), or choose a higher min_confidence.",
                method.name,
                method.nominal_ratio,
                100 * most,
            )
        return breaks

    def is_broken(self, method: Method) -> bool:
        return repr(method) in self._broken
