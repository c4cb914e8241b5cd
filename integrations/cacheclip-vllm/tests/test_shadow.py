"""Shadow checks of vLLM's answers: which are compared, with what, and what is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cacheclip_vllm.shadow import SHADOW_TOKENS, Shadow

from cacheclip_rag.guards import Metrics

GREEDY = {"temperature": 0, "n": 1, "max_tokens": 64, "logprobs": 5, "prompt_logprobs": None}
GREEDY["structured_outputs"] = None
CARRIED = {"kv_transfer_params": {"cacheclip": {}}, "other": 1}


def params(**changed: Any) -> Any:
    return SimpleNamespace(**{**GREEDY, "extra_args": CARRIED, **changed})


def test_which_answers() -> None:
    shadow = Shadow(1.0, Metrics())
    assert shadow.chooses(params(), "fused") and shadow.chooses(params(), "cached")
    assert not shadow.chooses(params(), "plain") and not shadow.chooses(params(), None)
    for changed in ({"temperature": 0.7}, {"n": 2}, {"structured_outputs": object()}, {"prompt_logprobs": 1}):
        assert not shadow.chooses(params(**changed), "fused")
    assert not any(Shadow(0.0, Metrics()).chooses(params(), "fused") for _ in range(100))
    chosen = sum(Shadow(0.3, Metrics()).chooses(params(), "fused") for _ in range(2000))
    assert 450 < chosen < 750


def test_which_answers_of_a_server() -> None:
    shadow, body = Shadow(1.0, Metrics()), {"temperature": 0, "messages": []}
    for same in ({}, {"n": None}, {"tools": []}, {"logprobs": False}, {"response_format": {"type": "text"}}):
        assert shadow.chooses({**body, **same}, "fused"), same
    fields = ({"temperature": None}, {"temperature": 1}, {"n": 2}, {"tools": [{}]}, {"logprobs": True}, {"logprobs": 2})
    for changed in (*fields, {"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}):
        assert not shadow.chooses({**body, **changed}, "fused"), changed
    assert not shadow.chooses({"messages": []}, "fused")


def test_the_plain_request() -> None:
    shadow, given = Shadow(1.0, Metrics()), params()
    plain = shadow.params(given, 5)
    assert (plain.max_tokens, plain.logprobs, plain.extra_args) == (5, None, {"other": 1})
    assert given.max_tokens == 64 and "kv_transfer_params" in given.extra_args, "the answer's own are left alone"
    assert shadow.params(given, 64).max_tokens == SHADOW_TOKENS
    assert shadow.params(params(extra_args=None), 0).max_tokens == 1


@pytest.mark.parametrize(
    ("answer", "plain", "agreement", "other_first"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0, 0),
        ([1, 2, 3, 4], [1, 2, 9, 4], 0.5, 0),
        ([1, 2, 3, 4], [9, 2, 3, 4], 0.0, 1),
        ([1, 2, 3, 4], [1], 0.25, 0),
        ([1, *range(40)], [1, *range(40)], 1.0, 0),
    ],
)
def test_what_is_counted(
    answer: list[int], plain: list[int], agreement: float, other_first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that begins otherwise is a warning."""
    metrics = Metrics()
    with caplog.at_level("INFO"):
        assert Shadow(1.0, metrics).record(answer, plain[:SHADOW_TOKENS], method="epic") == agreement
    assert [each.levelname for each in caplog.records] == ["WARNING" if other_first else "INFO"]
    counts = {"checks_total": 1, "greedy_checks_total": 1, "agreement_sum": agreement}
    counts["other_first_token_total"] = other_first
    assert metrics.snapshot() == {f"shadow_{name}": count for name, count in counts.items()}
    assert f"cacheclip_shadow_agreement_sum {agreement:g}" in metrics.to_prometheus()
