"""What is kept of vLLM's requests before their KV is made, without vLLM: which are refused, what a step loads, what
becomes of blocks whose load failed."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheclip_rag.vllm.parameters import PARAMETER, UNREADABLE, Ready
from cacheclip_rag.vllm.prefix_blocks import salt
from cacheclip_rag.vllm.scheduling import Load, RequestLoads, check_engine, check_request, untested

ENGINE = {
    "model_config": {
        "model": "here",
        "use_mla": False,
        "is_moe": False,
        "is_multimodal_model": False,
        "hf_overrides": {},
        "hf_config_path": None,
        "enable_sleep_mode": False,
    },
    "parallel_config": {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 2,
    },
    "scheduler_config": {"scheduler_cls": None},
    "kv_transfer_config": {"kv_load_failure_policy": "recompute"},
    "cache_config": {"cache_dtype": "auto"},
    "device_config": {"device_type": "cpu"},
}
REQUEST = {
    "sampling_params": SimpleNamespace(prompt_logprobs=None),
    "lora_request": None,
    "mm_features": [],
    "prompt_token_ids": [1, 2],
    "prompt_embeds": None,
    "skip_reading_prefix_cache": False,
}


class Whole:
    """In place of vLLM's class of caches that keep all blocks."""


class Window:
    """Another kind of cache."""


def engine(
    part: str = "", groups: int = 1, draft: str | None = None, spec: Any = None, **changed: Any
) -> tuple[Any, Any]:
    parts = {
        name: SimpleNamespace(**{**values, **(changed if name == part else {})}) for name, values in ENGINE.items()
    }
    if not hasattr(parts["model_config"], "dtype"):
        parts["model_config"].dtype = torch.float32
    whole = {"speculative_config": None if draft is None else SimpleNamespace(method=draft)}
    whole |= {"lora_config": None, "use_v2_model_runner": False, **(changed if part == "whole" else {})}
    group = SimpleNamespace(kv_cache_spec=spec or Whole())
    return SimpleNamespace(**parts, **whole), SimpleNamespace(kv_cache_groups=[group] * groups)


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

    def test_accepted(self) -> None:
        check_engine(*engine(), Whole)
        check_engine(*engine(draft="ngram"), Whole)

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
        ],
    )
    def test_untested(self, part: str, changed: dict[str, Any], what: str) -> None:
        config, cache = engine(part, **changed)
        check_engine(config, cache, Whole)
        (found,) = untested(config)
        assert what in found and not untested(engine()[0])
        assert not untested(engine("cache_config", cache_dtype="fp8_e4m3")[0])


class TestRequest:
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
    def test_refused(self, changed: dict[str, Any], what: str) -> None:
        check_request(SimpleNamespace(**REQUEST))
        with pytest.raises(ValueError, match=what):
            check_request(SimpleNamespace(**{**REQUEST, **changed}))


class Blocks:
    """In place of vLLM's manager of blocks, which are 32 tokens long."""

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}
        self.evicted: set[int] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.held[request_id],)

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids


class Counted:
    """In place of vLLM's statistics of a prefill."""

    num_prompt_tokens, num_local_cached_tokens = 200, 70

    def set(self, *numbers: int) -> None:
        self.numbers = numbers


class Scheduler:
    """What vLLM's scheduler does with requests whose first 150 tokens' KV can be made."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.loads = RequestLoads(32, lambda: self.blocks)
        self.requests: dict[str, Any] = {}

    def arrive(self, name: str, outcome: str = "cached") -> Any:
        request = SimpleNamespace(
            request_id=name, num_output_tokens=0, num_computed_tokens=150, prefill_stats=Counted()
        )
        self.requests[name] = request
        self.loads.arrive(request)
        self.loads.keep(request, Ready(150, context=f"context of {name}"))
        self.loads.tell(name, outcome)
        return request

    def step(
        self,
        new: dict[str, tuple[list[int], int]] | None = None,
        going: dict[str, tuple[Any, int]] | None = None,
        resumed: tuple[str, ...] = (),
        preempted: tuple[str, ...] = (),
    ) -> tuple[list[Load], int]:
        """Requests by name, each with its blocks and the tokens whose KV it has after the load."""
        for name in preempted:
            self.blocks.held[name] = []
        going = going or {}
        for name, (block_ids, _) in {**(new or {}), **{name: going[name] for name in resumed}}.items():
            self.blocks.held[name] = list(block_ids)
        return self.loads.step(
            SimpleNamespace(
                preempted_req_ids=set(preempted),
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=name, block_ids=(block_ids,), num_computed_tokens=count)
                    for name, (block_ids, count) in (new or {}).items()
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[*going],
                    resumed_req_ids=set(resumed),
                    new_block_ids=[(blocks,) for blocks, _ in going.values()],
                    num_computed_tokens=[count for _, count in going.values()],
                ),
            )
        )

    def finish(self, name: str) -> Any:
        return self.loads.finish(name, self.blocks.held[name])

    def begin(self, name: str, block_ids: tuple[int, ...]) -> Any:
        """A request with 64 tokens in the cache whose load is under way, as scheduled before its report came."""
        request = self.arrive(name)
        self.loads.schedule(name, 150 - 64)
        self.step({name: ([*block_ids], 150)})
        return request


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


class TestSteps:
    def test_tokens_that_can_be_made(self, scheduler: Scheduler) -> None:
        scheduler.arrive("a")
        assert [scheduler.loads.matched("a", known) for known in (0, 64, 149, 150, 180)] == [150, 86, 1, 0, 0]
        assert scheduler.loads.matched("another", 0) == 0

    def test_a_load(self, scheduler: Scheduler) -> None:
        """Of what vLLM's own cache lacks, once. Requests without a load have none."""
        for name in ("a", "b", "c"):
            scheduler.arrive(name)
        scheduler.loads.schedule("a", 86)
        scheduler.loads.schedule("b", 0)
        scheduler.loads.schedule("c", 150)
        found, first = scheduler.step({"b": ([9], 32), "c": ([4, 1, 7, 8, 2], 150), "a": ([3, 5, 6, 11, 12], 150)})
        assert found == [
            Load("a", (3, 5, 6, 11, 12), 64, 150, context="context of a"),
            Load("c", (4, 1, 7, 8, 2), 0, 150, context="context of c"),
        ]
        assert first == 2 and scheduler.step(going={"a": (None, 151)}) == ([], 0)
        assert [each.failed_blocks(32) for each in found] == [(6, 11, 12), (4, 1, 7, 8, 2)]
        assert scheduler.finish("a") == {PARAMETER: {"outcome": "fused", "reason": None}}
        assert scheduler.finish("b") == {PARAMETER: {"outcome": "cached", "reason": None}}
        assert scheduler.finish("a") is None and scheduler.loads.matched("a", 0) == 0

    def test_after_a_preemption_it_is_loaded_into_new_blocks(self, scheduler: Scheduler) -> None:
        """And counted once."""
        scheduler.begin("a", (1, 2, 3, 4, 5))
        scheduler.requests["a"].num_output_tokens = 1
        assert scheduler.step(preempted=("a",)) == ([], 0)
        scheduler.loads.schedule("a", 150)
        going = {"other": (None, 40), "a": ([6, 7, 8, 9, 10], 150)}
        assert scheduler.step(going=going, resumed=("a",)) == (
            [Load("a", (6, 7, 8, 9, 10), 0, 150, context="context of a")],
            0,
        )

    @pytest.mark.parametrize(
        ("start", "stop", "blocks"),
        [(0, 32, (7,)), (0, 33, (7, 8)), (31, 33, (7, 8)), (32, 64, (8,)), (40, 41, (8,)), (64, 90, (9,))],
    )
    def test_blocks_of_a_failed_load(self, start: int, stop: int, blocks: tuple[int, ...]) -> None:
        assert Load("a", (7, 8, 9), start, stop).failed_blocks(32) == blocks


class TestFailures:
    def test_the_request_is_computed_from_the_first_failed_block_on(self, scheduler: Scheduler) -> None:
        """Whatever vLLM had of it before; requests with other blocks go on."""
        hit, other = scheduler.begin("hit", (1, 2, 3, 4, 5)), scheduler.begin("other", (6, 7, 8, 9, 10))
        scheduler.loads.fail(set())
        assert scheduler.blocks.evicted == set() and hit.num_computed_tokens == 150
        scheduler.loads.fail({4, 5, 99})
        assert (hit.num_computed_tokens, other.num_computed_tokens) == (96, 150)
        assert scheduler.blocks.evicted == {4, 5}
        assert hit.prefill_stats.numbers == (200, 70, 0) and not hasattr(other.prefill_stats, "numbers")
        scheduler.loads.fail({2})
        assert hit.num_computed_tokens == 32 and hit.prefill_stats.numbers == (200, 32, 0)
        assert scheduler.finish("hit") == {PARAMETER: {"outcome": "plain", "reason": UNREADABLE}}
        assert scheduler.finish("other") == {PARAMETER: {"outcome": "fused", "reason": None}}

    def test_it_has_computed_less_already(self, scheduler: Scheduler) -> None:
        request = scheduler.begin("a", (1, 2, 3, 4, 5))
        request.num_computed_tokens, request.prefill_stats = 20, None
        scheduler.loads.fail({3})
        assert request.num_computed_tokens == 20

    def test_blocks_of_a_preempted_request_are_no_longer_its_own(self, scheduler: Scheduler) -> None:
        """Another request's load into them may fail."""
        for name, blocks in {"gone": (1, 2, 3, 4), "here": (5, 6, 2, 7)}.items():
            scheduler.begin(name, blocks)
        scheduler.step(preempted=("gone",))
        scheduler.loads.fail({2})
        outcomes = {name: scheduler.finish(name)[PARAMETER]["outcome"] for name in ("gone", "here")}
        assert outcomes == {"gone": "fused", "here": "plain"}
        assert scheduler.requests["here"].num_computed_tokens == 64

    @pytest.mark.parametrize("num_new_tokens", [0, 1])
    def test_a_request_is_gone_before_its_load_is_reported(self, scheduler: Scheduler, num_new_tokens: int) -> None:
        """A token since the load says that the load was reported, and its blocks are good or were evicted then."""
        first, second = scheduler.begin("preempted", (1, 2, 3, 4)), scheduler.begin("left", (5, 6, 7, 8))
        first.num_output_tokens = second.num_output_tokens = num_new_tokens
        scheduler.step(preempted=("preempted",))
        scheduler.blocks.held["left"] = [5, 6, 7, 8, 9]
        scheduler.finish("left")
        assert scheduler.blocks.evicted == (set() if num_new_tokens else {3, 4, 7, 8, 9})
        scheduler.blocks.held["preempted"] = [11, 12, 13]
        scheduler.finish("preempted")
        assert not {11, 12, 13} & scheduler.blocks.evicted, "nothing of it is under way"


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
