"""Exact KV of prompts in the store: what a restarted engine finds, and what never goes there."""

import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, ConfigurationError
from cacheclip_rag.chunks.stored_prompts import SIZE
from cacheclip_rag.store.eviction import PROMPTS
from tests.conftest import SENTENCES, Make, Patch, spied
from tests.engine.asking import SHORT, logits

LIMIT = 2**30


@pytest.fixture
def prompt() -> str:
    generator = random.Random(3)
    return " ".join(generator.choice(SENTENCES) for _ in range(40)) + "\n\nQuestion: What is the magic number?"


@pytest.fixture
def start(make: Make, tmp_path: Path) -> Make:
    """An engine of a new process."""
    settings = {"store": tmp_path / "kv", "store_prompts": True, "max_bytes": LIMIT, "on_miss": "ignore"}
    return lambda **options: make(**{**settings, **options})


def stored(engine: CacheClipEngine) -> list[str]:
    return engine.store.catalog.keys_of(engine.store.namespace, PROMPTS)


def asked(engine: CacheClipEngine, prompt: Any, method: str = "prefix", **options: Any) -> int:
    """Exact tokens of earlier prompts that it finds; what it leaves is stored."""
    stats = engine.generate(prompt, SHORT, method=method, **options).stats
    assert engine.wait_for_observers()
    return stats.cached_prefix_tokens


def bytes_of_one(engine: CacheClipEngine) -> int:
    entries = engine.store.catalog.entries_of("default", stored(engine)[:1])
    return entries.popitem()[1].num_bytes


class TestRestart:
    def test_a_conversation_goes_on(self, start: Make, prompt: str) -> None:
        first = start()
        assert asked(first, prompt) == 0 and stored(first)
        expected = logits(first, prompt, first.make_method("full")).logits
        later = start()
        found = logits(later, prompt, later.make_method("prefix"))
        assert found.stats.cached_prefix_tokens == found.stats.prompt_tokens // SIZE * SIZE > SIZE
        assert float((found.logits - expected).abs().max()) < 1e-4
        ids = found.layout.token_ids[:SIZE]
        with first.prefixes.match(ids) as left, later.prefixes.match(ids) as right:
            pairs = [*zip(left.parts[0].blocks, right.parts[0].blocks, strict=True)]  # type: ignore[index]
            assert len(pairs) == SIZE // 16 and all((a[key] == b[key]).all() for a, b in pairs for key in a)

    def test_what_another_prompt_shares_with_it(self, start: Make, prompt: str) -> None:
        asked(start(), prompt)
        middle = len(prompt) // 2
        assert SIZE <= asked(start(), prompt[:middle] + " Or else. " + prompt[middle:]) < asked(start(), prompt)
        assert asked(start(), "Or else. " + prompt) < SIZE, "other tokens stand before it"

    def test_what_waits_is_stored_at_the_end(self, start: Make, prompt: str) -> None:
        engine = start()
        engine.parts.kv_sources(engine.make_method()).stored_prompts.add([1] * 5)  # type: ignore[union-attr]
        engine.generate(prompt, SHORT, method="prefix")
        engine.close()
        assert asked(start(), prompt)

    def test_what_a_fused_answer_completed(self, start: Make, prompt: str) -> None:
        """Approximate KV is not stored; what completes it is."""
        chunk = prompt[: len(prompt) // 2]
        engine = start(min_confidence=0.0)
        engine.precompute([chunk])
        asked(engine, "Hello. " + prompt, "direct")
        assert asked(start(), "Hello. " + prompt) == 0
        asked(start(min_confidence=0.0), "Hello. " + prompt, "direct", finish="idle")
        assert asked(start(), "Hello. " + prompt) > SIZE

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        "options", [{"namespace": "others"}, {"dtype": "bfloat16"}, {"store_prompts": False}], ids=str
    )
    def test_not_for_others(self, start: Make, prompt: str, options: dict[str, Any]) -> None:
        asked(start(), prompt)
        assert asked(start(**options), prompt) == 0


class TestErasure:
    def test_released_texts_take_it_along(self, start: Make, prompt: str) -> None:
        engine, other = start(stored=SENTENCES[:1]), start()
        asked(engine, prompt)
        assert stored(engine)
        other.release(["a text that nobody stored"])
        assert not stored(engine), "also by a text that has no entry"
        asked(other, prompt + " And now?")
        assert stored(engine), "what is read after it is stored again"

    def test_what_another_process_erases_meanwhile_is_not_found_again(
        self, start: Make, prompt: str, monkeypatch: Patch
    ) -> None:
        """It erases after the keys were made, and before they are written."""
        engine, other = start(stored=SENTENCES[:1]), start()

        def erase(*_: Any, **options: Any) -> None:
            if options.get("of_prompt"):
                monkeypatch.undo()
                other.release([SENTENCES[0]])

        engine.generate(prompt, SHORT, method="prefix")
        spied(monkeypatch, type(engine.store), "put", erase)
        engine.close()
        assert not stored(engine) and asked(start(), prompt) == 0


class TestStore:
    def test_it_is_evicted_before_chunks(self, start: Make, prompt: str) -> None:
        engine = start()
        engine.precompute(SENTENCES[:4])
        chunks = engine.store.stats().bytes
        asked(engine, prompt)
        before = stored(engine)
        small = start(max_bytes=engine.store.stats().bytes)
        small.precompute(SENTENCES[4:6])
        assert all(map(small.is_stored, SENTENCES[:6])) and small.store.stats().bytes > chunks
        assert 0 < len(stored(small)) < len(before)
        small.prefixes.clear()
        assert asked(start(store_prompts=True), prompt) == SIZE * (len(before) - 1), "its end went first"

    def test_no_more_is_read_than_the_prompt_cache_holds(self, start: Make, prompt: str, monkeypatch: Patch) -> None:
        engine = start()
        asked(engine, prompt)
        small, calls = start(prefix_cache_bytes=2 * bytes_of_one(engine)), spied(monkeypatch, type(engine.store), "get")
        assert asked(small, prompt) == 2 * SIZE
        read = [key for _, key, *_ in calls if key in stored(engine)]
        assert len({*read}) == 2 == len(read)

    def test_a_damaged_entry_is_computed(self, start: Make, prompt: str) -> None:
        engine = start()
        asked(engine, prompt)
        for key in (damaged := stored(engine)):
            path = engine.store.chunk_store.tiers.backends[-1].path_of(key)
            data = bytearray(path.read_bytes())
            data[-9] ^= 1
            path.write_bytes(data)
        later = start()
        assert asked(later, prompt) == 0
        assert not {*damaged} - {*stored(later)}, "it is stored again, under the same key"
        assert later.generate(prompt, SHORT, method="prefix").token_ids == engine.generate(prompt, SHORT).token_ids

    def test_it_takes_no_room_of_chunks(self, start: Make, prompt: str) -> None:
        """Nor does a prompt that has too little room take its own: it would be written for ever."""
        engine = start(stored=SENTENCES[:6])
        chunks = engine.store.stats().bytes
        asked(engine, prompt)
        entry = bytes_of_one(engine)
        engine.release(["nothing"])
        for room in (0, entry, 2 * entry + 1):
            small = start(max_bytes=chunks + room)
            asked(small, prompt + f" Of {room}?")
            small.close()
            assert all(map(small.is_stored, SENTENCES[:6])) and len(stored(small)) <= room // entry

    def test_a_beginning_that_is_evicted_while_the_rest_is_read(
        self, start: Make, prompt: str, monkeypatch: Patch
    ) -> None:
        asked(start(), prompt)
        later = start()
        ids = later.plan(prompt, method="prefix").layout.token_ids[:-1]
        later.parts.kv_sources(later.make_method("prefix")).stored_prompts.restore(ids[:SIZE])

        def evict(*_: Any, **__: Any) -> None:
            while later.prefixes._free:
                later.prefixes._remove(later.prefixes._free.popitem(last=False)[0])

        spied(monkeypatch, type(later.store), "get", evict)
        found = logits(later, prompt, later.make_method("prefix"))
        monkeypatch.undo()
        expected = logits(later, prompt, later.make_method("full")).logits
        assert found.stats.cached_prefix_tokens > SIZE and float((found.logits - expected).abs().max()) < 1e-4

    def test_a_busy_catalog_holds_up_no_answer(self, start: Make, prompt: str, tmp_path: Path) -> None:
        engine = start()
        engine.precompute(SENTENCES[:1])
        with closing(sqlite3.connect(tmp_path / "kv" / "catalog.sqlite3")) as other:
            other.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            asked(engine, prompt)
            asked(engine, "Hello")
            engine.close()
            assert time.monotonic() - began < 10
        assert not stored(start())

    def test_what_it_needs(self, make: Make, tmp_path: Path) -> None:
        for store, expected in ((None, "a folder"), ("s3://bucket/kv", "a folder"), (tmp_path / "kv", "max_bytes")):
            with pytest.raises(ConfigurationError, match=expected):
                make(store=store, store_prompts=True).generate("Hello", SHORT)
