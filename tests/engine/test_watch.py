"""The confidence gate after the first token: the exact KV is completed before a token of which the model is unsure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cacheclip_lab.evaluation.reference import Reference

from cacheclip_rag import Answer, CacheClipEngine, SamplingParams
from cacheclip_rag.measuring import ModelRuntime, confidence
from cacheclip_rag.methods import preset
from cacheclip_rag.models.load import load_model
from tests.conftest import CACHECLIP, CHUNKS, Make, Models, Patch, rag_prompt, raising
from tests.engine.asking import check_sums

PROMPT = rag_prompt(CHUNKS)
PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture
def make(tiny_models: Models, monkeypatch: Patch) -> Make:
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


def along(engine: CacheClipEngine, method: str, start: Sequence[int] = ()) -> tuple[list[int], list[float]]:
    """The slow reference: tokens one by one, these first and then greedy ones, and the confidence of each."""
    engine.prefixes.clear()
    prefilled: Any = engine.prefill(PROMPT, method=preset(method))
    ids, sure, logits = list[int](), [], prefilled.logits
    for step in range(12):
        ids.append(start[step] if step < len(start) else int(logits.argmax()))
        sure.append(confidence(logits))
        logits = engine.primary.decode_step(prefilled.cache, ids[-1])
    return ids, sure


def exact_after(engine: CacheClipEngine, ids: list[int]) -> list[int]:
    """These tokens, and full prefill's greedy choices after them."""
    return along(engine, "full", ids)[0]


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

    @pytest.mark.parametrize("is_sure", [True, False])
    def test_a_sure_answer_stays_as_it_is_and_so_does_one_without_room(
        self, make: Make, monkeypatch: Patch, is_sure: bool
    ) -> None:
        engine = make()
        ids, sure = along(engine, "direct")
        least = min(sure) if is_sure else later_least(engine, "direct")[0]
        never = AssertionError("the exact KV was begun") if is_sure else torch.OutOfMemoryError("no room")
        monkeypatch.setattr(ModelRuntime, "begin", raising(never))
        answer = ask(engine, least)
        assert list(answer.token_ids) == ids and answer.stats.completed_at is None
        assert answer.stats.verify_s == 0.0 or not is_sure

    def test_a_stream_is_the_answer_and_withdraws_nothing(self, make: Make) -> None:
        """A stop string and the limit hold, too."""
        engine = make()
        least, at, _ = later_least(engine, "direct")
        whole = ask(engine, least).text
        engine.prefixes.clear()
        events = list(engine.stream(PROMPT, PARAMS, method=replace(preset("direct"), min_confidence=least)))
        assert "".join(event.text for event in events) == whole
        assert all(event.revised_from is None and event.is_final for event in events)
        assert events[-1].answer is not None and events[-1].answer.stats.completed_at == at
        stop = whole[len(whole) // 2 :][:3]
        assert ask(engine, least, params=SamplingParams(max_tokens=12, stop=(stop,))).text == whole.split(stop)[0]
        assert len(ask(engine, least, params=SamplingParams(max_tokens=at + 2)).token_ids) == at + 2

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

    def test_the_exact_kv_enters_the_prefix_cache_and_metrics_count(self, make: Make) -> None:
        """The shadow check costs nothing, and is counted at the shadow rate: gates choose unsure answers."""
        engine = make(shadow_rate=1.0)
        least = later_least(engine, "direct")[0]
        assert engine.wait_for_observers(60)
        before = engine.metrics.snapshot()
        stats, after = ask(engine, least).stats, engine.metrics.snapshot()
        for name in ("completed_total", "shadow_checks_total"):
            assert after[name] - before.get(name, 0) == 1, name
        again = engine.generate(PROMPT, PARAMS, method="prefix").stats
        assert again.cached_prefix_tokens >= stats.prompt_tokens // 16 * 16, "whole blocks are kept"

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
