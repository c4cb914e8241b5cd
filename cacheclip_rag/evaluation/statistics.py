"""What a handful of questions can say: means with their uncertainty, and figures that one outlier does not make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError

__all__ = ["paired_bootstrap", "summary", "trimmed_mean"]

_SLAB = 1 << 20
"""Draws held at once: 8 MiB of indices."""


def paired_bootstrap(differences: Sequence[float], *, samples: int = 10000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean of paired differences: percentile bootstrap over the pairs (Efron, 1979).

    Pairs are drawn with replacement, so that what makes a question hard for both sides cancels. With fewer than about
    ten pairs the interval is too narrow. The same input and seed give the same interval.

    Raises:
        ConfigurationError: no differences, one that is not a finite number, or ``samples`` below 1.
    """
    values = _checked(differences)
    if samples < 1:
        raise ConfigurationError(f"expected at least one bootstrap sample, got {samples}.")
    generator = np.random.default_rng(seed)
    rows = max(1, _SLAB // len(values))
    means = np.concatenate(
        [
            values[generator.integers(len(values), size=(min(rows, samples - start), len(values)))].mean(axis=1)
            for start in range(0, samples, rows)
        ]
    )
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def trimmed_mean(values: Sequence[float], share: float = 0.1) -> float:
    """Mean without the lowest and the highest ``share`` of the values (rounded down), cut from each end.

    Raises:
        ConfigurationError: no values, one that is not a finite number, or a share not in 0 to below 0.5.
    """
    if not 0 <= share < 0.5:
        raise ConfigurationError(f"expected a share from 0 to below 0.5 to cut from each end, got {share!r}.")
    ordered = np.sort(_checked(values))
    cut = int(share * len(ordered) + 1e-9)  # 0.29 * 100 is 28.999…
    return float(ordered[cut : len(ordered) - cut].mean())


def summary(values: Sequence[float]) -> dict[str, float]:
    """``mean``, ``median``, ``trimmed_mean`` (a tenth from each end) and ``max``; KL has outliers that rule its mean.

    Raises:
        ConfigurationError: no values, or one that is not a finite number.
    """
    checked = _checked(values)
    return {
        "mean": float(checked.mean()),
        "median": float(np.median(checked)),
        "trimmed_mean": trimmed_mean(values),
        "max": float(checked.max()),
    }


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
