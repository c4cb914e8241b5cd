"""The bootstrap against one that draws pair by pair, and figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cacheclip_lab.evaluation import statistics as module
from cacheclip_lab.evaluation.statistics import paired_bootstrap, paired_ratio

from cacheclip_rag import ConfigurationError

DIFFERENCES = [float(x) for x in np.random.default_rng(7).normal(0.3, 1.0, size=50)]


def slow_bootstrap(differences: list[float], samples: int, seed: int) -> tuple[float, float]:
    generator = np.random.default_rng(seed)
    means = []
    for _ in range(samples):
        drawn = [differences[int(index)] for index in generator.integers(len(differences), size=len(differences))]
        means.append(sum(drawn) / len(drawn))
    means.sort()

    def percentile(share: float) -> float:
        place = share * (samples - 1)
        below = math.floor(place)
        return means[below] + (place - below) * (means[min(below + 1, samples - 1)] - means[below])

    return percentile(0.025), percentile(0.975)


@pytest.mark.parametrize("slab", [1, 170, 1 << 20], ids=["row-by-row", "three-rows", "at-once"])
def test_bootstrap_is_the_slow_one(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLAB", slab)
    found = paired_bootstrap(DIFFERENCES, samples=500, seed=3)
    assert found == pytest.approx(slow_bootstrap(DIFFERENCES, 500, 3))
    assert found == paired_bootstrap(DIFFERENCES, samples=500, seed=3)
    assert found != paired_bootstrap(DIFFERENCES, samples=500, seed=4)


def test_ratio_is_of_means_and_paired() -> None:
    others = [abs(value) + 0.1 for value in DIFFERENCES]
    assert paired_ratio([0.5 * value for value in others], others) == pytest.approx((0.5, 0.5, 0.5))
    values = list(reversed(others))
    ratio, low, high = paired_ratio(values, others) or (0, 0, 0)
    assert ratio == pytest.approx(1.0) and low is not None and high is not None and low < 0.95 and high > 1.05
    generator = np.random.default_rng(3)
    drawn = [generator.integers(50, size=50) for _ in range(500)]
    slow = [sum(values[i] for i in rows) / sum(others[i] for i in rows) for rows in drawn]
    assert paired_ratio(values, others, samples=500, seed=3) == pytest.approx((1.0, *np.percentile(slow, (2.5, 97.5))))


def test_nothing_is_a_value() -> None:
    """A score of 0, and one draw, are allowed."""
    assert paired_ratio([0.0, 1.0], [1.0, 1.0]) == (0.5, 0.0, 1.0)
    low, high = paired_bootstrap(DIFFERENCES, samples=1)
    assert low == high


def test_ratio_to_nothing() -> None:
    assert paired_ratio([1.0, 2.0], [0.0, 0.0]) is None
    assert paired_ratio([1.0, 2.0], [0.0, 1.0]) == (3.0, None, None), "some draws have nothing to divide by"
    with pytest.raises(ConfigurationError, match="expected pairs"):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ConfigurationError, match="from 0 up"):
        paired_ratio([1.0, -1.0], [1.0, 2.0])


def test_nothing_and_what_is_no_number_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one value"):
        paired_bootstrap([])
    with pytest.raises(ConfigurationError, match=r"finite numbers, got nan at index 1 \(2 such"):
        paired_bootstrap([1.0, math.nan, math.inf])


def test_senseless_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one bootstrap sample"):
        paired_bootstrap([1.0], samples=0)
