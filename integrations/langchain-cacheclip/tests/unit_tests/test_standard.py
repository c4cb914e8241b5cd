"""LangChain's own suite for chat models: nothing skipped by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing import fake_models
from langchain_cacheclip import ChatCacheClip
from langchain_tests.unit_tests import ChatModelUnitTests


class TestChatCacheClip(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _models(self, tmp_path: Path) -> None:
        self.settings = {**fake_models(), "store": str(tmp_path / "store")}

    @property
    def chat_model_class(self) -> type[ChatCacheClip]:
        return ChatCacheClip

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.settings
