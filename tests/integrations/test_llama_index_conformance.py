"""Our parts are what LlamaIndex expects of such: the LLM as a chat model, as a completion model, and where nothing can
be reused; the transform, the synthesizer, the document store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform
from llama_index.response_synthesizers.cacheclip import CacheClipSynthesizer
from llama_index.storage.docstore.cacheclip import CacheClipDocumentStore

from cacheclip_rag.testing.llama_index import (
    DocumentStoreConformance,
    LLMConformance,
    SynthesizerConformance,
    TransformConformance,
)


class TestChatModel(LLMConformance):
    @pytest.fixture
    def llm(self, tiny_models: dict[str, str]) -> CacheClipLLM:
        return CacheClipLLM(primary=tiny_models["smollm3"], auxiliary=tiny_models["auxiliary"], max_tokens=12)


class TestCompletionModel(LLMConformance):
    @pytest.fixture
    def llm(self, tiny_models: dict[str, str]) -> CacheClipLLM:
        return CacheClipLLM(primary=tiny_models["qwen2"], auxiliary=None, max_tokens=12, is_chat_model=False)


@pytest.fixture
def llm(tiny_models: dict[str, str]) -> CacheClipLLM:
    return CacheClipLLM(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], max_tokens=12)


class TestTransform(TransformConformance):
    @pytest.fixture
    def transform(self, llm: CacheClipLLM) -> CacheClipTransform:
        return CacheClipTransform.from_llm(llm)


class TestSynthesizer(SynthesizerConformance):
    @pytest.fixture
    def make(self, llm: CacheClipLLM) -> Callable[..., CacheClipSynthesizer]:
        return lambda **options: CacheClipSynthesizer(llm=llm, **options)


class TestStockSynthesizer(SynthesizerConformance):
    """LlamaIndex's own over our LLM; and what the class asks is what these do."""

    @pytest.fixture
    def make(self, llm: CacheClipLLM) -> Callable[..., Any]:
        return lambda **options: get_response_synthesizer(llm=llm, **options)


class TestDocumentStore(DocumentStoreConformance):
    @pytest.fixture
    def docstore(self, llm: CacheClipLLM) -> CacheClipDocumentStore:
        return CacheClipDocumentStore.of(llm)


class TestStockDocumentStore(DocumentStoreConformance):
    @pytest.fixture
    def docstore(self) -> SimpleDocumentStore:
        return SimpleDocumentStore()
