"""``finish="idle"``: exact KV is completed while no answer is under way, and gives way to every question."""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.answering import completion
from cacheclip_rag.answering.completion import IdleCompletion
from cacheclip_rag.answering.turns import turns_of
from cacheclip_rag.methods import preset
from cacheclip_rag.prompt.known_kv import FOLLOW_UP_SHARE
from tests.answering.test_turns import Threads, until
from tests.conftest import SENTENCES, Logs, Make, Patch, raising, spied
from tests.engine.asking import SHORT, check_sums, logits, rag
from tests.engine.test_continued import METHODS

BLOCK = 16


@pytest.fixture
def passages() -> list[str]:
    generator = random.Random(3)
    return [" ".join(generator.sample(SENTENCES, 5)) for _ in range(5)]


@pytest.fixture
def idle(make: Make, passages: list[str]) -> Iterator[CacheClipEngine]:
    engine = make(stored=passages, method="cacheclip", recompute_ratio=0.4, finish="idle")
    yield engine
    engine.close()


def completion_of(engine: CacheClipEngine) -> IdleCompletion:
    return engine._answering.completion


class Slices:
    """Slices that a runtime computes, and what happens within them."""

    def __init__(self, engine: CacheClipEngine, monkeypatch: Patch) -> None:
        self.tokens: list[tuple[int, int]] = []
        """First token and number of tokens."""
        self.within: Callable[[int], object] = lambda number: None

        def spy(state: Any, ids: torch.Tensor, start: int, **options: Any) -> None:
            if threading.current_thread().name == "cacheclip-idle":
                self.tokens.append((start, len(ids)))
                self.within(len(self.tokens))

        spied(monkeypatch, engine.primary, "extend", spy)


@pytest.fixture
def slices(idle: CacheClipEngine, monkeypatch: Patch) -> Slices:
    return Slices(idle, monkeypatch)


class TestNextQuestion:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("method", METHODS)
    def test_it_is_full_prefills_at_the_cost_of_prefix_caching(
        self, make: Make, passages: list[str], method: str
    ) -> None:
        engine = make(stored=passages, method=method, recompute_ratio=0.4, min_confidence=0.0, finish="idle")
        expected = engine.generate(rag(passages, "Who?"), SHORT, finish="none").token_ids
        engine.prefixes.clear()
        assert engine.generate(rag(passages, "Who?"), SHORT).token_ids == expected
        assert engine.wait_for_observers()
        answer = engine.generate(rag(passages, "Where was it?"), SHORT)
        check_sums(answer)
        stats = answer.stats
        assert (stats.method, stats.bypassed, stats.continued_tokens) == ("prefix", True, 0)
        assert engine.wait_for_observers()
        engine.prefixes.clear()
        engine.generate(rag(passages, "Who?"), SHORT, method="prefix")
        exact = engine.generate(rag(passages, "Where was it?"), SHORT, method="prefix")
        assert (answer.token_ids, stats.fresh_tokens) == (exact.token_ids, exact.stats.fresh_tokens)
        assert stats.cached_prefix_tokens == exact.stats.cached_prefix_tokens

    def test_its_kv_is_plain_prefills(self, idle: CacheClipEngine, passages: list[str]) -> None:
        idle.generate(rag(passages), SHORT)
        assert idle.wait_for_observers()
        expected = logits(idle, rag(passages, "Who?"), preset("full")).logits
        found = logits(idle, rag(passages, "Who?"), preset("cacheclip"))
        assert found.is_exact and found.stats.cached_prefix_tokens > 0.8 * found.stats.prompt_tokens
        torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("options", [{"finish": "none"}, {"method": "full"}, {"method": "prefix"}])
    def test_not_for(self, idle: CacheClipEngine, passages: list[str], options: dict[str, str]) -> None:
        idle.generate(rag(passages), SHORT, **options)
        assert completion_of(idle)._worker is None
        assert not idle.prefixes.stats.evictions


class TestHalfDone:
    """The time until the next question sufficed for the first part of the exact KV."""

    @pytest.fixture
    def half(self, idle: CacheClipEngine, passages: list[str]) -> CacheClipEngine:
        idle.generate(rag(passages, "Who?"), SHORT, finish="none")
        prefilled = logits(idle, rag(passages, "Who?"), preset("full"))
        idle.prefixes.insert(prefilled.layout.token_ids[: prefilled.layout.num_tokens // 2], prefilled.cache)
        return idle

    def test_the_rest_is_continued(self, half: CacheClipEngine, passages: list[str]) -> None:
        plan = half.plan(rag(passages, "Where was it?"))
        exact = half.prefixes.known(plan.layout.token_ids)
        answer = half.generate(rag(passages, "Where was it?"), SHORT, finish="none", trace=True)
        check_sums(answer)
        stats = answer.stats
        assert 0 < exact == stats.cached_prefix_tokens < stats.continued_tokens
        assert answer.trace is not None and answer.trace.recomputed and min(answer.trace.recomputed) >= exact
        parts = [span.stop - (span.start if span in plan.exact else max(span.start, exact)) for span in plan.reused]
        rest = sum(part for part in parts if part > 0)  # a chunk that is exact as stored counts as in a first question
        assert stats.recomputed_tokens == pytest.approx(0.4 * FOLLOW_UP_SHARE * rest, abs=1)
        assert stats.stale_from is not None and stats.stale_from >= exact

    @torch.inference_mode()
    @pytest.mark.parametrize("planted", [False, True])
    def test_its_kv_is_exact_first_then_that_of_the_answer_before(
        self, half: CacheClipEngine, passages: list[str], planted: bool, monkeypatch: Patch
    ) -> None:
        """The reference: plain prefill's KV in the first slots, and that of the first prompt after them. Planted: the
        approximate KV in all of them."""
        monkeypatch.setattr("cacheclip_rag.prompt.known_kv.FOLLOW_UP_SHARE", 0.0)
        chosen = half.make_method("cacheclip", 0.4)
        found = logits(half, rag(passages, "Where was it?"), chosen)
        exact, start = found.stats.cached_prefix_tokens, found.stats.continued_tokens
        half.prefixes.clear()
        before = logits(half, rag(passages, "Who?"), chosen)
        if not planted:
            full = logits(half, rag(passages, "Who?"), preset("full"))
            for layer, own in zip(before.cache.layers, full.cache.layers, strict=True):
                layer.write(0, own.keys[0, :, :exact], own.values[0, :, :exact])
        half.primary.cut(before.cache, start)
        expected = half.primary.extend(before.cache, found.layout.ids[start:], start)
        assert (float((found.logits - expected).abs().max()) < 1e-4) is not planted

    def test_it_stays_approximate(self, half: CacheClipEngine, passages: list[str], monkeypatch: Patch) -> None:
        """Also where every chunk is exact: what comes after it followed approximate KV. None of it is put into the
        prefix cache."""
        monkeypatch.setattr("cacheclip_rag.plan.plan.ROWS_FOR_EXACT_KV", 0)
        messages = [{"role": "user", "content": rag(passages, "Who?")}]
        answer = half.generate(messages, SHORT, finish="none")
        prefilled = logits(half, messages, preset("full"))
        half.prefixes.insert(prefilled.layout.token_ids, prefilled.cache)
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "More?"}]
        found = logits(half, messages, half.make_method("cacheclip", 0.4))
        assert found.stats.continued_tokens > found.stats.cached_prefix_tokens > 0 == found.stats.recomputed_tokens
        assert not found.is_exact and found.keeping is None and found.continuing is not None


class TestGivingWay:
    def test_nothing_is_computed_while_an_answer_is_under_way(
        self, idle: CacheClipEngine, passages: list[str], slices: Slices
    ) -> None:
        other = idle.stream(rag(passages[::-1]), SHORT, finish="none")
        next(other)
        idle.generate(rag(passages), SHORT)
        changed = turns_of(idle.primary)._changed
        until(lambda: bool(changed._waiters))  # type: ignore[attr-defined]
        assert not slices.tokens
        for _ in other:
            assert not slices.tokens
        assert idle.wait_for_observers() and slices.tokens

    def test_a_question_waits_for_one_slice_at_most(
        self, idle: CacheClipEngine, passages: list[str], slices: Slices, monkeypatch: Patch
    ) -> None:
        """It comes within the third slice, and is answered before the fourth, which begins at another token: what the
        slices before it computed is exact KV already."""
        monkeypatch.setattr(completion, "_MOST_ROWS", BLOCK)
        seen, threads = list[int](), Threads()

        def ask() -> None:
            seen.extend(len(slices.tokens) for _ in idle.stream(rag(passages, "Where was it?"), SHORT, finish="none"))

        def within(number: int) -> None:
            if number == 3:
                threads.start(ask)
                until(lambda: bool(turns_of(idle.primary)._prompts))

        slices.within = within
        idle.generate(rag(passages), SHORT)
        assert idle.wait_for_observers()
        threads.join()
        assert seen and set(seen) == {3} and len(slices.tokens) > 3
        starts = [start for start, _ in slices.tokens]
        assert starts == [*range(starts[0], starts[0] + BLOCK * len(starts), BLOCK)]

    def test_slices_are_as_long_as_a_question_may_wait(
        self, idle: CacheClipEngine, passages: list[str], slices: Slices
    ) -> None:
        """By a clock on which each token takes 4 ms."""
        completion_of(idle)._clock = lambda: 0.004 * sum(count for _, count in slices.tokens)
        idle.generate(rag(passages), SHORT)
        assert idle.wait_for_observers()
        first, *others, last = [count for _, count in slices.tokens]
        assert first == BLOCK and others and set(others) == {int(completion._SLICE_S / 0.004)} >= {last} - {last}
        assert last <= others[0] and 0.1 < 0.004 * others[0] <= 0.3

    def test_closing_ends_it(self, idle: CacheClipEngine, passages: list[str], slices: Slices) -> None:
        with turns_of(idle.primary).answer():
            idle.generate(rag(passages), SHORT)
            idle.close()
        assert not slices.tokens and completion_of(idle)._worker is None
        idle.generate(rag(passages), SHORT)
        assert idle.wait_for_observers() and slices.tokens


class TestLimits:
    def test_only_the_latest_prompt_of_a_conversation(
        self, idle: CacheClipEngine, passages: list[str], slices: Slices
    ) -> None:
        with turns_of(idle.primary).answer():
            for question in ("Who?", "Where?", "And when was that?"):
                idle.generate(rag(passages, question), SHORT)
            (waiting,) = completion_of(idle)._prompts
            last = idle.plan(rag(passages, "And when was that?")).layout.token_ids
            assert waiting.ids[: len(last)].tolist() == list(last)
            for number in range(1, 8):
                idle.generate(rag(passages[number % 5 :] + passages[: number % 5], f"{number}?"), SHORT)
            assert len(completion_of(idle)._prompts) == completion._MOST_PROMPTS
        assert idle.wait_for_observers() and slices.tokens

    def test_within_the_bytes_of_the_prefix_cache(self, make: Make, passages: list[str], monkeypatch: Patch) -> None:
        """It ends with the first slice for which there is no room."""
        whole = 0
        for is_limited in (False, True):
            engine = make(stored=passages, finish="idle", **({"prefix_cache_bytes": whole // 2} if is_limited else {}))
            slices = Slices(engine, monkeypatch)
            engine.generate(rag(passages), SHORT)
            assert engine.wait_for_observers()
            whole = whole or engine.prefixes.stats.bytes
            monkeypatch.setattr(completion, "_MOST_ROWS", BLOCK)
        stats = engine.prefixes.stats
        assert whole // 4 < stats.bytes + stats.continued_bytes <= whole // 2
        assert len(slices.tokens) * BLOCK <= stats.blocks * BLOCK + BLOCK

    @pytest.mark.parametrize("when", ["waiting", "running"])
    def test_released_texts_do_not_come_back(
        self, idle: CacheClipEngine, passages: list[str], slices: Slices, when: str
    ) -> None:
        if when == "running":
            slices.within = lambda number: idle.release(passages[:1])
        with turns_of(idle.primary).answer():
            idle.generate(rag(passages), SHORT)
            if when == "waiting":
                idle.release(passages[:1])
        assert idle.wait_for_observers()
        assert len(slices.tokens) == 1 and idle.prefixes.stats.blocks == 0

    @pytest.mark.some(3)
    @pytest.mark.parametrize("kind", [RuntimeError, MemoryError, ValueError])
    def test_an_error_is_logged(
        self, kind: type[Exception], idle: CacheClipEngine, passages: list[str], slices: Slices, caplog: Logs
    ) -> None:
        slices.within = raising(kind("out of memory"))
        with caplog.at_level(logging.WARNING):
            idle.generate(rag(passages), SHORT)
            assert idle.wait_for_observers()
        assert "could not be completed: out of memory" in caplog.text
        assert idle.generate(rag(passages, "Where?"), SHORT, finish="none").stats.continued_tokens > 0


def test_prompts_of_one_conversation() -> None:
    def prompt(*ids: int) -> Any:
        return completion._Prompt(None, None, np.array(ids), 0)  # type: ignore[arg-type]

    assert prompt(1, 2, 3).takes_place_of(prompt(1, 2, 4, 5)) and prompt(1, 2).takes_place_of(prompt(1, 2))
    assert not prompt(1, 2, 3).takes_place_of(prompt(1, 2, 4, 5, 6))
    assert not prompt(1, 2).takes_place_of(prompt(2, 1))
