"""Architectures whose attention, positions or layers differ: equal answers, or a refusal when the engine starts.

Models that vLLM runs by transformers' own code (SmolLM3, OLMo 2) are left out: it changes transformers' classes in its
process, which here is that of our engine too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_engines import CORRECTED, PROMPTS, architecture, ask, outcomes, outputs, started

NAMES = "qwen2 qwen2-rope-yarn llama-rope-llama3 llama-rope-linear phi3-partial gemma2 gemma3 granite gpt-oss".split()
NAMES += ["mixtral", "qwen3-moe"]


@pytest.mark.parametrize("name", NAMES)
def test_equal_answers(name: str, tmp_path: Path) -> None:
    made = architecture(name, tmp_path)
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
        started(architecture("mistral-sliding", tmp_path)),
    ):
        pass
