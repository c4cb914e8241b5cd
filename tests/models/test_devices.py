"""Where models compute: one device, several, or offloaded weights. What a CPU can show is shown on a CPU."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from torch.nn.attention import SDPBackend, sdpa_kernel

import cacheclip_rag.runtime.transformers.attention as attention
import cacheclip_rag.runtime.transformers.cache as of_prompts
import cacheclip_rag.runtime.transformers.text as text
from cacheclip_rag import CacheClipEngine, ConfigurationError, SamplingParams
from cacheclip_rag.answering.decoding import Sampler
from cacheclip_rag.measuring import ModelRuntime, Prefilled
from cacheclip_rag.models.load import load_model, unload_models
from cacheclip_rag.runtime.transformers.attention import block_attention
from cacheclip_rag.runtime.transformers.attention_pattern import AttentionRule, causal_pattern
from tests.conftest import CHUNKS, SENTENCES, TINY_MODELS, Make, Models, Patch, rag_prompt
from tests.fusion.cases import EXACT, KINDS, gap, reference_logits
from tests.models.pretend import Pretended, Queue, move, pretended

PARAMS = SamplingParams(max_tokens=16)
OF_TRANSFORMERS = (20, 2, 2, 0) if transformers.__version__.startswith("5.0.") else (0, 0, 0, 0)
"""Kernels, copies, blocking copies and waits that the oldest supported transformers adds to a prefill, at most."""


@pytest.fixture(autouse=True)
def endless(tiny_models: Models, monkeypatch: Patch) -> None:
    monkeypatch.setattr(text, "eos_ids_of", lambda model, tokenizer: frozenset())
    unload_models()


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    unload_models()


class TestDeviceMap:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("device", ["balanced", "sequential"])
    def test_gives_the_same_answer(self, tiny_models: Models, device: str) -> None:
        answers = []
        for name in ("cpu", device):
            engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], device=name)
            engine.precompute(CHUNKS)
            answers.append(engine.generate(rag_prompt(CHUNKS), PARAMS).token_ids)
        assert answers[0] == answers[1]

    def test_unknown_name_lists_them(self, tiny_models: Models) -> None:
        with pytest.raises(ConfigurationError, match=r"'automatic'.*auto.*cpu.*cuda.*balanced"):
            load_model(tiny_models["llama"], device="automatic")

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "smollm3"])
    def test_weights_on_disk(self, tiny_models: Models, tmp_path: Path, name: str) -> None:
        """Offloaded weights have no device of their own (meta): their hooks say where they compute."""
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
        logits = []
        for each in (plain, runtime):
            cache = each.new_cache(200)
            cache.fill(left, slot=0, position=0)
            logits.append(each.extend(cache, ids[90:], 90))
        assert gap(*logits) < 1e-5

    def test_each_layer_keeps_its_kv_where_it_computes(self, tiny_models: Models) -> None:
        runtime, devices = load_model(tiny_models["llama"]), ["cpu", "meta", "cpu"]
        runtime.layer_devices[:] = map(torch.device, devices)
        cache = runtime.new_cache(8)
        assert [layer.keys.device.type for layer in cache.layers] == devices
        assert [table[0].device.type for table in runtime.rotary.tables(torch.arange(8)) if table] == devices
        cache.scatter(torch.tensor([1, 3]))
        assert [layer.slots.device.type for layer in cache.layers] == devices
        cache.fill(torch.zeros(3, 2, 2, 4, 16), slot=0, position=0)
        assert [layer.length for layer in cache.layers] == [4, 4, 4]

    def test_offloaded_weights_in_many_threads(self, tiny_models: Models) -> None:
        """Such weights come and go with each pass: two at once would take them from each other."""
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


def test_an_auxiliary_on_a_device_of_its_own(tiny_models: Models) -> None:
    """A primary spread by accelerate beside an auxiliary on the CPU."""
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    engine = CacheClipEngine(**models, device="balanced", auxiliary_device="cpu", min_confidence=0.0)
    engine.precompute(CHUNKS)
    assert engine.generate(rag_prompt(CHUNKS), PARAMS).stats.fallback is None
    with pytest.raises(ConfigurationError, match="nowhere"):
        CacheClipEngine(**models, auxiliary_device="nowhere").precompute(CHUNKS)


def attended(head_dim: int, device: str = "cpu") -> tuple[Any, ...]:
    """Queries of 40 rows, keys and values of 90, and the blocks of the rows."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 40, head_dim, generator=generator)
    key, value = torch.randn(2, 1, 2, 90, head_dim, generator=generator)
    rows = torch.randperm(90, generator=generator)[:40].sort().values
    blocks = causal_pattern(rows, torch.device(device)).blocks
    return query.to(device), key.to(device), value.to(device), blocks


class TestAttentionKernels:
    """The mask is exact with every kernel that may be chosen."""

    @pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
    @pytest.mark.parametrize("window", [None, 7])
    def test_on_the_cpu(self, backend: SDPBackend, window: int | None) -> None:
        inputs = attended(16)
        default = block_attention(*inputs, AttentionRule(0.25, window=window))
        with sdpa_kernel([backend, SDPBackend.MATH]):
            assert gap(block_attention(*inputs, AttentionRule(0.25, window=window)), default) < 1e-5

    @pytest.mark.parametrize("more", [{}, {"window": 7}, {"softcap": 3.0}], ids=str)
    def test_mask_goes_where_the_layer_is(self, more: dict[str, Any]) -> None:
        """Under a device map the plan is made for the first layer's device; others take it to theirs."""
        *inputs, blocks = attended(16)
        there = (each.to("meta") for each in inputs)
        assert block_attention(*there, blocks, AttentionRule(0.25, **more)).device.type == "meta"

    def test_no_cudnn_on_cuda(self) -> None:
        """Only what the choice is; whether the kernels run is for the GPU tests."""
        from torch.nn.attention import _cur_sdpa_kernel_backends

        with attention.sdpa_backends(torch.device("cuda")):
            chosen = set(_cur_sdpa_kernel_backends())
        assert chosen == {SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH}
        with attention.sdpa_backends(torch.device("cpu")):
            assert SDPBackend.CUDNN_ATTENTION in set(_cur_sdpa_kernel_backends())


HAS_CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_CUDA, reason="torch finds no CUDA device"))]
"""What the tests below compute on: without an accelerator they run all the same, and prove the tests."""
OPENING = "Read these texts with care, before you say anything.\n\n"
"""Of the prompt's own: longer than a block of the prefix cache."""


class TestAccelerator:
    """An engine on the accelerator, held against plain transformers on the CPU, or against the same engine there."""

    @pytest.fixture(params=DEVICES)
    def device(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        return name

    @pytest.fixture
    def make(self, tiny_models: Models, device: str) -> Make:
        def build(**options: Any) -> CacheClipEngine:
            models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"], "device": device}
            engine = CacheClipEngine(**{**models, **options})
            engine.precompute(CHUNKS)
            return engine

        return build

    def prefilled(self, engine: CacheClipEngine, method: str, ratio: float | None = None) -> Prefilled:
        """Asked with the engine's own settings, which its chunks were stored by."""
        found = engine.prefill(OPENING + rag_prompt(CHUNKS), PARAMS, method=engine.make_method(method, ratio))
        expected = engine.config.device if engine.config.device != "auto" else "cuda" if HAS_CUDA else "cpu"
        assert found.logits.device.type == expected
        return found

    @pytest.mark.some(2)
    @pytest.mark.parametrize("primary", TINY_MODELS if HAS_CUDA else KINDS, indirect=True)
    def test_exact(self, primary: str, make: Make) -> None:
        engine = make(primary=primary)
        fused = self.prefilled(engine, "cacheclip", 1.0)
        assert fused.stats.hits == len(CHUNKS) and fused.stats.fallback is None
        assert gap(fused.logits.cpu(), reference_logits(primary, fused.layout.ids)) < 10 * EXACT

    def test_plain_prefill(self, make: Make) -> None:
        engine = make()
        found = self.prefilled(engine, "full")
        assert gap(found.logits.cpu(), reference_logits(engine.config.primary, found.layout.ids)) < 10 * EXACT

    @pytest.mark.some(2)
    @pytest.mark.parametrize("places", ["auto and cpu", "device and cpu", "cpu and device"])
    def test_models_on_two_devices(self, make: Make, device: str, places: str) -> None:
        """The auxiliary's scores choose tokens of a primary that is elsewhere."""
        first, second = places.replace("device", device).split(" and ")
        found = self.prefilled(make(device=first, auxiliary_device=second), "cacheclip")
        expected = self.prefilled(make(device="cpu"), "cacheclip")
        assert found.stats.recomputed_tokens == expected.stats.recomputed_tokens > 0
        assert gap(found.logits.cpu(), expected.logits) < 10 * EXACT

    @pytest.mark.some(3)
    @pytest.mark.parametrize("method", ["cacheclip", "epic", "direct"])
    def test_methods_choose_and_compute_what_they_do_on_the_cpu(self, make: Make, method: str) -> None:
        """Selection, and correction (``cacheclip``), without which the logits are others."""
        engine, other = make(), make(device="cpu")
        found, expected = (self.prefilled(each, method) for each in (engine, other))
        assert found.stats.hits == len(CHUNKS) and found.stats.fallback is None
        assert found.stats.recomputed_tokens == expected.stats.recomputed_tokens
        assert gap(found.logits.cpu(), expected.logits) < 10 * EXACT
        if method == "cacheclip":
            without: Any = replace(other.make_method(method), correction=0.0)
            other.prefixes.clear()
            assert (
                gap(other.prefill(OPENING + rag_prompt(CHUNKS), PARAMS, method=without).logits, expected.logits) > 1e-3
            )

    @pytest.mark.parametrize("method", ["prefix", "cacheclip"])
    def test_prefix_cache(self, make: Make, method: str) -> None:
        """The second prompt that begins alike takes its start from the cache, and is as exact."""
        engine = make(recompute_ratio=1.0)
        engine.generate(OPENING + "Something else?", PARAMS, method="prefix")
        found = self.prefilled(engine, method)
        assert found.stats.cached_prefix_tokens > 16
        assert gap(found.logits.cpu(), reference_logits(engine.config.primary, found.layout.ids)) < 10 * EXACT

    @pytest.mark.long
    @pytest.mark.parametrize("codec", ["float32", "int8"])
    @pytest.mark.parametrize("method", ["cacheclip", "direct"])
    def test_long_prompts(self, make: Make, method: str, codec: str) -> None:
        """Most keys are multiplied apart, without a mask; payloads of many chunks are put side by side there."""
        texts = [" ".join(SENTENCES[(start + step) % 8] for step in range(6)) for start in range(8)]
        found = []
        for device in ({}, {"device": "cpu"}):
            engine = make(codec=codec, **device)
            engine.precompute(texts)
            found.append(engine.prefill(rag_prompt(texts), PARAMS, method=engine.make_method(method)))
        assert len(found[0].layout.ids) > 1.5 * attention._UNMASKED and found[0].stats.hits == len(texts)
        assert gap(found[0].logits.cpu(), found[1].logits) < 10 * EXACT

    @pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_parts_merge(self, device: str, dtype: torch.dtype, head_dim: int) -> None:
        assert attention.parts_merge(torch.device(device), dtype, head_dim)

    def test_answers(self, make: Make) -> None:
        """Decoding goes on from the fused cache, token by token as on the CPU."""
        answers = [each.generate(rag_prompt(CHUNKS), PARAMS).token_ids for each in (make(), make(device="cpu"))]
        assert answers[0] == answers[1] and len(answers[0]) == PARAMS.max_tokens

    @pytest.mark.some(3)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, make: Make, dtype: str) -> None:
        from cacheclip_lab.evaluation.exactness import check_exactness
        from cacheclip_lab.evaluation.prompts import EvaluationPrompt

        engine = make(dtype=dtype, chunk_context="prefix")  # as the checks store chunks
        result: dict[str, Any] = check_exactness(engine, EvaluationPrompt(tuple(CHUNKS), "How tall?", None))
        assert result["passed"], result

    @pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    @pytest.mark.parametrize("window", [None, 7])
    def test_kernels(self, device: str, backend: SDPBackend, window: int | None, monkeypatch: Patch) -> None:
        """With a mask flash attention is not available, and the next in line is taken; none gives another result."""
        rule = AttentionRule(0.125, window=window)
        expected = block_attention(*attended(64), rule)
        monkeypatch.setattr(attention, "sdpa_backends", lambda device: sdpa_kernel([backend, SDPBackend.MATH]))
        assert gap(block_attention(*attended(64, device), rule).cpu(), expected) < 1e-3


@pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device, on which the tests above compute")
class TestPretendedAccelerator:
    """The same engine on a device that is pretended: no tensor is on the wrong device, numbers are those of the CPU,
    and numbers are read from the device a few times per request, whatever the number of layers and chunks.
    Of a chunk nothing but its KV is copied to it."""

    def prefilled(
        self, tiny_models: Models, method: str, there: str = "", chunks: int = 2, primary: str = "llama"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the first token and of the one after. ``there``: models that are moved."""
        unload_models()
        models = {"primary": tiny_models[primary], "auxiliary": tiny_models["auxiliary"]}
        engine = CacheClipEngine(**models, chunk_context="prefix", prefix_cache_bytes=0)
        for name in there.split():
            move(getattr(engine, name))
        # alike in length, so that the auxiliary reads them together
        texts = [f"{number}. {CHUNKS[number % 2]}" for number in range(chunks)]
        engine.precompute(texts)
        prompts = [OPENING + rag_prompt(order) for order in (texts, texts[::-1])]
        engine.generate(prompts[0], SamplingParams(max_tokens=1), method=method)  # computes shared prefixes, captures
        before = self.queue.counts()
        found = engine.prefill(prompts[1], PARAMS, method=engine.make_method(method))
        sampler = Sampler(SamplingParams(), found.logits.device)
        first = sampler.pick(found.logits, found.following)
        between = self.queue.counts()
        assert first == sampler.pick(found.logits)
        before_step = self.queue.counts()
        assert found.stats.fallback is None
        following = engine.primary.decode_step(found.cache, 5)  # type: ignore[arg-type]
        after = self.queue.counts()
        self.of_request, self.of_token = (
            {name: now[name] - then[name] for name in now} for then, now in ((before, between), (before_step, after))
        )
        assert isinstance(found.logits, Pretended) is ("primary" in there)
        return tuple(each.inner if isinstance(each, Pretended) else each for each in (found.logits, following))

    queue = Queue()
    of_request: dict[str, Counter[str]]
    of_token: dict[str, Counter[str]]

    @pytest.mark.some(2)
    @pytest.mark.parametrize("there", ["primary", "auxiliary"])
    def test_is_the_cpu_s_answer(self, tiny_models: Models, monkeypatch: Patch, there: str) -> None:
        expected = self.prefilled(tiny_models, "cacheclip")
        with pretended(monkeypatch) as self.queue:
            found = self.prefilled(tiny_models, "cacheclip", there)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        ("method", "two", "four"),
        [
            ("full", (131, 1, 0, 1), (131, 1, 0, 1)),
            ("direct", (191, 10, 0, 1), (191, 10, 0, 1)),
            ("cacheclip", (361, 23, 0, 2), (368, 23, 0, 2)),
        ],
    )
    def test_work_of_a_question(
        self, tiny_models: Models, monkeypatch: Patch, method: str, two: tuple[int, ...], four: tuple[int, ...]
    ) -> None:
        """Kernels, copies, blocking copies and waits, of two and of four chunks: meters that only fall. A number is
        read once for the first token, with its confidence, and once per set of scores; none for a later token."""
        expected = self.prefilled(tiny_models, method)
        with pretended(monkeypatch) as self.queue:
            for chunks, most in ((2, two), (4, four)):
                found = self.prefilled(tiny_models, method, "primary auxiliary", chunks)
                if chunks == 2:
                    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
                work = tuple(each.total() for each in self.of_request.values())
                assert all(m <= n <= m + o for n, m, o in zip(work, most, OF_TRANSFORMERS, strict=True)), work
                assert self.of_token["copies"].total() == 2 and not self.of_token["stops"]

    @pytest.mark.long
    @pytest.mark.parametrize(("primary", "method"), [("qwen2-sliding", "direct"), ("gemma3", "cacheclip")])
    def test_windows_and_caps(self, tiny_models: Models, monkeypatch: Patch, primary: str, method: str) -> None:
        expected = self.prefilled(tiny_models, method, primary=primary)
        with pretended(monkeypatch) as self.queue:
            found = self.prefilled(tiny_models, method, "primary auxiliary", primary=primary)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert self.of_request["stops"].total() <= 2 and not self.of_token["stops"]

    def test_prefix_cache(self, tiny_models: Models, monkeypatch: Patch) -> None:
        """Blocks are inserted from a cache on the device, and matched into another one."""

        def answered(there: str = "") -> torch.Tensor:
            unload_models()
            engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"])
            for name in there.split():
                move(getattr(engine, name))
            engine.precompute(CHUNKS[:2])
            engine.generate(OPENING + "Something else?", SamplingParams(max_tokens=1), method="prefix")
            method = engine.make_method("cacheclip")
            found = engine.prefill(OPENING + rag_prompt(CHUNKS[:2]), PARAMS, method=method)
            assert found.stats.cached_prefix_tokens > 16
            return found.logits

        expected = answered()
        with pretended(monkeypatch):
            found = answered("primary auxiliary")
        assert isinstance(found, Pretended) and torch.equal(found.inner, expected)

    def test_blocks_are_copied_together(self, tiny_models: Models, monkeypatch: Patch) -> None:
        """Two kernels for as many as are copied together; one by one once a layer has grown. The same numbers."""
        runtime = load_model(tiny_models["llama"])
        with pretended(monkeypatch) as queue:
            move(runtime)
            cache = runtime.new_cache(90)
            assert cache.memory is not None
            cache.memory.copy_(torch.randn(cache.memory.shape))
            cache.extend_to(80)
            parts = [slice(at, min(at + 16, 75)) for at in range(3, 75, 16)]
            expected = [torch.stack([array[0, :, part] for array in cache.arrays]) for part in parts]
            for together, groups in ((1 << 27, 1), (1, 5)):
                monkeypatch.setattr(of_prompts, "_TOGETHER", together)
                before = queue.kernels.total()
                blocks = [block for of_group in cache.blocks(3, 75, 16) for block in of_group.values()]
                assert queue.kernels.total() - before == 2 * groups
                assert all(torch.equal(a.inner, b.inner) for a, b in zip(blocks, expected, strict=True))
            cache.layers[0]._grow(100)
            cache.layers[0].write(3, *torch.zeros(2, *cache.layers[0].keys[0, :, 3:75].shape, device="cuda"))
            blocks = [block for of_group in cache.blocks(3, 75, 16) for block in of_group.values()]
            assert not blocks[0].inner[:2].any() and torch.equal(blocks[0].inner[2:], expected[0].inner[2:])

    def test_finds_what_is_wrong(self, monkeypatch: Patch) -> None:
        """The twin of the tests before: two devices are refused, and what waits or is copied is counted."""
        with pretended(monkeypatch) as queue:
            stops, copies = queue.stops, queue.copies
            there, here = torch.ones(4, device="cuda"), torch.ones(4)
            assert there.device.type == "cuda" and there[:2].device.type == "cuda"
            for wrong in (lambda: there + here, lambda: here[there.long()], lambda: torch.cat((here, there))):
                with pytest.raises(RuntimeError, match="two devices"):
                    wrong()
            assert not stops.total() and not copies.total()
            assert float(there.sum()) == 4 and there.tolist() == [1.0] * 4
            assert there.cpu().device.type == there[there > 0].cpu().device.type == "cpu"
            assert stops.total() == 5 and not copies.total()
            there.copy_(here)
            with torch.inference_mode():
                copied = here.to("cuda"), torch.tensor([1.0], device="cuda"), there[torch.tensor([0, 2])]
            assert stops.total() == 5 and copies.total() == 1 + len(copied) == queue.blocking.total()
            kernels = queue.kernels.total()
            there[:2].view(2, 1).add_(1.0)
            there.view(2, 2)[:, 0].copy_(here[:2].pin_memory(), non_blocking=True)  # into place by way of new memory
            assert queue.kernels.total() == kernels + 2 and queue.blocking.total() == 1 + len(copied)
            there.copy_(here, non_blocking=True)  # waits all the same: its memory is not page-locked
            assert queue.blocking.total() == 2 + len(copied) and copies.total() == 3 + len(copied)
