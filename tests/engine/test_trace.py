"""An answer's trace: what was scored, what was computed again, and how long each layer took."""

from __future__ import annotations

import pytest

from cacheclip_rag import CacheClipEngine, SamplingParams
from tests.conftest import CHUNKS, rag_prompt

SHORT = SamplingParams(max_tokens=2)


@pytest.mark.parametrize("method", ["cacheclip", "anchored", "epic", "cacheblend"])
def test_it_agrees_with_the_statistics(engine: CacheClipEngine, method: str) -> None:
    engine.precompute(CHUNKS, method=method)
    answer = engine.generate(rag_prompt(CHUNKS), SHORT, method=method, recompute_ratio=0.3, trace=True)
    trace, stats = answer.trace, answer.stats
    assert trace is not None
    assert len(trace.token_ids) == stats.prompt_tokens and len(trace.chunks) == stats.hits == len(CHUNKS)
    inside = [n for n in trace.recomputed if any(start <= n < stop for start, stop in trace.chunks)]
    assert len(inside) == len(trace.recomputed) == stats.recomputed_tokens
    assert len(trace.layer_s) == engine.primary.num_layers
    assert all(seconds > 0 for seconds in trace.layer_s) and sum(trace.layer_s) <= stats.ttft_s


def test_scores_are_those_that_chose(engine: CacheClipEngine) -> None:
    """Single tokens by place in the chunk: every recomputed token scores above every other."""
    engine.precompute(CHUNKS)
    trace = engine.generate(rag_prompt(CHUNKS), SHORT, method="epic", recompute_ratio=0.3, trace=True).trace
    assert trace is not None and trace.scores[0] == (), "the first chunk is exact behind the prefix: nothing is scored"
    chosen, others = [], []
    for (start, stop), scores in list(zip(trace.chunks, trace.scores, strict=True))[1:]:
        assert len(scores) == stop - start
        for place, score in enumerate(scores):
            (chosen if start + place in trace.recomputed else others).append(score)
    assert min(chosen) >= max(others) - 1 and max(chosen) > min(others)


def test_none_unless_asked_for(engine: CacheClipEngine) -> None:
    engine.precompute(CHUNKS)
    assert engine.generate(rag_prompt(CHUNKS), SHORT).trace is None
    assert engine.generate(rag_prompt(CHUNKS), SHORT, method="full", trace=True).trace is None
