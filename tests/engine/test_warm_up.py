"""Warming up: what the first answer would wait for is done before it; unloading frees weights, whoever has them."""

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, ConfigurationError, UnknownModelError
from cacheclip_rag.models.load import _registry
from cacheclip_rag.runtime.base import Runtime
from tests.adapters.plain_model import PlainModel
from tests.conftest import CACHECLIP, CHUNKS, Logs, Make, Models, Patch, rag_prompt
from tests.engine.asking import SHORT, rag


def test_everything_is_loaded_and_nothing_is_counted(make: Make, tmp_path: Path) -> None:
    engine = make(store=tmp_path / "store")
    done = engine.warm_up()
    assert engine.auxiliary is not None
    assert done.models == (engine.primary.name, engine.auxiliary.name)
    assert done.seconds > 0 and (done.chunks_read, done.bytes_read) == (0, 0)
    lines = [line for line in engine.metrics.to_prometheus().splitlines() if not line.startswith("#")]
    assert all("_store_" in line for line in lines), "no answer is counted"


def test_the_first_answer_loads_and_reads_nothing_more(
    make: Make, tmp_path: Path, chunks: list[str], monkeypatch: Patch
) -> None:
    make(store=tmp_path).precompute(chunks)
    engine = make(store=tmp_path, memory_bytes=1 << 26)
    done = engine.warm_up()
    assert done.chunks_read == engine.store.stats().entries > 8 and done.bytes_read > 0
    before = engine.parts.tier_stats()[1].hits
    with monkeypatch.context() as patch:
        patch.setattr(
            "cacheclip_rag.answering.models.load_any", lambda *given, **options: pytest.fail("a model is loaded")
        )
        answer = engine.generate(rag(chunks), SHORT)
    assert answer.stats.hits == len(chunks)
    assert engine.parts.tier_stats()[1].hits == before, "the disk was not read again"
    assert answer.token_ids == make(store=tmp_path).generate(rag(chunks), SHORT).token_ids


def test_the_most_recently_used_chunks_are_read_as_far_as_there_is_room(
    make: Make, tmp_path: Path, chunks: list[str]
) -> None:
    engine = make(stored=chunks, store=tmp_path, auxiliary=None, method="epic-corrected")
    engine.chunk_caches()[0].read(chunks[0])  # used last
    engine.close()
    caches = engine.chunk_caches()[0]
    entry = engine.store.catalog.entries_of("default", [key := caches.key(chunks[0])]).get(key)
    assert entry is not None
    small = make(store=tmp_path, auxiliary=None, method="epic-corrected", memory_bytes=entry.num_bytes)
    assert small.warm_up(read_chunks=False).chunks_read == 0
    done = make(store=tmp_path, auxiliary=None, method="epic-corrected", memory_bytes=entry.num_bytes).warm_up()
    assert (done.chunks_read, done.bytes_read) == (1, entry.num_bytes)
    in_memory = make(auxiliary=None, method="epic-corrected", memory_bytes=1 << 26)
    assert in_memory.warm_up().chunks_read == 0, "a store in memory is warm"


def test_without_a_memory_tier_chunks_are_read_and_dropped(
    make: Make, tmp_path: Path, chunks: list[str], monkeypatch: Patch
) -> None:
    """So that the system's page cache has them. They are used in the same order as before."""
    make(store=tmp_path).precompute(chunks)
    engine = make(store=tmp_path)
    order = engine.store.keys()
    done = engine.warm_up()
    assert done.chunks_read == len(order) > 8 and done.bytes_read > 0
    assert [tier.hits >= done.chunks_read for tier in engine.parts.tier_stats()] == [True]
    own = {caches.key(chunk) for caches in engine.chunk_caches() for chunk in chunks}
    done_order = engine.store.keys()
    assert [key for key in done_order if key in own] == [key for key in order if key in own]
    monkeypatch.setattr("cacheclip_rag.answering.parts.free_bytes", lambda device: 0)
    assert make(store=tmp_path).warm_up().chunks_read == 0, "no memory to read them into"


@pytest.mark.parametrize("method", ["full", "direct", "cacheclip"])
def test_every_kind_of_method(make: Make, method: str, monkeypatch: Patch) -> None:
    engine, steps = make(method=method), []
    runtime: Runtime = engine.primary
    real = runtime.decode_step
    monkeypatch.setattr(runtime, "decode_step", lambda state, token: steps.append(token) or real(state, token))
    assert engine.warm_up().models and len(steps) == 1
    assert engine.warm_up().seconds > 0, "again is allowed"


def test_a_wrong_model_is_refused_when_the_server_starts(make: Make) -> None:
    with pytest.raises(UnknownModelError):
        make(primary="no-such-model").warm_up()
    with pytest.raises(UnknownModelError):
        make(auxiliary="no-such-model", method="direct").warm_up()


def test_an_auxiliary_that_cannot_be_loaded_is_only_logged(
    make: Make, tiny_models: Models, tmp_path: Path, caplog: Logs
) -> None:
    broken = shutil.copytree(tiny_models["auxiliary"], tmp_path / "auxiliary")
    (broken / "model.safetensors").unlink()
    done = make(auxiliary=str(broken), method="direct").warm_up()
    assert len(done.models) == 1 and "continuing without the auxiliary model" in caplog.text


PROMPT = rag_prompt(list(CHUNKS))


@pytest.fixture(params=[CacheClipEngine, PlainModel])
def loaded(request: pytest.FixtureRequest, tiny_models: dict[str, str], tmp_path: Path) -> Any:
    """Something with an engine and ``unload``."""
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    # a namespace of its own: other tests may hold an engine with these settings
    return request.param(**models, **CACHECLIP, store=str(tmp_path / "store"), namespace="unload", finish="verify")


def engine_of(loaded: Any) -> CacheClipEngine:
    return loaded if isinstance(loaded, CacheClipEngine) else loaded.engine


@pytest.mark.long
def test_weights_are_freed_and_loaded_again(loaded: Any) -> None:
    registry = dict(_registry)
    _registry.clear()  # models that other tests have loaded
    try:
        engine = engine_of(loaded)
        engine.precompute(list(CHUNKS))
        before = engine.generate(PROMPT, max_tokens=4)
        assert before.stats.hits
        weights = [weakref.ref(each.model) for each in (engine.primary, engine.auxiliary) if each is not None]
        assert len(weights) == 2
        gc.collect()
        loaded.unload()
        assert [each() for each in weights] == [None, None]
        assert not _registry and engine.prefixes.stats.bytes == 0
        after = engine.generate(PROMPT, max_tokens=4)
        assert (after.token_ids, after.stats.hits) == (before.token_ids, before.stats.hits)
    finally:
        _registry.clear()
        _registry.update(registry)


def test_there_is_nothing_to_unload_of_a_server() -> None:
    with pytest.raises(ConfigurationError, match="the model runs in the server"):
        PlainModel(base_url="http://localhost:1/v1").unload()


def test_another_engine_keeps_its_weights(tiny_models: dict[str, str]) -> None:
    ours, other = (CacheClipEngine(primary=tiny_models["qwen2"], auxiliary=None, method="full") for _ in range(2))
    model = other.primary
    assert ours.primary is model
    ours.unload()
    assert other.generate("What?", max_tokens=2).text is not None and other.primary is model
    assert ours.primary is not model
