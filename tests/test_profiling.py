"""Measured profiles: real prefills of a tiny model, saved and found by the engines that they hold for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, profiling
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.plan.controller import Sample
from cacheclip_rag.types import PHASES
from tests.conftest import CACHECLIP, CHUNKS, rag_prompt

Make = Callable[..., CacheClipEngine]


@pytest.fixture
def make(tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    for name, value in {"_LEAST_TOKENS": 64, "_MOST_TOKENS": 256, "_SHORT": 32, "_LONG": 128, "_REPEATS": 1}.items():
        monkeypatch.setattr(profiling, name, value)

    def make(**options: Any) -> CacheClipEngine:
        models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
        return CacheClipEngine(**{**models, **CACHECLIP, "recompute_ratio": "auto", **options})

    return make


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """What the next profile is fitted to."""
    found: list[Sample] = []
    fitted = profiling.Profile.of

    def recorded(identity: Any, measured: list[Sample], reads: Any) -> Any:
        found.extend(measured)
        return fitted(identity, measured, reads)

    monkeypatch.setattr(profiling.Profile, "of", recorded)
    return found


def test_it_is_measured_once_and_used_by_every_engine_of_its_kind(make: Make, samples: list[Sample]) -> None:
    engine = make()
    found = engine.profile_machine()
    assert {sample.ratio for sample in samples} == {None, *profiling._RATIOS}
    plain = sorted(sample.work.tokens for sample in samples if sample.ratio is None)
    assert len(plain) == 3 and plain[1] - plain[0] > 50 and plain[2] - plain[1] > 100
    assert {sample.work.chunks for sample in samples if sample.ratio} == {1, 2, 4, 8}
    assert all(set(sample.phases_s) == set(PHASES) and sample.phases_s["recompute"] > 0 for sample in samples)
    for sample in samples:
        assert sample.work.known == 0 and sample.work.stale < sample.work.tokens
    assert found.plain_s(samples[-1].work) > 0
    for other in (engine, make()):
        other.precompute(CHUNKS)
        stats = other.generate(rag_prompt(CHUNKS), max_tokens=1).stats
        assert stats.predicted_ttft_s is not None and stats.hits == len(CHUNKS)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"method": "epic"}, {"chunk_context": "passages"}])
def test_other_settings_need_another_profile(
    make: Make, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    make().profile_machine()
    other = make(**options)
    other.precompute(CHUNKS)
    with caplog.at_level(logging.WARNING):
        stats = other.generate(rag_prompt(CHUNKS), max_tokens=1).stats
    assert stats.predicted_ttft_s is None and "not profiled" in caplog.text


def test_the_store_of_the_engine_is_left_alone(make: Make, tmp_path: Path) -> None:
    engine = make(store=str(tmp_path / "store"), max_bytes=10**6)
    engine.precompute(CHUNKS)
    before = sorted(engine.store.catalog.keys(engine.config.namespace))
    engine.profile_machine()
    assert sorted(engine.store.catalog.keys(engine.config.namespace)) == before
    assert engine.metrics.to_prometheus().count("answers_total{") == 0
    assert engine.prefixes.stats.blocks == 0


@pytest.mark.parametrize("method", ["full", "cachecraft", "map_reduce"])
def test_methods_without_stored_chunks_are_refused(make: Make, method: str) -> None:
    with pytest.raises(ConfigurationError, match="nothing to choose"):
        make().profile_machine(method)


def test_a_context_too_short_for_three_sizes_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_MOST_TOKENS", 150)
    with pytest.raises(ConfigurationError, match="too short"):
        make().profile_machine()


def test_sizes_stop_where_prefills_get_long(make: Make, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_MOST_TOKENS", 512)
    monkeypatch.setattr(profiling, "_ENOUGH_S", 0.0)
    make().profile_machine()
    assert len({sample.work.tokens for sample in samples if sample.ratio is None}) == 3, "never fewer than three"


@pytest.mark.parametrize("method", ["direct", "epic"])
def test_methods_with_and_without_a_ratio(make: Make, samples: list[Sample], method: str) -> None:
    engine = make(method=method, auxiliary=None)
    engine.profile_machine()
    engine.precompute(CHUNKS)
    assert engine.plan(rag_prompt(CHUNKS)).prediction is not None
    assert {sample.ratio for sample in samples} == ({None, 0.0} if method == "direct" else {None, *profiling._RATIOS})
