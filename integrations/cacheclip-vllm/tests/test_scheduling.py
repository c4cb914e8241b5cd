"""What is kept of vLLM's requests before their KV is made, without vLLM: which are refused, what a step loads, what
becomes of blocks whose load failed."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cacheclip_vllm.parameters import PARAMETER, UNREADABLE, Ready
from cacheclip_vllm.prefix_blocks import salt
from cacheclip_vllm.scheduling import Load, RequestLoads, check_engine, check_request, untested, windows_cost
from vllm_cases import Whole, engine

REQUEST = {"lora_request": None, "mm_features": [], "prompt_token_ids": [1, 2], "prompt_embeds": None}
REQUEST |= {"sampling_params": SimpleNamespace(prompt_logprobs=None), "skip_reading_prefix_cache": False}


class Window:
    """Another kind of cache."""


class TestEngine:
    @pytest.mark.parametrize(
        ("part", "changed", "what"),
        [
            ("model_config", {"use_mla": True}, "MLA"),
            ("model_config", {"is_multimodal_model": True}, "multimodal"),
            ("model_config", {"hf_overrides": {"rope_theta": 7}}, "hf_overrides"),
            ("model_config", {"hf_config_path": "elsewhere"}, "hf_config_path"),
            ("model_config", {"dtype": torch.float64}, "dtype"),
            ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline"),
            ("parallel_config", {"decode_context_parallel_size": 2}, "context parallelism"),
            ("parallel_config", {"prefill_context_parallel_size": 2}, "context parallelism"),
            ("kv_transfer_config", {"kv_load_failure_policy": "fail"}, "recompute"),
            ("whole", {"lora_config": object()}, "LoRA"),
            ("model_config", {"enable_sleep_mode": True}, "sleep mode"),
            ("whole", {"weight_transfer_config": object()}, "weight transfer"),
            ("model_config", {"revision": "another"}, "revision"),
            ("model_config", {"quantization_config": object()}, "quantization_config"),
            ("whole", {"diffusion_config": object()}, "diffusion"),
            ("attention_config", {"use_non_causal": True}, "later tokens"),
            ("", {"groups": 2}, "KV cache groups"),
            ("", {"draft": "eagle3"}, "drafters"),
            ("", {"spec": Window()}, "blocks"),
        ],
    )
    def test_refused(self, part: str, changed: dict[str, Any], what: str) -> None:
        with pytest.raises(ValueError, match=what):
            check_engine(*engine(part, **changed), Whole)

    def test_experts_under_data_parallelism(self) -> None:
        config, cache = engine("parallel_config", data_parallel_size=2)
        check_engine(config, cache, Whole)
        config.model_config.is_moe = True
        with pytest.raises(ValueError, match="mixture-of-experts"):
            check_engine(config, cache, Whole)

    @pytest.mark.parametrize(
        ("part", "changed", "what"),
        [
            ("whole", {"use_v2_model_runner": True}, "V2 model runner"),
            ("", {"draft": "suffix"}, "speculative decoding by suffix"),
            ("cache_config", {"cache_dtype": "int8_per_token_head"}, "kv_cache_dtype int8_per_token_head"),
            ("device_config", {"device_type": "cuda"}, "device"),
            ("parallel_config", {"tensor_parallel_size": 4}, "4 tensor parallel ranks"),
            ("parallel_config", {"data_parallel_size": 2}, "data parallel ranks"),
            ("parallel_config", {"nnodes": 2}, "several nodes"),
            ("parallel_config", {"enable_dbo": True}, "enable_dbo"),
            ("parallel_config", {"enable_expert_parallel": True}, "enable_expert_parallel"),
            ("cache_config", {"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
            ("scheduler_config", {"scheduler_cls": "my.Scheduler"}, "scheduler_cls"),
            ("model_config", {"model_impl": "transformers"}, "model_impl"),
            ("offload_config", {"uva": SimpleNamespace(cpu_offload_gb=4)}, "cpu_offload_gb"),
        ],
    )
    def test_untested(self, part: str, changed: dict[str, Any], what: str) -> None:
        config, cache = engine(part, **changed)
        check_engine(config, cache, Whole)
        (found,) = untested(config)
        assert what in found and not untested(engine()[0])
        assert not untested(engine("cache_config", cache_dtype="fp8_e4m3")[0])

    @pytest.mark.parametrize(
        ("kinds", "window", "times"),
        [
            (["sliding_attention", "full_attention"] * 3, 1024, "1.6 times"),
            (["full_attention"] * 6, 1024, None),
            (["sliding_attention"] * 6, 8192, None),
            (None, None, None),
        ],
    )
    def test_what_windows_cost(self, kinds: Any, window: int | None, times: str | None) -> None:
        """Half of the layers would keep a quarter of 4096 tokens."""
        text = SimpleNamespace(layer_types=kinds, sliding_window=window)
        config, _ = engine("model_config", hf_text_config=text, max_model_len=4096)
        found = windows_cost(config)
        assert found is None if times is None else times in str(found)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"lora_request": object()}, "LoRA"),
        ({"mm_features": [object()]}, "multimodal"),
        ({"prompt_token_ids": None}, "embeddings"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"sampling_params": SimpleNamespace(prompt_logprobs=1)}, "logprobs"),
        ({"sampling_params": None}, "pools"),
        ({"skip_reading_prefix_cache": True}, "prefix cache"),
    ],
)
def test_refused(changed: dict[str, Any], what: str) -> None:
    check_request(SimpleNamespace(**REQUEST))
    with pytest.raises(ValueError, match=what):
        check_request(SimpleNamespace(**{**REQUEST, **changed}))


class Counted:
    """In place of vLLM's statistics of a prefill."""

    num_prompt_tokens, num_local_cached_tokens = 200, 70

    def set(self, *numbers: int) -> None:
        self.numbers = numbers


class Scheduler:
    """What vLLM's scheduler does with requests whose first 150 tokens' KV can be made."""

    def __init__(self) -> None:
        self.loads = RequestLoads(32)

    def begin(self, name: str, block_ids: tuple[int, ...], num_tokens: int = 86) -> Any:
        """A request with 64 tokens in the cache, whose load begins."""
        request = SimpleNamespace(request_id=name, prefill_stats=Counted())
        self.loads.keep(name, Ready(150, context=f"context of {name}"))
        self.loads.tell(name, "cached")
        assert self.loads.begin(request, block_ids, num_tokens), "its first"
        return request

    def outcome(self, name: str) -> Any:
        return self.loads.finish(name)[PARAMETER]["outcome"]  # type: ignore[index]


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


class TestSteps:
    def test_a_load(self, scheduler: Scheduler) -> None:
        """Of what vLLM's own cache lacks, once."""
        scheduler.begin("a", (3, 5, 6, 11, 12))
        scheduler.begin("c", (4, 1, 7, 8, 2), 150)
        found = scheduler.loads.take()
        rest = Load("a", (3, 5, 6, 11, 12), 64, 150, context="context of a")
        assert found == [rest, Load("c", (4, 1, 7, 8, 2), 0, 150, context="context of c")]
        assert scheduler.loads.take() == []
        assert [each.failed_blocks(32) for each in found] == [(6, 11, 12), (4, 1, 7, 8, 2)]
        assert scheduler.loads.end(["a", "c"], set()) == []
        scheduler.loads.time({"a": 0.25, "gone": 9.0})
        assert scheduler.loads.finish("a") == {PARAMETER: {"outcome": "fused", "reason": None, "read_s": 0.25}}
        assert scheduler.loads.finish("c") == {PARAMETER: {"outcome": "fused", "reason": None}}
        assert scheduler.loads.finish("a") is None and scheduler.loads.matched("a", 0) == 0

    def test_after_a_preemption_it_is_loaded_into_new_blocks(self, scheduler: Scheduler) -> None:
        """And counted once."""
        request = scheduler.begin("a", (1, 2, 3, 4, 5))
        scheduler.loads.take(), scheduler.loads.time({"a": 0.25}), scheduler.loads.end(["a"], set())
        assert scheduler.loads.matched("a", 0) == 150
        assert not scheduler.loads.begin(request, (6, 7, 8, 9, 10), 150)
        assert scheduler.loads.take() == [Load("a", (6, 7, 8, 9, 10), 0, 150, context="context of a")]
        scheduler.loads.time({"a": 7.0})
        told = scheduler.loads.finish("a")
        assert told is not None and told[PARAMETER]["read_s"] == 0.25, "the second one came after the first token"


class TestFailures:
    def test_the_request_is_not_loaded_again(self, scheduler: Scheduler) -> None:
        """Requests with other blocks go on, and blocks before the load are good."""
        hit, other = scheduler.begin("hit", (1, 2, 3, 4, 5)), scheduler.begin("other", (6, 7, 8, 9, 10))
        assert scheduler.loads.end(["hit"], {1, 2, 99}) == []
        hit = scheduler.begin("hit", (1, 2, 3, 4, 5))
        assert scheduler.loads.end(["hit", "other"], {4, 99}) == [(hit, 64)]
        assert hit.prefill_stats.numbers == (200, 64, 0) and not hasattr(other.prefill_stats, "numbers")
        assert [scheduler.loads.matched(name, 0) for name in ("hit", "other")] == [0, 150]
        assert scheduler.loads.finish("hit") == {PARAMETER: {"outcome": "plain", "reason": UNREADABLE}}
        assert scheduler.outcome("other") == "fused"

    def test_its_answer_has_begun(self, scheduler: Scheduler) -> None:
        """Before a preemption; vLLM has counted its prefill then."""
        request = scheduler.begin("a", (1, 2, 3, 4, 5))
        request.prefill_stats = None
        assert scheduler.loads.end(["a"], {3}) == [(request, 64)]


class Hashed:
    """In place of vLLM's request of 10 tokens in blocks of 3: a hash is that of all tokens before its end."""

    def __init__(self, salt: str | None = None, count: int = 3) -> None:
        self.cache_salt, self.block_hashes, self._count = salt, list[bytes](), count
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        while len(self.block_hashes) < self._count:
            before = self.block_hashes[-1] if self.block_hashes else (self.cache_salt or "").encode()
            self.block_hashes.append(hashlib.sha256(before + bytes([len(self.block_hashes)])).digest())


class TestSalt:
    @pytest.mark.parametrize("given", [None, "a client's"])
    @pytest.mark.parametrize(("first", "expected"), [(0, 0), (1, 1), (2, 2), (3, 2), (7, 2)])
    def test_blocks_with_hashes_of_their_own(self, given: str | None, first: int, expected: int) -> None:
        plain, found, again = Hashed(given), Hashed(given), Hashed(given)
        assert salt(found, "name", first, b"key") == salt(again, "name", first, b"key") == expected
        same = [a == b for a, b in zip(plain.block_hashes, found.block_hashes, strict=True)]
        assert same == [number < expected for number in range(3)]
        assert found.block_hashes == again.block_hashes

    @pytest.mark.parametrize("first", [0, 2])
    @pytest.mark.parametrize(
        ("name", "key", "given"), [("other", b"key", None), ("name", b"other", None), ("name", b"key", "other")]
    )
    def test_they_differ_by_name_key_and_salt(self, first: int, name: str, key: bytes, given: str | None) -> None:
        """Whoever knows the name and not the key cannot make them by a salt."""
        ours, other = Hashed(), Hashed(given)
        salt(ours, "name", first, b"key")
        salt(other, name, first, key)
        assert not set(ours.block_hashes[first:]) & set(other.block_hashes)

    def test_a_prompt_of_less_than_a_block(self) -> None:
        """Its answer fills the first one."""
        found = Hashed(count=0)
        assert salt(found, "name", 4, b"key") == 0
        found._count = 1
        found.update_block_hashes()
        assert found.block_hashes != Hashed(count=1).block_hashes
