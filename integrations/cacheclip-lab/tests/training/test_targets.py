"""Training targets, against a model of transformers that returns its attention weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_lab.training.targets import attention_to_stale, question_slots
from cacheclip_testing import SENTENCES
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from cacheclip_rag import CacheClipEngine, Chunk, Fresh
from cacheclip_rag.measuring import cache_argument
from cacheclip_rag.methods import preset

QUESTION = "What is the magic number?"


@pytest.fixture(params=["llama", "qwen3"])
def stored(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> Any:
    chunks = [" ".join(SENTENCES[:3]), " ".join(SENTENCES[3:5])]
    engine = CacheClipEngine(primary=tiny_models[request.param], auxiliary=None)
    engine.precompute(chunks, method="direct")
    segments = [Fresh("Read this. "), *map(Chunk, chunks), Fresh(f"\n\nQuestion: {QUESTION}\n")]
    return engine, engine.prefill(segments, method=preset("direct"))


@torch.inference_mode()
def test_attended_and_stale(stored: Any) -> None:
    engine, prefilled = stored
    ids, asking = prefilled.layout.ids, question_slots(prefilled, QUESTION)
    folder = Path(engine.config.primary)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    computed = DynamicCache()
    output = model(input_ids=ids[None], output_attentions=True, **cache_argument(model, computed))
    expected = torch.zeros(len(ids))
    for weights, fresh, old in zip(output.attentions, computed.layers, prefilled.cache.layers, strict=True):
        change = (fresh.values[0] - old.values[0, :, : len(ids)]).norm(dim=-1)
        relative = (change / fresh.values[0].norm(dim=-1).mean(-1, keepdim=True)).mean(0)
        expected += weights[0].mean(0)[asking].mean(0) * relative / len(computed.layers)
    found = attention_to_stale(engine.primary, prefilled, QUESTION)
    assert float((found - expected).abs().max()) < 1e-5
    assert all(float(found[span.start : span.stop].max()) > 1e-4 for span in prefilled.layout.chunks)


def test_slots_of_the_question(stored: Any) -> None:
    engine, prefilled = stored
    layout = prefilled.layout
    named = question_slots(prefilled, QUESTION)
    assert "".join(engine.primary.decode_ids(layout.ids[named].tolist())).strip() == QUESTION
    every = question_slots(prefilled, "Not in there.")
    assert {*named.tolist()} < {*every.tolist()} <= {*range(layout.chunks[-1].stop, layout.num_tokens)}
