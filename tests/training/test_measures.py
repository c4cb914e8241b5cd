"""Measures against hand-computed values, and the grouping they stand for."""

from __future__ import annotations

import pytest
import torch

from cacheclip_rag.lab.training.measures import chosen, rank_correlation, span_recall, token_recall
from cacheclip_rag.selection.grouping import Windows


class TestChosen:
    @pytest.mark.parametrize("seed", range(8))
    def test_it_is_the_default_grouping(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = [5, 40, 8, 23, 1]
        scores = torch.rand(3, sum(lengths), generator=generator)
        if seed % 2:
            scores = (scores * 4).round() / 4  # ties
        for ratio in (0.0, 0.05, 0.2, 0.7, 1.0):
            ours = chosen(scores, lengths, ratio)
            for row, mask in zip(scores, ours, strict=True):
                expected = Windows(8).take(list(row.double().split(lengths)), round(ratio * len(row)))
                assert torch.equal(mask, torch.cat(expected))


class TestRecall:
    def test_by_hand(self) -> None:
        wanted = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
        mask = torch.tensor([[1, 1, 1, 1, 0, 0, 1, 0], [0, 1, 1, 0, 1, 0, 1, 1]], dtype=torch.bool)
        assert token_recall(mask, wanted).tolist() == [pytest.approx(3 / 5), 1.0]
        assert span_recall(mask, wanted).tolist() == [pytest.approx(1 / 3), 1.0]


class TestRankCorrelation:
    def test_by_hand(self) -> None:
        one = torch.tensor([1.0, 2.0, 3.0, 4.0])
        assert rank_correlation(one, one * 10) == pytest.approx(1.0)
        assert rank_correlation(one, -one) == pytest.approx(-1.0)
        # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
        assert rank_correlation(torch.tensor([0.0, 1.0, 1.0, 7.0]), one) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
        assert rank_correlation(one, torch.ones(4)) == 0.0
