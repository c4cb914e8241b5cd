"""Exact first, then continued KV: no prompt computes more than without reuse, and approximate KV stays in its cache."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, FusionStats, Plan, SamplingParams
from cacheclip_rag.measuring import Prediction, RatioChooser, kl_divergence
from cacheclip_rag.methods import Method, preset
from cacheclip_rag.models.load import load_model
from cacheclip_rag.prompt.known_kv import FOLLOW_UP_SHARE
from cacheclip_rag.runtime.base import KVMatch, KVSource
from tests.conftest import SENTENCES, Make, Models, Patch, spied
from tests.engine.asking import SHORT, check_sums, logits, rag

METHODS = ["epic", "epic-corrected", "cacheclip", "cacheclip-gated"]
"""Presets without positions of their own."""
WORTH = 64
"""Rows that may be computed more if the KV is exact then."""
BLOCK = 16


@pytest.fixture
def passages() -> list[str]:
    generator = random.Random(3)
    return [" ".join(generator.sample(SENTENCES, 5)) for _ in range(5)]


def rows(stats: object) -> int:
    return stats.fresh_tokens + stats.recomputed_tokens  # type: ignore[attr-defined]


def wrong_in_history(
    engine: CacheClipEngine,
    method: str,
    passages: list[str],
    prompt_of: Callable[[list[str], str], Any],
    monkeypatch: Patch,
    planted: bool = False,
) -> int:
    """Answers of a random history, ``full`` among its methods, that compute more rows than plain prefill after the
    exact KV of all earlier answers would, or whose statistics do not say whether they continue approximate KV.
    ``planted``: exact KV is not looked at."""
    if planted:
        monkeypatch.setattr("cacheclip_rag.answering.pipeline.least_computed", lambda plan, *_: plan)
    written = spied(monkeypatch, KVMatch, "write_to")
    generator, wrong, exact = random.Random(11), 0, list[tuple[int, ...]]()
    for _ in range(8):
        chosen = generator.sample(passages, generator.randint(1, len(passages)))
        for question in generator.sample(["Who?", "Where?", "And when was that?"], 3):
            prompt, asked = prompt_of(chosen, question), generator.choice(["full", "prefix", method])
            ids = engine.plan(prompt, method="prefix").layout.token_ids
            known = max((len(os.path.commonprefix([ids[:-1], each])) for each in exact), default=0) // BLOCK * BLOCK
            written.clear()
            stats = engine.generate(prompt, SamplingParams(max_tokens=1), method=asked).stats
            wrong += asked != "full" and rows(stats) > len(ids) - known
            used = any(run.source == KVSource.CONTINUED for match, _ in written for run in match.runs)
            wrong += used is not (stats.continued_tokens > stats.cached_prefix_tokens)
            wrong += (stats.continued_turns > 0) is not used
            exact += [ids] if asked == "prefix" else []
    return wrong


class TestContinued:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("method", METHODS)
    def test_the_next_question_continues(self, make: Make, passages: list[str], method: str) -> None:
        engine = make(stored=passages, method=method, recompute_ratio=0.3, min_confidence=0.0)
        first = engine.generate(rag(passages, "Who?"), SHORT).stats
        assert (first.continued_tokens, first.continued_turns, first.stale_from) == (0, 0, None)
        later = [engine.generate(rag(passages, question), SHORT) for question in ("Where was it?", "And then?")]
        for turn, answer in enumerate(later, 1):
            check_sums(answer)
            stats = answer.stats
            start = stats.prompt_tokens - stats.fresh_tokens
            assert (stats.method, stats.hits, stats.misses, stats.fallback) == (method, len(passages), 0, None)
            assert stats.continued_turns == turn and stats.continued_tokens == start > first.prompt_tokens * 0.8
            assert stats.stale_from is not None and stats.stale_from < start
            assert abs(stats.recomputed_tokens - 0.3 * FOLLOW_UP_SHARE * stats.chunk_tokens) <= 1
            assert stats.charged_ratio > 0 and stats.cached_prefix_tokens < stats.stale_from

    @pytest.mark.some(3)
    @pytest.mark.parametrize("method", METHODS)
    def test_every_question_recomputes_other_tokens_until_none_is_stale(
        self, make: Make, passages: list[str], method: str
    ) -> None:
        engine = make(stored=passages, method=method, recompute_ratio=0.4, min_confidence=0.0)
        plan, seen = engine.plan(rag(passages), method=method), set[int]()
        stale = {slot for span in plan.reused if span not in plan.exact for slot in range(span.start, span.stop)}
        for turn in range(5):
            answer = engine.generate(rag(passages, f"Question {turn}?"), SHORT, trace=True)
            chosen = {*answer.trace.recomputed}
            assert not seen & chosen and chosen <= stale
            seen |= chosen
            assert answer.stats.stale_from == (min(stale - seen, default=None) if turn else None)
        assert seen == stale

    @torch.inference_mode()
    @pytest.mark.parametrize("method", ["epic", "cacheclip"])
    def test_it_is_the_kv_of_the_answer_before(
        self, make: Make, passages: list[str], method: str, monkeypatch: Patch
    ) -> None:
        """The reference: the first prompt's own state, cut to what is equal, and extended by the rest."""
        monkeypatch.setattr("cacheclip_rag.prompt.known_kv.FOLLOW_UP_SHARE", 0.0)
        engine = make(stored=passages, method=method, recompute_ratio=0.4)
        chosen = engine.make_method(method, 0.4)
        before = logits(engine, rag(passages, "Who?"), chosen)
        engine.generate(rag(passages, "Who?"), SHORT)
        found = logits(engine, rag(passages, "Where was it?"), chosen)
        start = found.stats.continued_tokens
        assert found.layout.token_ids[:start] == before.layout.token_ids[:start]
        assert found.layout.token_ids[start] != before.layout.token_ids[start]
        engine.primary.cut(before.cache, start)
        expected = engine.primary.extend(before.cache, found.layout.ids[start:], start)
        torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-4)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("num_chats", [1, 2])
    def test_a_chat_continues_with_the_answer_too(self, make: Make, passages: list[str], num_chats: int) -> None:
        """Several on the same documents in turn, too: what a chat has alone takes no other one's place."""
        engine = make(stored=passages, method="cacheclip", recompute_ratio=0.4)
        chats = [[{"role": "user", "content": rag(passages)}] for _ in range(num_chats)]
        lengths = [0] * num_chats
        for turn in range(5):
            for number, messages in enumerate(chats):
                answer = engine.generate(messages, SHORT)
                assert answer.stats.continued_turns >= turn and answer.stats.continued_tokens >= 7 / 8 * lengths[number]
                lengths[number] = answer.stats.prompt_tokens
                question = f"What does number {number} say of the harbour in turn {turn}?"
                messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]

    def test_a_new_chunk_has_the_whole_ratio(self, make: Make, passages: list[str]) -> None:
        engine = make(stored=passages, method="cacheclip", recompute_ratio=0.4)
        engine.generate(rag(passages[:4]), SHORT)
        stats = engine.generate(rag(passages), SHORT).stats
        new = len(engine.primary.tokenize(passages[4]))
        assert stats.continued_turns == 1 and stats.hits == 5
        expected = 0.4 * (new + FOLLOW_UP_SHARE * (stats.chunk_tokens - new))
        assert abs(stats.recomputed_tokens - expected) <= 2

    @pytest.mark.some(3)
    @pytest.mark.parametrize("is_cancelled", [False, True])
    @pytest.mark.parametrize("method", METHODS)
    def test_the_same_prompt_again_has_the_same_answer(
        self, make: Make, passages: list[str], method: str, is_cancelled: bool
    ) -> None:
        """Also if the reader left in the middle of the first one."""
        engine = make(stored=passages, method=method, recompute_ratio=0.4, min_confidence=0.0)
        stream = engine.stream(rag(passages), SHORT)
        first = next(stream).text
        if is_cancelled:
            stream.close()
        first += "".join(event.text for event in stream)
        later = [engine.generate(rag(passages), SHORT) for _ in range(2)]
        assert len({answer.token_ids for answer in later}) == 1 and first
        for again in later:
            assert again.text.startswith(first)
            assert (again.stats.fresh_tokens, again.stats.recomputed_tokens) == (1, 0)

    @pytest.mark.parametrize(
        "other", [{"method": "direct"}, {"recompute_ratio": 0.3}, {"namespace": "another tenant's"}]
    )
    def test_another_method_ratio_or_tenant_does_not(
        self, make: Make, passages: list[str], other: dict[str, str]
    ) -> None:
        settings = {"method": "cacheclip", "recompute_ratio": 0.4}
        engine = make(stored=passages, **settings)
        engine.generate(rag(passages), SHORT)
        if "namespace" in other:
            engine, other = make(stored=passages, **settings, **other), {}
        stats = engine.generate(rag(passages, "Where?"), SHORT, **other).stats
        assert stats.continued_tokens == 0 and stats.hits == 5

    def test_a_ratio_that_is_chosen_by_time(self, make: Make, passages: list[str], monkeypatch: Patch) -> None:
        """Another one than the method's own."""

        class Chooser(RatioChooser):
            def decide(self, method: Method, plan: Plan, *_: object) -> Plan:
                return replace(plan, method=plan.method.at(0.4), prediction=Prediction(1.0, 2.0))

        monkeypatch.setattr("cacheclip_rag.answering.parts.RatioChooser", Chooser)
        monkeypatch.setattr("cacheclip_rag.base.guests.MEASUREMENTS", "cacheclip.none")
        engine = make(stored=passages, method="epic", recompute_ratio="auto", min_confidence=0.0)
        found = [engine.generate(rag(passages, question), SHORT).stats for question in ("Who?", "Where?", "And then?")]
        assert [stats.nominal_ratio for stats in found] == [0.4] * 3 and not any(stats.bypassed for stats in found)
        assert [stats.continued_turns for stats in found] == [0, 1, 2]
        assert [stats.predicted_ttft_s is None for stats in found] == [False, True, True], "it is of fresh fusion"

    @pytest.mark.parametrize(
        ("settings", "saves"), [({"method": "direct"}, False), ({"prefix_cache_bytes": 0}, True)], ids=str
    )
    def test_not_where_it_saves_next_to_nothing_or_nothing_is_kept(
        self, make: Make, passages: list[str], settings: dict[str, Any], saves: bool
    ) -> None:
        engine = make(stored=passages, **settings)
        for _ in range(2):
            stats = engine.generate(rag(passages), SHORT).stats
            assert stats.continued_tokens == 0 and (rows(stats) >= WORTH) is saves

    @pytest.mark.parametrize("forget", ["release", "close", "clear"])
    def test_released_texts_leave_it(self, make: Make, passages: list[str], forget: str) -> None:
        engine = make(stored=passages, method="cacheclip", recompute_ratio=0.4)
        engine.generate(rag(passages), SHORT)
        assert engine.prefixes.stats.continued_bytes > 0
        ways = {"release": lambda: engine.release(passages[:1]), "close": engine.close, "clear": engine.prefixes.clear}
        ways[forget]()
        assert engine.prefixes.stats.continued_bytes == 0 == engine.prefixes.stats.bytes

    @pytest.mark.some(4)
    @pytest.mark.parametrize("method", ["cacheclip", "prefix", "cacheclip-gated"])
    @pytest.mark.parametrize("finish", ["none", "verify", "idle"])
    def test_texts_that_are_released_while_an_answer_is_read(
        self, make: Make, passages: list[str], method: str, finish: str
    ) -> None:
        engine = make(stored=passages, method=method, recompute_ratio=0.4, finish=finish)
        events = engine.stream(rag(passages), SHORT)
        next(events)
        engine.release(passages[:1])
        list(events)
        engine.wait_for_observers()
        assert engine.prefixes.stats.continued_bytes == 0 == engine.prefixes.stats.bytes
        engine.close()

    def test_the_gate_leaves_exact_kv(self, make: Make, passages: list[str]) -> None:
        engine = make(stored=passages, method=replace(preset("cacheclip"), min_confidence=1.0))
        assert engine.generate(rag(passages), SHORT).stats.gated
        stats = engine.generate(rag(passages, "Where?"), SHORT).stats
        assert (stats.continued_tokens, stats.method) == (0, "prefix") and stats.bypassed

    def test_an_unsure_continued_answer_is_full_prefill(self, make: Make, passages: list[str]) -> None:
        def asked(least: float) -> list[FusionStats]:
            engine = make(stored=passages, method=replace(preset("epic").at(0.4), min_confidence=least))
            return [engine.generate(rag(passages, each), max_tokens=1).stats for each in ("Where was it?", "And then?")]

        first, later = asked(0.0)
        assert later.continued_tokens and first.confidence > later.confidence > 0, (
            "else another question is needed here"
        )
        _, gated = asked((first.confidence + later.confidence) / 2)
        assert gated.gated and not gated.continued_tokens and gated.charged_ratio > later.charged_ratio

    def test_shadow_checks_compare_it_with_full_prefill(self, make: Make, passages: list[str]) -> None:
        engine = make(stored=passages, method="epic", recompute_ratio=0.4, min_confidence=0.0)
        engine.generate(rag(passages), SHORT)
        own = logits(engine, rag(passages, "Where?"), engine.make_method("epic", 0.4))
        watched = make(stored=passages, method="epic", recompute_ratio=0.4, min_confidence=0.0, shadow_rate=1.0)
        sums = list[float]()
        for prompt in (rag(passages), rag(passages, "Where?")):
            answer = watched.generate(prompt, SHORT)
            assert watched.wait_for_observers(30)
            sums.append(watched.metrics.snapshot()["shadow_first_token_kl_sum"])
        assert own.stats.continued_tokens == answer.stats.continued_tokens > 0
        full = logits(watched, rag(passages, "Where?"), preset("full")).logits
        assert sums[1] - sums[0] == pytest.approx(float(kl_divergence(full, own.logits)), abs=1e-5, rel=1e-3)

    def test_a_continued_answer_is_not_exact(self, make: Make, passages: list[str]) -> None:
        engine = make(stored=passages, method="cacheclip", recompute_ratio=0.4, finish="verify")
        engine.generate(rag(passages), SHORT, finish="none")
        stats = engine.generate(rag(passages, "Where?"), SHORT).stats
        assert stats.continued_tokens and stats.verified_tokens is not None


class TestLimit:
    @pytest.fixture
    def whole(self, make: Make, passages: list[str]) -> tuple[FusionStats, int]:
        """Of one prompt: statistics, and bytes of its KV."""
        probe = make(stored=passages, method="epic", recompute_ratio=0.4)
        return probe.generate(rag(passages), SHORT).stats, probe.prefixes.stats.bytes

    def test_the_least_recently_used_goes(self, make: Make, passages: list[str], whole: tuple[Any, int]) -> None:
        room = whole[1] * 5 // 2
        engine = make(stored=passages, method="epic", recompute_ratio=0.4, prefix_cache_bytes=room, moved="off")
        first, second, third = passages, passages[::-1], passages[2:] + passages[:2]
        for order in (first, second, first, third):  # second is the least recently used now
            engine.generate(rag(order), SHORT)
            assert engine.prefixes.stats.bytes <= room
        method, left = engine.make_method("epic", 0.4), list[float]()
        for order in (first, second, third):
            ids = engine.plan(rag(order)).layout.token_ids
            with engine.prefixes.match(ids, method) as match:
                left.append(match.num_tokens / len(ids))
        assert left[0] > 0.95 < left[2] and left[1] < 0.6, "of the least recently used, the end goes first"

    def test_of_a_long_prompt_as_much_as_fits(self, make: Make, passages: list[str], whole: tuple[Any, int]) -> None:
        tokens, size = whole[0].prompt_tokens, whole[1] // 2
        engine = make(stored=passages, method="epic", recompute_ratio=0.4, prefix_cache_bytes=size)
        engine.generate(rag(passages), SHORT)
        stats = engine.generate(rag(passages, "Where?"), SHORT).stats
        assert engine.prefixes.stats.bytes <= size
        assert tokens / 4 < stats.continued_tokens < tokens * 0.6 and stats.hits == 5

    def test_tenants_have_it_together(self, make: Make, passages: list[str], whole: tuple[Any, int]) -> None:
        room = whole[1] * 5 // 2
        first, second = (make(method="epic", namespace=name, prefix_cache_bytes=room) for name in ("a", "b"))
        second.prefixes.share_limit(first.prefixes)
        for engine in (first, second):
            engine.precompute(passages)
            for order in (passages, passages[::-1]):
                engine.generate(rag(order), SHORT)
            assert sum(each.prefixes.stats.bytes for each in (first, second)) <= room
            assert engine.plan(rag(passages[::-1], "Who?")).continues


class TestNeverInAnExactCache:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("planted", [False, True])
    @pytest.mark.parametrize("is_evicted", [False, True])
    def test_plain_prefill_after_fused_answers(
        self, make: Make, passages: list[str], is_evicted: bool, planted: bool
    ) -> None:
        """Planted: approximate KV is put into the prefix cache. The comparison must find it. If the store has evicted
        all chunks but an exact one, the second answer continues approximate KV without reusing any."""
        engine, method = make(method="direct"), preset("direct")
        engine.precompute(passages)
        for question in ("Who?", "Where?", "And then?"):
            if is_evicted and question == "Where?":
                plan = engine.plan(rag(passages, question))
                assert plan.reused[:1] == plan.exact
                engine._answering.parts.kv_sources(method).primary.store.delete(plan.keys[1:])
                assert not logits(engine, rag(passages, question), method).is_exact
            stats = engine.generate(rag(passages, question), SHORT).stats
            assert not is_evicted or question != "Where?" or (stats.hits, stats.continued_turns) == (1, 1)
        if planted:
            prefilled = logits(engine, rag(passages, "Who?"), method)
            engine.prefixes.insert(prefilled.layout.token_ids, prefilled.cache)
        expected = logits(engine, rag(passages, "Who?"), preset("full")).logits
        found = logits(engine, rag(passages, "Who?"), preset("prefix"))
        assert (float((found.logits - expected).abs().max()) < 1e-4) is not planted


class TestNeverMoreThanPlain:
    @pytest.mark.long
    @pytest.mark.parametrize(("method", "planted"), [("epic", False), ("cacheclip", False), ("cacheclip", True)])
    def test_random_histories(
        self, make: Make, passages: list[str], method: str, planted: bool, monkeypatch: Patch
    ) -> None:
        engine = make(stored=passages, method=method, recompute_ratio=0.9)
        assert (wrong_in_history(engine, method, passages, rag, monkeypatch, planted) > 0) is planted

    def test_plain_prefill_says_why(self, make: Make, passages: list[str]) -> None:
        engine = make(stored=passages, method="cacheclip", recompute_ratio=0.4)
        engine.generate(rag(passages), SHORT, method="prefix")
        answer = engine.generate(rag(passages, "Where?"), SHORT)
        stats = answer.stats
        assert stats.bypassed and stats.method == "prefix" and "plain prefill computes less" in (stats.fallback or "")
        assert (stats.hits, stats.misses) == (5, 0) and stats.cached_prefix_tokens % BLOCK == 0 < WORTH
        expected = engine.generate(rag(passages, "Where?"), SHORT, method="full")
        assert answer.token_ids == expected.token_ids


def test_the_models_answer_depends_on_staleness(tiny_models: Models, make: Make, passages: list[str]) -> None:
    """Without this, the tests above would pass with any KV."""
    engine = make(stored=passages, method="direct")
    assert load_model(tiny_models["llama"]) is engine.primary
    direct = logits(engine, rag(passages), preset("direct")).logits
    full = logits(engine, rag(passages), preset("full")).logits
    assert float((direct - full).abs().max()) > 1e-2
