"""The benchmark's output is what scripts rely on; speed itself is never asserted here."""

from __future__ import annotations

from typing import Any

import pytest

from cacheclip_rag import EngineConfig
from cacheclip_rag.answering.profiling import make_texts
from cacheclip_rag.base.clock import PHASES
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.lab.evaluation.bench import bench
from cacheclip_rag.models.load import load_model


@pytest.fixture(scope="module")
def result(tiny_models: dict[str, str]) -> dict[str, Any]:
    config = EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], recompute_ratio=0.25)
    return bench(config, context_tokens=512, chunk_tokens=64, runs=2)


def test_shape_of_the_result(result: dict[str, Any]) -> None:
    assert {"context_tokens", "chunks", "ratio", "runs", "methods"} <= result.keys()
    assert (result["chunks"], result["ratio"], result["runs"]) == (8, 0.25, 2)
    assert list(result["methods"]) == ["full", "direct", "anchored"]
    for row in result["methods"].values():
        assert set(row["phases_s"]) == set(PHASES)
        assert 0 < row["ttft_s"]["min"] <= row["ttft_s"]["median"] <= row["ttft_s"]["max"]
        assert row["peak_rss_bytes"] > 50e6
        for ratio in ("nominal_ratio", "effective_ratio", "effective_ratio_of_stale", "charged_ratio"):
            assert 0.0 <= row[ratio] <= 1.0
    assert result["methods"]["full"]["speedup_vs_full"] == 1.0


def test_effective_ratio_is_the_nominal_one(result: dict[str, Any]) -> None:
    assert result["methods"]["anchored"]["effective_ratio"] == pytest.approx(0.25, abs=0.01)
    assert result["methods"]["anchored"]["nominal_ratio"] == 0.25
    assert result["methods"]["direct"]["effective_ratio"] == result["methods"]["direct"]["nominal_ratio"] == 0.0


def test_phases_add_up_to_the_time_to_first_token(result: dict[str, Any]) -> None:
    for row in result["methods"].values():
        assert sum(row["phases_s"].values()) <= row["ttft_s"]["max"] + 1e-3


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
