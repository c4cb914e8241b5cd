"""``unload`` frees the weights, whoever held them."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, ConfigurationError
from cacheclip_rag.models.load import _registry
from tests.adapters.plain_model import PlainModel
from tests.conftest import CACHECLIP, CHUNKS, rag_prompt

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
