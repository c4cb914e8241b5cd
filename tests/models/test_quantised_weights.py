"""Quantised weights: dense where transformers makes them so, tried row by row elsewhere, else refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing.tiny import TINY_MODELS, build_model, tiny_spec
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from cacheclip_rag.base.errors import ModelError, UnsupportedModelError
from cacheclip_rag.models import memory
from cacheclip_rag.models.checkpoints import quantization_of
from cacheclip_rag.models.load import load_model, load_planning
from cacheclip_rag.runtime.transformers import proof, quantised_weights
from cacheclip_rag.runtime.transformers.quantised_weights import (
    SCHEMES,
    Scheme,
    check_loaded,
    check_rows,
    loading_options,
    scheme_of,
)
from tests.conftest import CHUNKS, Models, Patch
from tests.fusion.cases import EXACT, gap, make_case, prefilled

pytestmark = pytest.mark.skipif(
    not quantised_weights._reads_all(), reason="this transformers reads no quantised weights: they are refused"
)
Tensors = dict[str, torch.Tensor]

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantised(folder: Path, name: str, change: Callable[[Tensors], Tensors], settings: dict[str, Any]) -> Path:
    """A tiny model with changed tensors, and what its config says of them."""
    build_model(folder, TINY_MODELS[name])
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def in_fp8(tensors: Tensors) -> Tensors:
    """One scale for each block of 128 x 128, as Qwen3's and DeepSeek's are published."""
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max() / 448
            changed |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}
    return changed


def in_mxfp4(tensors: Tensors) -> Tensors:
    """Experts in blocks of 32 numbers, as GPT-OSS is published."""
    changed = dict(tensors)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks = changed.pop(name).transpose(1, 2).unflatten(-1, (-1, 32))
            exponents = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=1e-8) / 6))
            codes = ((blocks / torch.exp2(exponents)[..., None])[..., None] - _FP4).abs().argmin(-1).to(torch.uint8)
            changed[f"{name}_blocks"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
            changed[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    return changed


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PUBLISHED: dict[str, tuple[str, Callable[[Tensors], Tensors], dict[str, Any], float]] = {
    "fp8": ("qwen3", in_fp8, {**FP8, "modules_to_not_convert": ["lm_head"]}, 0.05),
    "mxfp4": ("gpt-oss", in_mxfp4, {"quant_method": "mxfp4"}, 0.2),
}
"""A model, its tensors, its settings, and how far its weights are from those that were quantised."""


class TestDense:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("method", PUBLISHED)
    def test_published_formats_are_exact(self, method: str, tiny_models: Models, tmp_path: Path) -> None:
        name, change, settings, limit = PUBLISHED[method]
        folder = quantised(tmp_path, name, change, settings)
        case = make_case(str(folder), tiny_models["auxiliary"], CHUNKS[:3])
        runtime: Any = case.engine.primary
        dense = load_model(tiny_models[name]).model.state_dict()
        for path, weight in runtime.model.state_dict().items():
            assert weight.dtype == torch.float32
            assert gap(weight, dense[path]) <= limit * float(dense[path].abs().max()), path
        with torch.inference_mode():
            runtime.model.set_attn_implementation("eager")
            expected = runtime.model(input_ids=case.layout.ids[None], use_cache=False).logits[0, -1]
            runtime.model.set_attn_implementation("cacheclip")
        segments = [span.segment for span in case.layout.spans]
        fused, direct = prefilled(case.engine, segments, "cacheclip", 1.0), prefilled(case.engine, segments, "direct")
        assert fused.stats.hits == 3
        assert gap(fused.logits, expected) < EXACT * float(expected.abs().max()) < gap(direct.logits, expected)

    def test_kv_is_not_that_of_the_weights_as_they_are_stored(self, tmp_path: Path) -> None:
        """Another process, such as vLLM, computes with the eight bits. On a processor, transformers may make them dense
        without being asked."""
        folder = quantised(tmp_path, "qwen3", in_fp8, FP8)
        assert load_model(folder).fingerprint == f"{load_planning(folder).fingerprint}:dense"
        config = Qwen3Config(quantization_config=FP8)
        assert loading_options(SCHEMES["torchao"], config, "cuda:1")["device_map"] == {"": "cuda:1"}
        asked = loading_options(SCHEMES["fp8"], config, "cuda:1")["config"]
        assert asked.quantization_config == {**FP8, "dequantize": True}

    def test_memory_is_that_of_dense_weights(self, tmp_path: Path, monkeypatch: Patch) -> None:
        folder = quantised(tmp_path, "gpt-oss", in_mxfp4, {"quant_method": "mxfp4"})
        needed = 4 * sum(each.numel() for each in load_model(folder).model.parameters())
        assert needed > 1.5 * memory.weight_bytes(folder, torch.float32)
        monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 1)
        (folder / "touched.json").write_text("{}")
        with pytest.raises(ModelError, match="GiB"):
            load_model(folder)

    def test_weights_that_the_class_has_in_float32_stay_so(self, tmp_path: Path) -> None:
        """Rounding would choose other experts."""
        sizes = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1}
        spec = tiny_spec("ernie4_5_moe", **sizes, moe_layer_start_index=1)
        folder = build_model(tmp_path, spec)
        dense = load_model(folder, dtype="bfloat16").model
        expected = {path: weight.dtype for path, weight in dense.named_parameters()}
        assert {*expected.values()} == {torch.bfloat16, torch.float32}
        check_loaded(dense, SCHEMES["fp8"], torch.bfloat16, "m")
        assert {path: weight.dtype for path, weight in dense.named_parameters()} == expected

    def test_weights_that_stay_quantised_are_an_error(self, tmp_path: Path, quantizer: str) -> None:
        folder = quantised(tmp_path, "qwen3", in_int8, {"quant_method": quantizer, "scale_of": "token"})
        SCHEMES[quantizer] = Scheme(is_dense=True)
        with pytest.raises(ModelError, match=r"to become dense, got model\.layers\.0\..* as EightBits"):
            load_model(folder)


class EightBits(nn.Module):
    """Weights and activations of 8 bits, by the formulas of the kernels that are in use."""

    def __init__(self, out_features: int, in_features: int, scale_of: str) -> None:
        super().__init__()
        self.in_features, self.scale_of = in_features, scale_of
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(out_features, 1), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight, whole = self.weight * self.scale, torch.zeros_like(rows)
        if self.scale_of == "columns":  # those with outliers are not rounded
            whole = torch.where((rows.abs() > 6).any(dim=-2, keepdim=True), rows, 0)
        rows = rows - whole
        if self.scale_of == "weights" or (self.scale_of == "many" and rows.shape[-2] == 1):
            return rows @ weight.T
        most = rows.abs().amax() if self.scale_of == "tensor" else rows.abs().amax(-1, keepdim=True)
        step = most.clamp(min=1e-9) / 127
        return (rows / step).round() * step @ weight.T + whole @ weight.T


def in_int8(tensors: Tensors) -> Tensors:
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            step = tensor.abs().amax(1, keepdim=True) / 127
            changed |= {name: (tensor / step).round().to(torch.int8), f"{name}_scale": step}
    return changed


@pytest.fixture
def quantizer(monkeypatch: Patch) -> str:
    """A method of transformers whose layers are :class:`EightBits`."""

    class Settings(QuantizationConfigMixin):
        def __init__(self, scale_of: str, **rest: Any) -> None:
            self.quant_method, self.scale_of = "eight-bits", scale_of

    class Quantizer(HfQuantizer):
        is_trainable = is_serializable = False

        def _process_model_before_weight_loading(self, model: Any, **rest: Any) -> None:
            for path, layer in [*model.named_modules()]:
                if path.endswith("_proj"):
                    with torch.device("meta"):
                        changed = EightBits(*layer.weight.shape, self.quantization_config.scale_of)
                    model.set_submodule(path, changed)

        def _process_model_after_weight_loading(self, model: Any, **rest: Any) -> None:
            for layer in model.modules():
                if isinstance(layer, EightBits):
                    layer.scale = layer.weight_scale.data  # beside the parameters, as in bitsandbytes

    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "eight-bits", Settings)
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "eight-bits", Quantizer)
    monkeypatch.setitem(SCHEMES, "eight-bits", Scheme())
    return "eight-bits"


class TestRows:
    @pytest.mark.parametrize("scale_of", ["weights", "token"])
    def test_of_their_own_are_exact(self, quantizer: str, scale_of: str, tmp_path: Path, monkeypatch: Patch) -> None:
        folder = quantised(tmp_path, "qwen3", in_int8, {"quant_method": quantizer, "scale_of": scale_of})
        runtime = load_model(folder)
        assert sum(isinstance(each, EightBits) for each in runtime.model.modules()) == 3 * 7
        assert runtime.fingerprint == load_planning(folder).fingerprint
        monkeypatch.setattr(proof, "_LIMIT", 0.0)
        assert "noise" in proof._gaps(runtime, 7, proof._BRIEF)
        maps = Path("/proc/self/maps")
        assert not maps.is_file() or str(folder) not in maps.read_text()  # a mapped scale would change with its file

    @pytest.mark.parametrize("scale_of", ["tensor", "columns", "many"])
    def test_that_depend_on_others_are_refused(self, quantizer: str, scale_of: str, tmp_path: Path) -> None:
        """One scale a pass; outliers chosen over a pass; rows that are alone computed in another way."""
        folder = quantised(tmp_path, "qwen3", in_int8, {"quant_method": quantizer, "scale_of": scale_of})
        with pytest.raises(UnsupportedModelError, match=r"the other tokens of a pass: in model.layers.0.*_proj"):
            load_model(folder)

    def test_a_part_that_cannot_be_tried_is_refused(self) -> None:
        model: Any = nn.Sequential(nn.Embedding(4, 4), nn.Module())
        model.dtype = torch.float32
        model[0].register_buffer("table", torch.zeros(4, 4, dtype=torch.int8))
        check_rows(model, "m")
        model[1].register_buffer("experts", torch.zeros(2, 4, 4, dtype=torch.uint8))
        with pytest.raises(UnsupportedModelError, match="in 1, a Module, which cannot be tried alone"):
            check_rows(model, "m")


class TestRefused:
    def test_by_name(self, tmp_path: Path) -> None:
        """Also where the text part says so: transformers reads it there, too."""
        spqr, whole = {"quantization_config": {"quant_method": "spqr"}}, LlamaConfig()
        whole.get_text_config = lambda decoder=False: Qwen3Config(**spqr)
        for config in (LlamaConfig(**spqr), whole):
            with pytest.raises(UnsupportedModelError, match=r"quantised by 'spqr'\. Expected one of awq, bitsandbytes"):
                scheme_of(config, "m")
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": FP8}}))
        assert quantization_of(tmp_path) == FP8

    def test_whose_package_is_missing(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(quantised_weights.importlib.util, "find_spec", lambda name: None)
        needed = {"bitsandbytes": "bitsandbytes", "awq": "gptqmodel", "gptq": "gptqmodel and optimum"}
        cases: list[tuple[str, dict[str, Any]]] = [(name, {"quant_method": name}) for name in needed]
        for name, settings in (*cases, ("bitsandbytes", {"load_in_4bit": True}), ("bitsandbytes", {"load_in_8bit": 1})):
            with pytest.raises(ModelError, match=f"'{name}', for which accelerate and {needed[name]} must be"):
                scheme_of(LlamaConfig(quantization_config=settings), "m")

    @pytest.mark.parametrize("pattern", ["(a|a)*b", "(.+)+x", ".*" * 5, "re:(x{1,9}){1,9}"])
    def test_patterns_that_take_long(self, pattern: str) -> None:
        """Transformers compares them with the name of every module."""
        for settings in ({"modules_to_not_convert": [pattern]}, {"config_groups": {"a": {"targets": [pattern]}}}):
            with pytest.raises(ModelError, match="expected names of modules, or short patterns of them"):
                scheme_of(LlamaConfig(quantization_config={**FP8, **settings}), "m")
        published = ["re:.*lm_head", "model.layers.*.mlp.router", r"re:model\.layers\.\d+\.self_attn.(q|k|v)_proj$"]
        assert scheme_of(LlamaConfig(quantization_config={**FP8, "ignore": published}), "m") == SCHEMES["fp8"]


def test_a_transformers_that_leaves_files_mapped(monkeypatch: Patch) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda name: None)
    config = Qwen3Config(quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match=r"without mapping them, got 5\..*: pip install -U transformers"):
        scheme_of(config, "tiny")
