"""What a laboratory gets of vLLM's answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cacheclip_vllm import MeasuredVLLM

from cacheclip_rag.planning import PlannedPrompt

INF = float("inf")


def test_the_share_that_was_computed() -> None:
    """Spans of 10 and 5 tokens, of which runs cover 3 and 1; what is computed beside them does not count."""
    spans = [SimpleNamespace(start=10, stop=20), SimpleNamespace(start=30, stop=35)]
    fusion: Any = SimpleNamespace(computed=((0, 12), (15, 16), (20, 31)))
    plan: Any = SimpleNamespace(reused=spans)
    stats: Any = None
    assert PlannedPrompt((), plan, stats, fusion).effective_ratio == pytest.approx(4 / 15)
    for nothing in (PlannedPrompt((), plan, stats), PlannedPrompt((), SimpleNamespace(reused=[]), stats, fusion)):  # type: ignore[arg-type]
        assert nothing.effective_ratio == 1.0


def test_rows_of_flat_logprobs() -> None:
    flat = SimpleNamespace(start_indices=[0, 2], end_indices=[2, 5], token_ids=[3, 0, 1, 2, 0])
    flat.logprobs = [-1.0, -2.0, -3.0, -4.0, -5.0]
    session = MeasuredVLLM(None, None, None, True)  # type: ignore[arg-type]
    vars(session)["vocab_size"] = 4
    output = SimpleNamespace(outputs=[SimpleNamespace(logprobs=flat)])
    assert session._rows(output, True).tolist() == [[-2.0, -INF, -INF, -1.0], [-5.0, -3.0, -4.0, -INF]]
    assert session._rows(output, False).shape == (0, 4)


def test_what_was_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose chunks are not stored is not asked; one that vLLM did not fuse has vLLM's reason."""
    plan = SimpleNamespace(missing_texts=("a",), reused=[])
    fusion = SimpleNamespace(computed=(), digest="d", to_dict=dict)
    planned = PlannedPrompt((1, 2), plan, None, fusion)  # type: ignore[arg-type]
    planner: Any = SimpleNamespace(plan=lambda *_, **__: planned)
    session = MeasuredVLLM(None, planner, None, True)  # type: ignore[arg-type]
    vars(session)["vocab_size"] = 4
    method: Any = SimpleNamespace(reuses_chunks=True)
    assert session.ask("?", method, 1).not_reused == "some chunks were not found in the store"
    plan.missing_texts = ()
    for told, why in (
        ({"cacheclip": {"outcome": "fused"}}, None),
        ({"cacheclip": {"outcome": "plain", "reason": "its KV is gone"}}, "its KV is gone"),
        (None, "vLLM has no connector of this package"),
    ):
        output = SimpleNamespace(kv_transfer_params=told, outputs=[SimpleNamespace(token_ids=[3])])
        monkeypatch.setattr(MeasuredVLLM, "_generate", lambda *_, _output=output, **__: [_output])
        answer = session.ask("?", method, 1, rows=False)
        assert (answer.ids, answer.not_reused) == ([3], why)
    assert torch.equal(answer.rows, torch.empty(0, 4))
