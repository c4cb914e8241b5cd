"""What vLLM can do and reuse cannot is refused when the engine starts: as far as vLLM itself is needed to see it.

``../test_scheduling.py`` has all reasons."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_engines import started


class TestEngine:
    def test_a_real_engine_says_why(self, settings: Any) -> None:
        from cacheclip_vllm.offline import engine_options

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

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"enable_lora": True}, "LoRA is not supported"),
            ({"weight_transfer_config": {"backend": "ipc"}}, "weight transfer"),
            ({"revision": "another"}, "a revision would be another model"),
            ({"quantization_config": {"linear": "fp8_per_tensor"}}, "a quantization_config alone"),
        ],
        ids=["adapters", "weight-transfer", "revision", "quantization"],
    )
    def test_a_real_engine_of_other_weights(self, settings: Any, options: dict[str, Any], what: str) -> None:
        with pytest.raises(ValueError, match=what), started(settings(), **options):
            pass

    def test_a_real_engine_with_several_connectors(self, settings: Any) -> None:
        from cacheclip_vllm.offline import engine_options

        setting = settings()
        ours = engine_options(setting.store)["kv_transfer_config"]
        both = {"kv_connector": "MultiConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
        both["kv_connector_extra_config"] = {"connectors": [ours]}
        with (
            pytest.raises(ValueError, match="MultiConnector is not supported"),
            started(setting, kv_transfer_config=both),
        ):
            pass
