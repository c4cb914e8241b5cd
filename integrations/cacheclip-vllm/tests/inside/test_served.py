"""What vLLM fills in from a quantised checkpoint is what we say of it before vLLM starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cacheclip_vllm.served import Served
from vllm_cases import CHECKPOINTS

from cacheclip_rag.planning import load_planning


@pytest.mark.parametrize(("file", "given", "kv"), CHECKPOINTS)
def test_what_vllm_fills_in(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, given: dict[str, Any], kv: str
) -> None:
    from vllm.config import ModelConfig
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    monkeypatch.setattr(type(current_platform), "verify_quantization", lambda *args: None)  # CPUs have fewer
    folder = tmp_path / "model"
    shutil.copytree(settings().model, folder)
    content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**content, **given}))
    model = ModelConfig(str(folder), dtype="float32")
    assert (model.quantization is None) == (not given)
    made = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=resolve_kv_cache_dtype_string("auto", model)),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    found = Served.running(str(folder))
    assert found == Served.of(made)
    assert (found.quantization, found.kv_cache_dtype) == (None, kv)
    assert Served.running(str(folder), kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert load_planning(folder).fingerprint == load_planning(folder, quantization=model.quantization).fingerprint
