"""Grouping: hand-made examples of 24 tokens, properties, and a slow brute-force reference."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.selection.budget import AlignedWindows, Grouping, Tokens, Windows
from tests.conftest import examples

FIXED = examples(150)

# Small integers: many ties, and means of windows of 8 that floats hold exactly.
chunk_scores = st.lists(st.integers(0, 4), min_size=0, max_size=30)
all_scores = st.lists(chunk_scores, min_size=1, max_size=4)
EVERY: list[Grouping] = [Windows(), Tokens(), AlignedWindows()]
groupings = st.sampled_from(EVERY)


def tensors(scores: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(s, dtype=torch.float32) for s in scores]


def chosen(masks: list[torch.Tensor]) -> list[list[int]]:
    return [mask.nonzero().flatten().tolist() for mask in masks]


def flat(masks: list[torch.Tensor]) -> set[tuple[int, int]]:
    return {(c, t) for c, tokens in enumerate(chosen(masks)) for t in tokens}


def hot(*positions: int, length: int = 24) -> torch.Tensor:
    """Score 1 at the positions, 0 elsewhere."""
    scores = torch.zeros(length)
    scores[list(positions)] = 1.0
    return scores


class TestExamples:
    def test_a_span_over_a_window_border(self) -> None:
        """Tokens 5 to 12: three in the first window, five in the second; where windows are aligned, more than five are
        needed."""
        assert chosen(Windows().take([hot(*range(5, 13))], 8)) == [list(range(5, 13))]
        assert chosen(AlignedWindows().take([hot(*range(5, 13))], 8)) == [[]]
        scores = hot(4, 5, 6)
        assert chosen(AlignedWindows(4, threshold=2).take([scores], 3)) == [[4, 5, 6]]
        assert chosen(AlignedWindows(4, threshold=3).take([scores], 3)) == [[]]

    @pytest.mark.parametrize("grouping", EVERY)
    def test_nothing_to_choose_from(self, grouping: Grouping) -> None:
        assert grouping.take([], 5) == []
        assert chosen(grouping.take([torch.empty(0)], 5)) == [[]]
        assert chosen(grouping.take([hot(1, 2)], 0)) == [[]]

    @pytest.mark.parametrize("settings", [(0,), (True,), (2.5,), (8, 8), (8, -1), (4, 5), (4, True), (2.5, 1)])
    def test_contradictions_are_refused(self, settings: tuple[int, ...]) -> None:
        with pytest.raises(ConfigurationError, match="size|threshold"):
            (Windows if len(settings) == 1 else AlignedWindows)(*settings)  # type: ignore[operator]


class TestProperties:
    @FIXED
    @given(scores=all_scores, budget=st.integers(0, 130), grouping=groupings)
    def test_never_above_budget(self, scores: list[list[int]], budget: int, grouping: Grouping) -> None:
        """Deterministic, the input untouched, and among all by default."""
        inputs = tensors(scores)
        masks = grouping.take(inputs, budget)
        assert [len(m) for m in masks] == [len(s) for s in scores]
        assert all(m.dtype == torch.bool for m in masks)
        assert len(flat(masks)) <= budget
        everything = [torch.ones(len(s), dtype=torch.bool) for s in scores]
        assert (
            flat(masks) == flat(grouping.take(inputs, budget)) == flat(grouping.take(inputs, budget, among=everything))
        )
        assert [t.tolist() for t in inputs] == scores

    @FIXED
    @given(scores=all_scores, budget=st.integers(0, 130), grouping=groupings, data=st.data())
    def test_among_is_as_if_the_others_were_not_there(
        self, scores: list[list[int]], budget: int, grouping: Grouping, data: st.DataObject
    ) -> None:
        among = [data.draw(st.lists(st.booleans(), min_size=len(s), max_size=len(s))) for s in scores]
        first = [torch.arange(len(s)) < 2 for s in scores]
        masks = grouping.take(tensors(scores), budget, first=first, among=[torch.tensor(a).bool() for a in among])
        left = [[t for t, there in enumerate(a) if there] for a in among]
        remaining = [[s[t] for t in places] for s, places in zip(scores, left, strict=True)]
        ahead = [torch.tensor([t < 2 for t in places]).bool() for places in left]
        expected = grouping.take(tensors(remaining), budget, first=ahead)
        assert chosen(masks) == [
            [p for p, m in zip(places, mask.tolist(), strict=True) if m]
            for places, mask in zip(left, expected, strict=True)
        ]
        if grouping == Windows():
            assert len(flat(masks)) == min(budget, sum(map(len, left)))


class TestBruteForce:
    @FIXED
    @given(scores=all_scores, budget=st.integers(0, 130), window=st.integers(1, 9))
    def test_window_score(self, scores: list[list[int]], budget: int, window: int) -> None:
        if window not in (1, 2, 4, 8):  # float means of other windows may round two equal fractions apart
            scores = [[s * 2520 for s in chunk] for chunk in scores]
        expected = brute_window_score(scores, budget, window)
        assert flat(Windows(window).take(tensors(scores), budget)) == expected
        if window == 1:
            assert flat(Tokens().take(tensors(scores), budget)) == expected

    @examples(40)
    @given(seed=st.integers(0, 10_000), budget=st.integers(0, 90))
    def test_window_score_on_random_floats(self, seed: int, budget: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        scores = [torch.rand(n, generator=generator) for n in (40, 5, 1, 33)]
        assert flat(Windows().take(scores, budget)) == brute_window_score([s.tolist() for s in scores], budget, 8)

    @FIXED
    @given(scores=all_scores, budget=st.integers(0, 130))
    def test_v1_literal(self, scores: list[list[int]], budget: int) -> None:
        top = brute_top(scores, budget)
        expected = {(c, t) for c, t in top if sum((c, u) in top for u in range(t // 8 * 8, t // 8 * 8 + 8)) > 5}
        assert flat(AlignedWindows().take(tensors(scores), budget)) == expected


def brute_windows(length: int, window: int) -> list[range]:
    """All runs of ``window`` tokens; one shorter run in a shorter chunk."""
    size = min(window, length)
    return [range(start, start + size) for start in range(length - size + 1)] if length else []


def brute_top(scores: list[list[int]], budget: int) -> set[tuple[int, int]]:
    tokens = [(c, t) for c, chunk in enumerate(scores) for t in range(len(chunk))]
    return set(sorted(tokens, key=lambda ct: (-scores[ct[0]][ct[1]], ct))[:budget])


def brute_window_score(scores: list[list[float]], budget: int, window: int) -> set[tuple[int, int]]:
    """By the definition, with exact fractions: windows ranked by mean, then position; tokens by (window, score)."""
    windows = [(c, run) for c, chunk in enumerate(scores) for run in brute_windows(len(chunk), window)]
    mean = {(c, run): sum((Fraction(scores[c][t]) for t in run), Fraction(0)) / len(run) for c, run in windows}
    ranked = sorted(windows, key=lambda w: (-mean[w], w[0], w[1].start))
    best: dict[tuple[int, int], int] = {}
    for rank, (c, run) in enumerate(ranked):
        for t in run:
            best.setdefault((c, t), rank)
    order = sorted(best, key=lambda ct: (best[ct], -scores[ct[0]][ct[1]], ct))
    return set(order[:budget])
