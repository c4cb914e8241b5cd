"""The benchmark's output is what scripts rely on; speed itself is never asserted here."""

from __future__ import annotations

from typing import Any

import pytest
from cacheclip_lab.evaluation import bench as module
from cacheclip_lab.evaluation.bench import bench
from cacheclip_lab.timing.texts import make_texts
from fake_stats import stats

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig
from cacheclip_rag.measuring import PHASES
from cacheclip_rag.models import load_model


@pytest.fixture(scope="module")
def result(tiny_models: dict[str, str]) -> dict[str, Any]:
    config = EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], recompute_ratio=0.25)
    return bench(config, context_tokens=512, chunk_tokens=64, runs=2)


def test_shape_of_the_result(result: dict[str, Any]) -> None:
    assert {"context_tokens", "chunks", "ratio", "runs", "methods"} <= result.keys()
    assert (result["chunks"], result["ratio"], result["runs"]) == (8, 0.25, 2)
    assert list(result["methods"]) == ["full", "direct", "epic-corrected"]
    for row in result["methods"].values():
        assert set(row["phases_s"]) == set(PHASES)
        assert 0 < row["ttft_s"]["min"] <= row["ttft_s"]["median"] <= row["ttft_s"]["max"]
        assert 0 < row["second_ttft_s"]["min"] <= row["second_ttft_s"]["median"] <= row["second_ttft_s"]["max"]
        assert row["peak_rss_bytes"] > 50e6
        for ratio in ("nominal_ratio", "effective_ratio", "effective_ratio_of_stale", "charged_ratio"):
            assert 0.0 <= row[ratio] <= 1.0
    assert result["methods"]["full"]["speedup_vs_full"] == 1.0


def test_first_questions_find_nothing_of_earlier_ones(
    tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[str, int]]()
    generate = CacheClipEngine.generate

    def asked(engine: CacheClipEngine, prompt: Any, *args: Any, **options: Any) -> Any:
        answer = generate(engine, prompt, *args, **options)
        known = max(answer.stats.cached_prefix_tokens, answer.stats.continued_tokens)
        seen.append((answer.stats.method, known))
        return answer

    monkeypatch.setattr(CacheClipEngine, "generate", asked)
    config = EngineConfig(primary=tiny_models["llama"], auxiliary=None, recompute_ratio=0.25)
    bench(config, methods=("full", "prefix", "direct", "epic"), context_tokens=512, chunk_tokens=64, runs=2)
    runs = seen[1:]  # after the one that warms up
    assert all(known == 0 for _, known in runs[::2]), runs
    assert all((known > 500) == (method in ("prefix", "epic")) for method, known in runs[1::2]), runs


def test_figures_of_several_runs() -> None:
    """By hand: medians over runs, the speed-up of the medians, the largest memory, and the counts of a run."""

    def run(
        ttft_s: float, peak: int, recomputed: int = 150, second_s: float = 0.5, **phases: float
    ) -> module._TwoQuestions:
        phases_s = {name: phases.get(name, 0.0) for name in PHASES}
        first = stats("epic", ttft_s=ttft_s, phases_s=phases_s, recomputed_tokens=recomputed, charged_ratio=0.3)
        return module._TwoQuestions(first, stats("epic", ttft_s=second_s, charged_ratio=0.1), peak)

    found = module._summaries(
        {
            "full": [run(8.0, 10), run(3.0, 30), run(4.0, 20)],
            "epic": [run(0.5, 7, read=0.1, recompute=0.2), run(1.0, 9, second_s=0.2, read=0.4, recompute=0.3)]
            + [run(9.0, 8, 160, read=0.3, recompute=8.0)],
        }
    )
    assert found["full"]["ttft_s"] == {"median": 4.0, "min": 3.0, "max": 8.0}
    assert (found["full"]["speedup_vs_full"], found["full"]["peak_rss_bytes"]) == (1.0, 30)
    epic = found["epic"]
    assert epic["ttft_s"] == {"median": 1.0, "min": 0.5, "max": 9.0} and epic["speedup_vs_full"] == 4.0
    assert epic["second_ttft_s"] == {"median": 0.5, "min": 0.2, "max": 0.5}
    assert epic["phases_s"] == {**dict.fromkeys(PHASES, 0.0), "read": 0.3, "recompute": 0.3}
    counts = ("prompt_tokens", "reused_tokens", "recomputed_tokens", "peak_rss_bytes")
    assert [epic[name] for name in counts] == [1000, 740, 160, 9]
    ratios = ("nominal_ratio", "effective_ratio", "effective_ratio_of_stale", "charged_ratio")
    assert [epic[name] for name in ratios] == pytest.approx([0.2, 160 / 850, 160 / 843, 0.3])
    assert module._summaries({"epic": [run(1.0, 1)]})["epic"]["speedup_vs_full"] is None


def test_texts_have_the_length_asked_for_and_differ(tiny_models: dict[str, str]) -> None:
    tokenize = load_model(tiny_models["llama"]).tokenize
    texts = make_texts(tokenize, 3, 64)
    assert len(set(texts)) == 3
    assert all(abs(len(tokenize(text)) - 64) <= 2 for text in texts)
    assert texts == make_texts(tokenize, 3, 64)


@pytest.mark.parametrize(
    "options", [{"methods": ["fast"]}, {"methods": []}, {"runs": 0}, {"context_tokens": 10}, {"chunk_tokens": 1}]
)
def test_senseless_settings_are_refused(tiny_models: dict[str, str], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        bench(EngineConfig(primary=tiny_models["llama"]), **options)
