"""KV on its way out of vLLM's workers, without vLLM: which rows, what is there, files; and a runtime that another
process encodes for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cacheclip_testing import TINY_MODELS, build_model
from cacheclip_testing.plugin import CHUNKS
from cacheclip_vllm import encoding
from cacheclip_vllm.captures import (
    CAPTURE,
    Captor,
    Capture,
    CapturedRows,
    CaptureSchedule,
    open_context,
    read_capture,
    remove_capture,
    remove_context,
    write_capture,
    write_context,
)
from cacheclip_vllm.encoding import ChunkEncoder, encoding_options, encoding_primary, vllm_engine
from cacheclip_vllm.parameters import Settings

from cacheclip_rag import CacheClipEngine, ConfigurationError, EncodingError, ModelError
from cacheclip_rag.models import load_model
from cacheclip_rag.planning import load_planning
from cacheclip_rag.runtime import rotate
from cacheclip_rag.runtime.transformers.rotary import unrotate

NAME, CONTEXT = "a" * 32, "b" * 32
LAYERS, HEADS, DIM = 3, 4, 8


class TestCapture:
    def test_there_and_back(self) -> None:
        assert Capture.of(Capture(NAME, 3, CONTEXT).to_dict(), 9) == Capture(NAME, 3, CONTEXT)
        assert Capture.of({"name": NAME}, 1) == Capture(NAME)

    @pytest.mark.parametrize(
        ("given", "what"),
        [
            (None, "must have a name"),
            ({}, "must have a name"),
            ({"name": NAME, "more": 1}, "must have a name"),
            ({"name": "../" + "a" * 29}, "hexadecimal"),
            ({"name": NAME, "start": 3, "context": "x"}, "hexadecimal"),
            ({"name": NAME, "start": 9}, "a position of the prompt"),
            ({"name": NAME, "start": -1}, "a position of the prompt"),
            ({"name": NAME, "start": "1"}, "a position of the prompt"),
            ({"name": NAME, "context": CONTEXT}, "no positions"),
        ],
    )
    def test_nonsense(self, given: Any, what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            Capture.of(given, 9)


def new(request_id: str, blocks: list[int], computed: int) -> Any:
    return SimpleNamespace(req_id=request_id, block_ids=(blocks,), num_computed_tokens=computed)


def scheduled(new_ones: list[Any], tokens: dict[str, int], **cached: Any) -> Any:
    empty = {"req_ids": [], "num_computed_tokens": [], "new_block_ids": [], "resumed_req_ids": set()}
    old_ones = SimpleNamespace(**{**empty, **cached})
    return SimpleNamespace(scheduled_new_reqs=new_ones, scheduled_cached_reqs=old_ones, num_scheduled_tokens=tokens)


class TestSchedule:
    """By hand: a prompt of 20 tokens, of which 5 on are wanted; "other" is nobody's capture."""

    @pytest.fixture
    def schedule(self) -> CaptureSchedule:
        made = CaptureSchedule()
        made.add("r", Capture(NAME, 5, CONTEXT), 20)
        return made

    def rows(self, blocks: tuple[int, ...], begin: int, end: int) -> CapturedRows:
        return CapturedRows("r", NAME, blocks, 5, 20, begin, end)

    def test_in_pieces(self, schedule: CaptureSchedule) -> None:
        first = scheduled([new("r", [7, 8], 5), new("other", [1], 0)], {"r": 6, "other": 3})
        assert schedule.step(first) == [self.rows((7, 8), 5, 11)]
        more = {"req_ids": ["other", "r"], "num_computed_tokens": [3, 11], "new_block_ids": [None, ([9],)]}
        assert schedule.step(scheduled([], {"r": 9, "other": 1}, **more)) == [self.rows((7, 8, 9), 11, 20)]
        after = {"req_ids": ["r"], "num_computed_tokens": [20], "new_block_ids": [None]}
        assert schedule.step(scheduled([], {"r": 1}, **after)) == [], "what it decodes is not wanted"

    def test_other_blocks_after_a_preemption(self, schedule: CaptureSchedule) -> None:
        schedule.step(scheduled([new("r", [7, 8], 5)], {"r": 6}))
        assert schedule.step(scheduled([], {})) == []
        again = {"req_ids": ["r"], "num_computed_tokens": [5], "new_block_ids": [([3, 4],)], "resumed_req_ids": {"r"}}
        assert schedule.step(scheduled([], {"r": 15}, **again)) == [self.rows((3, 4), 5, 20)]

    def test_removed(self, schedule: CaptureSchedule) -> None:
        schedule.remove("r")
        schedule.remove("unknown")
        assert schedule.step(scheduled([new("r", [7], 0)], {"r": 8})) == []


def kv_of(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, HEADS, num_tokens, DIM, generator=generator)


def writing(folder: Path, layers: int = LAYERS, first_head: int = 0) -> Captor:
    return Captor(layers, lambda rows, kv: write_capture(folder, rows.name, kv, first_head))


def give(captor: Captor, kv: torch.Tensor, slots: torch.Tensor, order: torch.Tensor, *, layers: int = LAYERS) -> None:
    """Layers write rows in this order, with two rows behind that have no slot."""
    padding = torch.zeros(2, kv.shape[2], DIM)
    for layer in range(layers):
        key, value = (torch.cat([part.transpose(0, 1)[order], padding]) for part in kv[layer])
        captor.take(layer, key, value, slots[order])


class TestContext:
    """The KV before chunks, as a file."""

    def test_there_and_back(self, tmp_path: Path) -> None:
        kv = kv_of(9)
        name = write_context(tmp_path, kv, "model")
        assert write_context(tmp_path, kv, "model") != name
        with open_context(tmp_path, name) as context:
            assert (context.model, context.num_layers, context.num_tokens) == ("model", LAYERS, 9)
            keys, values = context.layer(1, 2, 7, slice(1, 3))
        assert torch.equal(keys, kv[1, 0, 1:3, 2:7].transpose(0, 1))
        assert torch.equal(values, kv[1, 1, 1:3, 2:7].transpose(0, 1))
        remove_context(tmp_path, name)
        remove_context(tmp_path, name)
        with pytest.raises(FileNotFoundError), open_context(tmp_path, name):
            pass

    def test_damage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / f"{NAME}.safetensors").write_bytes(b"no tensors")
        with pytest.raises(ValueError, match="cannot be read"), open_context(tmp_path, NAME):
            pass
        monkeypatch.setattr("cacheclip_vllm.captures.FORMAT_VERSION", 99)
        name = write_context(tmp_path, kv_of(9), "model")
        monkeypatch.undo()
        with pytest.raises(ValueError, match="format is 99"), open_context(tmp_path, name):
            pass


class TestCaptor:
    def test_two_captures_in_two_steps(self, tmp_path: Path) -> None:
        """The second step has the rest of one, all of another, and rows of nobody's capture."""
        captor = writing(tmp_path)
        one, other, nobody = kv_of(6), kv_of(3, 1), kv_of(4, 2)
        first = CapturedRows("one", NAME, (), 5, 11, 5, 9)
        captor.begin([first], [torch.arange(32, 36)])
        give(captor, one[:, :, :, :4], torch.arange(32, 36), torch.tensor([2, 0, 3, 1]))
        assert captor.end() == [] and not list(tmp_path.iterdir())
        rows = [CapturedRows("one", NAME, (), 5, 11, 9, 11), CapturedRows("other", CONTEXT, (), 0, 3, 0, 3)]
        captor.begin(rows, [torch.tensor([70, 71]), torch.tensor([1, 2, 3])])
        together = torch.cat([one[:, :, :, 4:], other, nobody], dim=3)
        slots = torch.tensor([70, 71, 1, 2, 3, 90, 91, 92, 93])
        give(captor, together, slots, torch.randperm(9, generator=torch.Generator().manual_seed(3)))
        assert captor.end() == []
        assert torch.equal(read_capture(tmp_path, NAME, HEADS), one)
        assert torch.equal(read_capture(tmp_path, CONTEXT, HEADS), other)
        remove_capture(tmp_path, NAME)
        with pytest.raises(ValueError, match="have not written"):
            read_capture(tmp_path, NAME, HEADS)

    def test_heads_of_several_workers(self, tmp_path: Path) -> None:
        kv = kv_of(5)
        for head in (0, 2):
            captor = writing(tmp_path, LAYERS, head)
            captor.begin([CapturedRows("r", NAME, (), 0, 5, 0, 5)], [torch.arange(5)])
            give(captor, kv[:, :, head : head + 2], torch.arange(5), torch.arange(5))
            assert captor.end() == []
        assert len(list(tmp_path.iterdir())) == 2
        assert torch.equal(read_capture(tmp_path, NAME, HEADS), kv)
        next(tmp_path.glob("*.2.safetensors")).unlink()
        with pytest.raises(ValueError, match="have not written all"):
            read_capture(tmp_path, NAME, HEADS)

    def test_a_damaged_part(self, tmp_path: Path) -> None:
        (tmp_path / f"{NAME}.0.safetensors").write_bytes(b"nothing")
        with pytest.raises(ValueError, match="cannot be read"):
            read_capture(tmp_path, NAME, HEADS)

    def test_rows_that_no_layer_wrote(self, tmp_path: Path) -> None:
        captor, kv, slots = writing(tmp_path), kv_of(5), torch.arange(5)
        for layers, shown in ((LAYERS, 4), (LAYERS - 1, 5)):
            captor.begin([CapturedRows("r", NAME, (), 0, 5, 0, 5)], [slots])
            give(captor, kv, slots, torch.arange(shown), layers=layers)
            ((name, reason),) = captor.end()
            assert name == NAME and "unseen" in reason and not list(tmp_path.iterdir())

    def test_an_aborted_request_is_forgotten(self, tmp_path: Path) -> None:
        captor, kv = writing(tmp_path), kv_of(5)
        captor.begin([CapturedRows("r", NAME, (), 0, 9, 0, 5)], [torch.arange(5)])
        give(captor, kv, torch.arange(5), torch.arange(5))
        captor.end()
        captor.forget({"r", "unknown"})
        captor.begin([CapturedRows("r", NAME, (), 0, 9, 5, 9)], [torch.arange(5, 9)])
        give(captor, kv, torch.arange(5, 10), torch.arange(4))
        assert len(captor.end()) == 1, "its first tokens are gone"

    def test_a_folder_that_is_gone(self, tmp_path: Path) -> None:
        captor = writing(tmp_path / "file" / "folder")
        (tmp_path / "file").write_text("")
        captor.begin([CapturedRows("r", NAME, (), 0, 5, 0, 5)], [torch.arange(5)])
        give(captor, kv_of(5), torch.arange(5), torch.arange(5))
        ((_, reason),) = captor.end()
        assert "could not be written" in reason


def test_a_quantised_checkpoint_is_what_it_is(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "model", TINY_MODELS["llama"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    (folder / "config.json").write_text(json.dumps(config))
    found = load_planning(folder, quantization="compressed-tensors")
    assert found.fingerprint == load_planning(folder).fingerprint


class Elsewhere:
    """Encodes as another process would, and fails for chunks with a word."""

    def __init__(self, folder: str, fails: str = "") -> None:
        self.model, self.fails = load_model(folder), fails
        self.calls: list[int] = []

    def __call__(self, name: str, *, dtype: str) -> Any:
        return load_planning(name, dtype=dtype).encoding_by(self.encode, batch_characters=100_000, max_tokens=512)

    def encode(self, chunks: Any, context: torch.Tensor | None) -> list[torch.Tensor]:
        self.calls.append(len(chunks))
        found: list[Any] = self.model.encode_many(chunks, context)
        if self.fails:
            texts = [self.model.decode_ids(ids) for ids in chunks]
            found = [None if self.fails in text else kv for text, kv in zip(texts, found, strict=True)]
        if any(kv is None for kv in found):
            raise EncodingError("a chunk failed", found)
        return found


class TestEncodingElsewhere:
    def test_the_same_entries(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        options: dict[str, Any] = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
        elsewhere = Elsewhere(tiny_models["llama"])
        engine = CacheClipEngine(**options, store=str(tmp_path / "a"), load_primary=elsewhere)
        ours = CacheClipEngine(**options, store=str(tmp_path / "b"))
        many = [*CHUNKS, *(f"{chunk} And number {n}." for n in range(10) for chunk in CHUNKS)]
        assert engine.precompute(many) == ours.precompute(many) == len(many)
        assert elsewhere.calls == [1, len(many)], "the prefix, then all that its runtime takes at once"
        for chunk in many:
            (a, b), (c, d) = ((each.read(chunk) for each in made.chunk_caches()) for made in (engine, ours))
            assert torch.allclose(a.tensor(), c.tensor(), atol=1e-5) and torch.equal(b.tensor(), d.tensor())
        assert {*engine.store.catalog.keys("default")} == {*ours.store.catalog.keys("default")}
        assert engine.precompute(many) == 0
        assert engine.primary.reuse_tokens == 512

    def test_one_chunk_that_fails(self, tiny_models: dict[str, str]) -> None:
        elsewhere = Elsewhere(tiny_models["llama"], fails="lighthouse")
        engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None, load_primary=elsewhere)
        failing = [chunk for chunk in CHUNKS if "lighthouse" in chunk]
        assert 0 < len(failing) < len(CHUNKS)
        with pytest.raises(EncodingError, match="a chunk failed"):
            engine.precompute(CHUNKS)
        assert [chunk for chunk in CHUNKS if not engine.is_stored(chunk)] == failing
        elsewhere.fails = ""
        assert engine.precompute(CHUNKS) == len(failing)
        assert all(engine.is_stored(chunk) for chunk in CHUNKS)

    def test_without_an_encoder(self, tiny_models: dict[str, str]) -> None:
        planning = load_planning(tiny_models["llama"])
        assert planning.encoding_by(lambda chunks, context: [], batch_characters=1) is not planning
        with pytest.raises(ModelError, match="without its weights"):
            planning.encode([1, 2])


class InVllm:
    """In place of a ``vllm.LLM``: computes with our model, and hands KV out as the workers' connectors do."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, load_model(model)
        config = SimpleNamespace(
            model_config=SimpleNamespace(model=model, quantization=None, dtype=torch.float32),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)
        self.contexts: list[str | None] = []
        self.fails: Any = lambda number, kv: kv
        """What becomes of a chunk's KV: another one, or why there is none."""

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> list[Any]:
        return [self.answer(*each) for each in enumerate(zip(prompts, params, strict=True))]

    def answer(self, number: int, asked: Any) -> Any:
        ids = asked[0]["prompt_token_ids"]
        capture = Capture.of(asked[1].extra_args["kv_transfer_params"][CAPTURE], len(ids))
        self.contexts.append(capture.context)
        (kv,) = self.model.encode_many([ids[capture.start :]], self.read(capture))
        kv = self.fails(number, turned(self.model, kv, capture.start, rotate))
        if isinstance(kv, str):
            return SimpleNamespace(kv_transfer_params={"cacheclip": {"outcome": "plain", "reason": kv}})
        captor, slots = writing(self.folder, len(kv)), torch.arange(kv.shape[3])
        captor.begin([CapturedRows("r", capture.name, (), 0, len(slots), 0, len(slots))], [slots])
        for layer, (keys, values) in enumerate(kv):
            captor.take(layer, keys.transpose(0, 1), values.transpose(0, 1), slots)
        assert captor.end() == []
        outcome = "computed" if capture.context is None else "fused"
        return SimpleNamespace(kv_transfer_params={"cacheclip": {"outcome": outcome}})

    def read(self, capture: Capture) -> torch.Tensor | None:
        """The KV before a chunk, as stored chunks are: before RoPE."""
        if capture.context is None:
            return None
        with open_context(self.folder, capture.context) as found:
            assert (found.model, found.num_tokens) == (self.model.fingerprint, capture.start)
            heads = slice(self.model.num_kv_heads)
            layers = [found.layer(n, 0, capture.start, heads) for n in range(found.num_layers)]
        kv = torch.stack([torch.stack([part.transpose(0, 1) for part in layer]) for layer in layers])
        return turned(self.model, kv, 0, unrotate)


def turned(model: Any, kv: torch.Tensor, start: int, turn: Any) -> torch.Tensor:
    tables = model.rotary.tables(torch.arange(start, start + kv.shape[3]))
    return torch.stack([torch.stack([turn(keys, t), values]) for (keys, values), t in zip(kv, tables, strict=True)])


class TestEncodingInVllm:
    """What goes to vLLM's workers and comes from them, as files; ``inside/test_encoding.py`` has vLLM's own."""

    @pytest.fixture(params=["llama", "gemma3"])
    def made(self, request: Any, tiny_models: dict[str, str], tmp_path: Path, monkeypatch: Any) -> tuple[InVllm, Any]:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
        monkeypatch.setattr(encoding, "is_tried", lambda: True)
        llm = InVllm(tmp_path, tiny_models[request.param])
        return llm, ChunkEncoder(lambda: llm, load_planning(tiny_models[request.param]), tmp_path)

    def test_the_same_kv(self, made: tuple[InVllm, Any]) -> None:
        llm, encoder = made
        chunks, (context, other) = [[5, 6, 7, 8], [9, 3]], llm.model.encode_many([[11, 12, 13], [21, 22]])
        for before in (None, context, context, other):
            found = encoder(chunks, before)
            for kv, expected in zip(found, llm.model.encode_many(chunks, before), strict=True):
                torch.testing.assert_close(kv, expected, atol=1e-5, rtol=1e-4)
        names = [*dict.fromkeys(llm.contexts)]
        assert llm.contexts == [names[n] for n in (0, 0, 1, 1, 1, 1, 2, 2)], "a context is written once"
        assert [path.name for path in llm.folder.iterdir()] == [f"{names[2]}.safetensors"]
        encoder.close()
        assert not [*llm.folder.iterdir()]

    @pytest.mark.parametrize(
        ("fails", "what"),
        [
            (lambda number, kv: "no room" if number == 1 else kv, "1 of 2 chunks: no room"),
            (lambda number, kv: "", "2 of 2 chunks: its request was not served"),
            (lambda number, kv: kv if number else kv[:, :, :, 1:], "1 of 2 chunks: its KV has shape"),
            (lambda number, kv: kv if number else kv[:, :, 1:], "1 of 2 chunks: vLLM's workers have not written all"),
        ],
    )
    def test_chunks_that_fail(self, made: tuple[InVllm, Any], fails: Any, what: str) -> None:
        llm, encoder = made
        llm.fails = fails
        with pytest.raises(EncodingError, match=what) as raised:
            encoder([[5, 6, 7, 8], [9, 3]])
        assert [kv is None for kv in raised.value.encoded].count(True) == int(what[0])
        assert not [*llm.folder.iterdir()], "nothing is left"

    def test_other_weights_and_a_chunk_that_vllm_refuses(self, made: tuple[InVllm, Any]) -> None:
        llm, encoder = made
        model = llm.llm_engine.vllm_config.model_config
        model.quantization = "fp8"
        with pytest.raises(ConfigurationError, match="with quantization fp8, which is not the primary"):
            encoder([[5, 6]])

        def refuses(*_: Any) -> Any:
            raise ValueError("longer than max_model_len")

        model.quantization, llm.fails = None, refuses
        with pytest.raises(EncodingError, match="vLLM refuses a chunk: longer than max_model_len"):
            encoder([[5, 6]])

    @pytest.mark.some(2)
    @pytest.mark.parametrize("planted", ["", "what comes before is lost", "it is refused"])
    def test_a_version_that_was_never_tried(
        self, made: tuple[InVllm, Any], planted: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """KV behind KV that was given back is compared before anything is stored."""
        llm, encoder = made
        monkeypatch.setattr(encoding, "is_tried", lambda: False)
        if planted == "what comes before is lost":
            llm.read = lambda capture: llm.model.encode([9] * capture.start) if capture.start else None  # type: ignore[method-assign]
        if planted == "it is refused":
            llm.fails = lambda number, kv: "no room" if llm.contexts[-1] else kv
        if not planted:
            assert len(encoder([[5, 6]])) == 1 and len(llm.contexts) == 3
            assert len(encoder([[5, 6]])) == 1 and len(llm.contexts) == 4, "once"
            return
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="never tried before, got .*(no room|a difference of)"):
                encoder([[5, 6]])
        assert not [*llm.folder.iterdir()], "nothing is left"


class TestOptions:
    @pytest.mark.parametrize(("free", "found"), [(encoding._LEAST_MEMORY, True), (encoding._LEAST_MEMORY - 1, False)])
    def test_memory_for_what_is_exchanged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, found: bool
    ) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
        monkeypatch.setattr(encoding, "_SHARED_MEMORY", tmp_path)
        assert encoding._exchange() == (tmp_path if found else None)
        monkeypatch.setattr(encoding, "_SHARED_MEMORY", tmp_path / "none")
        assert encoding._exchange() is None

    def test_of_an_engine_that_ingests(self, tmp_path: Path) -> None:
        transfer = encoding_options(tmp_path / "exchange", tmp_path)["kv_transfer_config"]
        assert transfer["kv_connector_module_path"] == "cacheclip_vllm.capturing"
        settings = Settings.of(transfer["kv_connector_extra_config"])
        assert (settings.store, settings.exchange) == (tmp_path, tmp_path / "exchange")

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"kv_cache_dtype": "fp8"}, "rounded cache"),
            ({"dtype": "bfloat16"}, "primary or dtype"),
            ({"kv_transfer_config": {}}, "this package sets it"),
            ({"hf_overrides": {"rope_theta": 1}}, "change the model"),
            ({"hf_config_path": "elsewhere"}, "change the model"),
            ({"quantization_config": {"ignore": ["lm_head"]}}, "Give quantization, a name"),
            ({"enable_lora": True}, "LoRA"),
        ],
    )
    def test_refused(self, tiny_models: dict[str, str], options: dict[str, Any], what: str) -> None:
        refused = vllm_engine(primary=tiny_models["llama"], auxiliary=None, vllm=options)
        with pytest.raises(ConfigurationError, match=what), refused:
            pass

    def test_rotary_frequencies_that_depend_on_the_length(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        load = encoding_primary(None, tmp_path)
        engine = CacheClipEngine(primary=tiny_models["llama-rope-dynamic"], auxiliary=None, load_primary=load)
        with pytest.raises(ModelError, match="depend on the length"):
            engine.precompute(CHUNKS)
