"""Trained contexts: their files, which one an engine takes, and what it does to chunks and keys."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, EngineConfig, SamplingParams
from cacheclip_rag.chunks import trained as module
from cacheclip_rag.chunks.context import CONTEXTS, ChunkContext, context_name
from cacheclip_rag.chunks.trained import CONTEXT_FILE, TrainedContext, find_trained_context, trained_context_path
from cacheclip_rag.errors import ConfigurationError, ModelError, PromptTooLongError
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.settings import vary
from cacheclip_rag.plan.explain import explain_miss
from cacheclip_rag.runtime.base import weights_digest
from cacheclip_rag.store import chunk_key
from cacheclip_rag.testing.fake import FakeRuntime
from tests.conftest import CHUNKS, rag_prompt
from tests.fusion.cases import BROKEN, EXACT, gap, reference_logits

NUM_TOKENS = 5
Make = Callable[..., CacheClipEngine]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def make(tiny_models: dict[str, str]) -> Make:
    return lambda **options: CacheClipEngine(
        **{"primary": tiny_models["llama"], "auxiliary": None, "method": "direct", **options}
    )


def made_for(runtime: Any, seed: int = 0, num_tokens: int = NUM_TOKENS) -> TrainedContext:
    shape = (runtime.num_layers, 2, runtime.num_kv_heads, num_tokens, runtime.head_dim)
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return TrainedContext(weights_digest(runtime.fingerprint), kv, {"command": "a test"})


@pytest.fixture
def trained(make: Make) -> TrainedContext:
    """A trained context of the tiny llama, where engines look for it."""
    found = made_for(make().primary)
    found.save(trained_context_path(found.primary_sha256))
    return found


class TestFiles:
    def test_what_is_saved_is_read(self, trained: TrainedContext) -> None:
        read = TrainedContext.load(trained_context_path(trained.primary_sha256))
        assert torch.equal(read.kv, trained.kv) and read.kv.dtype == torch.bfloat16
        assert (read.sha256, read.about, read.num_tokens) == (trained.sha256, trained.about, NUM_TOKENS)

    def test_the_digest_is_of_what_affects_chunks(self, trained: TrainedContext) -> None:
        other = trained.kv.clone()
        other[0, 0, 0, 0, 0] += 1
        assert replace(trained, about={}).sha256 == trained.sha256
        assert replace(trained, kv=other).sha256 != trained.sha256
        assert replace(trained, primary_sha256="b" * 64).sha256 != trained.sha256

    @pytest.mark.parametrize("damage", ["cut", "changed", "empty", "text"])
    def test_damaged(self, trained: TrainedContext, make: Make, damage: str) -> None:
        path = trained_context_path(trained.primary_sha256)
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes({"cut": data[:-50], "changed": data, "empty": b"", "text": b"hello there, reader"}[damage])
        with pytest.raises(ModelError, match="cannot be read: .* Make one with 'cacheclip train-context'"):
            TrainedContext.load(path)
        with pytest.raises(ModelError, match="cannot be read"):
            make().context_of()

    def test_missing_or_of_another_version(
        self, trained: TrainedContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ModelError, match="no trained context at .* Make one with 'cacheclip train-context'"):
            TrainedContext.load(tmp_path / "none.safetensors")
        monkeypatch.setattr(module, "FORMAT_VERSION", 2)
        with pytest.raises(ModelError, match="its format is 1, this version reads 2"):
            TrainedContext.load(trained_context_path(trained.primary_sha256))

    def test_of_another_model(self, trained: TrainedContext, make: Make, tiny_models: dict[str, str]) -> None:
        other = make(primary=tiny_models["qwen2"]).primary
        with pytest.raises(ModelError, match="made for a model with digest .* Make one with"):
            trained.check(other)
        trained.check(make().primary)
        shutil.copy(trained_context_path(trained.primary_sha256), Path(trained_context_path(_sha256(other))))
        with pytest.raises(ModelError, match="made for a model with digest"):
            find_trained_context(other)

    @pytest.mark.parametrize("wrong", ["layers", "tokens", "nan"])
    def test_with_invalid_kv(self, trained: TrainedContext, make: Make, wrong: str) -> None:
        kv = {
            "layers": trained.kv[1:],
            "tokens": trained.kv[:, :, :, :0],
            "nan": torch.full_like(trained.kv, float("nan")),
        }[wrong]
        with pytest.raises(ModelError, match="holds invalid KV .* Make it again"):
            replace(trained, kv=kv).check(make().primary)


def _sha256(runtime: Any) -> str:
    return weights_digest(runtime.fingerprint)


class TestWhichOne:
    def test_the_users_then_the_models_then_the_packages(
        self, make: Make, tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))
        primary = make(primary=str(folder)).primary
        assert find_trained_context(primary) is None
        monkeypatch.setattr(module, "_SHIPPED", tmp_path / "shipped")
        own = trained_context_path(_sha256(primary))
        for seed, path in enumerate([tmp_path / "shipped" / own.name, folder / CONTEXT_FILE, own]):
            made_for(primary, seed).save(path)
            found = find_trained_context(primary)
            assert found is not None and found.sha256 == made_for(primary, seed).sha256

    def test_a_models_own_file_does_not_change_its_fingerprint(
        self, make: Make, tiny_models: dict[str, str], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))
        made_for(make().primary).save(folder / CONTEXT_FILE)
        assert make(primary=str(folder)).primary.fingerprint == make().primary.fingerprint

    def test_auto_takes_it_and_keeps_what_it_read(self, make: Make, trained: TrainedContext) -> None:
        engine, path = make(), trained_context_path(trained.primary_sha256)
        assert EngineConfig().chunk_context == "auto"
        assert engine.context_of() == ChunkContext(trained=trained.sha256)
        made_for(engine.primary, seed=1).save(path)
        assert engine.context_of() == ChunkContext(trained=trained.sha256), "read once"
        assert make().context_of().trained not in ("", trained.sha256)
        path.unlink()
        assert make().context_of() == CONTEXTS["passages"]

    def test_the_setting_decides(self, make: Make, trained: TrainedContext) -> None:
        behind = ChunkContext(trained=trained.sha256)
        assert make(chunk_context="trained").context_of() == behind
        assert make(chunk_context="passages").context_of() == CONTEXTS["passages"]
        engine = make(chunk_context="prefix")
        assert engine.context_of() == CONTEXTS["prefix"]
        assert engine.context_of(vary(preset("epic"), {"chunk_context": "trained"})) == behind
        assert engine.context_of(vary(preset("epic"), {"chunk_context": "auto"})) == behind
        assert make().context_of("cacheclip-paper") == CONTEXTS["prefix"]

    def test_trained_without_a_file(self, make: Make, tiny_models: dict[str, str], home: Path) -> None:
        engine = make(chunk_context="trained")
        message = f"no trained context for model .*: expected {home}.*cacheclip train-context --primary .*'auto'"
        with pytest.raises(ModelError, match=message):
            engine.precompute(CHUNKS[:1])
        with pytest.raises(ModelError, match=message):
            engine.generate(rag_prompt(CHUNKS[:2]), SamplingParams(max_tokens=1))
        assert engine.precompute([]) == 0, "without a text, no model is needed"

    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(ConfigurationError, match="one of prefix, passages, trained, auto, got 'learned'"):
            EngineConfig(chunk_context="learned")

    def test_names(self, trained: TrainedContext) -> None:
        assert [context_name(context) for context in CONTEXTS.values()] == list(CONTEXTS)
        assert context_name(ChunkContext(trained=trained.sha256)) == "trained"
        assert context_name(ChunkContext(isolated=True)) == "own"


class TestChunks:
    def test_they_are_encoded_behind_prefix_and_trained_kv(self, make: Make, trained: TrainedContext) -> None:
        engine = make(system_prompt="Be brief.")
        assert engine.precompute(CHUNKS[:2]) == 2 and engine.precompute(CHUNKS[:2]) == 0
        caches, prefix = engine.chunk_caches()[0], engine.parts.prefix_caches
        assert caches.num_prefix == caches.prefix.shape[3] == len(prefix.prefix_ids) + NUM_TOKENS
        assert torch.equal(caches.prefix, torch.cat((prefix.prefix, trained.kv.float()), dim=3))
        ids = caches.tokenize(CHUNKS[0]).ids
        stored, runtime = caches.read(CHUNKS[0]), engine.primary
        assert stored is not None
        assert gap(stored.tensor(), runtime.encode(ids, caches.prefix)) < EXACT
        for wrong in (prefix.prefix, torch.cat((trained.kv.float(), prefix.prefix), dim=3)):
            assert gap(stored.tensor(), runtime.encode(ids, wrong)) > BROKEN

    def test_without_a_shared_prefix(self, make: Make, trained: TrainedContext, monkeypatch: Any) -> None:
        from cacheclip_rag.prompt.segments import PromptReader

        monkeypatch.setattr(PromptReader, "prefix_ids", lambda self: [])
        caches = make().chunk_caches()[0]
        assert caches.prefix.shape[3] == NUM_TOKENS and caches.write(CHUNKS[0])
        stored = caches.read(CHUNKS[0])
        assert stored is not None
        expected = caches.runtime.encode(caches.tokenize(CHUNKS[0]).ids, trained.kv.float())
        assert gap(stored.tensor(), expected) < EXACT

    def test_int8_does_not_touch_the_trained_kv(self, make: Make, trained: TrainedContext) -> None:
        coarse = make(codec="int8").chunk_caches()[0]
        assert torch.equal(coarse.prefix[:, :, :, -NUM_TOKENS:], trained.kv.float())

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_answers(self, make: Make, trained: TrainedContext, dtype: str) -> None:
        engine = make(dtype=dtype)
        engine.precompute(CHUNKS[:3])
        stats = engine.generate(rag_prompt(CHUNKS[:3]), SamplingParams(max_tokens=2)).stats
        assert (stats.hits, stats.fallback, stats.exact_tokens) == (3, None, 0), "never exact behind the prefix"

    def test_everything_recomputed_is_full_prefill(self, make: Make, trained: TrainedContext) -> None:
        engine = make()
        engine.precompute(CHUNKS[:3])
        fused = engine.prefill(rag_prompt(CHUNKS[:3]), method=preset("epic").at(1.0))
        assert fused.stats.effective_ratio == 1.0
        assert gap(fused.logits, reference_logits(engine.config.primary, fused.layout.ids)) < EXACT

    def test_room(self, make: Make, trained: TrainedContext) -> None:
        caches = make().chunk_caches()[0]
        room = caches.runtime.reuse_tokens - len(caches.prefix_ids) - NUM_TOKENS
        word = next(w for w in ("a", "the", "x") if len(caches.tokenize(f"{w} {w}")) == 2 * len(caches.tokenize(w)))
        text = " ".join([word] * room)
        fits = text[: len(text) - len(word) - 1] if len(caches.tokenize(text)) > room else text
        assert len(caches.tokenize(fits)) <= room
        caches.check_length(fits)
        with pytest.raises(PromptTooLongError, match=f"room for {room} after shared prefix and trained context"):
            caches.check_length(fits + f" {word}" * 8)

    def test_keys_depend_on_the_digest(self, make: Make, trained: TrainedContext) -> None:
        engine = make()
        contexts = [*CONTEXTS.values(), *(ChunkContext(trained=sha) for sha in (trained.sha256, "b" * 64))]
        keys = {engine.parts.primary(context).key(CHUNKS[0]) for context in contexts}
        assert len(keys) == len(contexts)
        fields: dict[str, Any] = {"model_fingerprint": "m", "rope_pin": "", "namespace": "n"}
        plain = chunk_key(**fields, prefix_ids=[1], chunk_ids=[2])
        assert chunk_key(**fields, prefix_ids=[1], chunk_ids=[2], context_sha256="") == plain
        assert plain == "19b7b88310502d9275428cdb8921d3b8cea623ef4a9ca76e98ec644a84ad29e0", "as before"

    def test_the_digests_of_contexts_without_it_are_what_they_were(self) -> None:
        assert CONTEXTS["passages"].sha256 == "0486a8417b23e1a4f0c4cba388e55c630821f517070bf98298eb7cf952339d01"
        assert ChunkContext(trained="a").sha256 != ChunkContext(trained="b").sha256 != ChunkContext().sha256

    def test_an_earlier_one_can_be_found_but_not_computed(self, make: Make, trained: TrainedContext) -> None:
        first = make()
        first.precompute(CHUNKS[:1])
        made_for(first.primary, seed=1).save(trained_context_path(trained.primary_sha256))
        second = CacheClipEngine(replace(first.config), store=first.store.store)
        earlier = second.parts.primary(ChunkContext(trained=trained.sha256))
        assert CHUNKS[0] in earlier and CHUNKS[0] not in second.chunk_caches()[0]
        with pytest.raises(AssertionError, match="need its KV"):
            _ = earlier.prefix

    def test_certificates_tell_them_apart(self, make: Make, trained: TrainedContext) -> None:
        epic = preset("epic")
        identities = [make(chunk_context=name).parts.identity(epic) for name in ("auto", "trained", "passages")]
        assert identities[0] == identities[1] != identities[2]


class TestExplanations:
    def test_a_text_behind_something_else(self, make: Make, trained: TrainedContext, tmp_path: Path) -> None:
        store, prompt = str(tmp_path / "store"), rag_prompt(CHUNKS[:1])
        make(store=store, chunk_context="passages").precompute(CHUNKS[:1])
        found = explain_miss(make(store=store), prompt, CHUNKS[0])
        assert "precomputed with chunk_context='passages'" in found.explanation
        assert "reads chunks with chunk_context='trained'" in found.explanation
        make(store=store).precompute(CHUNKS[:1])
        assert explain_miss(make(store=store), prompt, CHUNKS[0]).is_hit
        make(store=store).store.delete([make(store=store).parts.primary(CONTEXTS["passages"]).key(CHUNKS[0])])
        found = explain_miss(make(store=store, chunk_context="passages"), prompt, CHUNKS[0])
        assert "precomputed with chunk_context='trained'" in found.explanation


class TestOtherRuntimes:
    def test_fake(self) -> None:
        assert find_trained_context(FakeRuntime()) is None
        context = made_for(FakeRuntime())
        context.save(trained_context_path(context.primary_sha256))
        found = find_trained_context(FakeRuntime())
        assert found is not None and found.sha256 == context.sha256
