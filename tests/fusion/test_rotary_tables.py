"""A fused prefill makes the primary's rotary tables once: stored keys, the correction and the model's layers take
their rows from them, and no bit of an answer changes."""

from collections.abc import Sequence

import pytest
import torch

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.measuring import FusedCache, Prefilled
from cacheclip_rag.runtime.transformers.rotary import ModelRotary, Tables, changed
from tests.conftest import CHUNKS, TINY_MODELS, Models, Patch, rag_prompt
from tests.fusion.cases import make_engine

METHODS = ("cacheclip", "direct")
"""With a correction, without, with rows that leave between layers, with other positions, with two passes."""
MODELS = ("llama", "gemma3", "gpt-oss", "smollm3", "phi3-longrope")
PROMPT = rag_prompt(CHUNKS)


def prefilled(engine: CacheClipEngine, method: str) -> Prefilled:
    found = engine.prefill(PROMPT, SamplingParams(max_tokens=1), method=engine.make_method(method))
    assert found.stats.hits == len(CHUNKS) and found.stats.fallback is None
    return found


def stored(primary: str, auxiliary: str, method: str, dtype: str = "float32") -> CacheClipEngine:
    """An engine that has the method's chunks."""
    engine = make_engine(primary, auxiliary, prefix_cache_bytes=0, dtype=dtype)
    engine.precompute(CHUNKS)
    engine.generate(PROMPT, SamplingParams(max_tokens=1), method=method)
    return engine


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("primary", "method"),
    [(name, METHODS[(n + more) % len(METHODS)]) for n, name in enumerate(MODELS) for more in (0, 2)],
    indirect=["primary"],
)
def test_they_are_made_once(primary: str, tiny_models: Models, method: str) -> None:
    engine = stored(primary, tiny_models["auxiliary"], method)
    runtime = engine.primary
    made, rotary = list[int](), runtime.model.base_model.rotary_emb
    with rotary.register_forward_hook(lambda _, args, tables: made.append(len(tables[0][0]))):
        layout = prefilled(engine, method).layout
    kinds = len({*runtime.rotary.readings} - {None})
    # each pass still asks for the position of its last row, with old transformers more than once
    assert made[:kinds] == [layout.num_tokens] * kinds
    assert len(made) > kinds and set(made[kinds:]) == {1}


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("primary", "method", "dtype"),
    [(name, METHODS[n % len(METHODS)], ("float32", "bfloat16")[n % 2]) for n, name in enumerate(TINY_MODELS)],
    indirect=["primary"],
)
def test_they_change_no_bit(primary: str, tiny_models: Models, monkeypatch: Patch, method: str, dtype: str) -> None:
    engine = stored(primary, tiny_models["auxiliary"], method, dtype)
    ours = prefilled(engine, method)
    assert isinstance(ours.cache, FusedCache) and not ours.cache.tables
    monkeypatch.setattr(FusedCache, "tables", property(lambda self: (), lambda self, tables: None))
    theirs = prefilled(engine, method)
    assert isinstance(theirs.cache, FusedCache) and torch.equal(ours.logits, theirs.logits)
    for one, other in zip(ours.cache.layers, theirs.cache.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_twin_wrong_tables_show(tiny_models: Models, monkeypatch: Patch) -> None:
    """The layers rotate by what is handed to them."""
    engine = stored(tiny_models["llama"], tiny_models["auxiliary"], "cacheclip")
    right = prefilled(engine, "cacheclip").logits
    embeddings = ModelRotary.embeddings

    def wrong(rotary: ModelRotary, tables: Sequence[Tables | None]) -> list[Tables | None]:
        return embeddings(rotary, changed(tables, lambda table: table[torch.arange(len(table)) // 2]))

    monkeypatch.setattr(ModelRotary, "embeddings", wrong)
    assert not torch.allclose(prefilled(engine, "cacheclip").logits, right, atol=1e-2)
