"""LangChain's own suite for chat models, over a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_cacheclip import ChatCacheClip
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage

from cacheclip_rag.config import EngineConfig
from cacheclip_rag.models.load import register_runtime
from tests.conftest import CHUNKS
from tests.integrations import test_langchain_standard as local
from tests.integrations.fakes import watched
from tests.serving.conftest import Served, running


class TestOverAServer(local.TestIntegration):
    @pytest.fixture(autouse=True)
    def _models(self, served: Served) -> None:
        self.served = served

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": self.served.url, "max_tokens": 64}

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> Iterator[BaseChatModel]:  # type: ignore[override]
        further = getattr(request, "param", None) or {}
        fields = {**self.standard_chat_model_params, **self.chat_model_params, **further}
        told = local.SAID.get(request.function.__name__)
        if told is None:
            yield ChatCacheClip(**fields)
            return
        register_runtime("told", local.Told)
        with running(EngineConfig(primary=f"told:{request.node.name}", auxiliary=None, method="direct")) as served:
            watched(served.engine).says = list(told)
            yield ChatCacheClip(**{**fields, "base_url": served.url})

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        self.served.engine.release([CHUNKS[0]])
        message = self._ask(stream, documents=[CHUNKS[0]])
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_creation"] > 0
        return message

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self.served.engine.precompute([CHUNKS[0]])
        message = self._ask(stream)
        assert message.usage_metadata is not None
        details = message.usage_metadata["input_token_details"]
        assert details["cache_read"] > 0 and details["cache_creation"] == 0
        return message
