"""A gate with a guarantee: it is as strict as the binomial test asks, the cheapest one, and seldom broken."""

from __future__ import annotations

import random

import pytest
from cacheclip_lab.evaluation import promise as module
from cacheclip_lab.evaluation.promise import Pairs, held_gates, promise_of
from cacheclip_lab.evaluation.results import ItemResult


def item(number: int, answer: str, confidence: float | None, *, ratio: float = 0.2, f1: float = 1.0) -> ItemResult:
    return ItemResult(f"q{number}", "", answer, {"f1": f1}, {}, ratio, ratio, ratio, ratio, {}, confidence=confidence)


def pairs_of(count: int, seed: int, *, ratio: float = 0.2, wrong_at: float = 0.6) -> Pairs:
    """Answers whose risk falls with their confidence: from ``wrong_at`` to none."""
    drawn, found = random.Random(seed), []
    for number in range(count):
        confidence = drawn.random()
        differs = drawn.random() < wrong_at * (1.0 - confidence)
        own = item(number, "other" if differs else "same", confidence, ratio=ratio, f1=0.5 if differs else 1.0)
        found.append((own, item(number, "same", None, ratio=1.0)))
    return found


@pytest.mark.parametrize(("ratios", "count", "is_made"), [(1, 28, False), (1, 29, True), (3, 38, False), (3, 39, True)])
def test_the_fewest_questions_that_can_show_a_promise(ratios: int, count: int, is_made: bool) -> None:
    # 0.9 ** 28 is above 0.05, 0.9 ** 29 below; three ratios share the error
    pairs = [(item(number, "same", 1.0), item(number, "same", None)) for number in range(count)]
    promise = promise_of({f"clip@{n}": pairs for n in range(ratios)}, 0.1)
    assert (promise is not None) == is_made
    if promise:
        # of gates that cost the same the strictest
        assert (promise.min_confidence, promise.wrong, promise.n) == (1.0, 0, count)
        assert promise.cost == pytest.approx(0.2)


def test_the_gate_is_the_cheapest_that_the_test_allows() -> None:
    # 100 questions; 7 of those below 0.3 differ. At most 4 of 100 show "at most 10 %" with 95 % confidence.
    confidences = [0.02] * 3 + [0.22] * 4 + [0.9] * 93
    own = [item(n, "other" if n < 7 else "same", confidence) for n, confidence in enumerate(confidences)]
    pairs = [(each, item(n, "same", None)) for n, each in enumerate(own)]
    promise = promise_of({"clip": pairs}, 0.1)
    assert promise and (promise.min_confidence, promise.wrong) == (0.2, 4)
    assert promise.cost == pytest.approx(0.2 + 0.03)


def test_a_gate_after_one_that_failed_shows_nothing() -> None:
    pairs = [
        (item(n, "other" if n < 30 else "same", 0.5 if n < 30 else 0.9), item(n, "same", None)) for n in range(100)
    ]
    promise = promise_of({"clip": pairs}, 0.1)
    assert promise and promise.min_confidence == 0.9 and promise.cost == pytest.approx(0.5)


def test_a_gate_that_costs_as_much_as_full_prefill_is_none() -> None:
    pairs = [(item(n, "other", 0.5), item(n, "same", None)) for n in range(100)]
    assert promise_of({"clip": pairs}, 0.1) is None


@pytest.mark.parametrize(
    ("wrong", "count", "bound"), [(0, 29, 0.0981), (4, 100, 0.0892), (9, 90, 0.1680), (0, 1, 0.95)]
)
def test_the_bound_is_that_of_clopper_and_pearson(wrong: int, count: int, bound: float) -> None:
    """Quantiles of beta(wrong + 1, count - wrong), from a table."""
    assert module._upper_bound(wrong, count, 0.05) == pytest.approx(bound, abs=1e-4)
    assert module._shows(wrong, count, bound + 1e-3, 0.05) and not module._shows(wrong, count, bound - 1e-3, 0.05)


def test_of_each_ratio_the_cheapest_gate_and_together_they_hold() -> None:
    runs = {f"clip@{ratio}": pairs_of(300, seed, ratio=ratio) for seed, ratio in enumerate((0.1, 0.2, 0.4))}
    found = held_gates(runs, 0.1)
    assert len(found) == 3 and found == sorted(found, key=lambda each: each.cost) and found[0] == promise_of(runs, 0.1)
    assert all(each.bound <= 0.1 for each in found)
    # each ratio has a third of the error, so that its gate is no cheaper than alone
    for each in found:
        alone = promise_of({each.label: runs[each.label]}, 0.1)
        assert alone and alone.cost <= each.cost and alone.min_confidence <= each.min_confidence


@pytest.mark.long
@pytest.mark.parametrize("risk", ["differs", "loses"])
def test_promises_are_seldom_broken(risk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 questions, made on random halves. With a wrong bound, the observed share itself, they are broken often."""
    runs = {"clip@0.2": pairs_of(400, 7), "clip@0.3": pairs_of(400, 8, ratio=0.3, wrong_at=0.5)}

    def broken(halves: int) -> float:
        drawn, count = random.Random(0), list[bool]()
        for _ in range(halves):
            half = drawn.sample(range(400), 200)
            made = promise_of({label: [pairs[n] for n in half] for label, pairs in runs.items()}, 0.1, risk)
            if made:
                gated = module._with_gate(runs[made.label], made.min_confidence, module.RISKS[risk])
                count.append(gated.wrong > 40)
        assert len(count) > 0.9 * halves
        return sum(count) / len(count)

    assert broken(150) <= 0.05
    monkeypatch.setattr(module, "_shows", lambda wrong, count, most, error: wrong <= most * count)
    assert broken(60) > 0.2
