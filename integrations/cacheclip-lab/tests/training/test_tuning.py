"""Fine-tuning: the head that finds what is wanted counts most, and what is wanted is the primary's."""

from __future__ import annotations

import math

import pytest
import torch
from cacheclip_lab.training.families import Sample, synthetic_samples
from cacheclip_lab.training.features import SampleAttention, spread_over
from cacheclip_lab.training.targets import attended_and_stale
from cacheclip_lab.training.tuning import SINKS, fitted, loss_of, spaced

from cacheclip_rag import CacheClipEngine, EngineConfig


class TestFitted:
    def seen(self, wanted: int, seed: int) -> SampleAttention:
        """Heads that attend here and there, and one, number ``wanted``, to the evidence."""
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(2, 30, 40, generator=generator)
        evidence = torch.zeros(40, dtype=torch.bool)
        start = int(torch.randint(0, 30, (1,), generator=generator))
        evidence[start : start + 8] = True
        scores[wanted // 30, wanted % 30] = evidence + 0.01
        return SampleAttention((20, 20), scores / scores.sum(-1, keepdim=True), evidence)

    @pytest.mark.long
    def test_the_head_that_sees_it_counts_most(self) -> None:
        seen = [self.seen(40, seed) for seed in range(5)]
        targets = [each.evidence / each.evidence.sum() for each in seen]
        heads = fitted(seen, targets, "a" * 64)
        assert len(heads.heads) == 16 and heads.heads[int(heads.weights.argmax())] == (1, 10)
        assert float(heads.weights.max()) > 0.5 and float(heads.weights.sum()) == pytest.approx(1.0)
        assert heads.sinks == SINKS and list(heads.heads) == sorted(heads.heads)


def test_by_hand() -> None:
    scores, evidence = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([False, True, True])
    target = torch.tensor([0.5, 0.5, 0.0])
    likelihood, divergence = math.log(2), 0.5 * math.log(2)
    found = loss_of(scores, evidence, target)
    assert float(found) == pytest.approx(0.25 * likelihood + 0.75 * divergence)


def test_numbers_are_spread_evenly() -> None:
    assert spaced(range(23), 3) == [0, 11, 22] and spaced(range(4), 99) == [0, 1, 2, 3] and spaced(range(4), 0) == []


class TestTargets:
    def test_a_target_is_a_distribution_over_the_chunks(self, tiny_models: dict[str, str]) -> None:
        """Short samples are asked about too."""
        engine = CacheClipEngine(EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"]))
        chunks = ("The lamp of the harbour is red.", "It was lit.")
        short = Sample("given", chunks, "What is red?", "lamp", ((0, 0, 31),))
        for sample in (short, *synthetic_samples(2, chunk_words=25)):
            target = attended_and_stale(engine, sample)
            assert target is not None and float(target.sum()) == pytest.approx(1.0, abs=1e-5)
            assert len(target) == sum(map(len, map(engine.parts.models.auxiliary_caches.tokenize, sample.chunks)))
            assert bool((target >= 0).all()) and not engine.is_stored(sample.chunks[0])

    def test_mass_is_handed_over_by_characters(self) -> None:
        source, target = [(0, 4), (4, 6), (6, 10)], [(0, 2), (2, 6), (6, 6), (7, 10)]
        found = spread_over(torch.tensor([4.0, 2.0, 8.0]), source, target)
        assert found.tolist() == pytest.approx([2.0, 4.0, 0.0, 6.0])
        assert spread_over(torch.tensor([4.0, 2.0, 8.0]), source, source).tolist() == pytest.approx([4.0, 2.0, 8.0])
