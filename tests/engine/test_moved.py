"""Moved KV: what it is, when it is taken, and where it never goes."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.methods import PRESETS, preset
from cacheclip_rag.prompt.known_kv import LEAST_END, MOST_BORDER
from cacheclip_rag.runtime.base import KVRun, KVSource
from cacheclip_rag.runtime.kv_blocks import LEAST_PAST
from cacheclip_rag.runtime.transformers.rotary import rotate, unrotate
from tests.conftest import SENTENCES, Make, Patch
from tests.engine.asking import SHORT, check_sums, logits
from tests.prompt.test_tools import SEARCH


@pytest.fixture
def passages() -> list[str]:
    generator = random.Random(5)
    return [" ".join(generator.sample(SENTENCES, 3)) for _ in range(16)]


def chat(header: str, passages: list[str], question: str = "What is the magic number?") -> str:
    return header + "\n\n" + "\n\n".join(passages) + f"\n\nQuestion: {question}"


def turned(runtime: Any, state: Any, run: KVRun, wrong_by: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer the KV of an earlier prompt's state where a run begins in it, turned to the run's positions."""
    there = slice(run.source_start, run.source_start + run.stop - run.start)
    before = runtime.rotary.tables(torch.arange(there.start, there.stop))
    after = runtime.rotary.tables(torch.arange(run.start, run.stop) + wrong_by)
    for layer, old, new in zip(state.layers, before, after, strict=True):
        yield rotate(unrotate(layer.keys[0, :, there], old), new), layer.values[0, :, there]


def reference(engine: CacheClipEngine, old: str, new: str, *, wrong_by: int = 0) -> torch.Tensor:
    """Logits of ``new`` with the KV that a plain prefill of ``old`` gives, turned to the new positions (``wrong_by``
    tokens beside them), where the engine takes it from there."""
    runtime, method = engine.primary, engine.make_method("cacheclip", 0.2)
    sources = engine.parts.kv_sources(method)
    plan = engine.plan(new, method=method)
    state, _ = runtime.prefill(engine.plan(old, method="prefix").layout.ids, 4096)
    with sources.match(method, plan.layout, continued=True, moves=True) as match:
        runs = match.runs
    cache, rows = runtime.new_cache(4096), torch.ones(plan.layout.num_tokens, dtype=torch.bool)
    cache.extend_to(plan.layout.num_tokens)
    for run in runs:
        border = MOST_BORDER if run.source == KVSource.MOVED else 0
        for layer, (keys, values) in zip(
            cache.layers, turned(runtime, state, run, wrong_by if border else 0), strict=True
        ):
            layer.write(run.start, keys, values)
        rows[run.start + border : run.stop] = False
    slots = rows.nonzero()[:, 0]
    found = runtime.run_slots(cache, plan.layout.ids[slots], slots)
    assert found is not None
    return found


EDITS: dict[str, Callable[[list[str]], tuple[str, str]]] = {
    "header": lambda p: (chat("Checksum a91f3.", p), chat("Checksum 07c2e, longer.", p)),
    "deleted": lambda p: (chat("Hello.", p), chat("Hello.", [p[0], *p[2:]])),
    "replaced": lambda p: (chat("Hello.", p[:-1]), chat("Hello.", [p[0], p[-1], *p[2:-1]])),
    "inserted": lambda p: (chat("Hello.", p[1:]), chat("Hello.", p)),
}


@pytest.mark.some(3)
@torch.inference_mode()
@pytest.mark.parametrize("wrong_by", [0, 3])
@pytest.mark.parametrize("edit", EDITS)
def test_kv_of_an_edited_prompt(make: Make, passages: list[str], edit: str, wrong_by: int) -> None:
    """Planted: positions off by three tokens. The comparison must find it."""
    engine = make(min_confidence=0.0, on_miss="ignore")
    old, new = EDITS[edit](passages)
    engine.generate(old, SHORT)
    expected = reference(engine, old, new, wrong_by=wrong_by)
    found = logits(engine, new, engine.make_method("cacheclip", 0.2))
    assert found.stats.moved_tokens > found.stats.prompt_tokens / 2
    assert (float((found.logits - expected).abs().max()) < 1e-4) == (not wrong_by)
    assert not found.is_exact


@torch.inference_mode()
def test_kv_between_stored_chunks(make: Make, passages: list[str]) -> None:
    """Chunks on both sides are put together and written at once, with nothing in between."""
    engine = make(min_confidence=0.0, on_miss="ignore")
    stored = [
        "Alden quarry closed in 1931, as slate from Wales cost less.",
        "Two ferries cross Mirren sound daily.",
    ]
    engine.precompute(stored)
    old = chat("Hello.", passages)
    new = chat("Hello.", [stored[0], *passages[:9], stored[1], *passages[9:]])
    engine.generate(old, SHORT, method="prefix")
    state, _ = engine.primary.prefill(engine.plan(old, method="prefix").layout.ids, 4096)
    found = engine.prefill(new, method="direct")
    spans = [span for span in found.layout.spans if span.is_chunk]
    assert [span.segment.text for span in spans] == stored
    with engine.prefixes.match(found.layout.token_ids, preset("direct"), moves=range(10**6)) as match:
        runs = [run for run in match.runs if run.source == KVSource.MOVED]
    assert any(spans[0].stop <= run.start and run.stop <= spans[1].start for run in runs)
    for run in runs:
        inner = slice(2 * MOST_BORDER, found.layout.num_tokens - LEAST_END - run.start)
        for layer, expected in zip(found.cache.layers, turned(engine.primary, state, run), strict=True):
            for own, each in zip((layer.keys, layer.values), expected, strict=True):
                torch.testing.assert_close(own[0, :, run.start : run.stop][:, inner], each[:, inner])


NOT_MOVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"moved": "off"}, {}),
    ({"prefix_cache_bytes": 0}, {}),
    ({"require_certificate": True}, {}),
    ({}, {"moved": "off"}),
    ({}, {"method": "prefix"}),
    ({}, {"recompute_ratio": 1.0}),
]


class TestWhenItIsTaken:
    def test_statistics_say_what_was_moved(self, make: Make, passages: list[str]) -> None:
        engine = make(min_confidence=0.0, on_miss="ignore")
        old, new = EDITS["inserted"](passages)
        engine.generate(old, SHORT)
        work, answer = engine.plan(new).work, engine.generate(new, SHORT)
        check_sums(answer)
        stats = answer.stats
        assert (stats.method, stats.fallback, stats.hits, stats.continued_turns) == ("cacheclip", None, 0, 0)
        assert stats.moved_tokens > stats.prompt_tokens / 2
        assert stats.moved_past is not None and LEAST_PAST <= stats.moved_past < 1.0, "a passage is new"
        assert stats.reused_tokens == stats.cached_prefix_tokens + stats.moved_tokens
        assert work == stats.prompt_tokens - stats.reused_tokens < stats.prompt_tokens / 2, "as much as it computes"
        values = engine.metrics.snapshot()
        assert values['prompt_tokens_total{source="moved"}'] == stats.moved_tokens

    @pytest.mark.some(3)
    @pytest.mark.parametrize(("settings", "call"), NOT_MOVED, ids=str)
    def test_not_where_it_is_switched_off_or_the_answer_must_be_exact(
        self, make: Make, passages: list[str], settings: dict[str, Any], call: dict[str, Any]
    ) -> None:
        engine = make(on_miss="ignore", **settings)
        for prompt in EDITS["inserted"](passages):
            answer = engine.generate(prompt, SHORT, **call)
        assert answer.stats.moved_tokens == 0
        assert answer.token_ids == make(on_miss="ignore").generate(prompt, SHORT, method="full").token_ids

    @pytest.mark.some(3)
    @pytest.mark.parametrize("edit", EDITS)
    def test_the_end_of_a_prompt_is_computed(self, make: Make, passages: list[str], edit: str) -> None:
        """Earlier prompts end with the same question, and it has not read the edit."""
        engine = make(on_miss="ignore")
        old, new = EDITS[edit](passages)
        engine.generate(old, SHORT)
        stats = engine.generate(new, SHORT).stats
        assert stats.moved_tokens and stats.fresh_tokens >= LEAST_END
        layout = engine.plan(new).layout
        with engine.prefixes.match(layout.token_ids, engine.make_method(), moves=range(10**6)) as match:
            assert match.runs[-1].stop > layout.num_tokens - LEAST_END, "earlier prompts have the end"

    def test_one_other_token_inside_makes_two_runs(self, make: Make, passages: list[str]) -> None:
        engine = make(on_miss="ignore")
        old, new = EDITS["header"](passages)
        engine.generate(old, SHORT)
        layout, method = engine.plan(new).layout, engine.make_method()
        ids = [*layout.token_ids]
        with engine.prefixes.match(ids, method, moves=range(10**6)) as match:
            (whole,) = (run for run in match.runs if run.source == KVSource.MOVED)
        middle = (whole.start + whole.stop) // 2
        ids[middle] += 1
        with engine.prefixes.match(ids, method, moves=range(10**6)) as match:
            runs = [(run.start, run.stop) for run in match.runs if run.source == KVSource.MOVED]
        assert runs == [(whole.start, middle), (middle + 1, whole.stop)]

    def test_tokens_behind_which_too_little_of_their_past_is_left_are_computed(
        self, make: Make, passages: list[str]
    ) -> None:
        """Of the last passage, before which all others stood, nothing is left to be taken where it comes first."""
        engine = make(on_miss="ignore")
        engine.generate(chat("Hello.", passages), SHORT)
        reordered = engine.generate(chat("Hello.", [passages[5], passages[4]]), SHORT).stats
        assert reordered.moved_tokens == 0
        kept = engine.generate(chat("Hello.", passages[1:]), SHORT).stats
        assert kept.moved_tokens > 0 and kept.moved_past is not None and 1.0 > kept.moved_past >= LEAST_PAST

    def test_the_answer_is_a_source_too(self, make: Make, passages: list[str]) -> None:
        """Of a chat whose system message changes."""
        engine = make(on_miss="ignore", min_confidence=0.0)
        long = SamplingParams(max_tokens=64)
        user = {"role": "user", "content": chat("Hello.", passages[:9])}

        def turn(time: str, *later: dict[str, str]) -> list[dict[str, str]]:
            return [{"role": "system", "content": f"It is {time}."}, user, *later]

        answer = engine.generate(turn("noon"), long)
        said = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
        ids = engine.plan(turn("a quarter past one", *said)).layout.token_ids
        begin = engine.plan(turn("a quarter past one")).layout.num_tokens
        with engine.prefixes.match(ids, engine.make_method(), moves=range(10**6)) as match:
            assert match.runs[-1].stop > begin

    def test_stored_chunks_are_not_read_where_moved_kv_has_them(self, make: Make, passages: list[str]) -> None:
        engine, fresh = (make(stored=passages, min_confidence=0.0) for _ in range(2))
        old, new = EDITS["inserted"](passages)
        engine.generate(old, SHORT, method="prefix")
        stats = engine.generate(new, SHORT).stats
        assert stats.hits == len(passages) and stats.moved_tokens > stats.prompt_tokens / 2
        assert stats.recomputed_tokens < fresh.generate(new, SHORT).stats.recomputed_tokens
        assert all(value >= 0 for value in engine.metrics.snapshot().values())

    def test_what_is_computed_again_counts_once(self, make: Make, passages: list[str]) -> None:
        """Chunks as they are stored, moved, and computed again in part."""
        engine = make(stored=passages[:8], min_confidence=0.0)
        old, new = EDITS["header"](passages)
        engine.generate(old, SHORT, method="direct")
        stats = engine.generate(new, SHORT, recompute_ratio=0.5).stats
        assert stats.moved_tokens and stats.recomputed_tokens
        assert stats.reused_tokens >= stats.cached_prefix_tokens + stats.moved_tokens
        assert engine.metrics.snapshot()['prompt_tokens_total{source="store"}'] >= 0

    def test_the_gate_holds_for_it(self, make: Make, passages: list[str]) -> None:
        engine = make(method=replace(preset("cacheclip"), min_confidence=1.0), on_miss="ignore")
        old, new = EDITS["inserted"](passages)
        engine.generate(old, SHORT)
        answer = engine.generate(new, SHORT)
        assert answer.stats.gated and answer.stats.moved_tokens == 0
        assert answer.token_ids == engine.generate(new, SHORT, method="full").token_ids

    @pytest.mark.some(2)
    @pytest.mark.parametrize("settings", [{}, {"min_confidence": 0.0}], ids=str)
    def test_calls_and_structured_answers_are_gated(
        self, monkeypatch: Patch, tool_model: str, passages: list[str], settings: dict[str, Any]
    ) -> None:
        """Unless no gate is asked for. An answer in words is not."""
        monkeypatch.setattr("cacheclip_rag.answering.pipeline.CALL_CONFIDENCE", 1.0)
        engine = CacheClipEngine(primary=tool_model, auxiliary=None, method="direct", store=None, **settings)
        old, new = EDITS["inserted"](passages)
        as_json = SamplingParams(max_tokens=8, json_schema={"type": "array", "items": {"type": "string"}})
        for params, options in ((SHORT, {"tools": [SEARCH]}), (as_json, {}), (SHORT, {})):
            engine.prefixes.clear()
            engine.generate(old, SHORT, **options)
            answer = engine.generate(new, params, **options)
            is_gated = not settings and bool(options or params is as_json)
            assert (answer.stats.gated, answer.stats.moved_tokens == 0) == (is_gated, is_gated)
            if is_gated:
                engine.prefixes.clear()
                assert answer.token_ids == engine.generate(new, params, method="full", **options).token_ids

    def test_a_call_in_an_answer_that_continues_moved_kv_is_gated(
        self, monkeypatch: Patch, tool_model: str, passages: list[str]
    ) -> None:
        engine = CacheClipEngine(primary=tool_model, auxiliary=None, method="direct", store=None)
        monkeypatch.setattr("cacheclip_rag.answering.pipeline.CALL_CONFIDENCE", 0.0)
        for prompt in EDITS["inserted"](passages):
            stats = engine.generate(prompt, SHORT, tools=[SEARCH]).stats
        assert stats.moved_tokens and not stats.gated
        monkeypatch.setattr("cacheclip_rag.answering.pipeline.CALL_CONFIDENCE", 1.0)
        plan = engine.plan(prompt + " And then?", tools=[SEARCH])
        assert plan.continues
        assert engine.generate(prompt + " And then?", SHORT, tools=[SEARCH]).stats.gated


class TestWhereItNeverGoes:
    @pytest.mark.parametrize("planted", [False, True])
    def test_into_the_exact_cache(self, make: Make, passages: list[str], planted: bool) -> None:
        """Planted: the approximate KV is put there. The comparison must find it."""
        engine = make(on_miss="ignore", min_confidence=0.0)
        old, new = EDITS["inserted"](passages)
        engine.generate(old, SHORT)
        assert engine.generate(new, SHORT).stats.moved_tokens
        if planted:
            prefilled = logits(engine, new, engine.make_method())
            engine.prefixes.insert(prefilled.layout.token_ids, prefilled.cache)
        expected = logits(engine, new, preset("full")).logits
        found = logits(engine, new, preset("prefix")).logits
        assert (float((found - expected).abs().max()) < 1e-4) is not planted

    def test_to_another_tenant_or_after_texts_were_released(self, make: Make, passages: list[str]) -> None:
        mine, others = (make(namespace=name, on_miss="ignore") for name in ("mine", "others"))
        others.prefixes.share_limit(mine.prefixes)
        mine.precompute(passages)
        old, new = EDITS["header"](passages)
        mine.generate(old, SHORT)
        assert others.generate(new, SHORT).stats.moved_tokens == 0
        assert mine.generate(new, SHORT).stats.moved_tokens > 0
        mine.generate(old, SHORT)
        mine.release(passages[:1])
        assert mine.generate(new, SHORT).stats.moved_tokens == 0

    @pytest.mark.some(3)
    @pytest.mark.parametrize("method", [name for name in PRESETS if preset(name).reuses_chunks])
    def test_more_rows_than_plain_prefill(self, make: Make, passages: list[str], method: str) -> None:
        """Random histories of edits, some with stored chunks, by every method."""
        engine, generator = make(method=method, min_confidence=0.0, on_miss="ignore"), random.Random(4)
        engine.precompute(passages[:2])
        for turn in range(8):
            chosen = generator.sample(passages, generator.randint(2, 6))
            stats = engine.generate(chat(f"Turn {turn}.", chosen), SamplingParams(max_tokens=2)).stats
            plain = stats.prompt_tokens - stats.cached_prefix_tokens
            assert stats.fresh_tokens + stats.recomputed_tokens <= plain
