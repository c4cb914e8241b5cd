"""A checkpoint with 8-bit weights: vLLM computes its chunks and answers from them. Our own runtime refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing import build_model
from cacheclip_vllm.offline import FusedLLM
from safetensors.torch import load_file, save_file
from vllm_engines import CHUNKS, MODELS, PROMPTS, Setting, check_against_full, encoding, outcomes, sampling

from cacheclip_rag import CacheClipEngine, UnsupportedModelError

EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
LINEAR = {
    "targets": ["Linear"],
    "weights": {**EIGHT_BITS, "strategy": "channel", "dynamic": False},
    "input_activations": {**EIGHT_BITS, "strategy": "token", "dynamic": True},
}
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
INT8 |= {"ignore": ["lm_head"], "config_groups": {"group_0": LINEAR}}
"""A scale for each row of a weight, and for each token."""


def quantised(folder: Path) -> Path:
    """Round the linear layers of a saved model to 8 bits."""
    file = folder / "model.safetensors"
    tensors = dict[str, torch.Tensor]()
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors[f"{name}_scale"], tensor = scale, (tensor / scale).round().to(torch.int8)
        tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": INT8}))
    return folder


def test_eight_bits(settings: Any, tmp_path: Path) -> None:
    full = settings()
    options = {
        **full.options,
        "primary": str(quantised(build_model(tmp_path / "model", MODELS["qwen3"]))),
        "store": str(tmp_path / "store"),
        "dtype": "bfloat16",  # vLLM runs these weights in no other
    }
    setting = Setting(options["primary"], options["store"], options)
    with pytest.raises(UnsupportedModelError, match="quanti"):
        setting.engine.precompute(CHUNKS)
    unquantised = {**options, "primary": full.model, "store": str(tmp_path / "unquantised")}
    CacheClipEngine(**unquantised).precompute(CHUNKS)
    with encoding(setting, tmp_path, dtype="bfloat16") as made:
        assert made.engine(Path(setting.store)).precompute(CHUNKS) == len(CHUNKS)
        fused = FusedLLM(made.fused.llm, setting.planner())
        check_against_full(fused, 0.1)

        other = FusedLLM(made.fused.llm, setting.planner(store=unquantised["store"]))
        planned = other.planner.plan(PROMPTS[0])
        assert planned.fusion is None and planned.stats.misses == 4, "chunks of other weights are not found"
        planned = setting.planner(**unquantised).plan(PROMPTS[0])
        given = {"prompt_token_ids": list(planned.token_ids)}
        found = fused.llm.generate([given], [sampling(planned.fusion)], use_tqdm=False)
        assert outcomes(found) == ["plain"]
        assert "other weights" in found[0].kv_transfer_params["cacheclip"]["reason"]
