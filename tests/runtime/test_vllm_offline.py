"""Offline answers up to the moment in which vLLM gets them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.errors import ConfigurationError, StoreError, UnknownModelError
from cacheclip_rag.runtime.vllm.offline import FusedLLM
from cacheclip_rag.runtime.vllm.planner import Planner
from tests.test_tools import SEARCH

TEXT = "The harbour was built in the year of the great storm, and its lighthouse was lit by hand until the war. " * 3


class Asked:
    """Instead of ``vllm.LLM``: remembers what it was asked."""

    def __init__(self, model: str) -> None:
        config = SimpleNamespace(
            model_config=SimpleNamespace(model=model, quantization=None),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)
        self.inputs: list[list[int]] = []
        self.carried: list[Any] = []
        self.sizes: list[int] = []
        """Prompts of each call."""

    def generate(self, inputs: Any, params: Any, **options: Any) -> list[Any]:
        self.sizes.append(len(inputs))
        self.inputs = [each["prompt_token_ids"] for each in inputs]
        self.carried = [(each.extra_args or {}).get("kv_transfer_params") for each in params]
        return [SimpleNamespace(kv_transfer_params=None) for _ in inputs]


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


def test_a_handoff_of_a_prompt_with_tools(options: dict[str, Any], tmp_path: Path) -> None:
    engine, planner = CacheClipEngine(**options), Planner(**options)
    llm = Asked(options["primary"])
    fused = FusedLLM(llm, planner, engine=engine, handoffs=tmp_path / "handoffs")
    asked = ask(fused, [messages("Who?")], method="cacheblend", tools=[SEARCH])
    assert not fused.plain and asked.carried[0], "fused by the engine, which sees the tools too"


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


class TestHandoffs:
    @pytest.fixture
    def fused(self, options: dict[str, Any], tmp_path: Path) -> FusedLLM:
        engine, planner = CacheClipEngine(**options), Planner(**options)
        return FusedLLM(Asked(options["primary"]), planner, engine=engine, handoffs=tmp_path / "handoffs")

    def test_few_exist_at_once(self, fused: FusedLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM gets the prompts in slices, and each slice's handoffs are deleted after it."""
        counts: list[int] = []
        sizes: list[int] = []
        generate = fused.llm.generate

        def noting(*args: Any, **given: Any) -> list[Any]:
            sizes.extend(path.stat().st_size for path in (tmp_path / "handoffs").iterdir())
            counts.append(len(list((tmp_path / "handoffs").iterdir())))
            return list(generate(*args, **given))

        monkeypatch.setattr(fused.llm, "generate", noting)
        prompts = [messages(f"Question {number}?") for number in range(5)]
        assert ask(fused, prompts, method="cacheblend").sizes == [5]
        assert counts == [5] and list((tmp_path / "handoffs").iterdir()) == []
        monkeypatch.setattr("cacheclip_rag.runtime.vllm.offline._MAX_HANDOFF_BYTES", max(sizes) + 1)
        assert len(fused.generate(prompts, SimpleNamespace(extra_args=None), method="cacheblend")) == 5
        assert fused.llm.sizes == [5, 2, 2, 1] and counts == [5, 2, 2, 1]
        assert fused.generate([], SimpleNamespace(extra_args=None)) == []

    def test_a_full_folder_is_plain_prefill(self, fused: FusedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: Any, **given: Any) -> None:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("cacheclip_rag.tensor_files.save_file", full)
        asked = ask(fused, [messages("Who?"), messages("When?")], method="cacheblend")
        assert asked.carried == [None, None]
        assert fused.plain == {"fusing failed (SafetensorError: I/O error: No space left on device (os error 28))": 2}

    def test_what_a_killed_process_left(self, options: dict[str, Any], tmp_path: Path) -> None:
        folder = tmp_path / "handoffs"
        folder.mkdir()
        old, new = f"{'0' * 32}.safetensors", f"{'1' * 32}.safetensors"
        for name in (old, new, ".tmp-1.safetensors", "model.safetensors"):
            (folder / name).write_bytes(b"")
            if name != new:
                os.utime(folder / name, (0, 0))
        FusedLLM(Asked(options["primary"]), Planner(**options), engine=CacheClipEngine(**options), handoffs=folder)
        assert {path.name for path in folder.iterdir()} == {new, "model.safetensors"}
