"""The time to the first token counts everything between the call and that token, and nothing after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import transformers

from cacheclip_rag import CacheClipEngine, SamplingParams
from tests.conftest import CHUNKS, QUESTION, rag_prompt

SLEEP_S = 0.4
"""Far more than all else takes: what a slowed part is told by."""
PARAMS = SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, seed=0)


@pytest.fixture
def stored(make: Callable[..., CacheClipEngine]) -> CacheClipEngine:
    """An engine that has answered before: nothing is left to load."""
    engine = make(method="direct")
    engine.precompute(CHUNKS)
    engine.generate(rag_prompt(CHUNKS), PARAMS)
    return engine


def timed(engine: CacheClipEngine, method: str) -> tuple[float, float]:
    """Time to the first token as it is told, and the seconds of the whole call."""
    engine.prefixes.clear()
    started = time.perf_counter()
    answer = engine.generate(rag_prompt(CHUNKS), PARAMS, method=method)
    elapsed = time.perf_counter() - started
    assert answer.stats.generated_tokens == PARAMS.max_tokens
    return answer.stats.ttft_s, elapsed


class Slow:
    """A tokenizer that takes its time for the question alone, which stands in no stored chunk."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        if QUESTION in text:
            time.sleep(SLEEP_S)
        return self.tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def slow_down(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tokenizer", "text_tokenizer"):
        monkeypatch.setattr(runtime, name, Slow(getattr(runtime, name)))


@pytest.mark.parametrize("method", ["full", "direct"])
def test_tokenising_counts(stored: CacheClipEngine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    slow_down(stored.primary, monkeypatch)
    ttft_s, elapsed = timed(stored, method)
    assert SLEEP_S <= ttft_s <= elapsed


def test_tokenising_for_the_auxiliary_counts(
    make: Callable[..., CacheClipEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the question with a tokenizer of its own."""
    engine = make(method="cacheclip")
    engine.precompute(CHUNKS)
    engine.generate(rag_prompt(CHUNKS), PARAMS)
    slow_down(engine.auxiliary, monkeypatch)
    ttft_s, elapsed = timed(engine, "cacheclip")
    assert SLEEP_S <= ttft_s <= elapsed


@pytest.mark.parametrize("method", ["full", "direct"])
def test_sampling_the_first_token_counts_and_the_others_do_not(
    stored: CacheClipEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    choose = transformers.TopPLogitsWarper.__call__

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        time.sleep(SLEEP_S)
        return choose(self, *args, **options)

    monkeypatch.setattr(transformers.TopPLogitsWarper, "__call__", slow)
    ttft_s, elapsed = timed(stored, method)
    assert SLEEP_S <= ttft_s <= elapsed - (PARAMS.max_tokens - 1) * SLEEP_S


def test_reading_the_store_counts(stored: CacheClipEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    get_each = stored.store.get_each

    def slow(*args: Any, **options: Any) -> Any:
        for found in get_each(*args, **options):
            time.sleep(SLEEP_S)
            yield found

    monkeypatch.setattr(stored.store, "get_each", slow)
    ttft_s, _ = timed(stored, "direct")
    assert ttft_s >= len(CHUNKS) * SLEEP_S


@pytest.mark.parametrize("method", ["full", "direct"])
def test_finding_stored_texts_counts(stored: CacheClipEngine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    _slow(monkeypatch, stored.library.index, "find")
    ttft_s, elapsed = timed(stored, method)
    assert SLEEP_S <= ttft_s <= elapsed


@pytest.mark.parametrize("method", ["full", "direct"])
def test_asking_the_prefix_cache_counts(stored: CacheClipEngine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    _slow(monkeypatch, stored.prefixes, "match")
    ttft_s, elapsed = timed(stored, method)
    assert SLEEP_S <= ttft_s <= elapsed


def _slow(monkeypatch: pytest.MonkeyPatch, part: Any, name: str) -> None:
    ordinary = getattr(part, name)

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(SLEEP_S)
        return ordinary(*args, **options)

    monkeypatch.setattr(part, name, slow)
