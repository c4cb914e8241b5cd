"""Answers of a GGUF file pass the tests of transformers' answers that follow schemas and call tools."""

from pathlib import Path

import pytest
from tiny_gguf import write_gguf

from cacheclip_rag import CacheClipEngine
from tests.engine.test_tools import TestSchema, TestTools

__all__ = ["TestSchema", "TestTools"]


@pytest.fixture(scope="module")
def tool_gguf(tool_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("tools"), "llama", Path(tool_model)))


@pytest.fixture
def engine(tool_gguf: str) -> CacheClipEngine:
    return CacheClipEngine(primary=tool_gguf, auxiliary=None, method="direct", chunk_context="prefix", store=None)
