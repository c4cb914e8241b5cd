"""An answer's trace, and the phases of its first token."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, SamplingParams, StoreError, Trace
from cacheclip_rag.base import clock
from cacheclip_rag.guards.base import Observer
from cacheclip_rag.store import ReadAhead, Sources
from tests.conftest import CHUNKS, rag_prompt

SHORT = SamplingParams(max_tokens=2)


def traced(engine: CacheClipEngine, prompt: Any, **options: Any) -> Trace:
    trace = engine.generate(prompt, SHORT, trace=True, **options).trace
    assert trace is not None
    assert [0, *(span.stop for span in trace.spans)] == [*(span.start for span in trace.spans), len(trace.token_ids)]
    return trace


@pytest.mark.parametrize("method", ["cacheclip", "epic-corrected", "epic"])
def test_it_agrees_with_the_statistics(engine: CacheClipEngine, method: str) -> None:
    engine.precompute(CHUNKS, method=method, source="a node", document="a.md")
    answer = engine.generate(rag_prompt(CHUNKS), SHORT, method=method, recompute_ratio=0.3, trace=True)
    trace, stats = answer.trace, answer.stats
    assert trace is not None and not trace.is_exact and trace.turns == 0
    assert len(trace.token_ids) == stats.prompt_tokens and len(trace.chunks) == stats.hits == len(CHUNKS)
    inside = [n for n in trace.recomputed if any(start <= n < stop for start, stop in trace.chunks)]
    assert len(inside) == len(trace.recomputed) == stats.recomputed_tokens
    chunks = [span for span in trace.spans if span.kind == "chunk"]
    assert tuple((span.start, span.stop) for span in chunks) == trace.chunks
    assert [trace.texts[span.text].text for span in chunks if span.text is not None] == CHUNKS
    assert all(text.medium in ("page cache", "disk") and text.is_stored for text in trace.texts)
    assert {text.sources for text in trace.texts} == {(("a node", "a.md"),)}
    scored = [span for span in chunks if not span.is_exact]
    assert all(len(span.scores) == span.stop - span.start for span in scored)
    sums = [sum(span.scores) for span in scored]
    assert [span.score_share for span in scored] == pytest.approx([each / sum(sums) for each in sums])
    _, best = max((score, span.start + n) for span in scored for n, score in enumerate(span.scores))
    assert best in trace.recomputed and json.loads(json.dumps(trace.to_dict()))["chunks"]


def test_what_earlier_prompts_left(engine: CacheClipEngine) -> None:
    engine.precompute(CHUNKS)
    first = traced(engine, rag_prompt(CHUNKS), recompute_ratio=0.3)
    assert {span.kind for span in first.spans} == {"prefix", "chunk", "fresh"}
    again = traced(engine, rag_prompt(CHUNKS) + " And then?", recompute_ratio=0.3)
    continued = [span for span in again.spans if span.kind == "continued"]
    assert continued and again.turns == 1 and not all(span.is_exact for span in continued)
    assert all(text.medium is None for text in again.texts), "nothing was read"


def test_tokens_are_the_whole_prompt(engine: CacheClipEngine) -> None:
    trace = traced(engine, [{"role": "user", "content": "Zürich’s 🦀 seen?"}], method="full")
    control = "".join("".join(trace.tokens[span.start : span.stop]) for span in trace.spans if span.is_control)
    user = "".join("".join(trace.tokens[span.start : span.stop]) for span in trace.spans if not span.is_control)
    assert len(trace.tokens) == len(trace.token_ids) and "Zürich’s 🦀 seen?" in user and "<" in control
    assert trace.is_exact and not trace.chunks and not trace.recomputed


def test_without_a_reused_chunk(engine: CacheClipEngine) -> None:
    engine.precompute(CHUNKS[:1])
    assert engine.generate(rag_prompt(CHUNKS), SHORT).trace is None
    trace = traced(engine, rag_prompt(CHUNKS), method="prefix", documents=CHUNKS[:2])
    assert {text.text: text.is_stored for text in trace.texts} == {CHUNKS[0]: True, CHUNKS[1]: False}
    named = {trace.texts[span.text].text for span in trace.spans if span.text is not None}
    assert trace.is_exact and named == {*CHUNKS[:2]}


def test_an_answer_is_not_lost_with_its_trace(engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise StoreError("the catalog is locked")

    monkeypatch.setattr(Sources, "holders", busy)
    engine.precompute(CHUNKS)
    answer = engine.generate(rag_prompt(CHUNKS), SHORT, trace=True)
    assert answer.trace is None and answer.stats.hits == len(CHUNKS)


class Slow(Observer):
    def __init__(self, tick: Any) -> None:
        self.on_plan = tick  # type: ignore[method-assign]


@pytest.mark.parametrize("method", ["cacheclip", "prefix"])
def test_phases_are_the_whole_time(engine: CacheClipEngine, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only planted work moves: observers, the end of reading, what is kept for later prompts."""
    now = 0.0

    def tick(*_: Any, **__: Any) -> None:
        nonlocal now
        now += 1.0

    engine.precompute(CHUNKS)
    engine.generate(rag_prompt(CHUNKS), SHORT, method=method)
    engine.prefixes.clear()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    close, insert = ReadAhead.close, engine.prefixes.insert
    monkeypatch.setattr(ReadAhead, "close", lambda self, *_: (tick(), close(self))[1])
    monkeypatch.setattr(type(engine.prefixes), "insert", lambda self, *a, **k: (tick(), insert(*a, **k))[1])
    engine.observers.append(Slow(tick))
    stats = engine.generate(rag_prompt(CHUNKS), SHORT, method=method).stats
    assert stats.ttft_s >= 2 + (method != "prefix")
    assert sum(stats.phases_s.values()) + stats.queued_s == stats.ttft_s
    assert stats.phases_s["first"] >= 1
