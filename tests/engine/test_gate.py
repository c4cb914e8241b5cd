"""The confidence gate: where the first token hangs in the balance, the prompt is prefilled in full."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, ConfigurationError, SamplingParams
from cacheclip_rag.measuring import FusedCache, ModelRuntime, confidence
from cacheclip_rag.methods import Method, preset
from tests.conftest import Make, Patch, spied
from tests.engine.asking import SHORT, check_sums, logits, rag
from tests.prompt.test_tools import SEARCH


def gated(name: str, least: float) -> Method:
    return replace(preset(name), min_confidence=least)


@pytest.fixture
def filled(make: Make, chunks: list[str]) -> CacheClipEngine:
    engine: CacheClipEngine = make(stored=chunks, prefix_cache_bytes=0)
    return engine


def test_confidence_is_the_lead_of_the_likeliest_token() -> None:
    assert confidence(torch.tensor([0.0, 0.0, 0.0, 0.0])) == 0.0
    assert confidence(torch.log(torch.tensor([0.1, 0.7, 0.2]))) == pytest.approx(0.5)
    assert confidence(torch.tensor([1000.0, -1000.0], dtype=torch.bfloat16)) == 1.0


def test_the_default_method_alone_has_a_gate(make: Make, chunks: list[str]) -> None:
    """Unless the settings have one. A tiny model is hardly ever sure."""
    engine = make(stored=chunks, method="auto")
    assert engine.make_method() == engine.make_method("auto") == gated("epic-corrected", 0.1)
    assert engine.make_method("epic-corrected") == preset("epic-corrected")
    assert engine.generate(rag(chunks), SHORT).stats.completed_at is not None
    assert "shadow_checks_total" not in engine.metrics.snapshot(), "no comparison was asked for"
    engine = make(stored=chunks, method="auto", min_confidence=0.0)
    assert engine.make_method() == preset("epic-corrected")
    assert engine.generate(rag(chunks), SHORT).stats.completed_at is None


class TestGate:
    @pytest.mark.parametrize("name", ["cacheclip", "epic", "epic-corrected", "direct"])
    def test_a_sure_answer_is_the_reusing_pass_and_an_unsure_one_full_prefill(
        self, filled: CacheClipEngine, chunks: list[str], name: str
    ) -> None:
        plain, full = (logits(filled, rag(chunks), preset(each)) for each in (name, "full"))
        sure = confidence(plain.logits)
        found = logits(filled, rag(chunks), gated(name, sure))
        assert torch.equal(plain.logits, found.logits)
        assert found.stats.confidence == plain.stats.confidence == sure > 0
        assert found.stats.charged_ratio == plain.stats.charged_ratio and found.stats.fallback is None
        method = gated(name, sure + 1e-6)
        found = logits(filled, rag(chunks), method)
        assert torch.equal(found.logits, full.logits) and not torch.equal(found.logits, plain.logits)
        stats = found.stats
        assert stats.method == "full" and stats.confidence == full.stats.confidence
        ratio = f"{method.nominal_ratio:.2g}"
        assert stats.fallback is not None and f"at recompute ratio {ratio}, below" in stats.fallback
        assert (stats.hits, stats.misses, stats.missed_tokens, found.missing) == (len(chunks), 0, 0, ())
        assert stats.gated and not plain.stats.gated and not full.stats.gated and found.is_exact
        assert stats.charged_ratio == pytest.approx(1.0 + plain.stats.charged_ratio)
        answer = filled.generate(rag(chunks), SHORT, method=method)
        check_sums(answer)
        assert answer.text == filled.generate(rag(chunks), SHORT, method="full").text

    @pytest.mark.parametrize("settings", [{}, {"min_confidence": 0.0}], ids=str)
    def test_calls_and_structured_answers_from_stored_chunks_are_gated(
        self, monkeypatch: Patch, tool_model: str, chunks: list[str], settings: dict[str, Any]
    ) -> None:
        """Unless no gate is asked for. An answer in words is not."""
        monkeypatch.setattr("cacheclip_rag.answering.pipeline.CALL_CONFIDENCE", 1.0)
        engine = CacheClipEngine(primary=tool_model, auxiliary=None, method="direct", prefix_cache_bytes=0, **settings)
        engine.precompute(chunks)
        prompt = "\n\n".join([*chunks, "What is the magic number?"])
        as_json = SamplingParams(max_tokens=8, json_schema={"type": "array", "items": {"type": "string"}})
        for params, options in ((SHORT, {"tools": [SEARCH]}), (as_json, {}), (SHORT, {})):
            stats = engine.generate(prompt, params, **options).stats
            is_gated = not settings and bool(options or params is as_json)
            assert (stats.hits, stats.gated) == (len(chunks), is_gated)

    def test_memory_holds_one_kv_at_a_time(
        self, filled: CacheClipEngine, chunks: list[str], monkeypatch: Patch
    ) -> None:
        held = []

        def count(*_: Any) -> None:
            gc.collect()
            held.append(sum(type(each) is FusedCache for each in gc.get_objects()))

        spied(monkeypatch, ModelRuntime, "prefill", count)
        for method in (preset("full"), gated("cacheclip", 1.0)):
            logits(filled, rag(chunks), method)
        assert held[0] == held[1]

    def test_a_coarse_codec_is_not_exact(self, make: Make, chunks: list[str]) -> None:
        """A chunk right after the prefix is exact as computed, and not as stored."""
        for codec, gates in (("float32", False), ("int8", True)):
            engine = make(stored=chunks[:1], codec=codec, chunk_context="prefix", method="direct", min_confidence=1.0)
            assert engine.generate(rag(chunks[:1]), SHORT).stats.gated == gates

    def test_ratio_one_is_exact(self, filled: CacheClipEngine, chunks: list[str]) -> None:
        found = logits(filled, rag(chunks), replace(preset("cacheclip").at(1.0), min_confidence=1.0))
        assert not found.stats.gated and found.stats.fallback is None and found.is_exact

    def test_the_trace_is_of_the_reusing_pass_and_the_time_of_both(
        self, filled: CacheClipEngine, chunks: list[str]
    ) -> None:
        plain, both = (
            filled.generate(rag(chunks), SHORT, method=gated("cacheclip", least), trace=True) for least in (0.0, 1.0)
        )
        assert both.trace is not None and both.trace.recomputed == plain.trace.recomputed != ()
        assert all(both.stats.phases_s[name] > 0 for name in ("select", "assemble", "recompute"))

    def test_a_missing_chunk_is_still_stored(self, make: Make, chunks: list[str]) -> None:
        engine = make(stored=chunks[:-1], min_confidence=1.0)
        stats = engine.generate(rag(chunks), SHORT, documents=chunks).stats
        assert (stats.misses, stats.method) == (1, "full") and stats.missed_tokens > 0
        assert engine.is_stored(chunks[-1])

    def test_exact_chunks_need_no_second_pass(self, make: Make, chunks: list[str]) -> None:
        """Full prefill enters the prefix cache, and the same prompt is exact from then on."""
        engine = make(stored=chunks, min_confidence=1.0)
        first, again = (engine.generate(rag(chunks), SHORT).stats for _ in range(2))
        assert again.cached_prefix_tokens > 0.9 * first.prompt_tokens
        assert (first.method, again.method, again.fallback) == ("full", "cacheclip", None)

    def test_setting_of_the_engine(self, make: Make, chunks: list[str]) -> None:
        """It holds for methods by name; an instance has its own, and the preset with a gate, unless another is set. The
        tiny model is never sure."""
        sure = make(stored=chunks, min_confidence=0.0)
        all_full = make(stored=chunks, min_confidence=1.0, prefix_cache_bytes=0)
        for engine, method, expected in (
            (all_full, None, "full"),
            (all_full, "direct", "full"),
            (all_full, preset("cacheclip"), "cacheclip"),
            (make(stored=chunks), "cacheclip-gated", "full"),
            (sure, "cacheclip-gated", "cacheclip-gated"),
        ):
            stats = engine.generate(rag(chunks), SHORT, method=method).stats
            assert (stats.method, stats.gated) == (expected, expected == "full"), method
        assert all_full.generate(rag(chunks), SHORT, method="full").stats.fallback is None

    @pytest.mark.parametrize("value", [-0.1, 1.1, True, "0.5", float("nan")])
    def test_refuses_what_is_no_probability(self, make: Make, value: object) -> None:
        with pytest.raises(ConfigurationError, match="min_confidence must be a probability, 0 to 1"):
            make(min_confidence=value)
        with pytest.raises(ConfigurationError, match="min_confidence must be a probability, 0 to 1"):
            replace(preset("cacheclip"), min_confidence=value)
