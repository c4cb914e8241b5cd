"""What is touched of vLLM is there, and a version that was never tried is judged by it and by a tiny answer."""

from __future__ import annotations

from typing import Any

import pytest
from cacheclip_vllm import internals
from cacheclip_vllm.internals import Internal, missing
from cacheclip_vllm.offline import FusedLLM
from vllm_engines import PROMPTS, ask, started

from cacheclip_rag import ConfigurationError


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() == []
    wrong = (
        Internal("vllm.v1.nowhere:Request", ()),
        Internal("vllm.v1.request:Request.gone", ()),
        Internal("vllm.v1.request:Request", ("cache_salt", "pepper")),
        Internal("vllm.forward_context:set_forward_context", ("num_tokens", "num_rows")),
        Internal("vllm.v1.nowhere:Request", ("cache_salt", "thyme"), before="vllm.v1.request:Request"),
    )
    monkeypatch.setattr(internals, "INTERNALS", wrong)
    assert missing() == [
        "vllm.v1.nowhere:Request",
        "vllm.v1.request:Request.gone",
        "vllm.v1.request:Request (pepper)",
        "vllm.forward_context:set_forward_context (num_rows)",
        "vllm.v1.nowhere:Request (thyme)",
    ]


def test_a_version_that_was_never_tried(
    settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cacheclip_vllm.rows import RowRunner

    setting = settings()
    monkeypatch.setattr(internals, "TRIED", ("0.31",))
    run = RowRunner.run

    def otherwise(self: Any, requests: Any) -> Any:
        return run(self, [(ids + 1, *rest) for ids, *rest in requests])

    with started(setting) as fused:
        assert "was never tried" in caplog.text and not fused.plain
        assert ask(fused, PROMPTS[:1], "cacheclip") == setting.expected(PROMPTS[:1], "cacheclip")
        fused.llm.reset_prefix_cache()
        monkeypatch.setattr(RowRunner, "run", otherwise)
        with pytest.raises(ConfigurationError, match="to have plain prefill's answer"):
            FusedLLM(fused.llm, fused.planner)
        monkeypatch.setattr(internals, "INTERNALS", (Internal("vllm.v1.request:Request", ("pepper",)),))
        with pytest.raises(ConfigurationError, match="pepper"):
            FusedLLM(fused.llm, fused.planner)
