"""LangChain's own suites for integrations, on tiny models: nothing skipped by us."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cacheclip_testing import FakeRuntime, fake_of
from cacheclip_testing.plugin import CHUNKS
from langchain_cacheclip import CacheClipVectorStore, ChatCacheClip
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import ChatModelIntegrationTests, VectorStoreIntegrationTests

from cacheclip_rag.models import register_runtime


class Told(FakeRuntime):
    """A runtime that says what it is told, also where its answer must follow a schema."""

    def constrain(self, json_schema: str) -> Any:
        return SimpleNamespace(allowed=lambda logits: logits, accept=lambda token: None)


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


SAID = {
    "test_agent_loop": [_call("get_weather", location="San Francisco, CA"), "It is sunny."],
    "test_unicode_tool_call_integration": [
        _call("unicode_customer", customer_name=name) for name in ("你好啊集团", "こんにちは株式会社")
    ],
}
"""What a model must choose to say, by test. A random one would not."""


@pytest.mark.long
class TestChatCacheClip(ChatModelIntegrationTests):
    """Forced calls and structured output have their form from the constraint, so a random model is good enough for
    them. In tests in which the model itself must choose to call, or what to write, a fake is told."""

    @pytest.fixture(autouse=True)
    def _models(self, tiny_models: dict[str, str], tool_model: str, tmp_path: Path) -> None:
        self.settings: dict[str, Any] = {"model": tool_model, "auxiliary": tiny_models["auxiliary"], "max_tokens": 64}
        self.settings["store"] = str(tmp_path / "store")

    @property
    def chat_model_class(self) -> type[ChatCacheClip]:
        return ChatCacheClip

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.settings

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> BaseChatModel:
        further = getattr(request, "param", None) or {}
        fields = {**self.standard_chat_model_params, **self.chat_model_params, **further}
        told = SAID.get(request.function.__name__)
        if told is None:
            return ChatCacheClip(**fields)
        register_runtime("told", Told)
        chat = ChatCacheClip(**{**fields, "model": f"told:{request.node.name}", "auxiliary": None, "method": "direct"})
        fake_of(chat.engine).says = list(told)
        return chat

    @property
    def supported_usage_metadata_details(self) -> Any:
        return dict.fromkeys(("invoke", "stream"), ["cache_read_input", "cache_creation_input"])

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


class TestCacheClipVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tiny_models: dict[str, str], tmp_path: Path) -> Iterator[VectorStore]:
        models: Any = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
        llm = ChatCacheClip(**models, store=str(tmp_path / "store"))
        store = CacheClipVectorStore(InMemoryVectorStore(self.get_embeddings()), llm)
        yield store
        assert isinstance(store.store, InMemoryVectorStore)
        left = [Document(each["text"]) for each in store.store.store.values()]
        assert all(llm.engine.is_stored(each.page_content) for each in left), "what is there is precomputed"
