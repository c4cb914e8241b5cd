"""Answers with a penalty are not full prefill's choice, and are held against it nowhere: one test for every penalty."""

from dataclasses import fields
from typing import Any

import pytest

from cacheclip_rag import SamplingParams
from cacheclip_rag.guards.shadow import ShadowChecker
from tests.conftest import CHUNKS, Make, Patch, rag_prompt

PENALTIES = {each.name: each.default + 2.0 for each in fields(SamplingParams) if each.name.endswith("_penalty")}
"""A strong value of each."""
PROMPT = rag_prompt(CHUNKS)


@pytest.fixture
def watched(monkeypatch: Patch) -> list[bool]:
    """Whether the answers that count for the promise differ."""
    found: list[bool] = []
    monkeypatch.setattr(ShadowChecker, "_count", lambda checker, method, *, differs: found.append(differs))
    return found


def test_there_are_penalties() -> None:
    assert "repetition_penalty" in PENALTIES


@pytest.mark.some(3)
@pytest.mark.parametrize("name", [*PENALTIES, None])
@pytest.mark.parametrize("finish", ["verify", "revise"])
def test_finish(make: Make, watched: list[bool], finish: str, name: str | None) -> None:
    """The twin without a penalty is verified, and differs from the answers with one."""
    engine = make(stored=CHUNKS, method="direct", shadow_rate=1.0)
    options: dict[str, Any] = {name: PENALTIES[name]} if name is not None else {}
    given = engine.generate(PROMPT, max_tokens=12, **options)
    assert engine.wait_for_observers()
    engine.prefixes.clear()
    before = engine.metrics.snapshot()
    answer = engine.generate(PROMPT, max_tokens=12, finish=finish, **options)
    assert engine.wait_for_observers()
    after = engine.metrics.snapshot()
    compared = [metrics.get("shadow_greedy_checks_total", 0) for metrics in (before, after)]
    if name is None:
        assert answer.stats.verified_tokens is not None and compared == [1, 2] and watched == [True]
        return
    assert compared == [0, 0] and after["shadow_checks_total"] == 2 and watched == []
    engine.prefixes.clear()
    greedy = engine.generate(PROMPT, max_tokens=12)
    engine.close()  # drops its comparison
    assert given.token_ids != greedy.token_ids, "choose another prompt"
    assert answer.token_ids == given.token_ids and answer.stats.verified_tokens is answer.stats.diverged_at is None


@pytest.mark.parametrize("name", [*PENALTIES, None])
def test_the_confidence_gate(make: Make, watched: list[bool], name: str | None) -> None:
    engine = make(stored=CHUNKS, method="cacheclip", recompute_ratio=0.2, min_confidence=1.0, shadow_rate=1.0)
    options: dict[str, Any] = {name: PENALTIES[name]} if name is not None else {}
    answer = engine.generate(PROMPT, max_tokens=12, **options)
    assert engine.wait_for_observers() and answer.stats.gated
    assert watched == ([False] if name is None else [])
