"""Where models compute: one device, several, or offloaded weights. What a CPU can show is shown on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cacheclip_rag.runtime.transformers.attention as attention
from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.models.load import load_model, unload_models
from cacheclip_rag.runtime.transformers.attention import AttentionRule, block_attention, causal_plan
from cacheclip_rag.runtime.transformers.model import ModelRuntime, device_of
from tests.conftest import CHUNKS, rag_prompt
from tests.fusion.cases import EXACT, gap, prefilled, reference_logits

PARAMS = SamplingParams(max_tokens=16)


@pytest.fixture(autouse=True)
def endless(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRuntime, "_find_eos_ids", lambda self: frozenset())
    unload_models()


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    unload_models()


class TestDeviceMap:
    @pytest.mark.parametrize("device", ["auto", "sequential"])
    def test_gives_the_same_answer(self, tiny_models: dict[str, str], device: str) -> None:
        answers = []
        for name in ("cpu", device):
            engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], device=name)
            engine.precompute(CHUNKS)
            answers.append(engine.generate(rag_prompt(CHUNKS), PARAMS).token_ids)
        assert answers[0] == answers[1]

    def test_unknown_name_lists_them(self, tiny_models: dict[str, str]) -> None:
        with pytest.raises(ConfigurationError, match=r"'automatic'.*cpu.*cuda.*auto, balanced"):
            load_model(tiny_models["llama"], device="automatic")

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "smollm3"])
    def test_weights_on_disk(self, tiny_models: dict[str, str], tmp_path: Path, name: str) -> None:
        """Offloaded weights have no device of their own (meta): their hooks say where they compute."""
        from accelerate import disk_offload

        plain = load_model(tiny_models[name])
        unload_models()
        offloaded = load_model(tiny_models[name]).model
        disk_offload(offloaded, str(tmp_path / "weights"), execution_device=torch.device("cpu"))
        assert next(offloaded.parameters()).device.type == "meta"
        runtime = ModelRuntime(offloaded, plain.tokenizer, name="offloaded", fingerprint="f")
        assert runtime.device.type == "cpu" and {d.type for d in runtime.layer_devices} == {"cpu"}
        ids = torch.arange(5, 180)
        left, right = (r.encode(ids[:90].tolist()) for r in (plain, runtime))
        assert gap(left, right) < 1e-6
        caches = [r.new_cache(200) for r in (plain, runtime)]
        for r, cache in zip((plain, runtime), caches, strict=True):
            r.fill(cache, left, slot=0, position=0)
        logits = [r.extend(c, ids[90:], 90) for r, c in zip((plain, runtime), caches, strict=True)]
        assert logits[0] is not None and logits[1] is not None and gap(logits[0], logits[1]) < 1e-5

    def test_each_layer_keeps_its_kv_where_it_computes(self, tiny_models: dict[str, str]) -> None:
        runtime = load_model(tiny_models["llama"])
        runtime.layer_devices = [torch.device("cpu"), torch.device("meta"), torch.device("cpu")]
        cache = runtime.new_cache(8)
        assert [layer.keys.device.type for layer in cache.layers] == ["cpu", "meta", "cpu"]
        assert [layer.keys.device.type for layer in cache.layers] == [
            table[0].device.type for table in runtime.rotary_tables(0, 8) if table
        ]
        cache.scatter(torch.tensor([1, 3]))
        assert [layer.slots.device.type for layer in cache.layers] == ["cpu", "meta", "cpu"]
        runtime.fill(cache, torch.zeros(3, 2, 2, 4, 16), slot=0, position=0)
        assert [layer.length for layer in cache.layers] == [4, 4, 4]

    def test_offloaded_weights_in_many_threads(self, tiny_models: dict[str, str]) -> None:
        """Such weights come and go with each pass: two at once would take them from each other."""
        from accelerate import cpu_offload

        plain = load_model(tiny_models["llama"])
        ids = torch.arange(5, 120)
        expected = plain.prefill(ids, 130)[1]
        unload_models()
        model = load_model(tiny_models["llama"]).model
        cpu_offload(model, execution_device=torch.device("cpu"))
        runtime = ModelRuntime(model, plain.tokenizer, name="offloaded", fingerprint="f")
        with ThreadPoolExecutor(4) as pool:
            logits = list(pool.map(lambda _: runtime.prefill(ids, 130)[1], range(24)))
        assert all(gap(each, expected) < 1e-5 for each in logits)

    def test_device_of_a_hooked_module(self) -> None:
        module = torch.nn.Linear(2, 2)
        assert device_of(module).type == "cpu"
        module._hf_hook = type("Hook", (), {"execution_device": "meta"})()  # type: ignore[assignment]
        assert device_of(module).type == "meta"


class TestAuxiliaryDevice:
    def test_is_loaded_there(self, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        """A primary spread by accelerate beside an auxiliary on the CPU."""
        engine = CacheClipEngine(
            primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], device="auto", auxiliary_device="cpu"
        )
        engine.precompute(CHUNKS)
        assert engine.generate(rag_prompt(CHUNKS), PARAMS).stats.fallback is None
        with pytest.raises(ConfigurationError, match="nowhere"):
            CacheClipEngine(
                primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], auxiliary_device="nowhere"
            ).precompute(CHUNKS)


class TestAttentionKernels:
    """The mask is exact with every kernel that may be chosen."""

    @pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
    @pytest.mark.parametrize("window", [None, 7])
    def test_on_the_cpu(self, backend: SDPBackend, window: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 6, 40, 16, generator=generator)
        key, value = torch.randn(2, 1, 2, 90, 16, generator=generator)
        rows = torch.randperm(90, generator=generator)[:40].sort().values
        rule = AttentionRule(0.25, window=window)
        default = block_attention(query, key, value, causal_plan(rows).blocks, rule)
        with sdpa_kernel([backend, SDPBackend.MATH]):
            got = block_attention(query, key, value, causal_plan(rows).blocks, rule)
        assert gap(got, default) < 1e-5

    @pytest.mark.parametrize(
        "rule", [AttentionRule(0.25), AttentionRule(0.25, window=7), AttentionRule(0.25, softcap=3.0)]
    )
    def test_mask_goes_where_the_layer_is(self, rule: AttentionRule) -> None:
        """Under a device map the plan is made for the first layer's device; others take it to theirs."""
        query, key, value = (torch.empty(1, heads, n, 16, device="meta") for heads, n in ((6, 40), (2, 90), (2, 90)))
        blocks = causal_plan(torch.arange(0, 80, 2)).blocks
        assert block_attention(query, key, value, blocks, rule).device.type == "meta"

    def test_no_cudnn_on_cuda(self) -> None:
        """Only what the choice is; whether the kernels run is for the GPU tests."""
        from torch.nn.attention import _cur_sdpa_kernel_backends

        with attention.sdpa_backends(torch.device("cuda")):
            chosen = set(_cur_sdpa_kernel_backends())
        assert chosen == {SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH}
        with attention.sdpa_backends(torch.device("cpu")):
            assert SDPBackend.CUDNN_ATTENTION in set(_cur_sdpa_kernel_backends())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: attention on CUDA is not tested")
class TestCuda:
    @pytest.mark.parametrize("device", ["cuda", "auto"])
    def test_exact(self, primary: str, tiny_models: dict[str, str], device: str) -> None:
        engine = CacheClipEngine(
            primary=primary, auxiliary=tiny_models["auxiliary"], device=device, auxiliary_device="cpu"
        )
        engine.precompute(CHUNKS)
        fused = prefilled(engine, rag_prompt(CHUNKS), "cacheclip", 1.0)
        assert fused.logits.device.type == "cuda" and fused.stats.fallback is None
        assert gap(fused.logits.cpu(), reference_logits(primary, fused.layout.ids)) < 10 * EXACT

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, tiny_models: dict[str, str], dtype: str) -> None:
        from cacheclip_rag.lab.evaluation.exactness import check_exactness
        from cacheclip_rag.lab.evaluation.prompts import EvaluationPrompt

        prompt = EvaluationPrompt(tuple(CHUNKS), "How tall?", None)
        engine = CacheClipEngine(
            primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], device="cuda", dtype=dtype
        )
        engine.precompute(prompt.chunks)
        result: dict[str, Any] = check_exactness(engine, prompt)
        assert result["passed"], result

    @pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    @pytest.mark.parametrize("window", [None, 7])
    def test_kernels(self, backend: SDPBackend, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a mask flash attention is not available, and the next in line is taken; none gives another result."""
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 6, 40, 64, generator=generator)
        key, value = torch.randn(2, 1, 2, 90, 64, generator=generator)
        rows = torch.randperm(90, generator=generator)[:40].sort().values
        rule = AttentionRule(0.125, window=window)
        expected = block_attention(query, key, value, causal_plan(rows).blocks, rule)
        monkeypatch.setattr(attention, "sdpa_backends", lambda device: sdpa_kernel([backend, SDPBackend.MATH]))
        blocks = causal_plan(rows, torch.device("cuda")).blocks
        got = block_attention(query.cuda(), key.cuda(), value.cuda(), blocks, rule)
        assert gap(got.cpu(), expected) < 1e-3
