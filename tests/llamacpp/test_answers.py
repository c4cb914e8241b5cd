"""Answers of a GGUF file: the tests of transformers' answers, and what is asked of both."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from cacheclip_rag import CacheClipEngine, SamplingParams
from tests.conftest import CACHECLIP
from tests.engine.asking import SHORT, check_sums, rag
from tests.engine.test_answers import TestStreaming
from tests.engine.test_queue import (
    test_an_answer_that_nobody_reads_on_holds_up_nobody,
    test_asynchronous_questions,
    test_first_come_first_token,
)

__all__ = [
    "TestStreaming",
    "test_an_answer_that_nobody_reads_on_holds_up_nobody",
    "test_asynchronous_questions",
    "test_first_come_first_token",
]


@pytest.fixture
def engine(make: Callable[..., CacheClipEngine], monkeypatch: pytest.MonkeyPatch) -> CacheClipEngine:
    found = make(**CACHECLIP)
    monkeypatch.setattr(found.primary, "eos_ids", frozenset())  # a random model may end its turn at once
    return found


@pytest.mark.parametrize("method", ["full", "prefix", "direct", "epic", "cacheclip"])
def test_statistics_add_up(engine: CacheClipEngine, chunks: list[str], method: str) -> None:
    engine.precompute(chunks[:3])
    check_sums(engine.generate(rag(chunks), SHORT, method=method))


def test_the_plan_is_what_is_done(engine: CacheClipEngine, chunks: list[str]) -> None:
    engine.precompute(chunks[:3])
    plan = engine.plan(rag(chunks))
    stats = engine.generate(rag(chunks), SHORT).stats
    assert (
        sum(len(span.tokens) for span in plan.reused) == stats.chunk_tokens > 0
        and plan.layout.num_tokens == stats.prompt_tokens
    )


@pytest.mark.parametrize("finish", ["revise", "verify"])
def test_exact_kv_is_completed(engine: CacheClipEngine, chunks: list[str], finish: str) -> None:
    engine.precompute(chunks)
    params = SamplingParams(max_tokens=24)
    full = engine.generate(rag(chunks), params, method="full")
    found = engine.generate(rag(chunks), params, finish=finish, recompute_ratio=0.0)
    assert found.stats.hits == len(chunks) and found.stats.verified_tokens is not None
    if finish == "revise":
        assert found.token_ids == full.token_ids
    else:
        assert (found.stats.diverged_at is None) == (found.token_ids == full.token_ids)


def test_the_kv_of_an_answer_is_dropped(engine: CacheClipEngine, chunks: list[str]) -> None:
    """More prompts than a context has room for, one after the other."""
    engine.precompute(chunks)
    for number in range(80):
        engine.generate(rag(chunks, f"Number {number}?"), SamplingParams(max_tokens=1))
        gc.collect(0)


def test_an_answer_is_that_of_the_next_process(
    make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: object
) -> None:
    """Stored KV is read again; that of another version, KV type or file has another key."""
    first = make(store=str(tmp_path), **CACHECLIP)
    first.precompute(chunks)
    expected = first.generate(rag(chunks), SHORT)
    first.close()
    again = make(store=str(tmp_path), **CACHECLIP)
    answer = again.generate(rag(chunks), SHORT)
    assert answer.stats.hits == len(chunks) and answer.token_ids == expected.token_ids
    again.close()
    other = make("qwen2", store=str(tmp_path), **CACHECLIP)
    assert other.generate(rag(chunks), SHORT).stats.hits == 0
    other.close()


@pytest.mark.parametrize("part", ["llama.cpp", "flash", "f16", "digest"])
def test_a_key_holds_what_kv_depends_on(make: Callable[..., CacheClipEngine], chunks: list[str], part: str) -> None:
    engine = make(**CACHECLIP)
    engine.precompute(chunks)
    runtime = engine.primary
    written = runtime.fingerprint
    part = written[:64] if part == "digest" else part
    assert part in written
    runtime.fingerprint = written.replace(part, "other")
    try:
        other = make(**CACHECLIP)
        caches, changed = engine.parts.caches_after_prefix, runtime.fingerprint
        runtime.fingerprint = written
        key = caches.key(chunks[0])
        runtime.fingerprint = changed
        assert other.parts.caches_after_prefix.key(chunks[0]) != key
    finally:
        runtime.fingerprint = written
