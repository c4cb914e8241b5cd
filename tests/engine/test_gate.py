"""The confidence gate: more is recomputed where the first token hangs in the balance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.base import Method
from cacheclip_rag.runtime.gate import confidence, rounds
from cacheclip_rag.selection.scoring import AuxiliaryScorer
from tests.engine.asking import SHORT, check_sums, logits, rag

Make = Callable[..., CacheClipEngine]


def gated(name: str, ratio: float, least: float) -> Method:
    return replace(preset(name).at(ratio), min_confidence=least)


@pytest.fixture
def filled(make: Make, chunks: list[str]) -> CacheClipEngine:
    engine = make(prefix_cache_bytes=0)
    engine.precompute(chunks)
    return engine


def sureness(engine: CacheClipEngine, chunks: list[str], name: str, ratio: float) -> float:
    return confidence(logits(engine, rag(chunks), preset(name).at(ratio)).logits)


class TestConfidence:
    def test_is_the_probability_of_the_likeliest_token(self) -> None:
        assert confidence(torch.tensor([0.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
        assert confidence(torch.log(torch.tensor([0.1, 0.7, 0.2]))) == pytest.approx(0.7)
        assert confidence(torch.tensor([1000.0, -1000.0], dtype=torch.bfloat16)) == 1.0


class TestRounds:
    @pytest.mark.parametrize(
        ("ratio", "expected"), [(0.05, [0.05, 0.1, 0.2, 0.4]), (0.2, [0.2, 0.4]), (0.3, [0.3]), (1.0, [1.0])]
    )
    def test_double_the_ratio(self, ratio: float, expected: list[float]) -> None:
        assert [each.nominal_ratio for each in rounds(gated("epic", ratio, 0.5))] == pytest.approx(expected)

    def test_end_at_once_without_a_gate_or_a_ratio(self) -> None:
        assert len(list(rounds(preset("epic")))) == 1
        assert len(list(rounds(replace(preset("direct"), min_confidence=0.5)))) == 1
        assert len(list(rounds(gated("epic", 0.0, 0.5)))) == 1


class TestGate:
    def test_a_sure_answer_is_the_first_pass(self, filled: CacheClipEngine, chunks: list[str]) -> None:
        found = sureness(filled, chunks, "cacheclip", 0.1)
        plain = logits(filled, rag(chunks), preset("cacheclip").at(0.1))
        same = logits(filled, rag(chunks), gated("cacheclip", 0.1, found))
        assert torch.equal(plain.logits, same.logits)
        assert (same.stats.passes, same.stats.confidence) == (1, pytest.approx(found))
        assert same.stats.charged_ratio == plain.stats.charged_ratio

    @pytest.mark.parametrize("name", ["cacheclip", "epic", "anchored", "cacheblend"])
    def test_stops_at_the_first_ratio_that_is_sure(self, filled: CacheClipEngine, chunks: list[str], name: str) -> None:
        """Every pass is the method at its ratio, bit for bit."""
        ratios = (0.1, 0.2, 0.4)
        sure = [sureness(filled, chunks, name, ratio) for ratio in ratios]
        best = max(range(len(ratios)), key=lambda number: sure[number])
        expected = logits(filled, rag(chunks), preset(name).at(ratios[best]))
        found = logits(filled, rag(chunks), gated(name, 0.1, sure[best]))
        assert torch.equal(found.logits, expected.logits)
        assert found.stats.passes == best + 1 and found.stats.method == name and found.stats.fallback is None
        assert found.stats.effective_ratio == expected.stats.effective_ratio
        assert found.stats.nominal_ratio == 0.1
        charged = [logits(filled, rag(chunks), preset(name).at(r)).stats.charged_ratio for r in ratios[: best + 1]]
        assert found.stats.charged_ratio == pytest.approx(sum(charged))

    @pytest.mark.parametrize("name", ["cacheclip", "direct"])
    def test_never_sure_is_full_prefill(self, filled: CacheClipEngine, chunks: list[str], name: str) -> None:
        method = replace(preset(name), min_confidence=1.0)
        full = logits(filled, rag(chunks), preset("full"))
        found = logits(filled, rag(chunks), method)
        assert torch.equal(found.logits, full.logits)
        stats, passes = found.stats, len(list(rounds(method)))
        assert stats.passes == passes + 1 and stats.method == "full"
        assert stats.fallback is not None and "below 1" in stats.fallback
        assert (stats.hits, stats.misses, stats.missed_tokens, found.missing) == (0, 0, 0, ())
        assert stats.charged_ratio == pytest.approx(1.0 + (0.2 + 0.4 if name == "cacheclip" else 0.0), abs=0.02)
        answer = filled.generate(rag(chunks), SHORT, method=method)
        check_sums(answer)
        assert answer.text == filled.generate(rag(chunks), SHORT, method="full").text

    def test_a_missing_chunk_is_still_stored(self, make: Make, chunks: list[str]) -> None:
        engine = make(min_confidence=1.0)
        engine.precompute(chunks[:-1])
        stats = engine.generate(rag(chunks), SHORT, documents=chunks).stats
        assert (stats.misses, stats.method) == (1, "full") and stats.missed_tokens > 0
        assert engine.is_stored(chunks[-1])

    def test_full_prefill_enters_the_prefix_cache(self, make: Make, chunks: list[str]) -> None:
        engine = make(min_confidence=1.0)
        engine.precompute(chunks)
        stats = engine.generate(rag(chunks), SHORT).stats
        again = engine.generate(rag(chunks), SHORT).stats
        assert again.cached_prefix_tokens > 0.9 * stats.prompt_tokens
        assert (stats.passes, again.passes, again.method) == (3, 1, "cacheclip")  # exact chunks need no more passes

    def test_the_auxiliary_scores_once(
        self, filled: CacheClipEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []
        score = AuxiliaryScorer.score

        def counted(*args: object, **options: object) -> object:
            calls.append(1)
            return score(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(AuxiliaryScorer, "score", counted)
        found = logits(filled, rag(chunks), gated("cacheclip", 0.05, 1.0))
        assert found.stats.passes == 5 and len(calls) == 1

    def test_setting_of_the_engine(self, make: Make, chunks: list[str]) -> None:
        """It holds for methods by name; an instance has its own."""
        engine = make(min_confidence=1.0, prefix_cache_bytes=0)
        engine.precompute(chunks)
        assert engine.generate(rag(chunks), SHORT).stats.passes == 3
        assert engine.generate(rag(chunks), SHORT, method="direct").stats.passes == 2
        assert engine.generate(rag(chunks), SHORT, method=preset("cacheclip")).stats.passes == 1
        assert engine.generate(rag(chunks), SHORT, method="full").stats.passes == 1

    def test_hidden_with_hits(self, make: Make, chunks: list[str]) -> None:
        engine = make(min_confidence=1.0, hide_hits=True)
        engine.precompute(chunks)
        assert engine.generate(rag(chunks), SHORT).stats.passes == 1

    @pytest.mark.parametrize("value", [-0.1, 1.1, True, "0.5", float("nan")])
    def test_refuses_what_is_no_probability(self, make: Make, value: object) -> None:
        with pytest.raises(ConfigurationError, match="min_confidence must be a probability, 0 to 1"):
            make(min_confidence=value)
        with pytest.raises(ConfigurationError, match="min_confidence must be a probability, 0 to 1"):
            replace(preset("cacheclip"), min_confidence=value)
