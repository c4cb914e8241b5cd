"""Answers of a GGUF file pass the tests of transformers' answers that follow schemas and call tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_gguf

from cacheclip_rag import CacheClipEngine
from tests.engine import test_queue
from tests.engine.test_tools import TestSchema, TestTools

__all__ = ["TestSchema", "TestTools"]


@pytest.fixture(scope="module")
def tool_gguf(tool_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("tools"), "llama", Path(tool_model)))


@pytest.fixture
def engine(tool_gguf: str) -> CacheClipEngine:
    return CacheClipEngine(primary=tool_gguf, auxiliary=None, method="direct", chunk_context="prefix", store=None)


@pytest.mark.parametrize(("text", "options"), test_queue.HELD_BACK_TOO.values(), ids=test_queue.HELD_BACK_TOO)
def test_a_schema_or_a_call_holds_up_nobody(
    engine: CacheClipEngine, chunks: list[str], text: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    test_queue.test_text_that_is_held_back_holds_up_nobody(engine, chunks, text, options, monkeypatch)
