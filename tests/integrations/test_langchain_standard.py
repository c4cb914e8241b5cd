"""LangChain's own suites for integrations: nothing skipped by us."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_cacheclip import CacheClipVectorStore, ChatCacheClip
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests

from tests.conftest import CHUNKS


class _Chat:
    @pytest.fixture(autouse=True)
    def _models(self, tiny_models: dict[str, str], tool_model: str, tmp_path: Path) -> None:
        self.models = {"llama": tool_model, "auxiliary": tiny_models["auxiliary"]}
        self.store = str(tmp_path / "store")

    @property
    def chat_model_class(self) -> type[ChatCacheClip]:
        return ChatCacheClip

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.models["llama"], "auxiliary": self.models["auxiliary"], "store": self.store}


class TestUnit(_Chat, ChatModelUnitTests):
    pass


class TestIntegration(_Chat, ChatModelIntegrationTests):
    """Forced calls and structured output have their form from the constraint, so a random model is good enough for
    them. It is not for tests in which the model itself must choose to call, or choose what to write."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "max_tokens": 64}

    @pytest.mark.xfail(reason="A random model does not call a tool of its own accord.", strict=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="A random model does not copy words from its prompt.", strict=True)
    def test_unicode_tool_call_integration(self, model: BaseChatModel) -> None:  # type: ignore[override]
        super().test_unicode_tool_call_integration(model)

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {
            "invoke": ["cache_read_input", "cache_creation_input"],
            "stream": ["cache_read_input", "cache_creation_input"],
        }

    def _ask(self, stream: bool, **options: Any) -> AIMessage:
        model = ChatCacheClip(**self.chat_model_params)
        prompt = f"{CHUNKS[0]}\n\nWhat does it say?"
        if not stream:
            return model.invoke(prompt, **options)
        parts = list(model.stream(prompt, **options))
        message = parts[0]
        for part in parts[1:]:
            message = message + part
        return message  # type: ignore[return-value]

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        """A document that is new: it is stored after the answer."""
        model = ChatCacheClip(**self.chat_model_params)
        model.engine.release([CHUNKS[0]])
        message = self._ask(stream, documents=[CHUNKS[0]])
        assert message.usage_metadata["input_token_details"]["cache_creation"] > 0
        return message

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """A document that was precomputed: its tokens are read, not computed."""
        ChatCacheClip(**self.chat_model_params).engine.precompute([CHUNKS[0]])
        message = self._ask(stream)
        details = message.usage_metadata["input_token_details"]
        assert details["cache_read"] > 0 and details["cache_creation"] == 0
        return message


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tiny_models: dict[str, str], tmp_path: Path) -> Iterator[VectorStore]:
        llm = ChatCacheClip(
            primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], store=str(tmp_path / "store")
        )
        store = CacheClipVectorStore(InMemoryVectorStore(self.get_embeddings()), llm)
        yield store
        assert isinstance(store.store, InMemoryVectorStore)
        left = [Document(each["text"]) for each in store.store.store.values()]
        assert all(llm.engine.is_stored(each.page_content) for each in left), "what is there is precomputed"
