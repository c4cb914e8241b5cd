"""Methods that answer one prompt by several: each of these is exact, and the numbers are those of all."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, Chunk, Fresh, SamplingParams
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.guards.fidelity import greedy
from cacheclip_rag.methods import PRESET_NAMES, preset
from cacheclip_rag.methods.composition import Composition
from cacheclip_rag.methods.map_reduce import MapReduce
from cacheclip_rag.models.load import load_model
from cacheclip_rag.types import PHASES
from tests.conftest import CHUNKS, QUESTION, SENTENCES, rag_prompt
from tests.fusion.cases import make_engine

COMPOSING = [name for name in PRESET_NAMES if preset(name).composes]
SHORT = SamplingParams(max_tokens=12)
THREE = CHUNKS[:3]
MADE = {"map_reduce": MapReduce(map_tokens=6)}
"""Settings that keep the tests short."""
every = pytest.mark.parametrize("name", COMPOSING)
few = pytest.mark.parametrize("engine", ["llama", "gemma3", "qwen3", "gpt-oss"], indirect=True)
INTRODUCED = "Read this first.\n\n" + rag_prompt(THREE)


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> CacheClipEngine:
    """In memory, on the tiny llama unless told, which never ends its turn here; three chunks stored."""
    folder = tiny_models[getattr(request, "param", "llama")]
    monkeypatch.setattr(load_model(folder), "eos_ids", frozenset())
    engine = make_engine(folder, tiny_models["auxiliary"])
    engine.precompute(THREE)
    return engine


def with_only(engine: CacheClipEngine, middle: Any, prompt: str = rag_prompt(THREE)) -> list[Any]:
    """The prompt's segments with one in place of all from the first chunk to the last."""
    segments = engine.segment(prompt)
    places = [n for n, segment in enumerate(segments) if isinstance(segment, Chunk)]
    return [*segments[: places[0]], middle, *segments[places[-1] + 1 :]]


def check_sums(stats: Any) -> None:
    assert stats.prefix_tokens + stats.fresh_tokens + stats.chunk_tokens == stats.prompt_tokens
    assert stats.reused_tokens == stats.prefix_tokens + stats.chunk_tokens - stats.recomputed_tokens
    assert set(stats.phases_s) == set(PHASES)


class TestMapRerank:
    @few
    @pytest.mark.parametrize("opening", ["", "Read this first.\n\n"])
    def test_one_chunk_is_full_prefill(self, engine: CacheClipEngine, opening: str) -> None:
        prompt = opening + rag_prompt(CHUNKS[:1])
        answer = engine.generate(prompt, SHORT, method="map_rerank")
        full = engine.generate(prompt, SHORT, method="full")
        assert (answer.text, answer.token_ids) == (full.text, full.token_ids)
        assert answer.stats.prompt_tokens == full.stats.prompt_tokens
        assert answer.stats.effective_ratio == (1.0 if opening else 0.0)

    @few
    @pytest.mark.parametrize("prompt", [rag_prompt(THREE), INTRODUCED], ids=["behind the prefix", "introduced"])
    def test_the_surest_of_separate_answers(self, engine: CacheClipEngine, prompt: str) -> None:
        rated = []
        for text in THREE:
            segments = with_only(engine, Chunk(text), prompt)
            prefilled = engine.prefill(segments, method=preset("full"))
            with torch.inference_mode():
                ids, logits = greedy(engine.primary, prefilled.cache, prefilled.logits, 12, stop=False)  # type: ignore
            chosen = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
            rated.append((float(chosen.mean()), tuple(ids)))
        answer = engine.generate(prompt, SHORT, method="map_rerank")
        assert answer.token_ids == max(rated)[1]

    def test_an_empty_answer_is_never_the_surest(
        self, engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = engine.generate(with_only(engine, Chunk(THREE[0])), SHORT, method="full").token_ids[0]
        monkeypatch.setattr(engine.primary, "eos_ids", frozenset([first]))
        answer = engine.generate(rag_prompt(THREE), SHORT, method="map_rerank")
        assert answer.token_ids[0] != first and answer.text


class TestMapReduce:
    @few
    def test_the_last_prompt_holds_the_separate_answers(self, engine: CacheClipEngine) -> None:
        lines = []
        for text in THREE:
            answer = engine.generate(with_only(engine, Chunk(text)), SamplingParams(max_tokens=5), method="full")
            lines.append(" ".join(answer.text.split()))
        last = with_only(engine, Fresh("\n".join(filter(None, lines))))
        expected = engine.generate(last, SHORT, method="full")
        answer = engine.generate(rag_prompt(THREE), SHORT, method=MapReduce(map_tokens=5))
        assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)

    def test_a_given_part_of_a_stored_chunk_is_a_chunk(self, engine: CacheClipEngine) -> None:
        """Each text that the caller gives is answered from by itself, whatever is stored."""
        windows = [text[20:240].strip() for text in THREE[:2]]
        engine.generate(rag_prompt(windows), SHORT, method=MapReduce(map_tokens=5), documents=windows)
        assert all(engine.is_stored(window, needs_auxiliary=False) for window in windows)

    def test_partial_answers_are_greedy(self, engine: CacheClipEngine) -> None:
        warm = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
        lines = [
            engine.generate(with_only(engine, Chunk(text)), SamplingParams(max_tokens=5), method="full").text
            for text in THREE
        ]
        last = with_only(engine, Fresh("\n".join(filter(None, (" ".join(line.split()) for line in lines)))))
        answer = engine.generate(rag_prompt(THREE), warm, method=MapReduce(map_tokens=5))
        assert answer.token_ids == engine.generate(last, warm, method="full").token_ids

    def test_longer_than_the_context(self, engine: CacheClipEngine) -> None:
        many = [f"Note {n}. " + " ".join(CHUNKS * 2) for n in range(4)]
        engine.precompute(many)
        stats = engine.generate(rag_prompt(many), SHORT, method=MapReduce(map_tokens=2)).stats
        assert stats.hits == 4 and stats.chunk_tokens > engine.primary.context_tokens
        check_sums(stats)

    def test_wrong_setting(self) -> None:
        with pytest.raises(ConfigurationError, match="1 or more"):
            MapReduce(map_tokens=0)


@every
class TestNumbers:
    def test_right_behind_the_prefix_all_chunks_are_exact(self, engine: CacheClipEngine, name: str) -> None:
        stats = engine.generate(rag_prompt(THREE), SHORT, method=MADE.get(name, name)).stats
        check_sums(stats)
        assert (stats.method, stats.fallback, stats.hits, stats.misses) == (name, None, 3, 0)
        assert stats.chunk_tokens == stats.exact_tokens == sum(len(engine.primary.tokenize(t)) for t in THREE)
        assert stats.effective_ratio == stats.charged_ratio == stats.nominal_ratio == 0.0

    def test_behind_other_text_all_chunks_are_computed(self, engine: CacheClipEngine, name: str) -> None:
        stats = engine.generate(INTRODUCED, SHORT, method=MADE.get(name, name)).stats
        check_sums(stats)
        assert stats.chunk_tokens == stats.recomputed_tokens == sum(len(engine.primary.tokenize(t)) for t in THREE)
        assert stats.effective_ratio == stats.charged_ratio == 1.0
        assert stats.cached_prefix_tokens > 0, "the later prompts begin as the first did"

    def test_sums_over_all_prompts(self, engine: CacheClipEngine, name: str) -> None:
        alone = [engine.generate(with_only(engine, Chunk(t)), SHORT, method="full").stats.prompt_tokens for t in THREE]
        stats = engine.generate(rag_prompt(THREE), SHORT, method=MADE.get(name, name)).stats
        assert stats.prompt_tokens >= sum(alone)
        assert (stats.prompt_tokens == sum(alone)) == (name == "map_rerank")
        assert stats.generated_tokens >= 3 * 6
        assert stats.ttft_s > sum(stats.phases_s.values())

    def test_asked_again_nothing_is_computed_twice(self, engine: CacheClipEngine, name: str) -> None:
        first, again = (engine.generate(INTRODUCED, SHORT, method=MADE.get(name, name)) for _ in range(2))
        assert again.token_ids == first.token_ids
        check_sums(again.stats)
        assert again.stats.effective_ratio == again.stats.charged_ratio < 0.2

    def test_streamed(self, engine: CacheClipEngine, name: str) -> None:
        whole = engine.generate(rag_prompt(THREE), SHORT, method=MADE.get(name, name))
        events = list(engine.stream(rag_prompt(THREE), SHORT, method=MADE.get(name, name)))
        assert "".join(event.text for event in events) == whole.text
        assert [event.answer is not None for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1].answer is not None and events[-1].answer.token_ids == whole.token_ids
        assert engine.metrics.snapshot()[f'answers_total{{method="{name}"}}'] == 2

    def test_missing_chunks_are_stored_afterwards(self, engine: CacheClipEngine, name: str) -> None:
        engine.release(THREE)
        stats = [
            engine.generate(rag_prompt(THREE), SHORT, method=MADE.get(name, name), documents=THREE).stats
            for _ in range(2)
        ]
        check_sums(stats[0])
        assert [(one.hits, one.misses) for one in stats] == [(0, 3), (3, 0)]
        assert stats[0].effective_ratio == 1.0 and stats[1].effective_ratio == 0.0

    def test_without_chunks_it_is_plain_prefill(self, engine: CacheClipEngine, name: str) -> None:
        answer = engine.generate(QUESTION, SHORT, method=MADE.get(name, name))
        assert (answer.stats.method, answer.stats.fallback) == ("full", "no chunk found in the prompt")
        assert answer.token_ids == engine.generate(QUESTION, SHORT, method="full").token_ids

    def test_there_is_no_single_prefill(self, engine: CacheClipEngine, name: str) -> None:
        with pytest.raises(ConfigurationError, match="several prompts"):
            engine.prefill(rag_prompt(THREE), method=preset(name))

    def test_chunks_behind_passages_are_exact_nowhere(
        self, engine: CacheClipEngine, tiny_models: dict[str, str], name: str
    ) -> None:
        """Plain prefill then, the second time behind the prefix cache; nothing is stored beside what there is."""
        method = MADE.get(name, name)
        expected = engine.generate(rag_prompt(THREE), SHORT, method=method)
        elsewhere = make_engine(tiny_models["llama"], tiny_models["auxiliary"], chunk_context="passages")
        elsewhere.precompute(THREE)
        stored = set(elsewhere.store.keys())
        answers = [elsewhere.generate(rag_prompt(THREE), SHORT, method=method) for _ in range(2)]
        assert all(answer.token_ids == expected.token_ids for answer in answers)
        assert [answer.stats.misses for answer in answers] == [3, 0], "computed, then known to the prefix cache"
        assert answers[0].stats.effective_ratio == 1.0 and answers[1].stats.cached_prefix_tokens > 0
        assert set(elsewhere.store.keys()) == stored
        for answer in answers:
            check_sums(answer.stats)


LONG = " ".join(SENTENCES[:8])


def num_prompts(engine: CacheClipEngine, prompt: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Prompts in which a chunk was put to the model."""
    asked: list[int] = []
    answer = Composition.answer
    with monkeypatch.context() as patch:
        patch.setattr(Composition, "answer", lambda *given: (asked.append(1), answer(*given))[1])
        engine.generate(prompt, SHORT, method=MapReduce(map_tokens=2))
    return len(asked)


class TestChunksInPieces:
    @pytest.mark.parametrize(
        ("written", "count"),
        [
            (LONG, 1),
            ("\n".join(f"> {line}" for line in textwrap.wrap(LONG, 100)), 1),
            (f"{LONG[:400]} Somebody wrote something else here, of a similar length as it was. {LONG[470:]}", 1),
            (f"{LONG}\n\n{LONG}", 2),
            (f"{LONG[400:]}\n\n{LONG[:400]}", 2),
            (f"{LONG[:400]}\n\n{'Now something else altogether, which is new. ' * 4}\n\n{LONG[400:]}", 2),
        ],
        ids=["whole", "quoted", "altered", "twice", "reversed", "apart"],
    )
    def test_one_prompt_for_each(
        self, engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch, written: str, count: int
    ) -> None:
        engine.release(THREE)  # which are parts of it
        engine.precompute([LONG])
        assert num_prompts(engine, f"Read.\n\n{written}\n\nWho?", monkeypatch) == count

    @every
    def test_statistics(self, engine: CacheClipEngine, name: str) -> None:
        """Those of the parts; documents that are not in the prompt; what is stored for other settings."""
        absent = "A given text that is nowhere in the prompt, of some length."
        engine.release(THREE)  # which are parts of it
        engine.precompute([LONG])
        method = MADE.get(name, name)
        stats = engine.generate(rag_prompt([LONG[:400]]), SHORT, method=method, documents=[LONG, absent]).stats
        assert (stats.hits, stats.partial_hits, stats.not_found) == (1, 1, 1)
        assert stats.partial_share is not None and 0.4 < stats.partial_share < 0.9 and stats.confidence is None
        assert engine.generate("Who?", SHORT, method=method, documents=[absent]).stats.not_found == 1
        other = CacheClipEngine(engine.config, system_prompt="Another system prompt.")
        other.parts._store = engine.store.store
        stats = other.generate(rag_prompt([LONG, LONG]), SHORT, method=method).stats
        assert (stats.hits, stats.misses, stats.unusable) == (0, 2, 2), "each prompt counts its own"
