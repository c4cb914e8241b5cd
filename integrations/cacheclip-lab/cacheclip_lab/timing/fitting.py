"""Lines of a profile, fitted to measured prefills and readings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .controller import Cost, Profile, Work
from .reads import TimedRead

_TICK_S = 1e-9
"""Least seconds of a measured reading: a clock may not have moved."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one measured prefill."""

    work: Work
    ratio: float | None
    """None: plain prefill."""
    phases_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.phases_s.values())

    @property
    def before_s(self) -> float:
        """Seconds of everything before the recompute."""
        return self.seconds - self.phases_s["recompute"]


def fitted_profile(identity: Mapping[str, Any], samples: Sequence[Timing], reads: Sequence[TimedRead] = ()) -> Profile:
    """The profile whose lines fit best.

    Args:
        samples: of both kinds, of three sizes or more.
        reads: of each medium, of three combinations of entries and bytes or more; a medium with fewer is left out.
    """
    plain = [sample for sample in samples if sample.ratio is None]
    fused = [(sample, sample.ratio) for sample in samples if sample.ratio is not None]
    return Profile(
        identity,
        fit([(*s.work.plain(), s.seconds) for s in plain]),
        fit([(*s.work.fused(ratio), s.phases_s["recompute"]) for s, ratio in fused]),
        fit([(s.work.stale, s.work.chunks, s.before_s) for s, _ in fused]),
        fit_media(reads),
    )


def fit(rows: Sequence[tuple[float, float, float]], *, constant: bool = True) -> Cost:
    """The line through ``(first, second, seconds)`` with the least squares of relative errors and no negative number;
    ``constant``: it may have one. Relative errors, because a millisecond matters in a short prompt. No negative number,
    because a line that falls with the work is wrong beyond the measured sizes."""
    if len(rows) < 3:
        raise ValueError(f"expected three measurements or more, got {len(rows)}")
    measured = np.array(rows, dtype=np.float64)
    weights = 1 / measured[:, 2:]
    columns = np.column_stack((np.ones(len(measured)), measured[:, :2])) * weights
    best, least = np.zeros(3), math.inf
    for count in range(1, 4):
        for chosen in map(list, itertools.combinations(range(0 if constant else 1, 3), count)):
            found, *_ = np.linalg.lstsq(columns[:, chosen], np.ones(len(measured)), rcond=None)
            error = float(((columns[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(3), error
                best[chosen] = found
    return Cost(*best.tolist())


def fit_media(reads: Sequence[TimedRead]) -> dict[str, Cost]:
    """A line for each medium, of two numbers: seconds for an entry, or for as many as are read at once, and seconds for
    a byte. Of equal reads, the shortest counts: other load only adds to it. What entries take must grow with them,
    because a prompt may need many more than were measured: a medium that serves many reads at once takes the seconds
    once, and again for every so many entries."""
    shortest: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for read in reads:
        of_medium = shortest.setdefault((read.medium, read.at_once), {})
        seconds, work = max(read.seconds, _TICK_S), (read.entries, read.num_bytes)
        of_medium[work] = min(seconds, of_medium.get(work, seconds))
    found = {}
    for (medium, at_once), measured in shortest.items():
        if len(measured) >= 3:
            once = float(at_once > 1)
            rows = [(once + entries / at_once, size, seconds) for (entries, size), seconds in measured.items()]
            line = fit(rows, constant=False)
            found[medium] = Cost(once * line.first, line.first / at_once, line.second)
    return found
