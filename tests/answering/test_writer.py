"""Chunks are written in batches: the same KV, sources and errors as one by one."""

import itertools
import sqlite3
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, ConfigurationError, PromptTooLongError, SamplingParams, StoreError
from cacheclip_rag.chunks.batches import in_batches
from tests.conftest import CHUNKS, SENTENCES, Models, Patch, rag_prompt, raising, spied


def test_batches_keep_the_order_and_the_limits(monkeypatch: Patch) -> None:
    texts = ["a" * 3000, *["b" * 1000] * 5, "c", "d" * 2400]
    batches = list(in_batches(texts, str))
    assert [text for batch in batches for text in batch] == texts
    assert [len(batch) for batch in batches] == [1, 2, 2, 2, 1]
    monkeypatch.setattr("cacheclip_rag.chunks.batches._TEXTS", 3)
    assert [len(batch) for batch in in_batches("abcdefg", str)] == [3, 3, 1]
    assert list(in_batches([], str)) == []


def test_items_are_taken_when_they_are_needed() -> None:
    numbers = itertools.count()
    next(in_batches(("x" * 1000 for _ in numbers), str))
    assert next(numbers) == 3


@pytest.fixture
def calls(engine: CacheClipEngine, monkeypatch: Patch) -> list[tuple[Any, ...]]:
    """Calls of the primary's ``encode_many``."""
    return spied(monkeypatch, engine.primary, "encode_many")


def test_a_text_that_is_released_while_an_answer_stores_it_is_not_stored(
    engine: CacheClipEngine, tiny_models: Models, monkeypatch: Patch
) -> None:
    engine.precompute(CHUNKS)
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    other = CacheClipEngine(**models, store=engine.config.store, method="cacheclip", chunk_context="passages")
    calls = spied(monkeypatch, other.primary, "encode_many", lambda *_: calls or engine.release(CHUNKS[:1]))
    other.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=1))
    stored = [other.is_stored(chunk) for chunk in CHUNKS]
    assert stored == [False, True, True, True] and not other.texts.index.known(CHUNKS[0])


def test_chunks_wait_as_long_as_another_process_has_the_catalog(engine: CacheClipEngine, monkeypatch: Patch) -> None:
    cause, busy = sqlite3.OperationalError("database is locked"), StoreError("another process uses the catalog")
    cause.sqlite_errorcode, busy.__cause__ = sqlite3.SQLITE_BUSY, cause
    few = SamplingParams(max_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.store, "check_writable", raising(busy))
        engine.generate(rag_prompt(CHUNKS[:1]), few, documents=CHUNKS[:1])
        engine.generate("Hello", few)
    assert not engine.is_stored(CHUNKS[0])
    engine.generate("Hello", few)
    assert engine.is_stored(CHUNKS[0])


def test_other_machines_hear_of_sources_that_are_removed(engine: CacheClipEngine, monkeypatch: Patch) -> None:
    """Also of those whose texts stay."""
    engine.precompute({CHUNKS[0]: [("n1", "d1"), ("n2", "d2")]})
    told: list[str] = []
    for owner, name in ((engine.texts, "remove_sources"), (engine.store, "commit")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, own=own, name=name: (told.append(name), own(*given))[1])
    engine.release(sources=["d1"])
    assert told and told[-2:] == ["remove_sources", "commit"]


def test_short_texts_are_encoded_together(engine: CacheClipEngine, calls: list[Any]) -> None:
    texts = [*SENTENCES[:4], SENTENCES[0]]
    engine.precompute(SENTENCES[1:2])
    assert [engine.precompute(texts) for _ in range(2)] == [3, 0]
    assert [len(chunks) for chunks, *_ in calls] == [1, 3]
    for caches in engine.chunk_caches():
        prefix = caches.prefix.kv if caches.prefix.kv.shape[3] else None
        for text in SENTENCES[:4]:
            stored = caches.read(text)
            assert stored is not None
            alone = caches.runtime.encode(caches.tokenize(text).ids, prefix)
            tolerance = 0.02 if caches.is_lossy else 1e-4
            torch.testing.assert_close(stored.tensor().to(alone.dtype), alone, rtol=tolerance, atol=tolerance)


def test_a_mapping_names_the_sources(engine: CacheClipEngine) -> None:
    engine.precompute({SENTENCES[0]: [("n1", "d1"), ("n2", "d2")], SENTENCES[1]: [("n3", "d1")], SENTENCES[2]: []})
    assert engine.release(sources=["d1"]) == 1 and not engine.is_stored(SENTENCES[1])
    assert engine.is_stored(SENTENCES[0]) and engine.release(sources=["n2"]) == 1
    assert engine.is_stored(SENTENCES[2])


@pytest.mark.parametrize(
    ("bad", "error"), [("word " * 5000, PromptTooLongError), ("  ", ConfigurationError)], ids=["long", "blank"]
)
def test_what_comes_before_a_bad_text_is_stored(engine: CacheClipEngine, bad: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        engine.precompute([*SENTENCES[:2], bad, SENTENCES[3]])
    assert [engine.is_stored(text) for text in (*SENTENCES[:2], SENTENCES[3])] == [True, True, False]
    assert engine.texts.index.known(SENTENCES[1]) and not engine.texts.index.known(SENTENCES[3])
    assert engine.library is engine.texts, "its earlier name"
