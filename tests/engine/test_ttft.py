"""The time to the first token counts everything between the call and that token, and nothing after it."""

from typing import Any

import pytest
import transformers
from fake_time import FakeTime

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.answering import verification
from cacheclip_rag.base import clock
from tests.conftest import CHUNKS, QUESTION, Make, Patch, rag_prompt

PARAMS = SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, seed=0)


@pytest.fixture
def stored(make: Make) -> CacheClipEngine:
    """An engine that has answered before: nothing is left to load."""
    engine = make(stored=CHUNKS, method="direct")
    engine.generate(rag_prompt(CHUNKS), PARAMS)
    return engine


class Clock(FakeTime):
    """Stands still but for slow parts, whose calls take a second each."""

    def __init__(self, monkeypatch: Patch) -> None:
        super().__init__(monkeypatch, clock)
        self._patch = monkeypatch

    def slow(self, part: Any, name: str) -> None:
        """Calls of a part's method take a second."""
        ordinary = getattr(part, name)

        def slowly(*args: Any, **options: Any) -> Any:
            self.perf_counter()
            self.sleep(1.0)
            return ordinary(*args, **options)

        self._patch.setattr(part, name, slowly)

    def times(self, engine: CacheClipEngine, method: str) -> tuple[float, float]:
        """Time to the first token and time of the others, as they are told; their sum is the time of the call."""
        engine.prefixes.clear()
        begin = self.perf_counter()
        stats = engine.generate(rag_prompt(CHUNKS), PARAMS, method=method).stats
        assert stats.generated_tokens == PARAMS.max_tokens
        assert stats.ttft_s + stats.decode_s == self.perf_counter() - begin
        return stats.ttft_s, stats.decode_s


@pytest.fixture
def time(monkeypatch: Patch) -> Clock:
    return Clock(monkeypatch)


class Slow:
    """A tokenizer that takes a second for the question alone, which stands in no stored chunk."""

    def __init__(self, tokenizer: Any, time: Clock) -> None:
        self.tokenizer, self._time = tokenizer, time

    def __call__(self, text: str, **options: Any) -> Any:
        self._time.perf_counter()
        self._time.sleep(1.0 * (QUESTION in text))
        return self.tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def slow_tokenizers(runtime: Any, time: Clock, monkeypatch: Patch) -> None:
    for name in ("tokenizer", "text_tokenizer"):
        monkeypatch.setattr(runtime, name, Slow(getattr(runtime, name), time))


@pytest.mark.parametrize("method", ["full", "direct"])
def test_tokenising_counts(stored: CacheClipEngine, time: Clock, monkeypatch: Patch, method: str) -> None:
    slow_tokenizers(stored.primary, time, monkeypatch)
    assert time.times(stored, method) == (1.0, 0.0)


@pytest.mark.parametrize("method", ["full", "direct"])
def test_sampling_the_first_token_counts_and_the_others_do_not(
    stored: CacheClipEngine, time: Clock, method: str
) -> None:
    time.slow(transformers.TopPLogitsWarper, "__call__")
    assert time.times(stored, method) == (1.0, PARAMS.max_tokens - 1)


@pytest.mark.parametrize(("method", "seconds"), [("full", 2.0), ("direct", 3.0)])
def test_looking_things_up_counts(stored: CacheClipEngine, time: Clock, method: str, seconds: float) -> None:
    """Stored texts, and the prefix cache; a plan that reuses chunks looks there too, before its prefill does."""
    time.slow(stored.texts.index, "find")
    time.slow(stored.prefixes, "match")
    assert time.times(stored, method) == (seconds, 0.0)


@pytest.mark.some(2)
@pytest.mark.parametrize("finish", ["none", "verify", "revise"])
@pytest.mark.parametrize("rows", [8, 10_000], ids=["verified at the end", "verified at once"])
def test_text_that_may_be_withdrawn_is_no_first_token(
    stored: CacheClipEngine, time: Clock, monkeypatch: Patch, rows: int, finish: str
) -> None:
    monkeypatch.setattr(verification, "_BLOCK_ROWS", {"cpu": rows})
    for part in ("fuse", "extend"):
        time.slow(stored.primary, part)
    stored.prefixes.clear()
    begin = time.perf_counter()
    stats = stored.generate(rag_prompt(CHUNKS), max_tokens=3, method="direct", finish=finish).stats
    spent = time.perf_counter() - begin
    assert stats.ttft_s + stats.decode_s == spent
    assert stats.ttft_s == (1.0 if finish != "revise" else 2.0 if rows > 8 else spent)
