"""Measured profiles: real prefills of a tiny model, saved and found by the engines that they hold for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.timing import profiling
from cacheclip_lab.timing.fitting import Timing
from cacheclip_testing import ThrottledBackend
from cacheclip_testing.plugin import CACHECLIP, CHUNKS, rag_prompt
from fake_time import FakeTime

from cacheclip_rag import CacheClipEngine, ConfigurationError
from cacheclip_rag.measuring import PHASES
from cacheclip_rag.store import Catalog, ChunkStore, DiskBackend, Tiers

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
def samples(monkeypatch: pytest.MonkeyPatch) -> list[Timing]:
    """What the next profile is fitted to."""
    found: list[Timing] = []
    fitted = profiling.fitted_profile

    def recorded(identity: Any, measured: list[Timing], reads: Any) -> Any:
        found.extend(measured)
        return fitted(identity, measured, reads)

    monkeypatch.setattr(profiling, "fitted_profile", recorded)
    return found


def test_it_is_measured_once_and_used_by_every_engine_of_its_kind(make: Make, samples: list[Timing]) -> None:
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


@pytest.mark.long
def test_other_settings_need_another_profile(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make().profile_machine()
    for options in ({"dtype": "bfloat16"}, {"method": "epic"}, {"chunk_context": "passages"}):
        caplog.clear()
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


def behind(folder: Path, kind: type[ThrottledBackend] = ThrottledBackend) -> ChunkStore:
    """A store that reads 100 kB/s."""
    return ChunkStore(Catalog(folder), Tiers([kind(DiskBackend(folder), bytes_per_s=1e5)]))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*.kv")}


@pytest.mark.some(2)
@pytest.mark.parametrize("method", ["cacheclip", "epic"])
def test_the_own_stores_speed_is_measured(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """And predicts what reading takes, of the auxiliary's KV and of the primary's."""
    FakeTime(monkeypatch)
    engine = make(store=behind(tmp_path / "store"), method=method)
    engine.precompute(CHUNKS)
    before = files(tmp_path / "store"), engine.store.chunk_store.stats(), engine.store.keys()
    found = engine.profile_machine()
    assert (files(tmp_path / "store"), engine.store.chunk_store.stats(), engine.store.keys()) == before
    assert set(found.media) == {"throttled"}
    prediction = engine.plan(rag_prompt(CHUNKS)).prediction
    took_s = engine.generate(rag_prompt(CHUNKS), max_tokens=1, recompute_ratio=0.2).stats.reading_s
    kv_sources = engine.parts.kv_sources(engine.make_method())
    reading = found.reading(engine.plan(rag_prompt(CHUNKS), recompute_ratio=0.2), kv_sources, 0)
    assert reading.seconds == pytest.approx(took_s, rel=0.2) and took_s > 0.5
    assert (reading.auxiliary_s > 0) == (method == "cacheclip") and reading.primary_s > 0
    assert prediction is not None and prediction.seconds == prediction.plain_s, "the first answer is plain prefill"


@pytest.mark.long
@pytest.mark.parametrize("room", [1000, 45_000])
def test_a_full_store_is_left_alone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """It is measured with as little as there is room for, or not at all."""
    FakeTime(monkeypatch)
    engine = make(store=behind(tmp_path / "store"))
    engine.precompute(CHUNKS)
    engine.store.chunk_store.set_limit(engine.store.stats().bytes + room)
    before = files(tmp_path / "store"), engine.store.keys()
    found = engine.profile_machine()
    assert (files(tmp_path / "store"), engine.store.keys()) == before
    assert set(found.media) == (set() if room == 1000 else {"throttled"})
    assert ("the store is full" in caplog.text) == (room == 1000)


def test_a_store_that_fails_does_not_stop_the_profile(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(DiskBackend):
        def put(self, key: str, data: object) -> None:
            raise OSError("the network is gone")

    store = ChunkStore(Catalog(tmp_path / "store"), Tiers([Failing(tmp_path / "store")]))
    found = make(store=store, system_prompt="").profile_machine()
    assert found.media == {} and "the network is gone" in caplog.text


def test_methods_without_stored_chunks_are_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="nothing to choose"):
        make().profile_machine("full")


def test_a_context_too_short_for_three_sizes_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_MOST_TOKENS", 150)
    with pytest.raises(ConfigurationError, match="too short"):
        make().profile_machine()


@pytest.mark.parametrize("method", ["direct", "epic"])
def test_methods_with_and_without_a_ratio(make: Make, samples: list[Timing], method: str) -> None:
    engine = make(method=method, auxiliary=None)
    engine.profile_machine()
    engine.precompute(CHUNKS)
    assert engine.plan(rag_prompt(CHUNKS)).prediction is not None
    assert {sample.ratio for sample in samples} == ({None, 0.0} if method == "direct" else {None, *profiling._RATIOS})
