"""What is known of a vLLM engine before it starts, and the tokens that its answers are made to follow.

``inside/test_served.py`` asks vLLM the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cacheclip_vllm import internals
from cacheclip_vllm.forcing import FORCED, processor
from cacheclip_vllm.served import Served
from vllm_cases import CHECKPOINTS


@pytest.mark.parametrize(("file", "given", "kv"), CHECKPOINTS)
def test_what_a_checkpoint_says(
    tiny_models: dict[str, str], tmp_path: Path, file: str, given: dict[str, Any], kv: str
) -> None:
    folder = Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))
    content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**content, **given}))
    found = Served.running(str(folder), "cuda", "fp8")
    assert (found.device, found.quantization, found.kv_cache_dtype) == ("cuda", None if given else "fp8", kv)
    assert Served.running(str(folder), kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), quantization="fp8"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cuda"),
    )
    assert Served.of(config) == found


@pytest.mark.parametrize(
    ("where", "names", "lacks"),
    [
        ("json:dumps", "obj indent", []),
        ("json:dumps", "obj pepper", ["pepper"]),
        ("json:JSONEncoder.encode", "self o", []),
        ("collections:OrderedDict", "move_to_end pepper salt", ["pepper", "salt"]),
        ("cacheclip_rag.runtime.base:Runtime", "num_layers encode_many", []),
        ("cacheclip_vllm.once:WarnOnce", "_logger", []),
        ("json:none", "", [""]),
        ("json:JSONEncoder.none", "obj", [""]),
        ("json.none:dumps", "obj", [""]),
    ],
    ids=str,
)
def test_what_an_untried_version_lacks(
    monkeypatch: pytest.MonkeyPatch, where: str, names: str, lacks: list[str]
) -> None:
    """Parameters of functions; of classes members, fields and what their instances are given."""
    monkeypatch.setattr(internals, "INTERNALS", (internals.Internal(where, tuple(names.split())),))
    assert internals.missing() == [f"{where} ({each})" if each else where for each in lacks]


def test_forced_tokens() -> None:
    """One after the other, then the model's own; requests without any are left alone."""
    forcing = processor(object)()
    assert not forcing.is_argmax_invariant()
    for other in (None, {}, {FORCED: []}, {"other": [1]}):
        assert forcing.new_req_logits_processor(SimpleNamespace(extra_args=other)) is None
    choose = forcing.new_req_logits_processor(SimpleNamespace(extra_args={FORCED: [2, 0]}))
    answer: list[int] = []
    for _ in range(4):
        logits = torch.tensor([1.0, 5.0, 2.0])
        chosen = choose(answer, logits)
        answer.append(int(chosen.argmax()))
        assert int(chosen.isfinite().sum()) == (1 if len(answer) <= 2 else 3)
    assert answer == [2, 0, 1, 1]
