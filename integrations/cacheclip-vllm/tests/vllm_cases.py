"""Configurations of vLLM, and checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

ENGINE = {
    "model_config": {
        "model": "here",
        "use_mla": False,
        "is_moe": False,
        "is_multimodal_model": False,
        "hf_overrides": {},
        "hf_config_path": None,
        "enable_sleep_mode": False,
        "revision": None,
        "model_impl": "auto",
        "quantization": None,
    },
    "attention_config": {"use_non_causal": False},
    "offload_config": {"uva": SimpleNamespace(cpu_offload_gb=0)},
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
EIGHT_BITS = {"num_bits": 8, "type": "float", "dynamic": False}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
CHECKPOINTS: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {}, "auto"),
    ("config.json", {"quantization_config": COMPRESSED}, "auto"),
    ("config.json", {"quantization_config": {**COMPRESSED, "kv_cache_scheme": EIGHT_BITS}}, "fp8"),
    ("config.json", {"compression_config": COMPRESSED}, "auto"),
    ("config.json", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "auto"),
    ("config.json", {"quantization_config": {**MODELOPT, "quant_method": "modelopt"}}, "fp8_e4m3"),
    ("config.json", {"quantization_config": {**MODELOPT, "kv_cache_scheme": EIGHT_BITS}}, "fp8_e4m3"),
    ("config.json", {"quantization_config": {**MODELOPT, "kv_cache_scheme": {"num_bits": 3}}}, "auto"),
    ("hf_quant_config.json", MODELOPT, "fp8_e4m3"),
]
"""A file of the checkpoint, what is added to it, and what vLLM makes of ``kv_cache_dtype="auto"``."""


class Whole:
    """In place of vLLM's class of caches that keep all blocks."""


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


SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds texts.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
