"""Statistics for few questions: means with confidence intervals, and figures that outliers do not dominate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cacheclip_rag import ConfigurationError

MARGIN = 0.03
"""A method is no worse than full prefill by a score if the lower bound of the mean difference is above minus this:
non-inferiority, with a margin of 3 points."""
_SLAB = 1 << 20
"""Draws in memory at a time: 8 MiB of indices."""


def paired_bootstrap(differences: Sequence[float], *, samples: int = 10000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean of paired differences: percentile bootstrap over the pairs (Efron, 1979).

    Pairs are drawn with replacement, so that what makes a question hard for both sides cancels. With fewer than about
    ten pairs the interval is too narrow. The same input and seed give the same interval.

    Raises:
        ConfigurationError: no differences, one that is not a finite number, or ``samples`` below 1.
    """
    [means] = _drawn_means([_checked(differences)], samples, seed)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def paired_ratio(
    values: Sequence[float], others: Sequence[float], *, samples: int = 10000, seed: int = 0
) -> tuple[float, float | None, float | None] | None:
    """Mean of ``values`` divided by the mean of ``others``, and the 95 % interval of this ratio: percentile bootstrap
    over the pairs, as in :func:`paired_bootstrap`.

    None if the mean of ``others`` is 0; no interval if it is 0 in a draw.

    Raises:
        ConfigurationError: sequences of unlike lengths, no values, one that is not a finite number or is below 0, or
            ``samples`` below 1.
    """
    above, below = _checked(values), _checked(others)
    if len(above) != len(below):
        raise ConfigurationError(f"expected pairs, got {len(above)} values and {len(below)} others.")
    if above.min() < 0 or below.min() < 0:
        raise ConfigurationError("expected values from 0 up: ratios of means that change sign say nothing.")
    if below.mean() == 0:
        return None
    ratio = float(above.mean() / below.mean())
    drawn_above, drawn_below = _drawn_means([above, below], samples, seed)
    if drawn_below.min() == 0:
        return ratio, None, None
    low, high = np.percentile(drawn_above / drawn_below, (2.5, 97.5))
    return ratio, float(low), float(high)


def mcnemar(lost: int, won: int) -> float:
    """McNemar's exact test (1947): the probability that ``lost`` against ``won``, or a more uneven split of as many
    questions, comes about if either is as likely. Two-sided; 1 without any.

    Raises:
        ConfigurationError: a negative number.
    """
    if lost < 0 or won < 0:
        raise ConfigurationError(f"expected numbers of questions from 0 up, got {lost} and {won}.")
    count, fewer = lost + won, min(lost, won)
    as_uneven = sum(math.comb(count, each) for each in range(fewer + 1))
    return min(1.0, 2 * as_uneven / float(2**count))


def _drawn_means(columns: Sequence[NDArray[np.float64]], samples: int, seed: int) -> list[NDArray[np.float64]]:
    """Means of each column over ``samples`` draws with replacement, the same rows in all columns."""
    if samples < 1:
        raise ConfigurationError(f"expected at least one bootstrap sample, got {samples}.")
    generator = np.random.default_rng(seed)
    count = len(columns[0])
    rows = max(1, _SLAB // count)
    means: list[list[NDArray[np.float64]]] = [[] for _ in columns]
    for start in range(0, samples, rows):
        drawn = generator.integers(count, size=(min(rows, samples - start), count))
        for column, own in zip(columns, means, strict=True):
            own.append(column[drawn].mean(axis=1))
    return [np.concatenate(own) for own in means]


def _checked(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ConfigurationError("expected at least one value, got none. Measure at least one question.")
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise ConfigurationError(
            f"expected finite numbers, got {array[bad[0]]} at index {bad[0]} ({len(bad)} such in all). Find out what "
            "made them: leaving them out would make the mean look better."
        )
    return array
