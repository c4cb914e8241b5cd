"""Offline answers up to the moment in which vLLM gets them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cacheclip_vllm import offline
from cacheclip_vllm.offline import FusedLLM
from cacheclip_vllm.planner import Planner
from vllm_cases import SEARCH

from cacheclip_rag import CacheClipEngine, ConfigurationError, StoreError, UnknownModelError
from cacheclip_rag.methods import preset

TEXT = "The harbour was built in the year of the great storm, and its lighthouse was lit by hand until the war. " * 3


class Asked:
    """Instead of ``vllm.LLM``: remembers what it was asked."""

    def __init__(self, model: str) -> None:
        config = SimpleNamespace(
            model_config=SimpleNamespace(model=model, quantization=None),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            device_config=SimpleNamespace(device_type="cpu"),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)
        self.inputs: list[list[int]] = []
        self.carried: list[Any] = []

    def generate(self, inputs: Any, params: Any, **options: Any) -> list[Any]:
        self.inputs = [each["prompt_token_ids"] for each in inputs]
        self.carried = [(each.extra_args or {}).get("kv_transfer_params") for each in params]
        return [SimpleNamespace(kv_transfer_params=None, num_cached_tokens=0) for _ in inputs]


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever version is installed, if any."""
    monkeypatch.setattr(offline, "is_tried", lambda: True)


@pytest.fixture
def options(tool_model: str, tmp_path: Path) -> dict[str, Any]:
    found = {"primary": tool_model, "auxiliary": None, "store": str(tmp_path / "store"), "method": "epic"}
    CacheClipEngine(**found).precompute([TEXT])
    return found


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{TEXT}\n\n{question}"}]


def ask(fused: FusedLLM, prompts: list[Any], **given: Any) -> Asked:
    fused.generate(prompts, SimpleNamespace(extra_args=None), **given)
    found: Asked = fused.llm
    return found


@pytest.mark.parametrize("error", [StoreError("planted"), UnknownModelError("planted"), OSError("planted")])
def test_a_plan_that_fails_is_plain_prefill(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Of the batch, the other prompts are fused."""
    planner = Planner(**options)
    prompts = [messages("Who?"), messages("When?"), "What?", messages("Where?")]
    plan = planner.plan
    expected = [list(plan(each, tools=[SEARCH]).token_ids) for each in prompts]

    def failing(prompt: Any, **given: Any) -> Any:
        if prompt in prompts[1:3]:
            raise error
        return plan(prompt, **given)

    monkeypatch.setattr(planner, "plan", failing)
    fused = FusedLLM(Asked(options["primary"]), planner)
    with caplog.at_level(logging.WARNING):
        asked = ask(fused, prompts, tools=[SEARCH])
    assert asked.inputs == expected
    assert [each is not None for each in asked.carried] == [True, False, False, True]
    assert fused.plain == {f"planning failed ({type(error).__name__}: planted)": 2}
    assert sum("planted" in record.message for record in caplog.records) == 1, "logged once"


def test_wrong_settings_are_told(options: dict[str, Any]) -> None:
    fused = FusedLLM(Asked(options["primary"]), Planner(**options))
    with pytest.raises(ConfigurationError):
        ask(fused, ["Who?"], recompute_ratio=7.0)


def test_gated_methods_are_plain_prefill(options: dict[str, Any]) -> None:
    fused = FusedLLM(Asked(options["primary"]), Planner(**options))
    gated = replace(preset("epic"), min_confidence=0.5)
    asked = ask(fused, [messages("Who?"), messages("When?")], method=gated, tools=[SEARCH])
    assert asked.carried == [None, None] and len(asked.inputs) == 2
    ((reason, count),) = fused.plain.items()
    assert "min_confidence" in reason and count == 2
    assert ask(fused, [messages("Who?")], tools=[SEARCH]).carried[0], "the twin: epic is fused"
    assert fused.generate([], SimpleNamespace(extra_args=None)) == []
