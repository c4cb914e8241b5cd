"""Streams of a GGUF file pass the tests of transformers' streams and of the queue."""

from pathlib import Path

import pytest
from cacheclip_testing.plugin import CACHECLIP
from tiny_gguf import MakeEngine, write_gguf

from cacheclip_rag import CacheClipEngine
from tests.engine.asking import SHORT, check_sums, rag
from tests.engine.test_answers import TestStreaming
from tests.engine.test_queue import (
    test_an_answer_that_nobody_reads_on_holds_up_nobody,
    test_asynchronous_questions,
    test_first_come_first_token,
    test_text_that_is_held_back_holds_up_nobody,
    test_who_leaves_while_text_is_held_back_has_no_token_more,
)

__all__ = [
    "TestStreaming",
    "test_an_answer_that_nobody_reads_on_holds_up_nobody",
    "test_asynchronous_questions",
    "test_first_come_first_token",
    "test_text_that_is_held_back_holds_up_nobody",
    "test_who_leaves_while_text_is_held_back_has_no_token_more",
]


@pytest.fixture(scope="module")
def tool_model(tool_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("tools"), "llama", Path(tool_model)))


@pytest.fixture
def engine(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> CacheClipEngine:
    found = make("llama", **CACHECLIP)
    monkeypatch.setattr(found.primary, "eos_ids", frozenset())  # a random model may end its turn at once
    return found


@pytest.mark.parametrize("method", ["full", "prefix", "direct", "epic", "cacheclip"])
def test_statistics_add_up(engine: CacheClipEngine, chunks: list[str], method: str) -> None:
    engine.precompute(chunks[:3])
    check_sums(engine.generate(rag(chunks), SHORT, method=method))
