"""Selective recompute in llama.cpp: exact where it must be, whatever is recomputed, and never with wrong KV."""

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_llamacpp import library, loader, model
from cacheclip_llamacpp.weights import GgufWeights
from cacheclip_testing.plugin import CHUNKS
from tiny_gguf import ARCHITECTURES, PROMPT, QUESTION, TOLERANCE, WINDOW, MakeEngine, logits, write_header

from cacheclip_rag import CacheClipEngine, ConfigurationError, MissingExtraError, ModelError, UnsupportedModelError
from cacheclip_rag.fusion import in_order
from cacheclip_rag.methods import PRESET_NAMES, Method, preset
from cacheclip_rag.models import load, unload_models
from cacheclip_rag.plugins import PlacedKV
from cacheclip_rag.runtime import KVSource


def difference(engine: CacheClipEngine, prompt: str, method: Method) -> float:
    """Largest difference to full prefill."""
    return float((logits(engine, prompt, method) - logits(engine, prompt, preset("full"))).abs().max())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
class TestExactness:
    def test_ratio_one_equals_full_prefill(self, make: MakeEngine, architecture: str) -> None:
        engine = make(architecture)
        engine.precompute(CHUNKS)
        everything = engine.make_method("epic", 1.0)
        stats = engine.generate(PROMPT, method=everything, max_tokens=1).stats
        assert stats.hits == len(CHUNKS) and stats.recomputed_tokens == stats.chunk_tokens > WINDOW
        assert difference(engine, PROMPT, everything) < TOLERANCE
        assert difference(engine, PROMPT, preset("direct")) > TOLERANCE, "twin: KV that was computed elsewhere is seen"

    def test_a_chunk_right_after_its_own_context_is_exact(
        self, make: MakeEngine, architecture: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Twin: each token of the chunk stands one position too early."""
        engine = make(architecture, chunk_context="prefix")
        engine.precompute(CHUNKS[:1])
        whole, half = (f"{text}\n\n{QUESTION}" for text in (CHUNKS[0], CHUNKS[0][: len(CHUNKS[0]) // 2]))
        assert engine.plan(whole, method="direct").exact
        assert difference(engine, whole, preset("direct")) < TOLERANCE
        assert difference(engine, half, preset("direct")) < TOLERANCE

        def misplaced(data: torch.Tensor, num_tokens: int, first: int, count: int, at: int) -> PlacedKV:
            return PlacedKV(data, num_tokens, first + bool(at), count, at)

        monkeypatch.setattr(in_order, "PlacedKV", misplaced)
        assert difference(engine, half, preset("direct")) > TOLERANCE

    @pytest.mark.parametrize("seed", range(4))
    def test_any_choice_of_tokens_at_ratio_one_of_the_others(
        self, make: MakeEngine, architecture: str, seed: int, monkeypatch: Any
    ) -> None:
        """Random layouts and spans: chunks repeated, in parts, beside one another. The same rows computed in another
        division into runs give the same logits, and a recomputed token is that of the prompt, not of its chunk."""
        chance = random.Random(seed)
        engine = make(architecture)
        engine.precompute(CHUNKS)
        pieces = [chance.choice(CHUNKS) for _ in range(chance.randint(2, 5))]
        pieces[0] = pieces[0][chance.randint(0, 40) :]
        prompt = chance.choice(["\n\n", " ", "\n- "]).join([*pieces, QUESTION])
        some = RandomTokens(chance.random(), seed)
        with monkeypatch.context() as patch:
            patch.setattr(model, "grouped", lambda runs, *_, most: [[run] for run in runs])
            found = logits(engine, prompt, some)
            patch.setattr(in_order, "runs_of", one_by_one)
            assert float((logits(engine, prompt, some) - found).abs().max()) < TOLERANCE
        assert difference(engine, prompt, RandomTokens(1.0, seed)) < TOLERANCE

    @pytest.mark.parametrize("seed", range(3))
    def test_runs_of_a_call_see_each_other_as_stored(
        self, make: MakeEngine, architecture: str, seed: int, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(model, "_CALL_TOKENS", 64)  # all in one
        chance = random.Random(seed)
        runtime = make(architecture).primary
        ids = runtime.tokenize(PROMPT).ids[:300]
        held = runtime.prefill(torch.tensor(ids[::-1]), 300)[0].cells  # other tokens' KV
        held.runs = [(0, 300)]
        runs = [(n, n + chance.randint(8, 12)) for n in sorted(chance.sample(range(0, 280, 20), 5))]
        state, stale = runtime.compute_in_order(ids, held, [(299, 300)], 300)
        context, expected = held.context, state.cells
        context.cut(expected, 0)
        for start, stop in runs:
            alone = context.new(300)
            context.copy(held, alone, 0, start)
            context.decode(alone, ids[start:stop])
            context.copy(held, expected, expected.length, start)
            context.copy(alone, expected, start, stop)
        context.copy(held, expected, expected.length, 299)
        last = context.decode(expected, ids[299:])
        found = runtime.compute_in_order(ids, held, [*runs, (299, 300)], 300)[1]
        assert float((found - last[0]).abs().max()) < TOLERANCE
        assert float((found - stale).abs().max()) > TOLERANCE  # the comparison sees the runs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
class TestMoved:
    """KV of an earlier prompt at another position."""

    @pytest.mark.parametrize("wrong_by", [0, 3])
    @pytest.mark.parametrize("old", ["Checksum a91f3.", ""], ids=["another line", "a line more"])
    def test_of_an_edited_prompt(self, make: MakeEngine, architecture: str, old: str, wrong_by: int) -> None:
        """The same put together one run after the other. Planted: the KV of neighbouring tokens."""
        engine = make(architecture, on_miss="ignore", min_confidence=0.0)
        context, runtime, method = engine.primary._context, engine.primary, engine.make_method("epic", 0.2)
        before, now = (f"{line}\n\n{PROMPT}" for line in (old, "It is a quarter past two."))
        engine.generate(before, method="prefix", max_tokens=1)
        layout = engine.plan(now, method=method).layout
        with engine.parts.kv_sources(method).match(method, layout, continued=True, moves=True) as match:
            runs = match.runs
        assert sum(run.stop - run.start for run in runs if run.source == KVSource.MOVED) > layout.num_tokens / 3
        state, _ = runtime.prefill(engine.plan(before, method="full").layout.ids, 2048)
        expected = runtime._state(layout.num_tokens).cells
        for run in runs:
            border = 8 if run.source == KVSource.MOVED else 0
            context.decode(expected, layout.token_ids[expected.length : run.start + border], logits_of=0)
            first, count = run.source_start + border, run.stop - run.start - border
            first -= wrong_by if border else 0
            data = torch.frombuffer(bytearray(context.dump(state.cells, first, first + count)), dtype=torch.uint8)
            assert context.load(data, count, expected, first=0, count=count, at=expected.length)
        logits_there = context.decode(expected, layout.token_ids[expected.length :])
        prefilled = engine.prefill(now, method=method)
        assert prefilled.stats.moved_tokens > layout.num_tokens / 3 and not prefilled.is_exact
        assert (float((prefilled.logits - logits_there[0]).abs().max()) < TOLERANCE) == (not wrong_by)


def one_by_one(rows: list[int]) -> list[tuple[int, int]]:
    return [(row, row + 1) for row in rows]


@dataclass(frozen=True, slots=True)
class RandomTokens(Method):
    """Recomputes each token with a probability."""

    share: float = 0.5
    seed: int = 0

    def select(self, view: Any, scores: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(len(span.tokens), generator=generator) < self.share for span in view.spans]


@pytest.mark.parametrize(
    ("start", "runs", "expected"),
    [
        (3000, [(104, 174)], [[70]]),
        (3000, [(0, 9), (20, 29), (30, 39)], [[9, 9, 9]]),
        (3000, [(0, 40), (55, 80), (104, 144), (155, 180), (190, 199)], [[11], [29, 25, 10], [30, 25, 9]]),
        (3000, [(0, 9), (110, 354), (360, 364)], [[1], [8, 56], [128], [60, 4]]),
        (3000, [(0, 9), (100, 103), (110, 113)], [[9, 3], [3]]),
        (3000, [(n, n + 1) for n in range(0, 60, 2)], [[1] * 20, [1] * 10]),
        (0, [(104, 174), (180, 196)], [[70], [16]]),
        (0, [(0, 9), (20, 26), (30, 33), (40, 48)], [[9, 6, 3], [8]]),
        (0, [(0, 9), (100, 103), (110, 113)], [[9, 3], [3]]),
        (0, [(n, n + 1) for n in range(0, 26, 2)], [[1] * 10, [1] * 3]),
    ],
)
def test_calls_of_a_prompt(start: int, runs: list[tuple[int, int]], expected: list[list[int]]) -> None:
    """Short runs share a call: those of a long prompt more of them, and longer ones are cut for it."""
    runs = [(start + first, start + stop) for first, stop in runs]
    stored = [(0, start + 50), (start + 52, start + 100), (start + 103, start + 400)]
    groups = model.grouped(runs, stored, most=20 if start else 10)
    assert [[stop - first for first, stop in group] for group in groups] == expected
    assert [n for group in groups for run in group for n in range(*run)] == [n for run in runs for n in range(*run)]


class TestMethods:
    @pytest.mark.parametrize("name", PRESET_NAMES)
    def test_each_runs(self, make: MakeEngine, name: str) -> None:
        engine = make()
        engine.precompute(CHUNKS, method=name)
        answer = engine.generate(PROMPT, method=name, max_tokens=8)
        method = engine.make_method(name)
        assert answer.stats.hits == (len(CHUNKS) if method.reuses_chunks else 0)
        assert answer.token_ids == engine.generate(PROMPT, method=name, max_tokens=8).token_ids

    def test_a_gate_completes_the_exact_kv(self, make: MakeEngine) -> None:
        engine = make(method="auto")
        assert engine.make_method().name == "epic-corrected"
        engine.precompute(CHUNKS)
        full = engine.generate(PROMPT, method="full", max_tokens=8)
        gated = replace(preset("direct"), min_confidence=1.0)
        assert engine.generate(PROMPT, method=gated, max_tokens=8).token_ids == full.token_ids

    @pytest.mark.parametrize("finish", ["none", "verify", "revise"])
    def test_ways_to_finish(self, make: MakeEngine, finish: str) -> None:
        engine = make()
        engine.precompute(CHUNKS)
        full, direct = (engine.generate(PROMPT, method=name, max_tokens=12).token_ids for name in ("full", "direct"))
        answer = engine.generate(PROMPT, method="direct", finish=finish, max_tokens=12)
        assert answer.token_ids == (full if finish == "revise" else direct) and full != direct
        assert (answer.stats.verified_tokens is None) == (finish == "none")


class TestStored:
    def test_damaged_bytes_are_a_miss(self, make: MakeEngine, tmp_path: Path) -> None:
        engine = make()
        engine.precompute(CHUNKS)
        full = engine.generate(PROMPT, method="full", max_tokens=8)
        everything = engine.make_method("epic", 1.0)
        (damaged,) = (tmp_path / "store").rglob(f"*{engine.chunk_caches()[0].key(CHUNKS[2])}*")
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        answer = engine.generate(PROMPT, method=everything, max_tokens=8)
        assert answer.stats.hits == len(CHUNKS) - 1 and answer.token_ids == full.token_ids

    @pytest.mark.parametrize("change", ["zeros", "shorter"])
    def test_what_llama_cpp_cannot_read_is_computed(self, make: MakeEngine, change: str) -> None:
        """Checksums are right, and the content is not."""
        engine = make()
        engine.precompute(CHUNKS)
        caches = engine.parts.kv_sources(engine.make_method()).primary
        runtime, length = engine.primary, len(engine.primary.tokenize(CHUNKS[1]))
        kv = torch.zeros(runtime.kv_shape(length), dtype=torch.uint8)
        if change == "shorter":
            other = runtime.encode(range(5, 4 + length))
            kv.view(-1)[: other.numel()] = other.flatten()
        engine.store.put(caches.key(CHUNKS[1]), kv, "opaque", text=CHUNKS[1])
        answer = engine.generate(PROMPT, method=engine.make_method("epic", 1.0), max_tokens=8)
        assert answer.stats.hits == len(CHUNKS) - 1
        assert answer.token_ids == engine.generate(PROMPT, method="full", max_tokens=8).token_ids

    def test_kv_of_another_version_is_a_miss(self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make()
        engine.precompute(CHUNKS)
        assert engine.generate(PROMPT, max_tokens=1).stats.hits == len(CHUNKS)
        monkeypatch.setattr(model, "library_version", lambda: "0.0.1-3")
        other = make()
        stats = other.generate(PROMPT, max_tokens=1).stats
        assert stats.hits == 0 and stats.unusable == len(CHUNKS)

    def test_another_file_is_a_miss(self, make: MakeEngine) -> None:
        make("qwen2").precompute(CHUNKS)
        assert make("llama").generate(PROMPT, max_tokens=1).stats.hits == 0


def recorded(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Calls of llama.cpp from now on, in their order."""
    order, api = list[str](), library.library()
    for name in names:
        call = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *given, name=name, call=call: order.append(name) or call(*given))
    return order


def no_memory(*given: object) -> None:
    raise MemoryError


FAILING_CALLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "no memory for a context": ("llama_init_from_model", lambda *given: None),
    "no memory for its KV": ("llama_state_seq_get_size", no_memory),
    "KV that is not written": ("llama_state_seq_get_data", lambda *given: 0),
    "KV that is not read": ("llama_state_seq_set_data", lambda *given: 0),
}


def counted(call: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def counting(*given: Any) -> Any:
        counts[name] += 1
        return call(*given)

    return counting


class TestContext:
    def test_it_grows_while_answers_are_decoded(self, make: MakeEngine) -> None:
        """What was there is moved to the larger context, and goes on as if nothing had happened."""
        runtime = make().primary
        ids = torch.tensor(runtime.tokenize(PROMPT).ids)
        alone, first = runtime.prefill(ids, len(ids))
        expected = [first]
        for _ in range(3):
            expected.append(runtime.decode_step(alone, int(expected[-1].argmax())))
        del alone
        state, found = runtime.prefill(ids, len(ids))
        others = []
        for step in range(3):
            others.append(runtime.prefill(ids, 1500)[0])
            found = runtime.decode_step(state, int(expected[step].argmax()))
            assert float((found - expected[step + 1]).abs().max()) < TOLERANCE

    def test_cells_are_given_back(self, make: MakeEngine) -> None:
        runtime = make().primary
        ids = torch.tensor(runtime.tokenize(PROMPT).ids)
        for _ in range(100):
            runtime.prefill(ids, len(ids))
        assert runtime._context._opened.num_cells <= 2048  # type: ignore[attr-defined]

    def test_a_context_that_memory_has_no_room_for_is_refused(self, make: MakeEngine, monkeypatch: Any) -> None:
        """And what goes on goes on."""
        runtime = make().primary
        ids, context = torch.tensor(runtime.tokenize(PROMPT).ids), runtime._context  # type: ignore[attr-defined]
        state, _ = runtime.prefill(ids, len(ids))
        with monkeypatch.context() as patch:
            patch.setattr(context, "_free_bytes", lambda: 5000 * context.bytes_per_token)
            runtime.prefill(ids, 2000)
            with pytest.raises(ModelError, match=r"of 6144 tokens.* beside .*GiB are free.*fewer at a time"):
                runtime.prefill(ids, 5000)
            runtime.decode_step(state, 5)
            del state
            runtime.prefill(ids, 5000)  # nothing is moved: memory holds one of the two contexts

    @pytest.mark.parametrize(("call", "fails"), FAILING_CALLS.values(), ids=FAILING_CALLS)
    def test_a_context_that_cannot_grow_stays_as_it_is(
        self, make: MakeEngine, monkeypatch: Any, call: str, fails: Any
    ) -> None:
        """Who wanted more has the error, and the answers under way go on."""
        engine = make()
        engine.precompute(CHUNKS)
        monkeypatch.setattr(engine.primary, "eos_ids", frozenset())
        alone = engine.generate(PROMPT, max_tokens=9)
        under_way = engine.stream(PROMPT, max_tokens=9)
        events = [next(under_way)]
        counts = Counter[str]()
        for name in ("llama_init_from_model", "llama_free"):
            monkeypatch.setattr(library.library(), name, counted(getattr(library.library(), name), name, counts))
        with monkeypatch.context() as patch:
            patch.setattr(library.library(), call, fails)
            for _ in range(2):
                with pytest.raises((ModelError, MemoryError)):
                    engine.primary.prefill(torch.tensor([5, 6, 7]), 9000)
                events.append(next(under_way))
        assert counts["llama_free"] == counts["llama_init_from_model"], "no context that failed is left"
        events.append(next(under_way))
        engine.primary.prefill(torch.tensor([5, 6, 7]), 9000)
        *_, last = events + [*under_way]
        assert last.answer is not None and last.answer.token_ids == alone.token_ids

    def test_the_last_answer_ends_while_the_context_grows(self, make: MakeEngine, monkeypatch: Any) -> None:
        """Nobody needs the old context then, and there may be no new one."""
        runtime = make().primary
        ids, context = torch.tensor(runtime.tokenize(PROMPT).ids), runtime._context  # type: ignore[attr-defined]
        states = [runtime.prefill(ids, len(ids))]
        expected = states[0][1]
        with monkeypatch.context() as patch:
            patch.setattr(context, "_free_bytes", states.clear)
            patch.setattr(library.library(), "llama_init_from_model", lambda *given: None)
            with pytest.raises(ModelError, match="could not make a context"):
                runtime.prefill(ids, 9000)
        assert float((runtime.prefill(ids, 9000)[1] - expected).abs().max()) < TOLERANCE

    def test_kv_that_could_not_be_written_stays_out_of_other_kv(self, make: MakeEngine, monkeypatch: Any) -> None:
        runtime = make().primary
        context = runtime._context  # type: ignore[attr-defined]
        one, other = (runtime.prefill(torch.tensor(ids), 9)[0].cells for ids in ([5, 6, 7], [8, 9, 10]))
        written = context.dump(one, 0, 3)
        with monkeypatch.context() as patch:
            patch.setattr(library.library(), "llama_state_seq_get_size", no_memory)
            with pytest.raises(MemoryError):
                context.dump(other, 0, 3)
        assert context.dump(one, 0, 3) == written

    @pytest.mark.parametrize("is_live", [False, True])
    def test_memory_holds_two_contexts_only_if_kv_is_moved(
        self, make: MakeEngine, monkeypatch: Any, is_live: bool
    ) -> None:
        runtime = make().primary
        state = runtime.prefill(torch.tensor([5, 6, 7]), 3)[0] if is_live else None
        order = recorded(monkeypatch, "llama_init_from_model", "llama_free")
        runtime.prefill(torch.tensor([5, 6, 7]), 9000)
        assert order == (["llama_init_from_model", "llama_free"] if state else ["llama_free", "llama_init_from_model"])

    def test_the_weights_outlive_their_context(self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """llama.cpp reads them when it frees a context. Garbage in a circle is freed in any order."""
        order = recorded(monkeypatch, "llama_free", "llama_model_free")
        runtime = make().primary
        runtime.circle = runtime  # type: ignore[attr-defined]
        gc.collect()  # what earlier tests have left
        order.clear()
        del runtime
        unload_models()
        gc.collect()
        assert order == ["llama_free", "llama_model_free"]

    def test_it_takes_as_many_threads_as_torch(self, make: MakeEngine) -> None:
        runtime, before = make().primary, torch.get_num_threads()
        try:
            for threads in (2, 1):
                torch.set_num_threads(threads)
                runtime.prefill(torch.tensor([5, 6, 7]), 3)
                assert library.library().llama_n_threads(runtime._context._pointer) == threads  # type: ignore[attr-defined]
        finally:
            torch.set_num_threads(before)

    def test_it_grows_while_tokens_are_recomputed(self, make: MakeEngine) -> None:
        """Stored KV whose tokens were recomputed is gone by then, and what is left moves with its positions."""
        runtime = make().primary
        ids = runtime.tokenize(PROMPT).ids[:300]
        runs = [(0, 40), (100, 164), (200, 210), (240, 250), (299, 300)]
        found = []
        for grows in (False, True):
            held = runtime.prefill(torch.tensor(ids[::-1]), 300)[0].cells
            held.runs, context = [(0, 300)], held.context
            target = context.new(300)
            context.compute_apart(target, held, ids, runs[:1])
            context.compute_apart(target, held, ids, runs[1:2])
            if grows:
                context._grow(context._opened.num_cells + 1024)
            context.compute_apart(target, held, ids, runs[2:4])
            found.append(context.compute_apart(target, held, ids, runs[4:], logits_of=1))
        assert float((found[0] - found[1]).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("architecture", "fields", "why"),
    [
        ("mamba", {}, "recurrent"),
        ("falcon-h1", {}, "recurrent"),
        ("qwen2vl", {}, "M-RoPE"),
        ("gpt2", {}, "another way than by rotation"),
        ("bert", {"attention__causal": False}, "attends to later tokens"),
        ("t5", {}, "no decoder"),
        ("llada", {}, "all tokens at once"),
        ("llama4", {}, "chunks of positions"),
        ("phi3", {"rope__scaling__attn_factor": 1.2}, "LongRoPE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_whose_kv_cannot_be_moved(files: Any, tmp_path: Path, architecture: str, fields: Any, why: str) -> None:
    file = write_header(tmp_path, architecture, files["llama"].parent / "model", **fields)
    weights = GgufWeights(file, architecture, vocabulary_only=True)
    with pytest.raises(UnsupportedModelError, match=why):
        weights.check_supported()
    GgufWeights(files["llama"], "llama", vocabulary_only=True).check_supported()


@pytest.mark.parametrize(
    ("place", "other", "why"),
    [
        ("llama_cpp.llama_cpp.llama_memory_can_shift", False, "cannot move its KV"),
        ("cacheclip_llamacpp.context.Context._settle", None, "moves its keys otherwise"),  # it never rotates them
    ],
)
def test_a_model_whose_kv_llama_cpp_moves_wrongly_is_refused_when_it_is_loaded(
    files: Any, place: str, other: Any, why: str, monkeypatch: Any
) -> None:
    """With its architecture."""
    unload_models()
    monkeypatch.setattr(place, lambda *args: other)
    with pytest.raises(UnsupportedModelError, match=rf"\(gemma3\) cannot be used in llama.cpp: .*{why}"):
        load.load_any(files["gemma3"])


def test_more_chunks_than_sequences(make: MakeEngine) -> None:
    engine = make()
    chunks = [f"Boat {number} sails to island {number * 7}." for number in range(70)]
    engine.precompute(chunks)
    prompt = "\n\n".join([*chunks, QUESTION])
    assert engine.generate(prompt, method="direct", max_tokens=1).stats.hits == 70
    assert difference(engine, prompt, engine.make_method("epic", 1.0)) < TOLERANCE
    assert difference(engine, prompt, preset("direct")) > TOLERANCE


@pytest.mark.parametrize("found", ["none", "too old"])
def test_without_the_library_the_command_is_named(files: dict[str, Path], found: str, monkeypatch: Any) -> None:
    unload_models()
    library.library.cache_clear()
    if found == "none":
        monkeypatch.setitem(sys.modules, "llama_cpp", None)
    else:
        monkeypatch.delattr("llama_cpp.llama_cpp.llama_memory_seq_add")
    try:
        with pytest.raises(MissingExtraError, match=r"pip install.*\[llama-cpp\]"):
            CacheClipEngine(primary=str(files["qwen2"]), auxiliary=None, method="full").generate("Who?")
    finally:
        library.library.cache_clear()


@pytest.mark.parametrize("version", [*library.TRIED_VERSIONS, "0.3.99"])
def test_a_version_that_was_never_tried_is_named(version: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("llama_cpp.__version__", version)
    library.library.cache_clear()
    try:
        library.library()
    finally:
        library.library.cache_clear()
    warned = [record.getMessage() for record in caplog.records if "never tried" in record.getMessage()]
    assert len(warned) == (version not in library.TRIED_VERSIONS)
    assert all(version in each and "cacheclip certify" in each for each in warned)


class TestSettings:
    """Those that mean something else, or nothing, for a GGUF file."""

    @pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "balanced", "nonsense"])
    def test_a_device_that_llama_cpp_lacks_is_refused(self, make: MakeEngine, device: str) -> None:
        with pytest.raises(ConfigurationError, match=f"llama.cpp can use for a GGUF file, got '{device}'.*'cpu'"):
            make(device=device, auxiliary=None).generate(PROMPT)

    @pytest.mark.parametrize(
        ("of_torch", "of_llama", "device", "expected"),
        [
            ("cpu", True, "auto", ("cpu", None)),
            ("cuda", False, "auto", ("cpu", "cuda")),
            ("cpu", True, "cuda", ("cuda", "cpu")),
            ("cpu", True, "cpu", ("cpu", None)),
        ],
    )
    def test_each_model_is_where_its_library_has_a_device(
        self,
        make: MakeEngine,
        monkeypatch: pytest.MonkeyPatch,
        of_torch: str,
        of_llama: bool,
        device: str,
        expected: tuple[str, str | None],
    ) -> None:
        monkeypatch.setattr(library.library(), "llama_supports_gpu_offload", lambda: of_llama)
        for module in (load, loader):
            monkeypatch.setattr(module, "choose_device", lambda given: of_torch if given == "auto" else given)
        found = load.concrete(make(device=device).config)
        assert (found.device, found.auxiliary_device) == expected

    def test_the_log_says_what_dtype_and_codec_are_for(self, make: MakeEngine, caplog: Any) -> None:
        load._say_once.cache_clear()
        engine = make(dtype="float32", codec="int8", device="cpu")
        engine.precompute(CHUNKS[:1])
        (said,) = [record.message for record in caplog.records if "llama.cpp on cpu" in record.message]
        assert "weights have the types of the file" in said and "for the auxiliary model alone" in said
        assert engine.chunk_caches()[0].runtime.kv_codec == "opaque" and engine.auxiliary.dtype == torch.float32
