"""Lines fitted to measurements. No model is needed."""

from __future__ import annotations

import random

import pytest
from cacheclip_lab.timing.controller import Cost, Profile, Work
from cacheclip_lab.timing.fitting import Timing, fit, fitted_profile
from cacheclip_lab.timing.reads import TimedRead

from cacheclip_rag.measuring import PHASES

IDENTITY = {"primary": "a", "threads": 2}
PROFILE = Profile(IDENTITY, Cost(0.1, 1e-3, 1e-7), Cost(0.1, 1.2e-3, 2e-7), Cost(0.1, 5e-5, 0.01))


class TestFit:
    def test_a_line_is_found_again(self) -> None:
        line = Cost(0.05, 2e-3, 3e-7)
        points = [(n, n * n / 2, line.seconds(n, n * n / 2)) for n in (100, 300, 900, 2700)]
        found = fit(points)
        assert (found.constant, found.first, found.second) == pytest.approx((0.05, 2e-3, 3e-7))

    def test_noise_makes_nothing_negative(self) -> None:
        generator = random.Random(5)
        for _ in range(50):
            points = [(n, n * n / 2, (0.3 + 1e-5 * n) * generator.uniform(0.7, 1.4)) for n in (100, 200, 400, 800)]
            found = fit(points)
            assert min(found.constant, found.first, found.second) >= 0
            assert found.seconds(16000, 16000**2 / 2) > 0.1

    def test_without_a_constant(self) -> None:
        """However little the measured times differ, a hundred times the work takes a hundred times as long."""
        found = fit([(1, 10, 0.1), (3, 30, 0.1), (1, 80, 0.1), (3, 240, 0.1)], constant=False)
        assert found.constant == 0 and found.seconds(300, 24000) == pytest.approx(100 * found.seconds(3, 240))

    def test_two_points_are_refused(self) -> None:
        with pytest.raises(ValueError, match="three measurements"):
            fit([(1, 1, 1.0), (2, 4, 2.0)])

    def test_relative_errors_count(self) -> None:
        """A short prompt's error is not drowned by a long one's."""
        points = [(10, 0.0, 0.010), (20, 0.0, 0.020), (10000, 0.0, 11.0)]
        assert fit(points).seconds(10, 0.0) == pytest.approx(0.010, rel=0.08)


class TestProfile:
    def test_it_is_fitted_to_samples_of_both_kinds(self) -> None:
        samples = []
        for tokens in (200, 400, 800, 1600):
            for chunks in (2, 8):
                work = Work(tokens, stale=tokens - 20, chunks=chunks)
                phases = dict.fromkeys(PHASES, 0.0)
                samples.append(Timing(work, None, {**phases, "recompute": PROFILE.plain_s(work)}))
                for ratio in (0.1, 0.5):
                    before, compute = PROFILE.fused_s(work, ratio)
                    samples.append(Timing(work, ratio, {**phases, "select": before, "recompute": compute}))
        found = fitted_profile(IDENTITY, samples)
        work = Work(12000, stale=11000, chunks=40)
        assert found.plain_s(work) == pytest.approx(PROFILE.plain_s(work))
        assert found.fused_s(work, 0.2) == pytest.approx(PROFILE.fused_s(work, 0.2))

    def test_the_latency_of_a_medium_counts_once_for_all_that_are_read_at_once(self) -> None:
        works = [(1, 10**6), (3, 3 * 10**6), (1, 10**7), (3, 3 * 10**7)]
        reads = [TimedRead("far", *work, 0.02 * (1 + work[0] / 16) + 1e-9 * work[1], at_once=16) for work in works]
        samples = [
            Timing(Work(tokens, stale=tokens, chunks=2), ratio, dict.fromkeys(PHASES, 0.1 * tokens))
            for tokens in (100, 200, 300)
            for ratio in (None, 0.1)
        ]
        line = fitted_profile(IDENTITY, samples, reads).media["far"]
        assert line.seconds(16, 10**8) == pytest.approx(0.04 + 0.1)
        assert line.seconds(160, 10**8) == pytest.approx(0.22 + 0.1)
