"""The same answers from engines that schedule, compile or divide the work otherwise. Each test starts its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm_engines import CHUNKS, CORRECTED, PROMPTS, Setting, ask, check_against_full, gone, outcomes, outputs, started

METHODS = ["cacheclip", CORRECTED]


def check(setting: Setting, fused: Any) -> None:
    for method in METHODS:
        expected = setting.expected(PROMPTS, method)
        found = outputs(fused, PROMPTS, method)
        assert outcomes(found) == ["fused"] * 4 and not fused.plain
        assert [tuple(each.outputs[0].token_ids) for each in found] == expected
        assert ask(fused, PROMPTS[:2], method) == expected[:2], "a repeat"
    assert ask(fused, PROMPTS, "full") == setting.expected(PROMPTS, "full")


def test_a_shared_store(settings: Any, bucket: str) -> None:  # noqa: F811
    """The planner and the worker read it."""
    from cacheclip_shared.care import create

    create(bucket)
    setting = replace(settings(), store=bucket, options={**settings().options, "store": bucket})
    setting.engine.precompute(CHUNKS)
    with started(setting) as fused:
        check(setting, fused)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 160, "max_num_seqs": 9, "enable_chunked_prefill": True},
        {"enable_prefix_caching": False, "scheduling_policy": "priority", "block_size": 64},
    ],
    ids=["small-passes", "without-prefix-cache"],
)
def test_scheduling(settings: Any, options: dict[str, Any]) -> None:
    """Less room in a step than a prompt has, and few runs in a pass; or no prefix cache."""
    setting = settings()
    with started(setting, **options) as fused:
        check(setting, fused)


@pytest.mark.parametrize(
    "room",
    [
        {"max_num_batched_tokens": 160, "max_num_seqs": 9, "enable_chunked_prefill": True},
        {"num_gpu_blocks_override": 40},
        {"max_num_seqs": 2},
    ],
    ids=["chunked", "preempting", "two-sequences"],
)
def test_follow_ups(settings: Any, room: dict[str, Any]) -> None:
    """Later questions go on from the KV of the first one, where steps, blocks or sequences are few. Their answers are
    those of fresh fusion, as on a replica that has not seen the first one. After a failed load they are exact."""
    setting = settings()
    asked = [each.replace("?", f"? {n}") for each in PROMPTS[:2] for n in range(3)]
    with started(setting, **room) as fused:
        expected = setting.expected(asked, "direct", tokens=48)
        for first in (0, 3):
            outputs(fused, asked[first : first + 1], "direct")
            found = outputs(fused, asked[first + 1 : first + 3], "direct", tokens=48)
            told = [each.kv_transfer_params["cacheclip"] for each in found]
            assert [each.get("continued_turns") for each in told] == [1, 1]
            assert min(each["continued_tokens"] for each in told) > 400
            assert [tuple(each.outputs[0].token_ids) for each in found] == expected[first + 1 : first + 3]
        fused.llm.reset_prefix_cache()
        with gone(setting, fused.planner.plan(asked[0], method="direct").fusion.pieces[2].key):
            (found,) = outputs(fused, asked[:1], "direct")
        assert outcomes([found]) == ["plain"]
        (found,) = outputs(fused, asked[1:2], "direct")
        assert "continued_tokens" not in found.kv_transfer_params["cacheclip"]


def test_preemption(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks for two prompts, and not for their answers: a preempted request loads its KV again."""
    setting = settings()
    with started(setting, num_gpu_blocks_override=40) as fused:
        scheduler = fused.llm.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []

        def counting(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        monkeypatch.setattr(scheduler, "_preempt_request", counting)
        for method in METHODS:
            fused.llm.reset_prefix_cache()
            preempted.clear()
            assert ask(fused, PROMPTS, method, tokens=48) == setting.expected(PROMPTS, method, tokens=48)
            assert preempted, "there are more blocks than this test wants"


def test_compiled(settings: Any) -> None:
    setting = settings()
    with started(setting, enforce_eager=False) as fused:
        check(setting, fused)


@pytest.mark.parametrize("model", ["qwen3", "llama"], ids=["a-head-each", "replicated-heads"])
def test_tensor_parallel(settings: Any, model: str) -> None:
    """Two workers, each with one of two KV heads, or both with the only one."""
    setting = settings(model)
    with started(setting, tensor_parallel_size=2, distributed_executor_backend="mp") as fused:
        check(setting, fused)
        fused.llm.reset_prefix_cache()
        with gone(setting, fused.planner.plan(PROMPTS[0], method="cacheclip").fusion.pieces[2].key):
            (found,) = outputs(fused, PROMPTS[:1], "cacheclip")
        assert outcomes([found]) == ["plain"]
        assert [tuple(found.outputs[0].token_ids)] == setting.expected(PROMPTS[:1], "full")


def test_in_a_process_of_its_own(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's servers run it: plans are serialised, and steps are scheduled ahead of their results."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    setting = settings()
    with started(setting, distributed_executor_backend="uni") as fused:
        check(setting, fused)
        key = fused.planner.plan(PROMPTS[0], method="cacheclip").fusion.pieces[2].key
        with gone(setting, key):
            fused.llm.reset_prefix_cache()
            found = outputs(fused, PROMPTS[1:], CORRECTED.at(0.4))
        assert "plain" in outcomes(found)
        answers = zip(
            found, *(setting.expected(PROMPTS[1:], method) for method in ("full", CORRECTED.at(0.4))), strict=True
        )
        for each, plain, other in answers:
            failed = (each.kv_transfer_params or {})["cacheclip"]["outcome"] == "plain"
            assert tuple(each.outputs[0].token_ids) == (plain if failed else other)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_a_rounded_cache(settings: Any, dtype: str) -> None:
    """Stored KV is rounded as fresh KV is.

    Which prompts share a step changes the last bits of a float32 key, and some of these are then rounded to the next
    8-bit number: log-probabilities move by 0.03.
    """
    setting = settings()
    with started(setting, kv_cache_dtype=dtype) as fused:
        check_against_full(fused, 0.05)


def test_drafts_by_ngram(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are checked over the KV that was made. In a process of its own: it imports numba, beside whose modules the
    next vLLM does not start."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    setting = settings()
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with started(setting, speculative_config=ngram, distributed_executor_backend="uni") as fused:
        check(setting, fused)


def test_bfloat16(settings: Any) -> None:
    setting = settings()
    setting = replace(setting, options={**setting.options, "dtype": "bfloat16"})
    setting.engine.precompute(CHUNKS)
    with started(setting, dtype="bfloat16") as fused:
        check_against_full(fused, 0.1)
