"""Exact prefix caching: the answer of full prefill, whatever the cache held, and nothing computed twice."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cacheclip_rag import Chunk, Fresh, SamplingParams
from cacheclip_rag.measuring import FusedCache, greedy, known_kv
from cacheclip_rag.methods import preset
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.kv_blocks import KVBlock
from tests.conftest import CHUNKS, SENTENCES, Logs, Models, Patch, lose, rag_prompt, raising, some_of
from tests.fusion.cases import BROKEN, EXACT, Case, gap, make_case, make_engine, reference_greedy, reference_logits
from tests.methods.spying import REUSING, few, run

BLOCK = 16
ONE = SamplingParams(max_tokens=1)
SHORT = SamplingParams(max_tokens=12)


def segments_of(case: Case, order: tuple[int, ...] = (0, 1, 2), question: str | None = None) -> list[Any]:
    """The prompt of a case with its chunks in this order, and perhaps another question."""
    segments = [span.segment for span in case.layout.spans]
    chunks = [span.segment for span in case.layout.chunks]
    places = [n for n, segment in enumerate(segments) if isinstance(segment, Chunk)]
    for place, number in zip(places, order, strict=True):
        segments[place] = chunks[number]
    if question is not None:
        segments[places[-1] + 1] = Fresh(question)
    return segments


@pytest.fixture
def warm(case: Case) -> Iterator[Case]:
    """A case whose prompt the prefix cache has seen; the case is shared, so it is cleared again."""
    case.engine.prefixes.clear()
    case.engine.generate(segments_of(case), ONE, method="prefix")
    yield case
    case.engine.prefixes.clear()


@pytest.fixture
def engine(tiny_models: Models, monkeypatch: Patch) -> Any:
    """In memory, on the tiny llama, which never ends its turn here."""
    monkeypatch.setattr(load_model(tiny_models["llama"]), "eos_ids", frozenset())
    return make_engine(tiny_models["llama"], tiny_models["auxiliary"])


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


def check_sums(stats: Any) -> None:
    assert stats.prefix_tokens + stats.fresh_tokens + stats.chunk_tokens == stats.prompt_tokens
    assert stats.reused_tokens == stats.prefix_tokens + stats.chunk_tokens - stats.recomputed_tokens
    assert stats.reused_tokens >= stats.cached_prefix_tokens


class TestEqualsFullPrefill:
    def test_cold(self, case: Case) -> None:
        case.engine.prefixes.clear()
        plain = run(case, "prefix")
        assert plain.stats.cached_prefix_tokens == 0 and plain.stats.fresh_tokens == case.layout.num_tokens
        assert plain.stats.effective_ratio == plain.stats.charged_ratio == 1.0
        assert gap(plain.logits, reference_logits(case.folder, case.layout.ids)) < EXACT

    def test_with_a_hit_and_decoding_after_it(self, warm: Case) -> None:
        again = run(warm, "prefix")
        stats, num_tokens = again.stats, warm.layout.num_tokens
        check_sums(stats)
        assert (stats.method, stats.fallback) == ("prefix", None)
        assert stats.cached_prefix_tokens == stats.prefix_tokens == whole_blocks(num_tokens - 1) > 0
        assert stats.effective_ratio == stats.charged_ratio == stats.fresh_tokens / num_tokens < 1.0
        assert gap(again.logits, reference_logits(warm.folder, warm.layout.ids)) < EXACT
        with torch.inference_mode():
            ids, _ = greedy(warm.runtime, again.cache, again.logits, 6, stop=False)
        assert ids == reference_greedy(warm.folder, warm.layout.ids, 6)

    @few
    def test_a_wrongly_keyed_block_shows(self, warm: Case, monkeypatch: Patch) -> None:
        """The twin: were a block's tokens not part of its key, another prompt's KV would be taken, and be seen."""
        monkeypatch.setattr(KVBlock, "key_of", staticmethod(lambda method, ids: (method, b"alike")))
        warm.engine.prefixes.clear()
        warm.engine.generate(segments_of(warm), ONE, method="prefix")
        wrong = warm.engine.prefill(segments_of(warm, (2, 0, 1)), method=preset("prefix"))
        assert wrong.stats.cached_prefix_tokens > 0
        assert gap(wrong.logits, reference_logits(warm.folder, wrong.layout.ids)) > BROKEN


class TestOtherMethodsBehindIt:
    @some_of(3, ["primary"], name=REUSING, primary=["llama", "gemma3", "qwen3", "gpt-oss"])
    def test_the_same_chunks_in_the_same_order_are_exact_and_free(self, warm: Case, name: str) -> None:
        again = run(warm, name)
        stats = again.stats
        check_sums(stats)
        assert (stats.method, stats.fallback, stats.hits, stats.misses) == (name, None, 3, 0)
        assert stats.exact_tokens == stats.chunk_tokens and stats.effective_ratio == 0.0
        assert gap(again.logits, reference_logits(warm.folder, warm.layout.ids)) < EXACT

    @few
    def test_another_order_is_not(self, warm: Case) -> None:
        """Of the first chunk on all is as without the prefix cache; only text before it is not computed again."""
        order = segments_of(warm, (2, 0, 1))
        other = warm.engine.prefill(order, method=preset("cacheclip"))
        warm.engine.prefixes.clear()
        without = warm.engine.prefill(order, method=preset("cacheclip"))
        assert other.stats.effective_ratio == without.stats.effective_ratio > 0.0
        assert other.stats.exact_tokens == 0
        assert gap(other.logits, without.logits) < EXACT
        assert gap(other.logits, reference_logits(warm.folder, other.layout.ids)) > BROKEN

    @few
    def test_a_hit_that_ends_within_a_chunk_ends_before_it(self, warm: Case) -> None:
        segments = segments_of(warm, question="Who?")
        mixed = warm.engine.prefill(segments, method=preset("direct"))
        first, second, third = mixed.layout.chunks
        assert whole_blocks(third.stop) > third.start, "blocks must end within the third chunk"
        assert mixed.stats.cached_prefix_tokens == third.start
        assert mixed.stats.exact_tokens == len(first.tokens) + len(second.tokens) and mixed.stats.hits == 3
        assert mixed.stats.fresh_tokens == mixed.layout.num_tokens - third.stop
        check_sums(mixed.stats)
        expected = self.expected(warm, mixed.layout.ids, third.start, third.stop)
        assert gap(mixed.logits, expected) < EXACT

    @torch.inference_mode()
    def expected(self, case: Case, ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Full prefill up to the third chunk, this from the store, full prefill behind it."""
        cache, _ = case.runtime.prefill(ids[:start], len(ids))
        cache.fill(case.kv[start], slot=start, position=start)
        return case.runtime.extend(cache, ids[stop:], stop)

    @few
    def test_ratio_one_behind_it_is_full_prefill(self, warm: Case) -> None:
        segments = segments_of(warm, question="Who?")
        mixed = warm.engine.prefill(segments, method=preset("cacheclip").at(1.0))
        assert mixed.stats.bypassed and mixed.stats.method == "prefix"  # recomputing all would compute as much or more
        assert mixed.stats.hits == 3 and mixed.stats.fresh_tokens < mixed.layout.num_tokens
        assert gap(mixed.logits, reference_logits(warm.folder, mixed.layout.ids)) < EXACT

    @few
    def test_nothing_is_read_from_the_store_for_it(self, warm: Case, monkeypatch: Patch) -> None:
        caches = warm.engine.parts.models.caches_after_prefix
        lose(monkeypatch, caches, *(span.whole for span in warm.layout.chunks))
        assert run(warm, "direct").stats.hits == 3
        assert run(warm, "full").stats.cached_prefix_tokens == 0, "full prefill neither reads nor fills"
        warm.engine.prefixes.clear()
        warm.engine.generate(segments_of(warm), ONE, method="full")
        assert warm.engine.prefixes.stats.blocks == 0

    @pytest.mark.some(3)
    @pytest.mark.parametrize("name", REUSING)
    @pytest.mark.parametrize("primary", ["llama"], indirect=True)
    def test_fused_runs_keep_their_exact_start_alone(self, case: Case, name: str) -> None:
        method, prefixes = preset(name), case.engine.prefixes
        for prompt in (segments_of(case), [Fresh("<|im_start|>user\nAnother opening, then: "), *segments_of(case)[1:]]):
            prefixes.clear()
            case.engine.generate(prompt, ONE, method=method)
            layout = case.engine.prefill(prompt, method=method).layout
            known, kept = known_kv(layout, layout.chunks), prefixes.known(layout.ids.tolist())
            assert kept <= next(span.start for span in layout.chunks if not known.is_exact(span))
            assert case.engine.generate(prompt, ONE, method="prefix").stats.cached_prefix_tokens == kept
        prefixes.clear()

    def test_an_answer_over_exact_chunks_is_kept_too(self, engine: Any) -> None:
        """Nothing in it is approximate: the next turn goes on behind it."""
        engine.precompute(CHUNKS[:1])
        segments = engine.segment(rag_prompt(CHUNKS[:1]))
        answer = engine.generate(segments, SamplingParams(max_tokens=BLOCK + 8), method="direct")
        assert answer.stats.exact_tokens == answer.stats.chunk_tokens > 0
        kept = whole_blocks(answer.stats.prompt_tokens + len(answer.token_ids) - 1)
        assert engine.prefixes.stats.blocks * BLOCK == kept > whole_blocks(answer.stats.prompt_tokens)

    @pytest.mark.parametrize("primary", ["llama"], indirect=True)
    def test_an_own_opening_is_computed_once(self, case: Case) -> None:
        """A system prompt other than the engine's: the second question over other chunks finds it."""
        opening = [Fresh("<|im_start|>system\n", control=True), Fresh(" ".join(SENTENCES[:4]))]
        first = [*opening, *segments_of(case)[1:]]
        case.engine.prefixes.clear()
        start = case.engine.prefill(first, method=preset("direct")).layout.chunks[0].start
        case.engine.generate(first, ONE, method="direct")
        again = [*opening, *segments_of(case, (2, 1, 0))[1:]]
        stats = case.engine.generate(again, ONE, method="direct").stats
        assert stats.cached_prefix_tokens == whole_blocks(start) > 0
        assert stats.fresh_tokens < start
        case.engine.prefixes.clear()

    def test_a_missing_chunk_within_the_hit_is_stored_all_the_same(self, tiny_models: Models) -> None:
        case = make_case(tiny_models["llama"], tiny_models["auxiliary"], CHUNKS[:3])
        case.engine.release([CHUNKS[1]])
        case.engine.generate(segments_of(case), ONE, method="prefix")
        stats = case.engine.generate(segments_of(case), ONE, method="direct").stats
        check_sums(stats)
        assert (stats.hits, stats.misses, stats.effective_ratio) == (2, 1, 0.0)
        assert case.engine.is_stored(CHUNKS[1])


class TestConversation:
    def test_three_turns(self, engine: Any, tiny_models: Models) -> None:
        """Each turn begins with all earlier ones, answers included, and computes none of their whole blocks again."""
        segments: list[Any] = [Fresh("<|im_start|>user\n", control=True), Fresh(" ".join(SENTENCES[:3]))]
        known: list[int] = []
        for turn in range(3):
            segments.append(Fresh("<|im_end|>\n<|im_start|>assistant\n", control=True))
            answer = engine.generate(segments, SHORT, method="prefix")
            ids = [t for s in segments for t in engine.primary.tokenize(s.text, control=s.control).ids]
            # the generated text need not be cut into the tokens that were generated
            shared = len(os.path.commonprefix([known, ids]))
            assert answer.stats.cached_prefix_tokens == whole_blocks(min(shared, len(ids) - 1))
            assert (shared > 0) == (turn > 0)
            assert list(answer.token_ids) == reference_greedy(tiny_models["llama"], torch.tensor(ids), 12)
            known = ids + list(answer.token_ids)[:-1]
            segments += [Fresh(answer.text), Fresh("<|im_end|>\n<|im_start|>user\n", control=True)]
            segments.append(Fresh(f"And then? {SENTENCES[3 + turn]}"))

    def test_plain_fallbacks_of_other_methods_take_part(self, engine: Any) -> None:
        text = " ".join(SENTENCES)
        first = engine.generate(f"{text} Who?", SHORT).stats
        second = engine.generate(f"{text} When?", SHORT).stats
        assert (first.method, second.method) == ("full", "prefix")
        assert first.fallback == second.fallback == "no stored chunk found in the prompt"
        assert first.effective_ratio == 1.0 and 0.0 < second.effective_ratio < 0.5
        check_sums(second)
        values = engine.metrics.snapshot()
        assert values['prompt_tokens_total{source="prefix_cache"}'] == second.cached_prefix_tokens > 0
        assert values['prompt_tokens_total{source="store"}'] == 0

    @pytest.mark.parametrize("name", ["phi3-longrope", "llama-rope-dynamic"])
    def test_nothing_is_kept_of_what_crosses_a_rope_limit(
        self, tiny_models: Models, name: str, monkeypatch: Patch
    ) -> None:
        runtime = load_model(tiny_models[name])
        monkeypatch.setattr(runtime, "eos_ids", frozenset())
        engine = make_engine(tiny_models[name], tiny_models["auxiliary"])
        filler = " ".join(SENTENCES * 40)
        limit = runtime.reuse_tokens
        ids = runtime.tokenize(filler).ids[: limit - 8]
        text = runtime.decode_ids(ids)
        short = [Fresh(text)]
        num_tokens = len(runtime.tokenize(text).ids)
        assert limit - 40 < num_tokens <= limit
        params = SamplingParams(max_tokens=limit - num_tokens + 20)
        if num_tokens + params.max_tokens >= runtime.context_tokens:
            params = SamplingParams(max_tokens=4)
        answer = engine.generate(short, params, method="prefix")
        held = engine.prefixes.stats.blocks
        assert held == min(num_tokens + len(answer.token_ids) - 1, num_tokens if limit < 2048 else limit) // BLOCK
        again = engine.generate(short, params, method="prefix")
        assert again.stats.cached_prefix_tokens > 0 and again.token_ids == answer.token_ids
        if limit < runtime.context_tokens:
            longer = engine.generate([*short, Fresh(filler[:400])], ONE, method="prefix").stats
            assert longer.prompt_tokens > limit and longer.cached_prefix_tokens == 0
            assert engine.prefixes.stats.blocks == held


class TestLimits:
    def test_eviction_never_changes_an_answer(self, tiny_models: Models) -> None:
        small = make_engine(tiny_models["llama"], tiny_models["auxiliary"], prefix_cache_bytes=2**18)
        small.precompute(CHUNKS)
        prompts = [rag_prompt([CHUNKS[n] for n in order]) for order in ((0, 1, 2), (2, 1, 0), (0, 1, 3), (1, 0))]
        expected = [small.generate(prompt, SHORT, method="full").token_ids for prompt in prompts]
        hits = 0
        for number in (0, 1, 0, 2, 3, 3, 0, 2, 1, 1):
            answer = small.generate(prompts[number], SHORT, method="prefix")
            assert answer.token_ids == expected[number]
            hits += answer.stats.cached_prefix_tokens
        stats = small.prefixes.stats
        assert stats.evictions > 0 and hits > 0 and stats.bytes <= 2**18

    def test_released_and_closed_means_forgotten(self, engine: Any) -> None:
        engine.precompute(CHUNKS)
        for forget in (lambda: engine.release(CHUNKS[:1]), engine.close):
            engine.generate(rag_prompt(CHUNKS), ONE, method="prefix")
            assert engine.prefixes.stats.blocks > 0
            forget()
            assert engine.prefixes.stats.blocks == 0

    def test_no_room_for_it_costs_no_answer(self, engine: Any, monkeypatch: Patch, caplog: Logs) -> None:
        engine.prefill(rag_prompt(CHUNKS), method=preset("prefix"))
        assert engine.prefixes.stats.blocks == 0, "an evaluating prefill fills nothing"
        monkeypatch.setattr(FusedCache, "blocks", raising(RuntimeError("out of memory")))
        assert len(engine.generate(rag_prompt(CHUNKS), SHORT, method="prefix").token_ids) == 12
        assert "could not be kept" in caplog.text and engine.prefixes.stats.bytes == 0
