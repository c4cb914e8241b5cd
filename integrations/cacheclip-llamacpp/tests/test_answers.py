"""Answers of llama.cpp: several at a time, after earlier prompts, erased, and in both frameworks."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_llamacpp import library, model
from cacheclip_llamacpp.context import Context
from cacheclip_testing.plugin import CHUNKS
from tiny_gguf import PROMPT, QUESTION, MakeEngine, write_gguf

from cacheclip_rag import CacheClipEngine, ConfigurationError, ModelError, SamplingParams
from cacheclip_rag.models import known_context, load, unload_models
from cacheclip_rag.store.erasures import look_at_all
from tests.answering.test_turns import until
from tests.engine import test_continued
from tests.engine.test_continued import wrong_in_history

PARAMS = SamplingParams(max_tokens=16)


@pytest.fixture
def engine(make: MakeEngine) -> CacheClipEngine:
    engine = make()
    engine.precompute(CHUNKS)
    return engine


@pytest.mark.parametrize("method", ["epic", "full", "direct"])
def test_no_answer_that_is_compared_hangs_on_rounding(engine: CacheClipEngine, monkeypatch: Any, method: str) -> None:
    """An answer computed twice is rounded in two ways, by up to 0.01. These tests mean something only without ties."""
    gaps, compute = list[float](), Context.decode_many

    def decode_many(self: Context, parts: Any, *, logits_of: int) -> Any:
        found = compute(self, parts, logits_of=logits_of)
        best = [logits[0].topk(2).values for logits in found]
        gaps.extend(float(first - second) for first, second in best)
        return found

    monkeypatch.setattr(Context, "decode_many", decode_many)
    for _ in range(2):
        engine.generate(PROMPT, PARAMS, method=method)
    assert len(gaps) == 2 * PARAMS.max_tokens and min(gaps) > 0.02


class TestOneAnswer:
    def test_its_trace(self, engine: CacheClipEngine) -> None:
        answer = engine.generate(PROMPT, PARAMS, method="epic", recompute_ratio=0.3, trace=True)
        assert answer.trace is not None and len(answer.trace.recomputed) == answer.stats.recomputed_tokens
        assert [text.text for text in answer.trace.texts] == CHUNKS and CHUNKS[1] in "".join(answer.trace.tokens)
        scored = [span for span in answer.trace.spans if span.scores]
        assert len(scored) >= len(CHUNKS) - 1 and sum(span.score_share or 0 for span in scored) == pytest.approx(1)

    def test_an_answer_that_nobody_reads_on_gives_back_its_cells(self, engine: CacheClipEngine) -> None:
        for _ in range(70):  # more than there are sequences
            next(engine.stream(PROMPT, PARAMS))

    def test_plan_says_what_is_done(self, engine: CacheClipEngine) -> None:
        plan, stats = engine.plan(PROMPT), engine.generate(PROMPT, PARAMS).stats
        assert len(plan.reused) == stats.hits and plan.budget_tokens == stats.recomputed_tokens
        assert set(plan.keys) == {engine.chunk_caches()[0].key(text) for text in CHUNKS}


@pytest.mark.parametrize("least", [2, 99], ids=["together", "few"])
def test_several_at_a_time_are_the_same(engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """They are decoded together, unless they are so few that one by one is faster."""
    sizes, compute = list[int](), Context.decode_many

    def decode_many(self: Context, parts: Any, *, logits_of: int) -> Any:
        sizes.append(len(parts) if logits_of else 0)
        return compute(self, parts, logits_of=logits_of)

    monkeypatch.setattr(model, "_TOGETHER", least)
    monkeypatch.setattr(Context, "decode_many", decode_many)
    prompts = ["\n\n".join([*CHUNKS[n:], *CHUNKS[:n], QUESTION]) for n in range(4)]
    alone = [engine.generate(prompt, PARAMS).token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda prompt: engine.generate(prompt, PARAMS).token_ids, prompts))
    # cells lie elsewhere then, so that sums are rounded otherwise: the first tokens are equal
    assert [ids[:4] for ids in together] == [ids[:4] for ids in alone] and (max(sizes) > 1) is (least == 2)


@pytest.mark.parametrize("least", [2, 99], ids=["together", "few"])
def test_a_step_that_fails_changes_no_answer(engine: CacheClipEngine, monkeypatch: Any, least: int) -> None:
    runtime, api = engine.primary, library.library()
    states = [runtime.prefill(torch.arange(5, 30 + n), 100)[0] for n in range(3)]
    monkeypatch.setattr(model, "_TOGETHER", least)
    decode, calls = api.llama_decode, list[int]()

    def fails(*given: Any) -> int:
        calls.append(0)
        return 1 if len(calls) == (1 if least == 2 else 3) else decode(*given)

    with monkeypatch.context() as patch:
        patch.setattr(api, "llama_decode", fails)
        with pytest.raises(ModelError, match="could not compute"):
            runtime.decode_steps(states, [5, 6, 7])
    assert [state.get_seq_length() for state in states] == [25, 26, 27]
    found = runtime.decode_steps(states, [5, 6, 7])
    expected = [runtime.prefill(torch.tensor([*range(5, 30 + n), 5 + n]), 100)[1] for n in range(3)]
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 0.1


def test_it_is_no_auxiliary(make: MakeEngine) -> None:
    unload_models()
    primary = make().config.primary
    engine = make(auxiliary=primary, method="cacheclip")
    with pytest.raises(ConfigurationError, match="scores"):
        engine.generate(PROMPT, PARAMS)


class TestFrameworks:
    def test_what_is_known_without_loading(self, files: Any, tool_model: str, tmp_path: Path, monkeypatch: Any) -> None:
        """The file's context and its tools, and whose tokens LlamaIndex counts."""
        from langchain_cacheclip import ChatCacheClip
        from llama_index.llms.cacheclip import CacheClipLLM, base

        counted = list[Any]()
        monkeypatch.setattr(base, "count_with", counted.append)
        unload_models()
        with_tools = write_gguf(tmp_path, "llama", Path(tool_model))
        for file, context, tools in ((with_tools, 4096, True), (files["qwen2"], 2048, False)):
            metadata = CacheClipLLM(primary=str(file)).metadata
            assert (metadata.context_window, metadata.is_function_calling_model) == (context, tools)
            profile: Any = ChatCacheClip(primary=str(file)).profile
            assert (profile["max_input_tokens"], profile["tool_calling"]) == (context, tools)
        assert len(counted) == 2 and len(counted[0](CHUNKS[0])) > 5
        (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
        assert known_context(str(tmp_path / "damaged.gguf")) is None
        assert not load._registry, "no weights are loaded"

    async def test_server(self, engine: CacheClipEngine) -> None:
        from cacheclip_serve.transformers import TransformersBackend

        backend = TransformersBackend(engine.config)
        card = backend.start()
        assert card.context_tokens == 2048 and card.can_constrain
        backend.close()


class TestEarlierPrompts:
    @pytest.mark.parametrize("case", ["qwen2 prefix", "gemma3 prefix", "qwen2 direct"])
    def test_the_prefix_cache_gives_what_full_prefill_computes(self, make: Any, case: str) -> None:
        """Of direct reuse, after idle time has completed the KV."""
        architecture, method = case.split()
        engine = make(architecture)
        engine.precompute(CHUNKS)
        engine.generate(PROMPT, PARAMS, method=method, finish="idle" if method == "direct" else "none")
        assert engine.wait_for_observers()
        prompt = "\n\n".join([*CHUNKS, "Where does the ferry leave?"])
        again, full = (engine.prefill(prompt, method=engine.make_method(name)) for name in (method, "full"))
        assert again.is_exact and again.stats.cached_prefix_tokens > 100 and not full.stats.cached_prefix_tokens
        assert float((again.logits - full.logits).abs().max()) < 0.1

    def test_a_follow_up_continues_the_kv(self, engine: CacheClipEngine) -> None:
        first = engine.generate(PROMPT, PARAMS)
        stats = engine.generate(f"{PROMPT} And why is that so?", PARAMS).stats
        assert stats.continued_turns == 1 and stats.continued_tokens >= first.stats.chunk_tokens
        assert stats.hits == len(CHUNKS) and stats.stale_from is not None
        everything = engine.make_method("epic", 1.0)
        engine.generate(PROMPT, PARAMS, method=everything)
        full = engine.prefill(PROMPT, method=engine.make_method("full"))
        assert float((engine.prefill(PROMPT, method=everything).logits - full.logits).abs().max()) < 0.1

    @pytest.mark.parametrize("planted", [False, True])
    def test_approximate_kv_is_in_no_exact_cache(self, make: MakeEngine, planted: bool) -> None:
        """Planted: it is put into the prefix cache. The comparison must find it."""
        engine = make(method="direct")
        engine.precompute(CHUNKS)
        for question in ("Who?", "Where?", "And then?"):
            engine.generate("\n\n".join([*CHUNKS, question]), PARAMS)
        if planted:
            fused = engine.prefill(PROMPT, method=engine.make_method("direct"))
            engine.prefixes.insert(fused.layout.token_ids, fused.cache)
        found, full = (engine.prefill(PROMPT, method=engine.make_method(name)) for name in ("prefix", "full"))
        assert (float((found.logits - full.logits).abs().max()) < 0.1) is not planted

    @pytest.mark.parametrize("planted", [False, True])
    @pytest.mark.parametrize("method", ["epic", "cacheclip"])
    def test_no_prompt_computes_more_than_plain_prefill(
        self, make: MakeEngine, method: str, planted: bool, monkeypatch: Any
    ) -> None:
        engine, chunks = make(method=method, recompute_ratio=0.9), [*CHUNKS, *(" ".join(CHUNKS[n:]) for n in range(2))]
        engine.precompute(chunks)
        counted, decode = list[int](), Context.decode_many

        def decode_many(self: Any, parts: Any, **options: Any) -> Any:
            counted.extend(len(ids) for _, ids in parts)
            return decode(self, parts, **options)

        def prompt_of(chosen: list[str], question: str) -> str:
            counted.clear()
            return "\n\n".join([*chosen, question])

        monkeypatch.setattr(Context, "decode_many", decode_many)
        monkeypatch.setattr(test_continued, "rows", lambda stats: sum(counted))  # those that llama.cpp decoded
        assert (wrong_in_history(engine, method, chunks, prompt_of, monkeypatch, planted) > 0) is planted


class DroppingLock:
    """In place of a context's lock: at every release, memory is dropped."""

    def __init__(self, context: Any) -> None:
        self._own, self._context, self._depth = context._lock, context, 0

    def acquire(self, blocking: bool = True) -> bool:
        return bool(self._own.acquire(blocking))

    def release(self) -> None:
        self._own.release()

    def __enter__(self) -> None:
        self._own.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._own.release()
        if not self._depth:
            self._context.drop_freed()


class TestErasure:
    @pytest.mark.parametrize("under_way", [False, True])
    def test_memory_of_ended_answers_is_given_back(self, engine: CacheClipEngine, under_way: bool) -> None:
        """Cells that are free still hold their KV. Answers under way go on as if nothing had been."""
        expected = engine.generate(PROMPT, PARAMS).text
        engine.prefixes.clear()
        context = engine.primary._context  # type: ignore[attr-defined]
        events = engine.stream(PROMPT, PARAMS)
        text = next(events).text if under_way else ""
        old: Any = context._opened.free
        assert old.alive
        engine.store.catalog.note_erasure("default")
        look_at_all()
        assert old.alive is under_way
        assert text + "".join(event.text for event in events) == expected
        if under_way:
            del events
            gc.collect()
            until(lambda: not old.alive)  # as soon as the answer has ended
        engine.close()

    def test_between_the_steps_of_prompts(self, engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever gives the lock back, memory is to be dropped then."""
        context = engine.primary._context  # type: ignore[attr-defined]
        expected = [engine.generate(f"{number} {PROMPT}", PARAMS).token_ids for number in range(2)]
        engine.prefixes.clear()
        monkeypatch.setattr(context, "_lock", DroppingLock(context))
        assert [engine.generate(f"{number} {PROMPT}", PARAMS).token_ids for number in range(2)] == expected

    def test_a_release_drops_it_at_once_and_so_does_closing(self, engine: CacheClipEngine) -> None:
        context = engine.primary._context  # type: ignore[attr-defined]
        for drop in (lambda: engine.release(["a text that nobody stored"]), engine.close):
            engine.generate(PROMPT, PARAMS)
            assert context._pointer is not None
            drop()
            gc.collect()
            until(lambda: context._pointer is None)
