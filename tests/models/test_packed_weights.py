"""Packed weights: the same products, bit for bit, and no copy that nobody needs."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing.tiny import build_model, tiny_spec
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cacheclip_rag.measuring import ModelRuntime, processor_name
from cacheclip_rag.models.load import load_model, unload_models
from cacheclip_rag.runtime.transformers import packed_weights
from cacheclip_rag.runtime.transformers.packed_weights import PackedLinear, pack_weights
from cacheclip_rag.runtime.transformers.weight_files import copy_mapped


def packs() -> bool:
    layer = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    pack_weights(layer)
    return type(layer) is PackedLinear


def of_model(model: Any) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


@pytest.fixture(autouse=True)
def forget() -> Any:
    unload_models()
    yield
    unload_models()


@pytest.mark.some(4)
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gemma3", "phi3-partial", "gpt-oss"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_logits(tiny_models: dict[str, str], name: str, dtype: str) -> None:
    folder = tiny_models[name]
    loaded = load_model(folder, dtype=dtype)
    unpacked = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    plain = ModelRuntime(unpacked, loaded.tokenizer, name=name, fingerprint="plain")
    logits = []
    for runtime in (loaded, plain):
        cache, first = runtime.prefill(torch.arange(5, 75), 80)
        logits.append([first, *(runtime.decode_step(cache, token) for token in (7, 9, 11))])
    packed = packs() and dtype == "bfloat16"
    # weights that are mapped from a file lie elsewhere in memory, by which some processors sum float32 in another order
    rounding = 0.0 if dtype == "bfloat16" else 1e-5
    for own, expected in zip(*logits, strict=True):
        torch.testing.assert_close(own, expected, rtol=rounding, atol=rounding)
    assert {layer.weight.is_mkldnn for layer in of_model(loaded.model)} == {packed}
    assert not any(layer.weight.is_mkldnn for layer in of_model(plain.model))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what memory holds")
@pytest.mark.parametrize("change", [copy_mapped, pack_weights])
def test_memory_holds_weights_once(change: Callable[[torch.nn.Module], None], tmp_path: Path) -> None:
    """While the file is mapped still, for weights that are not copied yet."""
    if change is pack_weights and "AMD" not in processor_name():
        pytest.skip("this processor's weights in float32 are not packed")
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.rand(1024, 1024)}, file)

    def resident_kib() -> int:
        _, _, mapping = Path("/proc/self/smaps").read_text().partition(str(file))
        return int(mapping.partition("Rss:")[2].split()[0])

    layer = torch.nn.Linear(1024, 1024, bias=False)
    mapped = load_file(file)["weight"]
    layer.weight = torch.nn.Parameter(mapped, requires_grad=False)
    rows = torch.rand(2, 1024)
    expected = layer(rows)
    assert resident_kib() >= 4096
    change(layer)
    assert resident_kib() < 64
    torch.testing.assert_close(layer(rows), expected, rtol=1e-5, atol=0.0)  # its sums are in another order
    torch.testing.assert_close(rows @ mapped.T, expected)  # who still has the mapped weight reads the file again


def test_a_load_leaves_shared_weights_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load too, whose proof uses them."""
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    if not packs():  # the same copies, which this processor can multiply

        def pack(layer: PackedLinear) -> Any:
            layer.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
            return layer.weight

        monkeypatch.setattr(packed_weights, "_gains", lambda weight: True)
        monkeypatch.setattr(PackedLinear, "pack", pack)
        monkeypatch.setattr(
            PackedLinear, "forward", lambda layer, inputs: torch.nn.functional.linear(inputs, layer.pack(), layer.bias)
        )
    spec = tiny_spec("llama", tie_word_embeddings=True)
    runtime = load_model(str(build_model(tmp_path, spec)), dtype="bfloat16")
    head, table = runtime.model.lm_head, runtime.model.get_input_embeddings()
    assert type(head) is PackedLinear and head.weight is table.weight
    runtime.prefill(torch.arange(5, 9), 8)
    assert head.weight is not table.weight


@pytest.mark.skipif(not packs(), reason="this processor does not multiply bfloat16")
class TestPackedLinear:
    @pytest.mark.some(5)
    @pytest.mark.parametrize("sizes", [(3, 5), (896, 128), (896, 4864), (576, 1000)], ids=str)
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 130])
    def test_same_bits(self, sizes: tuple[int, int], bias: bool, rows: int) -> None:
        layer = torch.nn.Linear(*sizes, bias=bias, dtype=torch.bfloat16)
        inputs = torch.randn(1, rows, sizes[0], dtype=torch.bfloat16)
        weight = layer.weight.detach().clone()
        with torch.inference_mode():
            expected = layer(inputs)
            pack_weights(layer)
            for _ in range(2):
                assert torch.equal(layer(inputs), expected)
        assert torch.equal(layer.weight.to_dense(), weight)

    def test_float32_differs_by_its_rounding(self) -> None:
        layer = torch.nn.Linear(896, 512)
        inputs = torch.randn(1, 7, 896)
        with torch.inference_mode():
            pack_weights(layer)
            exact = inputs.double() @ layer.weight.to_dense().double().T + layer.bias.double()
            assert (layer(inputs) - exact).abs().max() < 1e-5
        assert layer.weight.is_mkldnn == ("AMD" in processor_name())

    def test_shared_weights_in_float32_are_not_copied(self) -> None:
        table, head = torch.nn.Embedding(4096, 64), torch.nn.Linear(64, 4096, bias=False)
        head.weight = table.weight
        pack_weights(torch.nn.ModuleList([table, head]))
        rows = torch.randn(1, 1, 64)
        with torch.inference_mode():
            torch.testing.assert_close(head(rows), rows @ table.weight.T)
        assert head.weight is table.weight

    def test_shared_weights_stay_with_the_embeddings(self) -> None:
        model = torch.nn.ModuleDict({"table": torch.nn.Embedding(90, 8), "head": torch.nn.Linear(8, 90, bias=False)})
        model = model.to(torch.bfloat16)
        model["head"].weight = model["table"].weight
        pack_weights(model)
        assert not model["head"].weight.is_mkldnn  # before its first pass
        with torch.inference_mode():
            rows = model["table"](torch.arange(4))
            assert torch.equal(model["head"](rows), rows @ model["table"].weight.T)
        assert model["head"].weight.is_mkldnn and not model["table"].weight.is_mkldnn

    def test_others_are_left_alone(self) -> None:
        class Other(torch.nn.Linear):
            pass

        hooked = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        hooked._hf_hook = object()  # type: ignore[assignment]
        layers = torch.nn.ModuleList([Other(4, 4, dtype=torch.bfloat16), hooked, torch.nn.Linear(4, 4)])
        pack_weights(layers)
        assert PackedLinear not in map(type, layers)

    def test_two_threads_pack_at_once(self) -> None:
        table = torch.nn.Embedding(512, 256, dtype=torch.bfloat16)
        layer = torch.nn.Linear(256, 512, dtype=torch.bfloat16)
        layer.weight = table.weight
        inputs = torch.randn(1, 3, 256, dtype=torch.bfloat16)
        with torch.inference_mode():
            expected = layer(inputs)
        pack_weights(torch.nn.ModuleList([table, layer]))
        found, both = [], threading.Barrier(4, timeout=30)

        def job() -> None:
            both.wait()
            with torch.inference_mode():
                found.append(layer(inputs))

        threads = [threading.Thread(target=job) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(found) == 4 and all(torch.equal(each, expected) for each in found)
