"""An answer's trace: what was computed again."""

from __future__ import annotations

import pytest

from cacheclip_rag import CacheClipEngine, SamplingParams
from tests.conftest import CHUNKS, rag_prompt

SHORT = SamplingParams(max_tokens=2)


@pytest.mark.parametrize("method", ["cacheclip", "anchored", "epic"])
def test_it_agrees_with_the_statistics(engine: CacheClipEngine, method: str) -> None:
    engine.precompute(CHUNKS, method=method)
    answer = engine.generate(rag_prompt(CHUNKS), SHORT, method=method, recompute_ratio=0.3, trace=True)
    trace, stats = answer.trace, answer.stats
    assert trace is not None
    assert len(trace.token_ids) == stats.prompt_tokens and len(trace.chunks) == stats.hits == len(CHUNKS)
    inside = [n for n in trace.recomputed if any(start <= n < stop for start, stop in trace.chunks)]
    assert len(inside) == len(trace.recomputed) == stats.recomputed_tokens


def test_none_unless_asked_for(engine: CacheClipEngine) -> None:
    engine.precompute(CHUNKS)
    assert engine.generate(rag_prompt(CHUNKS), SHORT).trace is None
    assert engine.generate(rag_prompt(CHUNKS), SHORT, method="full", trace=True).trace is None
