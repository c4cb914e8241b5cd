"""Block-Attention, for checkpoints that read chunks apart, from chunk caches of its own."""

from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.methods import preset
from tests.conftest import CHUNKS
from tests.fusion.cases import BROKEN, EXACT, gap, make_engine, reference_model

models = pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3", "mixtral", "gemma2", "gemma3", "gpt-oss"])
"""The last three with sliding windows; soft caps and sinks among them."""
BLOCK = preset("block")
PROMPT = "\n\n".join(CHUNKS[:3]) + "\n\nQuestion: What is the magic number?"


@pytest.fixture
def engine(name: str, tiny_models: dict[str, str]) -> CacheClipEngine:
    return make_engine(tiny_models[name], tiny_models["auxiliary"])


@torch.inference_mode()
def masked_reference(folder: str, layout: Any) -> torch.Tensor:
    """One forward pass in which a chunk's token sees its own chunk alone, and any other token everything before it."""
    num_tokens = layout.num_tokens
    block = torch.zeros(num_tokens, dtype=torch.int64)
    for number, span in enumerate(layout.chunks, 1):
        block[span.start : span.stop] = number
    slots = torch.arange(num_tokens)
    seen = slots[None, :] <= slots[:, None]
    seen &= (block[:, None] == 0) | (block[:, None] == block[None, :])
    model = reference_model(folder)
    masks = {"full_attention": _additive(seen)}
    if window := getattr(model.config, "sliding_window", None):
        masks["sliding_attention"] = _additive(seen & (slots[None, :] > slots[:, None] - window))
    output = model(
        input_ids=layout.ids[None],
        position_ids=slots[None],
        attention_mask=masks if window else masks["full_attention"],
        use_cache=False,
    )
    return output.logits[0, -1]


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


class TestBlockAttention:
    @models
    def test_equals_a_forward_pass_under_the_block_mask(self, engine: CacheClipEngine) -> None:
        method = BLOCK
        engine.precompute(CHUNKS[:3], method=method)
        result = engine.prefill(PROMPT, method=method)
        assert result.stats.hits == 3 and result.stats.exact_tokens == 0
        expected = masked_reference(engine.config.primary, result.layout)
        assert gap(result.logits, expected) < EXACT
        assert gap(engine.prefill(PROMPT, method=preset("full")).logits, expected) > BROKEN

    @pytest.mark.parametrize("name", ["llama"])
    def test_its_chunk_caches_are_its_own(self, engine: CacheClipEngine) -> None:
        method = BLOCK
        engine.precompute(CHUNKS[:3])
        assert engine.prefill(PROMPT, method=method).stats.misses == 3
        answer = engine.generate(PROMPT, SamplingParams(max_tokens=2), method=method)
        assert answer.stats.fallback is not None
        again = engine.generate(PROMPT, SamplingParams(max_tokens=2), method=method)
        assert again.stats.hits == 3, "what was missing was stored as the method needs it"
        assert engine.generate(PROMPT, SamplingParams(max_tokens=2), method="direct").stats.hits == 3
        assert engine.release(CHUNKS[:3]) == 3
        for each in (BLOCK, preset("direct")):
            stats = engine.prefill(PROMPT, documents=CHUNKS[:3], method=each).stats
            assert (stats.hits, stats.misses) == (0, 3)
