"""Greedy answers of an unmodified vLLM are those of our engine, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.conftest import CORRECTED, PROMPTS, Setting, ask, outcomes, outputs, started


@pytest.fixture(scope="module")
def setting(settings: Any) -> Setting:
    return settings()


@pytest.fixture(scope="module")
def fused(setting: Setting) -> Iterator[Any]:
    with started(setting, engine=True) as found:
        yield found


@pytest.fixture(autouse=True)
def fresh(fused: Any) -> None:
    """vLLM's prefix cache knows nothing of earlier tests."""
    assert fused.llm.reset_prefix_cache()
    fused.plain.clear()


class TestEqualAnswers:
    @pytest.mark.parametrize("method", ["cacheclip", "epic", "direct", "random", CORRECTED], ids=str)
    def test_recompute_in_workers(self, fused: Any, setting: Setting, method: Any) -> None:
        found = outputs(fused, PROMPTS, method)
        assert outcomes(found) == ["fused"] * 4 and not fused.plain
        assert [tuple(each.outputs[0].token_ids) for each in found] == setting.expected(PROMPTS, method)
        assert all(0 < len(each.prompt_token_ids) - each.num_cached_tokens < 60 for each in found)
        assert ask(fused, PROMPTS, "full") != setting.expected(PROMPTS, method), "the twin: plain answers differ"

    @pytest.mark.parametrize("method", ["cacheblend", "anchored", "full-ratio"])
    def test_handoff(self, fused: Any, setting: Setting, method: str) -> None:
        chosen = {"full-ratio": ("anchored", 1.0)}.get(method, (method, None))
        found = outputs(fused, PROMPTS[:2], chosen[0], recompute_ratio=chosen[1])
        assert outcomes(found) == ["fused"] * 2 and not fused.plain
        assert all(len(each.prompt_token_ids) - each.num_cached_tokens == 1 for each in found)
