"""Hybrids: chunks' state maps, composed, against the model's own modules, run over what was stored."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing import SENTENCES, RuntimeConformance, build_class, make_tokenizer, tiny_of_class
from transformers import CONFIG_MAPPING
from transformers.cache_utils import DynamicCache, DynamicLayer

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig, SamplingParams, UnsupportedModelError
from cacheclip_rag.answering.turns import Turns
from cacheclip_rag.fusion.in_order import PlacedKV
from cacheclip_rag.fusion.wire import runs_of
from cacheclip_rag.models import load_model, unload_models
from cacheclip_rag.runtime import Runtime
from cacheclip_rag.runtime.prompt_cache import PromptCache
from cacheclip_rag.runtime.transformers import state_map, state_map_model, state_map_proof
from cacheclip_rag.runtime.transformers.cache import FusedLayer, cache_argument
from cacheclip_rag.runtime.transformers.kept import kept_file
from cacheclip_rag.runtime.transformers.rotary import Tables
from cacheclip_rag.runtime.transformers.state_map import StateLayer
from cacheclip_rag.runtime.transformers.state_map_model import StateMapRuntime
from cacheclip_rag.runtime.transformers.stored_state_map import StateMapLayout, StoredSpan, StoredSpans
from tests.fusion.cases import prefilled

pytestmark = pytest.mark.skipif(state_map.LinearAttentionLayer is None, reason="this transformers is too old")

FAMILIES = ("qwen3_5_text", "nemotron_h", "falcon_h1", "kimi_linear")
FIRST, LAST = 16, 4
IDS = (torch.arange(100) * 37 % 290 + 5).tolist()
CONTEXT, CHUNKS, END = IDS[:24], (IDS[24:54], IDS[54:88]), IDS[88:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_class(tmp_path_factory.mktemp("hybrid") / "model", "qwen3_5_text"))


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference as a share of the largest number."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


def runtime_of(name: str, dtype: torch.dtype = torch.float32) -> StateMapRuntime:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    return StateMapRuntime(tiny_of_class(name).to(dtype), make_tokenizer(400), name=name, fingerprint="")


def placed(runtime: StateMapRuntime, order: Sequence[Sequence[int]]) -> tuple[list[int], StoredSpans]:
    """The ids of a prompt of context, chunks in this order and end, and what is stored of the former."""
    context, at = runtime.encode(CONTEXT), 0
    ids, pieces = list[int](), []
    for text in (CONTEXT, *order):
        kv = context if text is CONTEXT else runtime.encode(text, context)
        pieces.append(PlacedKV(kv.flatten(), len(text), 0, len(text), at))
        ids, at = ids + [*text], at + len(text)
    nothing: Any = None
    spans, unread = runtime.place(nothing, (), pieces)
    assert len(spans) == 1 + len(order) and not unread
    return ids + END, spans


def composed(runtime: StateMapRuntime, ids: list[int], spans: StoredSpans) -> tuple[Any, torch.Tensor]:
    rows = spans.computed(torch.tensor([len(ids) - 1]))
    return runtime.compute_in_order(ids, spans, runs_of(rows.tolist()), len(ids))


@torch.inference_mode()
def rolled(runtime: StateMapRuntime, order: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of the last token by transformers' own cache, into which the model's own modules roll a stored chunk:
    each over the inputs that it had when the chunk was stored, from the state that the prompt has by then."""
    model = runtime.model
    cache, at = DynamicCache(config=model.config), 0

    def run(into: DynamicCache, ids: Sequence[int], start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(ids))[None]
        return model(
            input_ids=torch.tensor([ids]),
            position_ids=positions,
            use_cache=True,
            **cache_argument(model.base_model, into),
        ).logits[0, -1]

    for text in (CONTEXT, *order):
        before = [] if text is CONTEXT else CONTEXT
        own, shift = DynamicCache(config=model.config), at - len(before)
        inner = range(FIRST, len(text) - LAST)
        run(own, [*before, *text[:FIRST]], shift)  # at positions of the prompt, from an empty state
        tails = {number: own.layers[number].conv_states[0].clone() for number in runtime.mixers}
        with runtime.mixers.calls() as calls:
            run(own, text[inner.start : inner.stop], at + FIRST)
        run(cache, text[:FIRST], at)
        for number, mixer in runtime.mixers.items():
            cache.layers[number].conv_states[0] = tails[number]
            arguments = {**calls[number].arguments}
            arguments |= {name: cache for name, value in arguments.items() if value is own}
            arguments.pop("attention_mask", None)
            mixer.module.forward(**{**arguments.pop("kwargs", {}), **arguments})
        for number in runtime.attending:
            kv = own.layers[number]
            assert isinstance(kv, DynamicLayer)
            cache.layers[number].update(kv.keys[:, :, -len(inner) :], kv.values[:, :, -len(inner) :])
        run(cache, text[inner.stop :], at + inner.stop)
        at += len(text)
    return run(cache, END, at)


def full(runtime: StateMapRuntime, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = runtime.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


class TestComposition:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_equals_rolling_the_modules_of_the_model(self, name: str) -> None:
        """Chunks at other positions, in another order than that of their text."""
        runtime = runtime_of(name)
        order = CHUNKS[::-1]
        ids, spans = placed(runtime, order)
        _, logits = composed(runtime, ids, spans)
        expected = rolled(runtime, order)
        assert gap(logits, expected) < 1e-5
        assert gap(composed(runtime, ids, spans.without_factors())[1], expected) > 1e-3
        assert gap(composed(runtime, *placed(runtime, CHUNKS))[1], expected) > 1e-3  # the order matters

    @pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
    def test_a_chunk_in_its_own_place_equals_full_prefill(self, name: str) -> None:
        runtime = runtime_of(name)
        ids, spans = placed(runtime, CHUNKS[:1])
        state, logits = composed(runtime, ids, spans)
        expected = full(runtime, [*ids, 7, 8])
        assert gap(logits, expected[len(ids) - 1]) < 1e-5
        assert gap(runtime.decode_step(state, 7), expected[-2]) < 1e-5
        assert gap(runtime.decode_step(state, 8), expected[-1]) < 1e-5
        for cut in (len(ids) + 1, 3):  # computed again from the prompt's end, and from the beginning
            logits = runtime.extend(state, torch.tensor([*ids, 7, 8][cut:]), cut)
            assert logits is not None and gap(logits, expected[-1]) < 1e-5
        other = [ids[0] + 1, *ids[1:]]
        assert gap(full(runtime, other)[-1], expected[len(ids) - 1]) > 1e-3

    def test_in_bfloat16(self) -> None:
        runtime = runtime_of("qwen3_5_text", torch.bfloat16)
        ids, spans = placed(runtime, CHUNKS[:1])
        assert gap(composed(runtime, ids, spans)[1], full(runtime, ids)[-1]) < 1e-2
        assert gap(composed(runtime, ids, spans.without_factors())[1], full(runtime, ids)[-1]) > 1e-2

    @pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h"])
    def test_a_matrix_that_is_near_a_number_is_seen_in_bfloat16(self, name: str) -> None:
        """The delta rule with a small beta: I - beta k k^T differs from I by less than rounding may."""
        model = tiny_of_class(name).to(torch.bfloat16)
        for module_name, module in model.named_modules():
            if module_name.endswith("in_proj_b"):
                module.register_forward_hook(lambda _, inputs, output: output - 4)
        mixers = StateMapRuntime(model, make_tokenizer(400), name=name, fingerprint="").mixers
        assert [mixer.is_matrix for mixer in mixers.values()] == [name == "qwen3_5_text"] * len(mixers)

    def test_tokens_before_the_mark_may_change(self) -> None:
        runtime = runtime_of("qwen3_5_text")
        state, _ = runtime.prefill(torch.tensor(IDS[:20]), 30)
        ids = [*IDS[:12], *IDS[60:73]]
        runtime.cut(state, 12)
        for token in ids[12:]:
            runtime.decode_step(state, token)
        runtime.cut(state, 23)
        assert gap(runtime.decode_step(state, ids[23]), full(runtime, ids[:24])[-1]) < 1e-5

    def test_a_hook_that_is_removed_during_a_pass_changes_nothing(self) -> None:
        """As by another thread, which has computed a chunk meanwhile."""
        runtime = runtime_of("qwen3_5_text")
        with ExitStack() as stack:
            runtime.mixers[0].module.register_forward_pre_hook(lambda *_: stack.close())
            calls = stack.enter_context(runtime.mixers.calls())
            runtime.prefill(torch.tensor(END), 30)
            assert not calls

    def test_a_pass_of_another_thread_changes_no_map(self) -> None:
        runtime = runtime_of("qwen3_5_text")
        with runtime.mixers.calls() as calls:
            runtime.prefill(torch.tensor(CONTEXT), 30)
            before = [call.arguments["hidden_states"] for call in calls.values()]
            with ThreadPoolExecutor(1) as pool:
                pool.submit(runtime.prefill, torch.tensor(END), 30).result()
        assert len(before) == 2
        assert all(call.arguments["hidden_states"] is each for call, each in zip(calls.values(), before, strict=True))

    def test_all_of_a_chunk_is_computed_or_its_edges(self) -> None:
        spans = StoredSpans([StoredSpan(2, 4, [], []), StoredSpan(6, 9, [], [])])
        assert spans.computed(torch.tensor([0, 3, 6, 7, 8, 10])).tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10]

    def test_parts_that_lack_what_is_mapped_are_not_read(self) -> None:
        runtime = runtime_of("qwen3_5_text")
        kv, nothing, size = runtime.encode(CHUNKS[0]), None, len(CHUNKS[0])
        usable = [PlacedKV(kv.flatten(), size, *part, at=40) for part in ((0, size), (16, size - 20))]
        lacking = [PlacedKV(kv.flatten(), size, *part, at=40) for part in ((17, size - 17), (0, size - 5))]
        spans, unread = runtime.place(nothing, (), [*usable, *lacking])  # type: ignore[arg-type]
        assert unread == lacking and [(span.start, span.stop) for span in spans] == [(56, 66), (40, 50)]


class TestFollowUp:
    @pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
    def test_equals_full_prefill(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """After the end of an earlier prompt, not of its answer: steps of one token may be computed otherwise."""
        runtime, cache = runtime_of(name), PromptCache(10**8)
        state, _ = runtime.prefill(torch.tensor(IDS[:40]), 60)
        assert cache.insert(IDS[:40], state)
        runtime.decode_step(state, IDS[40])
        assert not cache.insert(IDS[:41], state)
        runtime.extend(state, torch.tensor(IDS[40:45]), 40)
        assert cache.insert(IDS[:45], state)
        runtime.cut(state, 40)
        for token in IDS[40:45]:
            runtime.decode_step(state, token)
        assert not state.ends_at
        put, write, expected = StateLayer.put, FusedLayer.write, full(runtime, IDS[:88])[-1]

        def continued(stop: int) -> float:
            with cache.match(IDS[:stop]) as match:
                assert match.num_tokens == match.num_exact == (0 if stop < 40 else 40 if stop < 45 else 45)
                begun, start = runtime.begin(match, 88), match.num_tokens
            logits = runtime.extend(begun, torch.tensor(IDS[start:88]), start)
            assert logits is not None and begun.ends_at == 88
            runtime.cut(begun, 43)  # before what was kept
            again = runtime.extend(begun, torch.tensor(IDS[43:45]), 43)
            assert again is not None and gap(again, full(runtime, IDS[:45])[-1]) < 1e-5
            return gap(logits, expected)

        assert max(continued(39), continued(44), continued(88)) < 1e-5
        assert not cache.match([*IDS[:39], 3, *IDS[40:]]).num_tokens
        for owner, part, wrong in (
            (StateLayer, "put", lambda layer, tails, each, index: put(layer, tails, 0 * each, index)),
            (
                StateLayer,
                "put",
                lambda layer, tails, each, index: put(layer, [0 * tail for tail in tails], each, index),
            ),
            (FusedLayer, "write", lambda layer, start, keys, values: write(layer, start, keys.roll(1, 1), values)),
        ):
            with monkeypatch.context() as planted:
                planted.setattr(owner, part, wrong)
                assert continued(88) > 1e-3, part
        with cache.match(IDS) as match:
            held = [runtime.place(match, [(0, count)], ())[0] for count in (45, 30)]
        assert [spans.computed(torch.tensor([50])).tolist() for spans in held] == [[*range(45, 51)], [*range(51)]]

    def test_states_after_a_map_are_not_kept(self) -> None:
        """It is rounded to the model's dtype."""
        runtime, cache = runtime_of("qwen3_next"), PromptCache(10**8)
        ids, spans = placed(runtime, CHUNKS)
        assert not cache.insert(ids, composed(runtime, ids, spans)[0])
        assert cache.insert(ids, runtime.prefill(torch.tensor(ids), 100)[0])

    def test_a_chunk_behind_an_earlier_prompt(self, folder: str) -> None:
        question, text = " ".join(SENTENCES[:2]), " ".join(SENTENCES[4:9])
        logits = []
        for size in (10**8, 0):
            engine = CacheClipEngine(EngineConfig(primary=folder, prefix_cache_bytes=size, auxiliary=None))
            engine.precompute([text])
            messages = [{"role": "user", "content": question}]
            answer = engine.generate(messages, SamplingParams(max_tokens=3), method="epic")
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"{text}\n\nWhen?"}]
            result = prefilled(engine, messages, "epic")
            assert result.stats.hits == 1 and not result.is_exact
            assert result.stats.cached_prefix_tokens == (answer.stats.prompt_tokens if size else 0)
            logits.append(result.logits)
        assert gap(*logits) < 1e-5


class TestProof:
    @pytest.fixture(autouse=True)
    def own_home(self, home: Path) -> None:
        """Nothing is proven yet."""

    @pytest.mark.parametrize("mistake", ["factor", "position", "tail"])
    def test_a_mistake_is_refused(self, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        rotate, written = state_map_model.rotate, StateMapLayout.written

        def late(keys: torch.Tensor, tables: Tables, dtype: torch.dtype) -> torch.Tensor:
            return rotate(keys, tables.map(lambda each: each.roll(3, 0)), dtype)

        def without_tails(layout: Any, ids: Any, kv: Any, maps: Any) -> torch.Tensor:
            none = [each._replace(tails=tuple(0 * tail for tail in each.tails)) for each in maps]
            return written(layout, ids, kv, none)

        owner, name, wrong = {
            "factor": (state_map.StateMap, "apply", lambda made, state: state + made.offset),
            "position": (state_map_model, "rotate", late),
            "tail": (StateMapLayout, "written", without_tails),
        }[mistake]
        monkeypatch.setattr(owner, name, wrong)
        with pytest.raises(UnsupportedModelError, match="failed the proof|no affine map"):
            load_model(build_class(tmp_path / "model", "qwen3_5_text"))

    @pytest.mark.parametrize("package", ["flash-linear-attention", "fla-core", "mamba_ssm", "causal_conv1d"])
    def test_is_made_again_with_other_kernels(self, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        before, version = kept_file("state-maps"), metadata.version
        monkeypatch.setattr(metadata, "version", lambda name: "99" if name == package else version(name))
        assert kept_file("state-maps") != before

    def test_is_kept_and_says_once_that_it_is_experimental(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = build_class(tmp_path / "model", "qwen3_5")  # the text of a multimodal checkpoint
        runtime: Any = load_model(folder)
        assert caplog.text.count("reuse is experimental") == 1 and runtime.layout.edges == (FIRST, LAST)
        unload_models()
        asked = []
        gaps = state_map_proof._gaps
        monkeypatch.setattr(state_map_proof, "_gaps", lambda *each: asked.append(each[2]) or gaps(*each))
        load_model(folder)
        assert not asked
        for file in (tmp_path / "home" / "state-maps").iterdir():
            file.write_text('{"prefill": 0.0}')
        unload_models()
        load_model(folder)
        assert asked == [True, False]  # the tiny model, and the weights


class TestConformance(RuntimeConformance):
    @pytest.fixture
    def runtime(self, folder: str) -> Runtime:
        return load_model(folder)

    def reference_logits(self, runtime: Runtime, ids: torch.Tensor, num_decoded: int) -> torch.Tensor:
        hybrid: Any = runtime
        return full(hybrid, ids.tolist())[-1]

    def test_the_budget_is_kept(self, engine: CacheClipEngine) -> None:
        """Beside the edges it counts in whole chunks."""
        engine.precompute(chunks := [f"{word} " * 40 for word in ("lighthouse", "paraffin")])
        stats = engine.generate("\n\n".join(chunks) + "\n\nWhen?", recompute_ratio=0.25).stats
        assert stats.hits == 2 and stats.recomputed_tokens == 2 * (FIRST + LAST)


class TestEngine:
    def test_methods_that_choose_tokens_are_refused(self, folder: str, tiny_models: dict[str, str]) -> None:
        config = EngineConfig(primary=folder, auxiliary=tiny_models["auxiliary"], min_confidence=0.0)
        engine = CacheClipEngine(config)
        text = " ".join(SENTENCES[:4])
        engine.precompute([text])
        stats = engine.generate(f"{text}\n\nWhen?", SamplingParams(max_tokens=1)).stats
        assert stats.method == "epic" and stats.hits == 1 and stats.recomputed_tokens == FIRST + LAST
        part = engine.plan(f"{text[:200]}\n\nWhen?")  # without the end of what its map covers
        assert part.layout.chunks and not part.reused
        for name in ("cacheclip", "epic-corrected"):
            with pytest.raises(ConfigurationError, match=r"recurrent layers.*\(full, prefix, direct, epic\)"):
                engine.generate("When?", method=name)

    def test_a_prompt_that_comes_again_takes_a_turn_of_its_length(
        self, folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its end has no state before its last token, so that it is computed anew."""
        engine, text = CacheClipEngine(primary=folder, auxiliary=None, method="prefix"), " ".join(SENTENCES * 2)
        works, prompt = list[int](), Turns.prompt
        monkeypatch.setattr(Turns, "prompt", lambda turns, work: works.append(work()) or prompt(turns, work))
        asked = [engine.generate(text, SamplingParams(max_tokens=1)).stats for _ in range(2)]
        assert works == [stats.prompt_tokens for stats in asked] and not asked[1].cached_prefix_tokens

    @pytest.mark.parametrize("is_own", [False, True])
    def test_it_is_no_auxiliary(self, is_own: bool, folder: str, tiny_models: dict[str, str]) -> None:
        engine = CacheClipEngine(EngineConfig(primary=folder if is_own else tiny_models["llama"], auxiliary=folder))
        with pytest.raises(ConfigurationError, match="auxiliary must be a model whose attention scores"):
            engine.precompute(["The lamp burned whale oil until 1871."])
