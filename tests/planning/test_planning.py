"""A fusion plan that is carried out without what made it gives the KV of an engine with the weights."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, Chunk, Fresh
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.fusion.wire import FusionPlan, StoredPiece, runs_of
from cacheclip_rag.methods import preset
from cacheclip_rag.planning import PlanningEngine, StoredInterval, check_fits
from cacheclip_rag.runtime.transformers.model import ModelRuntime
from cacheclip_rag.store import ChunkStore, DiskBackend, FrameError, StoreReader, TenantStore, codecs
from tests.conftest import CHUNKS, rag_prompt

OTHERS = {"corrected": replace(preset("epic"), correction=0.5, name="corrected")}
METHODS = ["cacheclip", "epic", "direct", "corrected"]


def method_of(name: str) -> Any:
    return OTHERS.get(name) or preset(name)


@pytest.fixture(scope="module", params=["llama", "qwen2-sliding", "smollm3", "gemma3"])
def made(request: pytest.FixtureRequest, tiny_models: dict[str, str], tmp_path_factory: Any) -> dict[str, Any]:
    """An engine with stored chunks, and a planner on the same store."""
    models = {"primary": tiny_models[request.param], "auxiliary": tiny_models["auxiliary"]}
    store = {"store": str(tmp_path_factory.mktemp("store")), "chunk_context": "passages", "prefix_cache_bytes": 0}
    engine, planner = CacheClipEngine(**models, **store), PlanningEngine(**models, **store)
    engine.precompute(CHUNKS)
    return {"engine": engine, "planner": planner, "prompt": rag_prompt(CHUNKS)}


on_one = pytest.mark.parametrize("made", ["llama"], indirect=True)
"""For what does not depend on the architecture."""


@torch.inference_mode()
def carry_out(plan: FusionPlan, engine: CacheClipEngine, kept: Mapping[str, torch.Tensor] = {}) -> torch.Tensor:
    """Logits of the last token, as another process would compute them, each row seeing what is there. ``kept``: KV of
    earlier prompts, by key."""
    runtime = engine.primary
    assert isinstance(runtime, ModelRuntime)
    reader = StoreReader(engine.config.store, plan.namespace)
    keys = {piece.key for piece in plan.pieces}
    assert plan.moved_keys == keys & {*kept}
    entries = {key: kept[key] if key in kept else reader.get(key, codec=plan.codec) for key in keys}
    check_fits(plan, entries, runtime)
    ids, heads = torch.tensor(plan.token_ids), slice(0, runtime.num_kv_heads)
    cache = runtime.new_cache(len(ids))
    cache.extend_to(len(ids))
    for layer in cache.layers:
        layer._keys[:], layer._values[:] = 1e4, 1e4  # whatever is read before it is written must show
    stored = StoredInterval.of(plan, entries, 0, plan.end, runtime, runtime.device)
    rows = torch.tensor([row for a, b in plan.computed for row in range(a, b)], dtype=torch.int64)
    split = stored.split(plan.chunks if plan.correction else (), rows)
    for number, layer in enumerate(cache.layers):
        kv = stored.layer(number, heads)
        put(layer, stored.places, kv)
        if split is not None:
            layer.before_scatter = correcting(plan, stored, split, number, kv)
    if len(rows):
        runtime.run_slots(cache, ids[rows], rows, head=False)
    rest = torch.arange(plan.num_ready, len(ids))
    return runtime.run_slots(cache, ids[rest], rest)


def put(layer: Any, places: torch.Tensor, kv: Any) -> None:
    for target, values in zip((layer._keys, layer._values), kv, strict=True):
        target[0, :, places] = values.transpose(0, 1)


def correcting(plan: FusionPlan, stored: StoredInterval, split: Any, number: int, kv: Any) -> Any:
    """The correction before a layer's rows attend, which then are written over it."""

    def correct(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        layer.before_scatter = None
        stored.correct(number, kv, (keys[0].transpose(0, 1), values[0].transpose(0, 1)), split, plan.correction)
        put(layer, stored.places, kv)

    return correct


class TestEqualToTheEngine:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("name", METHODS)
    def test_with_every_method(self, made: dict[str, Any], name: str) -> None:
        method = method_of(name)
        planned = made["planner"].plan(made["prompt"], method=method)
        engine = made["engine"].prefill(made["prompt"], method=method)
        assert planned.fusion is not None and planned.token_ids == engine.layout.token_ids
        assert planned.fusion.num_ready < len(planned.token_ids)
        logits = carry_out(planned.fusion, made["engine"])
        assert (logits - engine.logits).abs().max() < 1e-4

    def test_twin_without_correction_differs(self, made: dict[str, Any]) -> None:
        fusion = made["planner"].plan(made["prompt"], method="cacheclip").fusion
        wrong = replace(fusion, correction=0.0)
        right = made["engine"].prefill(made["prompt"], method=preset("cacheclip")).logits
        assert (carry_out(wrong, made["engine"]) - right).abs().max() > 1e-2

    def test_a_chunk_at_the_very_end(self, made: dict[str, Any]) -> None:
        prompt = [Fresh("Read this.\n\n"), Chunk(CHUNKS[0]), Fresh("\n\n"), Chunk(CHUNKS[1])]
        method = method_of("corrected")
        fusion = made["planner"].plan(prompt, method=method, question="Who?").fusion
        assert fusion.end == len(fusion.token_ids) == fusion.num_ready + 1
        right = made["engine"].prefill(prompt, method=method, question="Who?").logits
        assert (carry_out(fusion, made["engine"]) - right).abs().max() < 1e-4


class TestParts:
    """Parts of chunks: a piece names the entry of the whole text, and the part's place in it."""

    PROMPT = f"Read.\n\n{CHUNKS[0][60:]}\n\n> {CHUNKS[2][:-50]}\n{CHUNKS[1]}\n\n{CHUNKS[3][40:-40]}\n\nWho keeps it?"

    @pytest.mark.some(3)
    @pytest.mark.parametrize("name", METHODS)
    def test_carried_out_from_json(self, made: dict[str, Any], name: str) -> None:
        method = method_of(name)
        fusion = made["planner"].plan(self.PROMPT, method=method).fusion
        again = FusionPlan.from_dict(json.loads(json.dumps(fusion.to_dict())))
        found = made["engine"].prefill(self.PROMPT, method=method)
        assert (carry_out(again, made["engine"]) - found.logits).abs().max() < 1e-4

    def test_they_name_tokens_of_stored_entries(self, made: dict[str, Any]) -> None:
        engine, planned = made["engine"], made["planner"].plan(self.PROMPT, method="direct")
        whole, named = {engine.chunk_caches()[0].key(text): text for text in CHUNKS}, set[str]()
        for piece in planned.fusion.pieces:
            text = whole[piece.key]
            ids = engine.primary.tokenize(text).ids[piece.first : piece.first + piece.num_tokens]
            assert ids == planned.token_ids[piece.start : piece.stop]
            named.add(text)
        assert named == {*CHUNKS} and any(piece.first for piece in planned.fusion.pieces)
        assert [piece.key for piece in planned.fusion.pieces] == list(planned.plan.keys)

    def test_twin_of_other_tokens_differs(self, made: dict[str, Any]) -> None:
        fusion = made["planner"].plan(self.PROMPT, method="direct").fusion
        wrong = replace(fusion, pieces=tuple(replace(piece, first=max(0, piece.first - 1)) for piece in fusion.pieces))
        right = made["engine"].prefill(self.PROMPT, method=preset("direct")).logits
        assert (carry_out(wrong, made["engine"]) - right).abs().max() > 1e-2


@on_one
class TestPlan:
    def test_survives_json(self, made: dict[str, Any]) -> None:
        fusion = made["planner"].plan(made["prompt"], method="cacheclip").fusion
        again = FusionPlan.from_dict(json.loads(json.dumps(fusion.to_dict())))
        assert again == fusion and again.digest == fusion.digest
        assert replace(fusion, correction=0.25).digest != fusion.digest

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("changed", "what"),
        [
            ({"version": 2}, "version"),
            ({"unknown": 1}, "unknown"),
            ({"pieces": [[0, "../../etc/passwd", 0, 3]]}, "key"),
            ({"pieces": []}, "pieces"),
            ({"computed": []}, "neither stored nor computed"),
            ({"computed": [[0, 3], [2, 4]]}, "order"),
            ({"computed": [["0", 3]]}, "whole numbers|read"),
            ({"chunks": [[1, 2]]}, "chunk"),
            ({"correction": 2.0}, "correction"),
            ({"correction": "0.5"}, "read"),
            ({"token_ids": []}, "token_ids|within"),
            ({"model": None}, "model"),
        ],
    )
    def test_refuses_what_contradicts_itself(self, made: dict[str, Any], changed: dict[str, Any], what: str) -> None:
        values = made["planner"].plan(made["prompt"], method="cacheclip").fusion.to_dict()
        with pytest.raises(ConfigurationError, match=what):
            FusionPlan.from_dict({**values, **changed})
        with pytest.raises(ConfigurationError, match="version"):
            FusionPlan.from_dict([1, 2])  # type: ignore[arg-type]

    def test_a_gate_needs_an_engine(self, made: dict[str, Any]) -> None:
        gated = replace(preset("epic"), min_confidence=0.5)
        planned = made["planner"].plan(made["prompt"], method=gated)
        assert planned.fusion is None and "min_confidence" in planned.reason

    def test_nothing_to_fuse(self, made: dict[str, Any]) -> None:
        planned = made["planner"].plan("Nothing of this is stored.", method="cacheclip")
        assert planned.fusion is None and planned.reason
        planned = made["planner"].plan(made["prompt"], method="full")
        assert planned.fusion is None and planned.reason is None, "full prefill needs no reason"


class TestReader:
    @on_one
    def test_refuses_other_tenants_coarser_codecs_and_damage(self, made: dict[str, Any], tmp_path: Path) -> None:
        fusion, folder = made["planner"].plan(made["prompt"], method="direct").fusion, made["engine"].config.store
        key = fusion.pieces[-1].key
        with pytest.raises(FrameError, match="tenant"):
            StoreReader(folder, "somebody").get(key, codec="float32")
        with pytest.raises(FrameError, match="is not in"):
            StoreReader(folder, "default").get("0" * 64, codec="float32")
        copy = tmp_path / "kv" / key[:2] / f"{key}.kv"
        copy.parent.mkdir(parents=True)
        data = bytearray((Path(folder) / "kv" / key[:2] / f"{key}.kv").read_bytes())
        data[-1] ^= 1
        copy.write_bytes(data)
        with pytest.raises(FrameError, match=f"entry {key[:12]}… cannot be used: .* checksum"):
            StoreReader(tmp_path, "default").get(key, codec="float32")
        assert copy.exists(), "a reader removes nothing"

    @pytest.mark.some(4)
    @pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3), slice(2, 4)], ids=str)
    def test_reads_some_heads_alone(self, tmp_path: Path, codec: str, heads: slice, monkeypatch: Any) -> None:
        kv, key = torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(0)), "a" * 64
        store, ranges, read_parts = ChunkStore.open(tmp_path), [], DiskBackend.read_parts
        TenantStore(store, "default").put(key, kv, codec)
        store.close()

        def noting(self: DiskBackend, key: str, parts: Any) -> bool:
            ranges.extend((start, target.nbytes) for start, target in parts)
            return read_parts(self, key, parts)

        monkeypatch.setattr(DiskBackend, "read_parts", noting)
        reader = StoreReader(tmp_path, "default", heads=heads)
        whole, own = StoreReader(tmp_path, "default").get(key, codec=codec), reader.get(key, codec=codec)
        count = heads.stop - heads.start
        assert own.shape == (3, 2, count, 7, 8) and torch.equal(own.tensor(), whole.tensor()[:, :, heads])
        assert sum(size for _, size in ranges) == 3 * whole.frame.layer_size * count // 4
        file = tmp_path / "kv" / key[:2] / f"{key}.kv"
        data = file.read_bytes()

        def is_refused(at: int) -> bool:
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            try:
                found = reader.get(key, codec=codec)
            except FrameError:
                return True
            assert torch.equal(found.tensor(), own.tensor()), "never wrong KV"
            return False

        for start, size in {*ranges}:
            assert is_refused(start) and is_refused(start + size - 1)
        read = {at for start, size in ranges for at in range(start, start + size)}
        others = {*range(whole.frame.start, len(data))} - read
        assert not any(is_refused(at) for at in sorted(others)[::97]), "what is not read does not matter"

    def test_payloads_without_checksums_of_heads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that older versions wrote are read as a whole."""
        write = codecs._write_header
        monkeypatch.setattr(codecs, "_write_header", lambda *given: write(*given[:-1], []))
        kv, key, store = torch.randn(3, 2, 4, 7, 8), "a" * 64, ChunkStore.open(tmp_path)
        TenantStore(store, "default").put(key, kv, "float32")
        store.close()
        found = StoreReader(tmp_path, "default", heads=slice(1, 2)).get(key, codec="float32")
        assert torch.equal(found.tensor(), kv)

    @on_one
    def test_an_entry_of_another_shape(self, made: dict[str, Any]) -> None:
        fusion = made["planner"].plan(made["prompt"], method="direct").fusion
        last = fusion.pieces[-1]
        moved = replace(fusion, pieces=(*fusion.pieces[:-1], StoredPiece(last.start, last.key, 9, last.num_tokens)))
        reader = StoreReader(made["engine"].config.store, "default")
        entries = {piece.key: reader.get(piece.key, codec="float32") for piece in fusion.pieces}
        with pytest.raises(ValueError, match="does not fit"):
            check_fits(moved, entries, made["engine"].primary)


def test_runs() -> None:
    assert runs_of([0, 1, 2, 5, 7, 8]) == ((0, 3), (5, 6), (7, 9)) and runs_of([]) == ()
