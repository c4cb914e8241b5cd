"""Architectures whose attention, positions or layers differ: equal answers, or a refusal when the engine starts.

Models that vLLM runs by transformers' own code (SmolLM3, OLMo 2) are left out: it changes transformers' classes in its
process, which here is that of our engine too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.testing.tiny import TINY_MODELS, build_auxiliary, build_model
from tests.vllm.conftest import CHUNKS, CORRECTED, PROMPTS, Setting, ask, outcomes, outputs, started

_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32}
_CHANGED: dict[str, dict[str, Any]] = {
    # what the tiny models leave out and vLLM wants
    "gemma2": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 32},
    "gpt-oss": {"rope_parameters": {**TINY_MODELS["gpt-oss"]["rope_parameters"], "beta_fast": 32.0, "beta_slow": 1.0}},
}
NAMES = (
    "qwen2",
    "qwen2-rope-yarn",
    "llama-rope-llama3",
    "llama-rope-linear",
    "phi3-partial",
    "gemma2",
    "gemma3",
    "granite",
    "gpt-oss",
    "mixtral",
    "qwen3-moe",
)


def setting(name: str, folder: Path) -> Setting:
    spec = {**TINY_MODELS[name], **_HEADS, **_CHANGED.get(name, {})}
    options = {
        "primary": str(build_model(folder / "model", spec)),
        "auxiliary": str(build_auxiliary(folder / "auxiliary")),
        "store": str(folder / "store"),
        "chunk_context": "passages",
        "prefix_cache_bytes": 0,
    }
    CacheClipEngine(**options).precompute(CHUNKS)
    return Setting(options["primary"], options["store"], options)


@pytest.mark.parametrize("name", NAMES)
def test_equal_answers(name: str, tmp_path: Path) -> None:
    made = setting(name, tmp_path)
    with started(made) as fused:
        assert ask(fused, PROMPTS, "full") == made.expected(PROMPTS, "full")
        for method in ("cacheclip", CORRECTED):
            assert fused.llm.reset_prefix_cache()  # with what full prefill left, plain prefill computes less
            found = outputs(fused, PROMPTS, method)
            assert outcomes(found) == ["fused"] * 4
            assert [tuple(each.outputs[0].token_ids) for each in found] == made.expected(PROMPTS, method)


def test_a_sliding_window_in_every_layer_is_refused(tmp_path: Path) -> None:
    """vLLM drops the blocks before the window, which recomputed tokens would read."""
    with (
        pytest.raises(ValueError, match="vLLM keeps not all blocks"),
        started(setting("mistral-sliding", tmp_path)),
    ):
        pass
