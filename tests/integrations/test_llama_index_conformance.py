"""CacheClipLLM is what LlamaIndex expects of a language model: as a chat model, as a completion model, and where
nothing can be reused."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_index.llms.cacheclip import CacheClipLLM

from tests.integrations.llama_index_conformance import LLMConformance
from tests.models.test_architectures import build


class TestChatModel(LLMConformance):
    @pytest.fixture
    def llm(self, tiny_models: dict[str, str]) -> CacheClipLLM:
        return CacheClipLLM(
            model_name=tiny_models["smollm3"], auxiliary_model_name=tiny_models["auxiliary"], max_new_tokens=12
        )


class TestCompletionModel(LLMConformance):
    @pytest.fixture
    def llm(self, tiny_models: dict[str, str]) -> CacheClipLLM:
        return CacheClipLLM(
            model_name=tiny_models["qwen2"], auxiliary_model_name=None, max_new_tokens=12, is_chat_model=False
        )


class TestWithoutReuse(LLMConformance):
    """A model without our support answers through the same class, by plain prefill."""

    @pytest.fixture
    def llm(self, tmp_path: Path) -> CacheClipLLM:
        return CacheClipLLM(
            model_name=build(tmp_path, "mamba"),
            auxiliary_model_name=None,
            max_new_tokens=12,
            engine_kwargs={"fallback": "full"},
        )
