"""The engine from the outside: what it answers, what it says about it, and how it refuses."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cacheclip_rag
from cacheclip_rag import (
    Answer,
    CacheClipEngine,
    CacheClipError,
    Chunk,
    EngineConfig,
    Fresh,
    SamplingParams,
    get_engine,
)
from cacheclip_rag.errors import ConfigurationError, PromptTooLongError, UnknownModelError
from cacheclip_rag.methods.base import Method
from cacheclip_rag.methods.cacheclip import CacheClip
from cacheclip_rag.methods.direct import Direct
from cacheclip_rag.methods.full import Full
from cacheclip_rag.models.load import load_model, loaded_models
from cacheclip_rag.prefill import Prefilled
from cacheclip_rag.stats import PHASES
from tests.conftest import add_bos

SHORT = SamplingParams(max_tokens=12)


@pytest.fixture(autouse=True)
def endless(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model may end its turn at the first token, and empty answers are all alike."""
    monkeypatch.setattr(load_model(tiny_models["llama"]), "eos_ids", frozenset())


@pytest.fixture
def make(tiny_models: dict[str, str]) -> Callable[..., CacheClipEngine]:
    def build(**options: Any) -> CacheClipEngine:
        return CacheClipEngine(
            **{"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"], "store": None, **options}
        )

    return build


def rag(chunks: list[str], question: str = "What is the magic number?") -> str:
    return "\n\n".join(chunks) + f"\n\nQuestion: {question}"


def logits(engine: CacheClipEngine, prompt: Any, method: Method) -> Prefilled:
    """The engine's own prefill, up to the logits that its answer is sampled from."""
    with torch.inference_mode():
        return engine.prefill(prompt, SHORT, method=method)


def check_sums(answer: Answer) -> None:
    stats = answer.stats
    assert stats.prefix_tokens + stats.fresh_tokens + stats.chunk_tokens == stats.prompt_tokens
    assert stats.reused_tokens == stats.prefix_tokens + stats.chunk_tokens - stats.recomputed_tokens
    assert 0 <= stats.recomputed_tokens <= stats.chunk_tokens
    assert stats.generated_tokens == len(answer.token_ids)
    assert set(stats.phases_s) == set(PHASES) and all(s >= 0 for s in stats.phases_s.values())
    assert sum(stats.phases_s.values()) <= stats.ttft_s + 1e-3
    assert stats.to_dict()["effective_ratio"] == stats.effective_ratio


class TestStats:
    @pytest.mark.parametrize("ratio", [0.0, 0.1, 0.2, 0.37, 0.5])
    def test_effective_ratio_is_the_nominal_to_a_token(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], ratio: float
    ) -> None:
        engine = make()
        engine.precompute(chunks)
        answer = engine.generate(rag(chunks), SHORT, recompute_ratio=ratio)
        check_sums(answer)
        stats = answer.stats
        assert stats.nominal_ratio == ratio
        assert abs(stats.recomputed_tokens - ratio * stats.chunk_tokens) <= 1
        assert abs(stats.effective_ratio - ratio) <= 1 / stats.chunk_tokens
        assert stats.charged_ratio == stats.effective_ratio
        assert (stats.method, stats.fallback, stats.hits, stats.misses) == ("cacheclip", None, len(chunks), 0)

    @pytest.mark.parametrize("grouping", ["vote_sliding", "v1_literal"])
    def test_other_groupings_never_exceed_the_nominal(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], grouping: str
    ) -> None:
        engine = make(grouping=grouping)
        engine.precompute(chunks)
        stats = engine.generate(rag(chunks), SHORT, recompute_ratio=0.4).stats
        assert stats.effective_ratio <= 0.4 + 1 / stats.chunk_tokens

    @pytest.mark.parametrize("method", ["full", "direct", "cacheclip"])
    def test_sums_for_every_method(self, engine: CacheClipEngine, chunks: list[str], method: str) -> None:
        engine.precompute(chunks)
        answer = engine.generate(rag(chunks), SHORT, method=method)
        check_sums(answer)
        assert answer.stats.method == method and answer.stats.fallback is None
        prompt_tokens = engine.generate(rag(chunks), SHORT, method="full").stats.prompt_tokens
        assert answer.stats.prompt_tokens == prompt_tokens

    def test_full_reuses_nothing(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        stats = engine.generate(rag(chunks), SHORT, method="full").stats
        assert stats.fresh_tokens == stats.prompt_tokens and stats.reused_tokens == 0
        assert stats.effective_ratio == 1.0 and stats.hits == 0

    def test_some_stored_some_not(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        engine = make()
        engine.precompute(chunks[:2])
        answer = engine.generate(rag(chunks), SHORT, candidates=chunks)
        check_sums(answer)
        assert (answer.stats.hits, answer.stats.misses) == (2, 2)
        again = engine.generate(rag(chunks), SHORT)
        assert (again.stats.hits, again.stats.misses) == (4, 0)

    def test_first_token_time_covers_the_phases(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        begin = time.perf_counter()
        stats = engine.generate(rag(chunks), SHORT).stats
        assert 0 < stats.ttft_s <= time.perf_counter() - begin
        assert stats.phases_s["recompute"] > 0 and stats.phases_s["select"] > 0

    def test_exact_tokens_explain_a_ratio_below_one(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        stats = engine.generate(rag(chunks), SHORT, recompute_ratio=1.0).stats
        assert stats.exact_tokens == len(engine.primary.tokenize(chunks[0]))
        assert stats.recomputed_tokens == stats.chunk_tokens - stats.exact_tokens
        assert stats.effective_ratio < 1.0 == stats.effective_ratio_of_stale


class TestMisses:
    def test_no_stored_chunk_is_plain_prefill_and_says_so(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        answer = engine.generate(rag(chunks), SHORT, candidates=chunks)
        check_sums(answer)
        assert answer.stats.method == "full"
        assert answer.stats.fallback is not None and "4 chunks" in answer.stats.fallback
        assert answer.stats.misses == 4 and answer.stats.nominal_ratio == 0.2
        assert answer.token_ids == engine.generate(rag(chunks), SHORT, method="full").token_ids

    def test_the_second_call_hits(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.generate(rag(chunks), SHORT, candidates=chunks)
        stats = engine.generate(rag(chunks), SHORT).stats  # and needs no candidates any more
        assert (stats.hits, stats.misses, stats.fallback) == (4, 0, None)

    def test_ignore_does_not_store(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        engine = make(on_miss="ignore")
        for _ in range(2):
            stats = engine.generate(rag(chunks), SHORT, candidates=chunks).stats
            assert (stats.hits, stats.misses) == (0, 4)
        assert not engine.is_stored(chunks[0])

    def test_prompt_without_chunks(self, engine: CacheClipEngine) -> None:
        answer = engine.generate("Hello, how are you?", SHORT)
        check_sums(answer)
        assert answer.stats.fallback == "no stored chunk found in the prompt"
        assert answer.stats.misses == 0

    def test_full_stores_nothing(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.generate(rag(chunks), SHORT, method="full", candidates=chunks)
        assert not engine.is_stored(chunks[0], needs_auxiliary=False)

    def test_chunk_segments_given_by_hand_are_stored_too(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        segments = [Fresh("Read: "), Chunk(chunks[0]), Fresh("\nWhat?")]
        assert engine.generate(segments, SHORT).stats.misses == 1
        assert engine.generate(segments, SHORT).stats.hits == 1

    def test_stored_for_direct_only(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path
    ) -> None:
        """A store written without an auxiliary serves direct reuse at once, and cacheclip from the second call on."""
        make(auxiliary=None, store=str(tmp_path)).precompute(chunks)
        engine = make(store=str(tmp_path))
        assert engine.generate(rag(chunks), SHORT, method="direct").stats.hits == 4
        assert engine.generate(rag(chunks), SHORT).stats.hits == 0
        assert engine.generate(rag(chunks), SHORT).stats.hits == 4


class TestDamage:
    def damage(self, engine: CacheClipEngine, model: str, text: str) -> None:
        path = engine.store.path_of(engine._caches_of(model).key(text))  # type: ignore[attr-defined]
        content = bytearray(path.read_bytes())
        content[-7] ^= 0xFF
        path.write_bytes(content)

    def test_damaged_chunk_is_a_miss_and_the_answer_is_right(
        self, engine: CacheClipEngine, make: Callable[..., CacheClipEngine], chunks: list[str]
    ) -> None:
        """As if that chunk had been fresh text all along."""
        engine.precompute(chunks)
        self.damage(engine, engine.config.primary, chunks[1])
        answer = engine.generate(rag(chunks), SHORT, method="direct")
        check_sums(answer)
        assert (answer.stats.hits, answer.stats.misses) == (3, 1)
        other = make(on_miss="ignore")
        other.precompute([c for c in chunks if c != chunks[1]])
        expected = other.generate(rag(chunks), SHORT, method="direct", candidates=chunks)
        assert answer.token_ids == expected.token_ids
        assert answer.stats.fresh_tokens == expected.stats.fresh_tokens
        assert engine.generate(rag(chunks), SHORT, method="direct").stats.hits == 4  # mended after the answer

    def test_ratio_one_stays_exact(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        self.damage(engine, engine.config.primary, chunks[0])
        self.damage(engine, engine.config.primary, chunks[3])
        answer = engine.generate(rag(chunks), SHORT, recompute_ratio=1.0)
        assert answer.stats.misses == 2
        assert answer.token_ids == engine.generate(rag(chunks), SHORT, method="full").token_ids

    def test_all_damaged(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        for chunk in chunks:
            self.damage(engine, engine.config.primary, chunk)
        answer = engine.generate(rag(chunks), SHORT)
        check_sums(answer)
        assert (answer.stats.hits, answer.stats.misses) == (0, 4)
        assert answer.token_ids == engine.generate(rag(chunks), SHORT, method="full").token_ids
        assert engine.generate(rag(chunks), SHORT).stats.hits == 4

    def test_all_damaged_says_that_it_was_a_plain_prefill(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        for chunk in chunks:
            self.damage(engine, engine.config.primary, chunk)
        stats = engine.generate(rag(chunks), SHORT).stats
        assert stats.fallback is not None

    def test_damaged_for_the_auxiliary(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        expected = engine.generate(rag(chunks), SHORT)
        assert engine.config.auxiliary
        self.damage(engine, engine.config.auxiliary, chunks[1])
        answer = engine.generate(rag(chunks), SHORT)
        check_sums(answer)
        assert answer.stats.recomputed_tokens == expected.stats.recomputed_tokens and answer.stats.hits == 4
        engine.generate(rag(chunks), SHORT)
        assert engine.generate(rag(chunks), SHORT).stats.hits == 4  # whole again

    def test_damaged_prefix(
        self, engine: CacheClipEngine, make: Callable[..., CacheClipEngine], chunks: list[str]
    ) -> None:
        engine.precompute(chunks)
        expected = engine.generate(rag(chunks), SHORT)
        caches = engine._caches_of(engine.config.primary)
        path = engine.store.path_of(caches._key((), caches.prefix_ids))  # type: ignore[attr-defined]
        assert path.exists()
        path.write_bytes(path.read_bytes()[:-9])
        again = make(store=engine.config.store)
        assert again.generate(rag(chunks), SHORT).token_ids == expected.token_ids


class TestRefusals:
    def test_prompt_too_long_says_by_how_much(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        many = [f"{n}. {chunks[n % 4]}" for n in range(60)]
        with pytest.raises(
            PromptTooLongError, match=r"\d+ tokens, \d+ more than the 2047 .*last \d+ of its 60 chunks"
        ) as caught:
            engine.generate(rag(many), SHORT, candidates=many)
        words = str(caught.value).split()
        total, excess = int(words[words.index("tokens,") - 1]), int(words[words.index("more") - 1])
        assert total - excess == 2047
        drop = int(words[words.index("last") + 1])
        engine.generate(rag(many[:-drop]), SamplingParams(max_tokens=1), candidates=many, method="full")
        assert drop > 5
        with pytest.raises(PromptTooLongError):  # nor does the advice throw away much more than it must
            engine.generate(rag(many[: -(drop - 3)]), SHORT, candidates=many)

    def test_question_too_long(self, engine: CacheClipEngine) -> None:
        with pytest.raises(PromptTooLongError, match="shorten the question"):
            engine.generate("word " * 5000, SHORT)

    def test_chunk_too_long(self, engine: CacheClipEngine) -> None:
        with pytest.raises(PromptTooLongError, match="smaller chunks"):
            engine.precompute(["word " * 5000])
        assert not engine.is_stored("word " * 5000)

    @pytest.mark.parametrize("prompt", ["", "  \n", [], [Fresh("")], [Fresh(""), Chunk("")], ()])
    def test_empty_prompt(self, engine: CacheClipEngine, prompt: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"empty|at least one"):
            engine.generate(prompt, SHORT)

    @pytest.mark.parametrize("text", ["", "  \n "])
    def test_empty_chunk(self, engine: CacheClipEngine, text: str) -> None:
        with pytest.raises(ConfigurationError, match="empty or blank"):
            engine.precompute([text])

    def test_no_auxiliary(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        engine = make(auxiliary=None)
        with pytest.raises(ConfigurationError, match=r"auxiliary.*full, prefix, direct"):
            engine.generate(rag(chunks), SHORT)
        with pytest.raises(ConfigurationError, match="auxiliary"):
            engine.generate(rag(chunks), SHORT, method=CacheClip(0.3))
        engine.precompute(chunks)
        assert engine.generate(rag(chunks), SHORT, method="direct").stats.hits == 4
        assert engine.generate(rag(chunks), SHORT, method="full").stats.method == "full"
        assert engine.auxiliary is None

    @pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf"), "x", None, [0.2]])
    def test_ratio_out_of_range(self, ratio: Any) -> None:
        with pytest.raises(ConfigurationError, match="recompute_ratio"):
            EngineConfig(recompute_ratio=ratio)
        with pytest.raises(ConfigurationError, match="recompute_ratio"):
            CacheClip(ratio)

    @pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "x"])
    def test_ratio_of_one_call(self, engine: CacheClipEngine, ratio: Any) -> None:
        with pytest.raises(ConfigurationError, match="recompute_ratio"):
            engine.generate("Hello", SHORT, recompute_ratio=ratio)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("method", "nonsense"),
            ("grouping", "nonsense"),
            ("window", 0),
            ("threshold", 8),
            ("dtype", "float64"),
            ("codec", "int3"),
            ("auxiliary_codec", "int3"),
            ("on_miss", "explode"),
            ("primary", ""),
            ("memory_bytes", -1),
            ("prefix_cache_bytes", -1),
            ("max_bytes", -1),
            ("memory_bytes", "1 GB"),
            ("max_bytes", 1.5),
            ("window", 2.5),
            ("namespace", None),
            ("namespace", ""),
            ("primary", None),
            ("store", ""),
            ("store", 5),
            ("auxiliary", 3),
            ("system_prompt", 3),
        ],
    )
    def test_senseless_options(self, option: str, value: Any) -> None:
        with pytest.raises(ConfigurationError):
            CacheClipEngine(**{option: value})

    def test_unknown_option_lists_the_known(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"unknown option recompute_ration\. Known: primary.*recompute_ratio"
        ):
            CacheClipEngine(recompute_ration=0.2)
        with pytest.raises(ConfigurationError, match="unknown option"):
            get_engine(tempo=3)

    def test_however_a_store_is_named_it_is_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        named = [EngineConfig(store=name) for name in (tmp_path / "st", str(tmp_path / "st"), "st", "./x/../st")]
        assert len(set(named)) == 1
        assert EngineConfig(store="~/st").store == str(Path.home() / "st")

    @pytest.mark.parametrize("prompt", [5, b"text", {"role": "user", "content": "x"}, iter(["x"]), None, [[]], ["x"]])
    def test_prompt_of_another_type(self, engine: CacheClipEngine, prompt: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"segments"):
            engine.generate(prompt, SHORT)

    @pytest.mark.parametrize("texts", ["one string", [1], None, 5, [b"bytes"]])
    def test_texts_of_another_type(self, engine: CacheClipEngine, texts: Any) -> None:
        """A single string would otherwise be taken for a list of letters."""
        for call in (engine.precompute, engine.release, lambda t: engine.generate("Hello", SHORT, candidates=t)):
            with pytest.raises(ConfigurationError, match=r"list of texts|must be a string"):
                call(texts)
        assert engine.store.stats().entries == 0

    def test_question_of_another_type(self, engine: CacheClipEngine) -> None:
        with pytest.raises(ConfigurationError, match="question"):
            engine.generate("Hello", SHORT, question=5)  # type: ignore[arg-type]

    def test_params_of_another_type(self, engine: CacheClipEngine) -> None:
        with pytest.raises(ConfigurationError, match="SamplingParams"):
            engine.generate("Hello", {"max_tokens": 3})  # type: ignore[arg-type]

    def test_half_a_character(self, engine: CacheClipEngine) -> None:
        text = "A text of some length with half of an emoji: \ud83d and more."
        for call in (lambda: engine.precompute([text]), lambda: engine.generate(text, SHORT)):
            with pytest.raises(ConfigurationError, match="half a character"):
                call()

    def test_unknown_method_of_one_call(self, engine: CacheClipEngine) -> None:
        with pytest.raises(ConfigurationError, match="full, prefix, direct, "):
            engine.generate("Hello", SHORT, method="nonsense")

    def test_all_errors_have_one_root(self) -> None:
        with pytest.raises(CacheClipError):
            CacheClipEngine(primary="no-such-model").primary  # noqa: B018

    def test_ratio_beside_a_method_that_has_one(self, engine: CacheClipEngine) -> None:
        with pytest.raises(ConfigurationError, match="own settings"):
            engine.generate("Hello", SHORT, method=CacheClip(0.3), recompute_ratio=0.9)

    def test_other_methods_work_while_the_auxiliary_cannot_be_had(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make(auxiliary="no-such-model")
        first = engine.generate(rag(chunks), SHORT, method="direct", candidates=chunks)
        assert (first.stats.hits, first.stats.misses) == (0, 4)
        assert "without the auxiliary" in caplog.text
        assert engine.generate(rag(chunks), SHORT, method="direct").stats.hits == 4
        assert engine.release(chunks) == 4
        with pytest.raises(UnknownModelError):
            engine.generate(rag(chunks), SHORT)
        with pytest.raises(UnknownModelError):
            engine.precompute(chunks)

    def test_unknown_model_only_when_used(self) -> None:
        engine = CacheClipEngine(primary="no-such-model")
        with pytest.raises(UnknownModelError, match="no-such-model"):
            engine.generate("Hello", SHORT)

    def test_wrong_things_as_segments(self, engine: CacheClipEngine) -> None:
        with pytest.raises(ConfigurationError, match="Fresh or Chunk"):
            engine.generate([Fresh("x"), "y"], SHORT)  # type: ignore[list-item]


class TestStreaming:
    @pytest.mark.parametrize("method", ["full", "direct", "cacheclip"])
    def test_joined_it_is_the_whole_text(self, engine: CacheClipEngine, chunks: list[str], method: str) -> None:
        engine.precompute(chunks)
        params = SamplingParams(max_tokens=30)
        whole = engine.generate(rag(chunks), params, method=method)
        events = list(engine.generate_stream(rag(chunks), params, method=method))
        assert "".join(e.text for e in events) == whole.text
        assert [e.answer is not None for e in events] == [False] * (len(events) - 1) + [True]
        last = events[-1].answer
        assert last is not None and (last.text, last.token_ids) == (whole.text, whole.token_ids)
        assert len(events) > 2

    def test_stop_string(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        whole = engine.generate(rag(chunks), SamplingParams(max_tokens=30))
        stop = whole.text[9:12]
        params = SamplingParams(max_tokens=30, stop=(stop,))
        events = list(engine.generate_stream(rag(chunks), params))
        answer = events[-1].answer
        assert answer is not None and answer.finish_reason == "stop"
        assert answer.text == "".join(e.text for e in events) == whole.text[: whole.text.index(stop)]
        assert len(answer.token_ids) < len(whole.token_ids)

    def test_seeded_sampling_is_repeatable(self, engine: CacheClipEngine) -> None:
        params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=5)
        assert engine.generate("Hello", params).text == engine.generate("Hello", params).text

    def test_end_of_turn(self, engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ending token is counted, and not a part of the text."""
        whole = engine.generate("Hello", SamplingParams(max_tokens=30))
        assert whole.finish_reason == "length"
        last = whole.token_ids[7]
        monkeypatch.setattr(engine.primary, "eos_ids", frozenset([last]))
        answer = engine.generate("Hello", SamplingParams(max_tokens=30))
        assert answer.finish_reason == "stop"
        assert answer.token_ids == whole.token_ids[: whole.token_ids.index(last) + 1]
        assert answer.text == engine.primary.decode_ids(answer.token_ids[:-1])

    def test_length_is_a_finish_reason(self, engine: CacheClipEngine) -> None:
        answer = engine.generate("Hello", SamplingParams(max_tokens=3))
        assert answer.finish_reason == "length" and len(answer.token_ids) == 3

    def test_ends_with_the_context(self, engine: CacheClipEngine) -> None:
        prompt = "word " * 600
        tokens = engine.generate(prompt, SamplingParams(max_tokens=1)).stats.prompt_tokens
        prompt += "\x00" * (engine.primary.context_tokens - tokens - 5)  # one token each
        answer = engine.generate(prompt, SamplingParams(max_tokens=50))
        assert answer.stats.prompt_tokens == engine.primary.context_tokens - 5
        assert len(answer.token_ids) == 5 and answer.finish_reason == "length"
        with pytest.raises(PromptTooLongError, match=", 1 more than the 2047"):
            engine.generate(prompt + "\x00" * 5, SamplingParams(max_tokens=50))
        assert len(engine.generate(prompt + "\x00" * 4, SamplingParams(max_tokens=50)).token_ids) == 1

    def test_abandoned_stream_leaves_the_engine_usable(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        expected = engine.generate(rag(chunks), SHORT, method="full")
        stream = engine.generate_stream(rag(chunks), SHORT, method="full")
        next(stream)
        stream.close()
        assert not torch.is_inference_mode_enabled()
        assert engine.generate(rag(chunks), SHORT, method="full").token_ids == expected.token_ids

    def test_two_streams_in_turns(self, engine: CacheClipEngine, chunks: list[str], question: str) -> None:
        engine.precompute(chunks)
        prompts = [rag(chunks), rag(chunks[:2], question)]
        expected = [engine.generate(p, SHORT).text for p in prompts]
        streams = [engine.generate_stream(p, SHORT) for p in prompts]
        texts = ["", ""]
        running = {0, 1}
        while running:
            for number in sorted(running):
                event = next(streams[number], None)
                if event is None:
                    running.discard(number)
                else:
                    texts[number] += event.text
        assert texts == expected


class TestStore:
    def test_precompute_is_idempotent(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        assert engine.precompute(chunks) == 4
        assert engine.precompute(chunks) == 0
        assert engine.precompute([f"\n {chunks[0]}  "]) == 0  # the same text once stripped
        assert engine.precompute([*chunks, "One more text for the store."]) == 1

    def test_precompute_takes_an_iterator_and_survives_an_error(
        self, engine: CacheClipEngine, chunks: list[str]
    ) -> None:
        with pytest.raises(ConfigurationError):
            engine.precompute(iter([chunks[0], "", chunks[1]]))
        assert engine.is_stored(chunks[0]) and not engine.is_stored(chunks[1])

    def test_survives_a_new_engine(
        self, engine: CacheClipEngine, make: Callable[..., CacheClipEngine], chunks: list[str]
    ) -> None:
        engine.precompute(chunks)
        again = make(store=engine.config.store)
        assert again.precompute(chunks) == 0
        assert again.generate(rag(chunks), SHORT).stats.hits == 4

    def test_memory_and_disk_give_the_same_answer(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path
    ) -> None:
        engines = [make(), make(store=str(tmp_path / "a")), make(store=str(tmp_path / "b"), memory_bytes=10**8)]
        answers = []
        for engine in engines:
            engine.precompute(chunks)
            answers.append(engine.generate(rag(chunks), SHORT).token_ids)
        assert answers[0] == answers[1] == answers[2]

    def test_release(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        assert engine.release(chunks[:2]) == 2
        assert engine.release(chunks[:2]) == 0
        assert not engine.is_stored(chunks[0]) and engine.is_stored(chunks[2])
        assert Chunk(chunks[0]) not in engine.segment(rag(chunks))
        stats = engine.generate(rag(chunks), SHORT).stats
        assert (stats.hits, stats.misses) == (2, 0)
        assert engine.precompute(chunks) == 2
        assert engine.generate(rag(chunks), SHORT).stats.hits == 4

    def test_namespaces_do_not_share(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path
    ) -> None:
        ours, theirs = (make(store=str(tmp_path), namespace=n) for n in ("ours", "theirs"))
        ours.precompute(chunks)
        assert not theirs.is_stored(chunks[0])
        assert Chunk(chunks[0]) not in theirs.segment(rag(chunks))
        assert theirs.generate(rag(chunks), SHORT).stats.hits == 0
        assert theirs.precompute(chunks) == 4
        theirs.release(chunks)
        assert ours.generate(rag(chunks), SHORT).stats.hits == 4

    def test_other_system_prompt_does_not_share(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path
    ) -> None:
        make(store=str(tmp_path)).precompute(chunks)
        assert not make(store=str(tmp_path), system_prompt="Be brief.").is_stored(chunks[0])

    def test_one_chunk_that_cannot_be_stored_does_not_keep_out_the_others(
        self, make: Callable[..., CacheClipEngine], tiny_models: dict[str, str], chunks: list[str], tmp_path: Path
    ) -> None:
        """Too long for the auxiliary's short context: that chunk alone stays fresh text."""
        short = tmp_path / "short"
        shutil.copytree(tiny_models["auxiliary"], short)
        config = json.loads((short / "config.json").read_text())
        (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 200}))
        engine = make(auxiliary=str(short))
        texts = [" ".join(chunks), *chunks[1:3]]
        assert engine.generate(rag(texts), SHORT, candidates=texts).stats.misses == 3
        assert [engine.is_stored(text) for text in texts] == [False, True, True]
        assert engine.generate(rag(texts), SHORT, candidates=texts).stats.hits == 2
        keys = set(engine.store.keys())
        with pytest.raises(PromptTooLongError):
            engine.precompute([texts[0] + " More."])
        assert set(engine.store.keys()) == keys  # nothing of it was written for the other model either

    def test_copies_are_the_same_engine(self, engine: CacheClipEngine) -> None:
        assert copy.deepcopy(engine) is engine
        assert pickle.loads(pickle.dumps(engine)) is get_engine(engine.config)

    def test_evicted_chunks_are_misses(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path
    ) -> None:
        engine = make(store=str(tmp_path), max_bytes=200_000)
        engine.precompute(chunks)
        assert engine.store.stats().evictions > 0 and engine.store.stats().bytes <= 200_000
        expected = engine.generate(rag(chunks), SHORT, method="full")
        answer = engine.generate(rag(chunks), SHORT, recompute_ratio=1.0)
        check_sums(answer)
        assert answer.token_ids == expected.token_ids

    def test_same_model_in_both_roles(
        self, make: Callable[..., CacheClipEngine], tiny_models: dict[str, str], chunks: list[str]
    ) -> None:
        engine = make(auxiliary=tiny_models["llama"])
        engine.precompute(chunks)
        stats = engine.generate(rag(chunks), SHORT).stats
        assert stats.hits == 4 and stats.recomputed_tokens > 0

    def test_coarser_entry_of_an_auxiliary_is_not_good_enough_for_a_primary(
        self, make: Callable[..., CacheClipEngine], tiny_models: dict[str, str], chunks: list[str], tmp_path: Path
    ) -> None:
        """One engine's auxiliary is another's primary, over one store: the primary reads no bfloat16 rounding."""
        first = make(primary=tiny_models["qwen2"], auxiliary=tiny_models["llama"], store=str(tmp_path))
        first.precompute(chunks)
        engine, clean = make(auxiliary=None, store=str(tmp_path)), make(auxiliary=None)
        assert not engine.is_stored(chunks[0]) and first.is_stored(chunks[0])
        assert engine.precompute(chunks) == clean.precompute(chunks) == 4
        for method in (Direct(), CacheClip(1.0)):
            ours, theirs = logits(engine, rag(chunks), method), logits(clean, rag(chunks), method)
            assert ours.stats.hits == theirs.stats.hits == 4
            assert torch.equal(ours.logits, theirs.logits)
        assert (ours.logits - logits(engine, rag(chunks), Full()).logits).abs().max() < 1e-4
        assert first.is_stored(chunks[0]) and first.precompute(chunks) == 0  # finer than it needs is good enough

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_other_dtypes_run(self, make: Callable[..., CacheClipEngine], chunks: list[str], dtype: str) -> None:
        engine = make(dtype=dtype)
        engine.precompute(chunks)
        stats = engine.generate(rag(chunks), SHORT).stats
        assert stats.hits == 4 and stats.recomputed_tokens > 0


class TestQuestion:
    def selected(self, engine: CacheClipEngine, prompt: str, question: str | None) -> list[int]:
        chosen: list[torch.Tensor] = []
        original = engine.primary.run_rows

        def spy(cache: Any, ids: torch.Tensor, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            chosen.append(positions)
            return original(cache, ids, positions, *args, **kwargs)

        engine.prefixes.clear()
        engine.primary.run_rows = spy  # type: ignore[method-assign]
        try:
            engine.generate(prompt, SamplingParams(max_tokens=1), question=question, recompute_ratio=0.2)
        finally:
            del engine.primary.run_rows
        return chosen[-1].tolist()

    def test_it_decides_what_is_recomputed(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        default = self.selected(engine, rag(chunks), None)
        assert default == self.selected(engine, rag(chunks), None)
        others = [self.selected(engine, rag(chunks), q) for q in ("7316042", "Seabirds nest on the eastern cliffs")]
        assert any(other != default for other in others) and others[0] != others[1]
        assert all(len(other) == len(default) for other in others)

    def test_default_is_the_text_after_the_last_chunk(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        prompt = rag(chunks, "Who went ashore in 1962?")
        assert self.selected(engine, prompt, None) == self.selected(
            engine, prompt, "Question: Who went ashore in 1962?"
        )

    def test_question_before_the_chunks(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        prompt = "Who went ashore?\n\n" + "\n\n".join(chunks)
        assert self.selected(engine, prompt, None) == self.selected(engine, prompt, "Who went ashore?")

    def test_no_question_at_all(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        answer = engine.generate("".join(chunks), SHORT)
        check_sums(answer)
        assert answer.stats.hits == 4

    def test_very_long_question(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        check_sums(engine.generate(rag(chunks, "why " * 300), SHORT))


class TestPrefix:
    def test_is_reused_when_the_prompt_opens_with_it(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        stats = engine.generate(rag(chunks), SHORT).stats
        opening = "<|im_start|>system\nYou answer questions.<|im_end|>\n<|im_start|>user\n"
        assert stats.prefix_tokens == len(engine.primary.tokenize(opening, control=True))

    def test_is_not_when_a_system_message_is_given(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": rag(chunks)}]
        answer = engine.generate(messages, SHORT)
        check_sums(answer)
        assert answer.stats.prefix_tokens == 0 and answer.stats.hits == 4
        exact = engine.generate(messages, SHORT, recompute_ratio=1.0)
        assert exact.token_ids == engine.generate(messages, SHORT, method="full").token_ids

    def test_of_the_configured_system_prompt(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        engine = make(system_prompt="Be brief.")
        engine.precompute(chunks)
        assert engine.generate(rag(chunks), SHORT).stats.prefix_tokens > 0
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": rag(chunks)}]
        assert engine.generate(messages, SHORT).stats.prefix_tokens > 0
        assert engine.generate(messages, SHORT).token_ids == engine.generate(rag(chunks), SHORT).token_ids

    def test_last_segment_may_be_a_chunk(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        for method in ("direct", "cacheclip"):
            answer = engine.generate([Fresh("Go on: "), Chunk(chunks[0]), Chunk(chunks[1])], SHORT, method=method)
            check_sums(answer)
            assert answer.stats.hits == 2
        segments = [Fresh("Go on: "), Chunk(chunks[0])]
        exact = engine.generate(segments, SHORT, recompute_ratio=1.0)
        assert exact.token_ids == engine.generate(segments, SHORT, method="full").token_ids

    @pytest.mark.parametrize("method", ["direct", "cacheclip"])
    def test_last_segment_is_an_exact_chunk(self, engine: CacheClipEngine, chunks: list[str], method: str) -> None:
        """Nothing needs computing but the last token, whose logits are the answer's first: as by full prefill."""
        engine.precompute(chunks[:1])
        opening = "<|im_start|>system\nYou answer questions.<|im_end|>\n<|im_start|>user\n"
        segments = [Fresh(opening, control=True), Chunk(chunks[0])]
        answer = engine.generate(segments, SHORT, method=method)
        check_sums(answer)
        assert (answer.stats.fresh_tokens, answer.stats.recomputed_tokens, answer.stats.hits) == (0, 1, 1)
        assert answer.token_ids == engine.generate(segments, SHORT, method="full").token_ids

    def test_prompt_that_is_one_chunk_and_nothing_else(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        segments = [Chunk(chunks[0])]
        exact = engine.generate(segments, SHORT, recompute_ratio=1.0)
        assert exact.token_ids == engine.generate(segments, SHORT, method="full").token_ids
        check_sums(engine.generate(segments, SHORT))

    def test_prompt_that_is_the_prefix_and_nothing_else(self, engine: CacheClipEngine) -> None:
        opening = "<|im_start|>system\nYou answer questions.<|im_end|>\n<|im_start|>user\n"
        check_sums(engine.generate([Fresh(opening, control=True)], SHORT))


class TestSystemPrompt:
    def test_a_stored_text_inside_it_does_not_change_the_prefix(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path
    ) -> None:
        options = {"store": str(tmp_path), "system_prompt": f"You are a guide. {chunks[3]} Be brief."}
        first = make(**options)
        first.precompute(chunks)
        again = make(**options)  # as after a restart: the store holds the text by now
        assert again._caches_of(again.config.primary).prefix_ids == first._caches_of(first.config.primary).prefix_ids
        stats = again.generate(rag(chunks[:2]), SHORT).stats
        assert (stats.hits, stats.misses) == (2, 0) and stats.prefix_tokens > 0

    def test_comes_before_messages_that_hold_none(
        self, make: Callable[..., CacheClipEngine], chunks: list[str]
    ) -> None:
        engine = make(system_prompt="Talk like a pirate.")
        engine.precompute(chunks)
        messages = [{"role": "user", "content": rag(chunks)}]
        assert engine.segment(messages) == engine.segment(rag(chunks))
        assert engine.generate(messages, SHORT).stats.prefix_tokens > 0
        own = [{"role": "system", "content": "Be brief."}, *messages]
        assert "pirate" not in "".join(segment.text for segment in engine.segment(own))


class TestTemplateWithADate:
    def test_chunks_outlive_the_day(
        self, make: Callable[..., CacheClipEngine], tiny_models: dict[str, str], chunks: list[str], tmp_path: Path
    ) -> None:
        """The prefix states a fixed date, so its chunks are found tomorrow; the prompt states today's."""
        folder = tmp_path / "dated"
        shutil.copytree(tiny_models["llama"], folder)
        dated = (folder / "chat_template.jinja").read_text().replace("You answer questions.", "It is {{ DATE }}.")
        (folder / "chat_template.jinja").write_text(dated.replace("DATE", "strftime_now('%d %b %Y')"))
        engine = make(primary=str(folder))
        engine.precompute(chunks)
        caches = engine._caches_of(str(folder))
        assert "01 Jan 2025" in engine.primary.decode_ids(caches.prefix_ids)
        fused = logits(engine, rag(chunks), CacheClip(1.0))
        assert time.strftime("%Y") in engine.primary.decode_ids(fused.layout.ids.tolist())
        assert (fused.stats.hits, fused.stats.prefix_tokens, fused.stats.exact_tokens) == (4, 0, 0)
        assert (fused.logits - logits(engine, rag(chunks), Full()).logits).abs().max() < 1e-4


class TestModelsWithoutATemplate:
    """Base models: the prompt opens with what their tokenizer puts before any text."""

    @pytest.fixture
    def build(self, tmp_path: Path, tiny_models: dict[str, str]) -> Callable[[bool], str]:
        def build(with_bos: bool) -> str:
            folder = tmp_path / f"base-{with_bos}"
            shutil.copytree(tiny_models["llama"], folder)
            (folder / "chat_template.jinja").unlink()
            if with_bos:
                add_bos(folder)
            return str(folder)

        return build

    def test_bos_comes_first_and_is_the_shared_prefix(
        self, make: Callable[..., CacheClipEngine], build: Callable[[bool], str], chunks: list[str]
    ) -> None:
        engine = make(primary=build(True))
        engine.precompute(chunks)
        fused = logits(engine, rag(chunks), CacheClip(1.0))
        tokenizer = engine.primary.tokenizer
        assert fused.layout.ids[0] == 0 and tokenizer("x")["input_ids"][0] == 0
        assert fused.stats.prefix_tokens == 1 and fused.stats.hits == 4
        assert (fused.logits - logits(engine, rag(chunks), Full()).logits).abs().max() < 1e-4

    @pytest.mark.parametrize("with_bos", [True, False])
    def test_first_chunk_is_exact_and_costs_nothing(
        self, make: Callable[..., CacheClipEngine], build: Callable[[bool], str], chunks: list[str], with_bos: bool
    ) -> None:
        engine = make(primary=build(with_bos))
        engine.precompute(chunks)
        for ratio in (0.0, 0.5, 1.0):
            one = logits(engine, rag(chunks[:1]), CacheClip(ratio))
            assert one.stats.recomputed_tokens == 0 and one.stats.exact_tokens == one.stats.chunk_tokens > 0
            assert (one.logits - logits(engine, rag(chunks[:1]), Full()).logits).abs().max() < 1e-4


class TestProcess:
    def test_constructor_costs_nothing(self, tmp_path: Path, tiny_models: dict[str, str]) -> None:
        before = loaded_models()
        seconds = []
        for n in range(3):
            begin = time.perf_counter()
            CacheClipEngine(primary="qwen2.5-coder-1.5b", store=str(tmp_path / f"store{n}"))
            seconds.append(time.perf_counter() - begin)
        assert min(seconds) < 0.010
        assert loaded_models() == before
        assert not list(tmp_path.iterdir())  # nothing written either

    def test_get_engine_is_one_per_settings(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        options = {"primary": tiny_models["llama"], "auxiliary": None, "store": str(tmp_path)}
        first = get_engine(**options)
        assert get_engine(**options) is first
        assert get_engine(EngineConfig(**options)) is first
        assert get_engine(EngineConfig(**options), recompute_ratio=0.2) is first
        assert get_engine(**options, recompute_ratio=0.3) is not first
        assert get_engine(**options, namespace="other") is not first

    def test_get_engine_from_threads(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        engines: list[CacheClipEngine] = []
        threads = [
            threading.Thread(
                target=lambda: engines.append(get_engine(primary=tiny_models["llama"], store=str(tmp_path)))
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(engines) == 8 and len(set(map(id, engines))) == 1

    def test_engines_share_weights(self, make: Callable[..., CacheClipEngine]) -> None:
        assert make().primary is make(namespace="other").primary

    @pytest.mark.parametrize("prepared", [True, False], ids=["stored", "missing"])
    def test_threads_get_the_same_text(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path, prepared: bool
    ) -> None:
        engine = make(store=str(tmp_path))
        if prepared:
            engine.precompute(chunks)
        method = "cacheclip" if prepared else "full"
        expected = engine.generate(rag(chunks), SHORT, method=method, recompute_ratio=0.3).text
        texts: list[str] = []
        problems: list[BaseException] = []

        def work() -> None:
            try:
                ratio = 0.3 if prepared else 1.0
                texts.append(engine.generate(rag(chunks), SHORT, recompute_ratio=ratio, candidates=chunks).text)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert texts == [expected] * 4

    def test_importing_is_fast_and_loads_no_torch(self) -> None:
        program = (
            "import sys, time; begin = time.perf_counter(); import cacheclip_rag; spent = time.perf_counter() - begin; "
            "heavy = {'torch', 'transformers', 'numpy', 'langchain_core', 'llama_index'} & set(sys.modules); "
            "assert not heavy, heavy; print(spent)"
        )
        seconds = [
            float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
            for _ in range(3)
        ]
        assert min(seconds) < 0.3

    def test_making_a_config_loads_no_torch(self) -> None:
        program = (
            "import sys; from cacheclip_rag import EngineConfig; EngineConfig(); assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], check=True)

    def test_public_names(self) -> None:
        for name in cacheclip_rag.__all__:
            assert getattr(cacheclip_rag, name) is not None
        assert dir(cacheclip_rag) == sorted(cacheclip_rag.__all__)
        assert set(cacheclip_rag._HOMES) == set(cacheclip_rag.__all__) - {"__version__"}
        with pytest.raises(AttributeError, match="nonsense"):
            cacheclip_rag.nonsense  # noqa: B018
