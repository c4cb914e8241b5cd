"""Answers of a server that does not tell which chunks are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from cacheclip_serve.hidden import SEEN, without_hits
from cacheclip_testing.plugin import CHUNKS, rag_prompt
from serve_cases import Served, running

from cacheclip_rag import Answer, EngineConfig, Event, FusionStats

ASKED = {"method": "epic", "nominal_ratio": 0.2, "finish": "none"}
TIMES = ("ttft_s", "decode_s", "queued_s")


def stats(number: int) -> FusionStats:
    """Every field has a value of its own, also those of later versions."""
    numbers: dict[str, Any] = {each.name: number + place for place, each in enumerate(fields(FusionStats))}
    return FusionStats(**numbers)


def shown(given: FusionStats) -> dict[str, Any]:
    [event] = without_hits(iter([Event("", Answer("", (), "stop", given))]), **ASKED)
    assert event.answer is not None and event.answer.trace is None
    return event.answer.stats.to_dict()


def test_all_is_hidden_but_what_is_listed() -> None:
    one = stats(100)
    other = replace(stats(900), **{name: getattr(one, name) for name in SEEN})
    assert shown(one) == shown(other)
    assert set(shown(one)) == set(one.to_dict()), "fields stay"
    for name in SEEN:
        assert shown(replace(one, **{name: 7}))[name] == 7


def test_the_twin_a_listed_statistic_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheclip_serve.hidden.SEEN", (*SEEN, "confidence"))
    assert shown(stats(100)) != shown(replace(stats(100), confidence=0.5))


def test_finality_does_not_tell_hits() -> None:
    """Only an answer from reused chunks can be revised, but every stream says that it may be."""
    events = [Event("a"), Event("b", Answer("ab", (), "stop", stats(1)))]
    assert [each.is_final for each in without_hits(iter(events), **{**ASKED, "finish": "revise"})] == [False, True]
    assert [each.is_final for each in without_hits(iter(events), **ASKED)] == [True, True]


@pytest.fixture(scope="module")
def hiding(config: EngineConfig) -> Iterator[Served]:
    with running(replace(config, on_miss="ignore", prefix_cache_bytes=0), hide_hits=True) as found:
        yield found


class TestServer:
    @pytest.mark.parametrize("field", [{}, {"method": "direct"}, {"ratio": 0.5}, {"finish": "verify"}, {"trace": True}])
    def test_the_same_with_and_without_hits(self, hiding: Served, field: dict[str, Any]) -> None:
        seen = []
        for _ in range(2):
            body = hiding.chat(rag_prompt(CHUNKS), cacheclip={**field, "documents": CHUNKS}).json()
            found = body["cacheclip"]
            for name in TIMES:
                assert found.pop(name) >= 0
            seen.append((found, body["usage"]))
            hiding.engine.precompute(CHUNKS)
        assert seen[0] == seen[1] and seen[0][1]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert seen[0][0]["method"] == field.get("method", hiding.engine.make_method().name)
        method = hiding.engine.make_method(field.get("method"), field.get("ratio"))
        assert seen[0][0]["nominal_ratio"] == method.nominal_ratio
        hiding.engine.release(CHUNKS)

    def test_logprobs_would_tell(self, hiding: Served) -> None:
        refused = hiding.chat(logprobs=True)
        assert refused.status_code == 400 and "which chunks are stored" in refused.json()["error"]["message"]

    def test_operators_see_them(self, hiding: Served) -> None:
        hiding.engine.precompute(CHUNKS[:2])
        before = hiding.engine.metrics.snapshot().get("chunk_hits_total", 0)
        hiding.chat(rag_prompt(CHUNKS[:3]))
        assert hiding.engine.metrics.snapshot()["chunk_hits_total"] == before + 2
