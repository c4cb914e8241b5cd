"""What vLLM can do and reuse cannot is refused, when the engine starts or before a request is scheduled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm.conftest import started

ENGINE = {
    "model_config": {
        "model": "here",
        "use_mla": False,
        "is_moe": False,
        "is_multimodal_model": False,
        "hf_overrides": {},
        "hf_config_path": None,
    },
    "parallel_config": {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
    },
    "kv_transfer_config": {"kv_load_failure_policy": "recompute"},
}
REQUEST = {
    "sampling_params": SimpleNamespace(prompt_logprobs=None),
    "lora_request": None,
    "mm_features": [],
    "prompt_token_ids": [1, 2],
    "prompt_embeds": None,
    "skip_reading_prefix_cache": False,
}


def full_attention() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)


def sliding_window() -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=64)


SPECS = {"full": full_attention, "sliding": sliding_window}


def engine(
    part: str = "", groups: int = 1, draft: str | None = None, spec: str = "full", **changed: Any
) -> tuple[Any, Any]:
    parts = {
        name: SimpleNamespace(**{**values, **(changed if name == part else {})}) for name, values in ENGINE.items()
    }
    if not hasattr(parts["model_config"], "dtype"):
        parts["model_config"].dtype = torch.float32
    speculative = None if draft is None else SimpleNamespace(method=draft)
    group = SimpleNamespace(kv_cache_spec=SPECS[spec]())
    return SimpleNamespace(**parts, speculative_config=speculative), SimpleNamespace(kv_cache_groups=[group] * groups)


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
            ("", {"groups": 2}, "KV cache groups"),
            ("", {"draft": "eagle3"}, "drafters"),
            ("", {"spec": "sliding"}, "blocks"),
        ],
    )
    def test_refused(self, part: str, changed: dict[str, Any], what: str) -> None:
        from cacheclip_rag.vllm.connector import check_engine

        with pytest.raises(ValueError, match=what):
            check_engine(*engine(part, **changed))

    def test_experts_under_data_parallelism(self) -> None:
        from cacheclip_rag.vllm.connector import check_engine

        config, cache = engine("parallel_config", data_parallel_size=2)
        check_engine(config, cache)
        config.model_config.is_moe = True
        with pytest.raises(ValueError, match="mixture-of-experts"):
            check_engine(config, cache)

    def test_accepted(self) -> None:
        from cacheclip_rag.vllm.connector import check_engine

        check_engine(*engine())
        check_engine(*engine(draft="ngram"))

    def test_a_real_engine_says_why(self, settings: Any) -> None:
        from cacheclip_rag.vllm.offline import engine_options

        setting = settings()
        transfer = engine_options(setting.store)["kv_transfer_config"]
        with (
            pytest.raises(ValueError, match="kv_load_failure_policy must be 'recompute'"),
            started(setting, kv_transfer_config={**transfer, "kv_load_failure_policy": "fail"}),
        ):
            pass

    def test_a_real_engine_with_vllms_own_worker(self, settings: Any) -> None:
        setting = settings()
        with pytest.raises(ValueError, match="worker_cls"), started(setting, worker_cls="auto"):
            pass


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
        from cacheclip_rag.vllm.connector import check_request

        check_request(SimpleNamespace(**REQUEST))
        with pytest.raises(ValueError, match=what):
            check_request(SimpleNamespace(**{**REQUEST, **changed}))


class TestBookkeeping:
    def connector(self) -> Any:
        from cacheclip_rag.vllm.connector import CacheClipConnector

        found = CacheClipConnector.__new__(CacheClipConnector)
        found._requests, found._scheduled, found._loading, found._outcomes, found._ready = {}, {}, {}, {}, {}
        found._block_size, found._kv_cache_manager = 32, Blocks()
        return found

    def begin(self, connector: Any, name: str, blocks: tuple[int, ...]) -> Any:
        """A request with 64 tokens in the cache whose load is under way, as scheduled before its report came."""
        from cacheclip_rag.vllm.loading import Load

        request = SimpleNamespace(request_id=name, prefill_stats=None, num_output_tokens=0, num_computed_tokens=160)
        connector._requests[name], connector._loading[name] = request, (Load(name, blocks, 64, 128), 0)
        connector._outcomes[name] = {"outcome": "fused", "reason": None}
        connector._kv_cache_manager.held[name] = list(blocks)
        return request

    def preempt(self, connector: Any, name: str) -> None:
        connector._kv_cache_manager.held[name] = []
        cached = SimpleNamespace(req_ids=[])
        connector.build_connector_meta(
            SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached, preempted_req_ids={name})
        )

    def test_blocks_of_a_preempted_request_are_no_longer_its_own(self) -> None:
        """Another request's load into them may fail."""
        connector = self.connector()
        for name, blocks in {"gone": (1, 2, 3, 4), "here": (5, 6, 2, 7)}.items():
            self.begin(connector, name, blocks)
        self.preempt(connector, "gone")
        connector.update_connector_output(SimpleNamespace(invalid_block_ids={2}))
        outcomes = {name: each["outcome"] for name, each in connector._outcomes.items()}
        assert outcomes == {"gone": "fused", "here": "plain"}
        assert connector._requests["here"].num_computed_tokens == 64

    @pytest.mark.parametrize("num_new_tokens", [0, 1])
    def test_a_request_is_gone_before_its_load_is_reported(self, num_new_tokens: int) -> None:
        """A token since the load says that the load was reported, and its blocks are good or were evicted then."""
        connector = self.connector()
        first, second = self.begin(connector, "preempted", (1, 2, 3, 4)), self.begin(connector, "left", (5, 6, 7, 8))
        first.num_output_tokens = second.num_output_tokens = num_new_tokens
        self.preempt(connector, "preempted")
        connector.request_finished(second, [5, 6, 7, 8, 9])
        assert connector._kv_cache_manager.evicted == (set() if num_new_tokens else {3, 4, 7, 8, 9})
        assert connector._loading == {}


class Blocks:
    """In place of vLLM's cache manager."""

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}
        self.evicted: set[int] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.held[request_id],)

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids
