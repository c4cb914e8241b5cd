"""The confidence gate after the first token: the exact KV is completed before a token of which the model is unsure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cacheclip_lab.evaluation.reference import Reference

from cacheclip_rag import Answer, CacheClipEngine, SamplingParams
from cacheclip_rag.answering.prefill import confidence
from cacheclip_rag.methods import preset
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.model import ModelRuntime
from tests.conftest import CACHECLIP, CHUNKS, rag_prompt
from tests.engine.asking import check_sums

PROMPT = rag_prompt(CHUNKS)
PARAMS = SamplingParams(max_tokens=12)
Make = Callable[..., CacheClipEngine]


@pytest.fixture
def make(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Engines on a tiny model that never ends its turn, with the chunks stored."""

    def build(name: str = "llama", **options: Any) -> CacheClipEngine:
        monkeypatch.setattr(load_model(tiny_models[name]), "eos_ids", frozenset())
        models = {"primary": tiny_models[name], "auxiliary": tiny_models["auxiliary"]}
        engine = CacheClipEngine(**{**models, **CACHECLIP, **options})
        engine.precompute(CHUNKS)
        return engine

    return build


def ask(engine: CacheClipEngine, least: float, method: str = "direct", **options: Any) -> Answer:
    """An answer that finds nothing in the prefix cache."""
    engine.prefixes.clear()
    gated = replace(preset(method), min_confidence=least)
    return engine.generate(PROMPT, options.pop("params", PARAMS), method=gated, **options)


def along(engine: CacheClipEngine, method: str) -> tuple[list[int], list[float]]:
    """The slow reference: greedy tokens one by one, and the confidence of each."""
    engine.prefixes.clear()
    found: Any = engine.prefill(PROMPT, method=preset(method))
    ids, sure, logits = [], [], found.logits
    for _ in range(12):
        ids.append(int(logits.argmax()))
        sure.append(confidence(logits))
        logits = engine.primary.decode_step(found.cache, ids[-1])
    return ids, sure


def exact_after(engine: CacheClipEngine, given: list[int]) -> list[int]:
    """The given tokens, and full prefill's greedy choices after them."""
    engine.prefixes.clear()
    full: Any = engine.prefill(PROMPT, method=preset("full"))
    logits = full.logits
    for token in given:
        logits = engine.primary.decode_step(full.cache, token)
    ids = list(given)
    while len(ids) < 12:
        ids.append(int(logits.argmax()))
        logits = engine.primary.decode_step(full.cache, ids[-1])
    return ids


def later_least(engine: CacheClipEngine, method: str) -> tuple[float, int, list[int]]:
    """A gate that lets the first token pass and stops at a later one, the number of that token, and the answer."""
    ids, sure = along(engine, method)
    at = next(n for n in range(1, 12) if sure[n] < sure[0])
    return min(sure[0], (sure[at] + min(sure[:at])) / 2), at, ids


class TestWatch:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("name", "method"),
        [("llama", "direct"), ("llama", "cacheclip"), ("gemma3", "direct"), ("gpt-oss", "epic"), ("smollm3", "direct")],
    )
    def test_an_unsure_token_and_all_after_it_are_full_prefills(self, make: Make, name: str, method: str) -> None:
        engine = make(name)
        least, at, ids = later_least(engine, method)
        answer = ask(engine, least, method)
        stats = answer.stats
        assert (stats.completed_at, stats.gated, stats.method) == (at, False, method)
        assert list(answer.token_ids) == exact_after(engine, ids[:at])
        assert stats.verify_s > 0 and stats.verified_tokens is None
        check_sums(answer)

    def test_the_twin_shows_that_it_matters(self, make: Make) -> None:
        """From the approximate KV, the tokens after the unsure one are others."""
        engine = make()
        least, at, ids = later_least(engine, "direct")
        assert list(ask(engine, 0.0).token_ids) == ids
        assert exact_after(engine, ids[:at]) != ids, "choose another prompt: this one shows nothing"
        assert list(ask(engine, least).token_ids) != ids

    def test_a_sure_answer_computes_nothing_more(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make()
        ids, sure = along(engine, "direct")

        def never(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the exact KV was begun")

        monkeypatch.setattr(ModelRuntime, "begin", never)
        answer = ask(engine, min(sure))
        assert list(answer.token_ids) == ids
        assert answer.stats.completed_at is None and answer.stats.verify_s == 0.0

    def test_a_stream_is_the_answer_and_withdraws_nothing(self, make: Make) -> None:
        engine = make()
        least, at, _ = later_least(engine, "direct")
        answer = ask(engine, least)
        engine.prefixes.clear()
        gated = replace(preset("direct"), min_confidence=least)
        events = list(engine.stream(PROMPT, PARAMS, method=gated))
        assert "".join(event.text for event in events) == answer.text
        assert all(event.revised_from is None and event.is_final for event in events)
        assert events[-1].answer is not None and events[-1].answer.stats.completed_at == at

    @pytest.mark.some(2)
    @pytest.mark.parametrize("finish", ["verify", "revise"])
    def test_finishing_completes_it_in_any_case(self, make: Make, finish: str) -> None:
        engine = make()
        least, _, _ = later_least(engine, "direct")
        plain, watched = (ask(engine, each, finish=finish) for each in (0.0, least))
        assert watched.token_ids == plain.token_ids and watched.stats.completed_at is None
        assert watched.stats.verified_tokens == plain.stats.verified_tokens is not None

    def test_sampled_answers_are_watched_too(self, make: Make) -> None:
        engine = make()
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
        stats = ask(engine, later_least(engine, "direct")[0], params=params).stats
        assert stats.completed_at is not None and stats.completed_at > 0

    def test_the_exact_kv_enters_the_prefix_cache(self, make: Make) -> None:
        engine = make()
        least, _, _ = later_least(engine, "direct")
        stats = ask(engine, least).stats
        again = engine.generate(PROMPT, PARAMS, method="prefix").stats
        assert again.cached_prefix_tokens >= stats.prompt_tokens // 16 * 16, "whole blocks are kept"

    def test_the_shadow_check_costs_nothing_and_metrics_count(self, make: Make) -> None:
        engine = make()
        before = engine.metrics.snapshot()
        ask(engine, later_least(engine, "direct")[0])
        found = engine.metrics.snapshot()
        for name in ("completed_total", "shadow_checks_total"):
            assert found[name] - before.get(name, 0) == 1, name

    def test_without_room_the_answer_stays_as_it_is(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make()
        least, _, ids = later_least(engine, "direct")

        def full(*args: Any, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(ModelRuntime, "begin", full)
        answer = ask(engine, least)
        assert list(answer.token_ids) == ids and answer.stats.completed_at is None

    def test_a_stop_string_and_the_limit_hold(self, make: Make) -> None:
        engine = make()
        least, at, _ = later_least(engine, "direct")
        whole = ask(engine, least).text
        stop = whole[len(whole) // 2 :][:3]
        assert ask(engine, least, params=SamplingParams(max_tokens=12, stop=(stop,))).text == whole.split(stop)[0]
        assert len(ask(engine, least, params=SamplingParams(max_tokens=at + 2)).token_ids) == at + 2

    @pytest.mark.long
    @pytest.mark.parametrize("method", ["direct", "cacheclip"])
    def test_the_laboratory_foresees_it(self, make: Make, method: str) -> None:
        """From an answer without a gate: when it completes, and whether the answer is then full prefill's."""
        engine = make()
        full = ask(engine, 0.0, "full")
        engine.prefixes.clear()
        reference = Reference.of(engine, engine.prefill(PROMPT, method=preset("full")), 12)
        assert reference.ids == list(full.token_ids)
        engine.prefixes.clear()
        followed = reference.follow(engine.prefill(PROMPT, method=preset(method)))
        ids, sure = along(engine, method)
        assert followed.confidences == pytest.approx(sure, abs=1e-5)
        assert followed.differs_at == next(n for n in range(12) if ids[n] != full.token_ids[n])
        for least in sorted({each + 1e-4 for each in sure[1:] if each + 1e-4 < sure[0]}):
            answer = ask(engine, least, method)
            assert followed.later_confidence is not None
            assert (answer.stats.completed_at is not None) == (followed.later_confidence < least)
            before = followed.confidence_to_difference
            assert (answer.token_ids == full.token_ids) == (before is not None and before < least)
