"""Comparing answers with full prefill in production, and the metrics that come of it."""

import logging
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from certificate_files import save
from fake_stats import stats

from cacheclip_rag import CacheClipEngine, ConfigurationError, SamplingParams
from cacheclip_rag.guards import Guarantee, Metrics, PromisedGate, promise
from cacheclip_rag.guards.promise import PromiseWatch
from cacheclip_rag.guards.shadow import ShadowChecker
from cacheclip_rag.measuring import greedy, read_along
from cacheclip_rag.methods import preset
from cacheclip_rag.models.load import load_model
from cacheclip_rag.store import TierStats
from tests.conftest import CACHECLIP, CHUNKS, Logs, Make, Models, Patch, rag_prompt
from tests.guards.test_certificate import certificate_for

PARAMS = SamplingParams(max_tokens=10)
NOT_GREEDY: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"frequency_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 1.5},
]


@pytest.fixture(autouse=True)
def endless(tiny_models: Models, monkeypatch: Patch) -> None:
    monkeypatch.setattr(load_model(tiny_models["llama"]), "eos_ids", frozenset())


@pytest.fixture
def make(tiny_models: Models) -> Iterator[Make]:
    engines = []

    def build(**options: Any) -> CacheClipEngine:
        engine = CacheClipEngine(
            **{"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"], **CACHECLIP, **options}
        )
        engine.precompute(CHUNKS)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def by_hand(engine: CacheClipEngine, answer_ids: tuple[int, ...], method: str, ratio: float) -> tuple[float, float]:
    """First-token KL and agreement the slow way: full prefill, and one forward per token of the answer."""
    runtime: Any = engine.primary
    ours = engine.prefill(rag_prompt(CHUNKS), method=engine.make_method(method, ratio)).logits
    full: Any = engine.prefill(rag_prompt(CHUNKS), method=preset("full"))
    p, q = full.logits.double().softmax(-1), ours.double().softmax(-1)
    kl = float((p * (p.log() - q.log())).sum())
    same, logits = 0, full.logits
    for token in answer_ids:
        same += int(logits.argmax()) == token
        logits = runtime.decode_step(full.cache, token)
    return kl, same / len(answer_ids)


class TestShadow:
    @pytest.mark.parametrize(("method", "ratio"), [("direct", 0.0), ("cacheclip", 0.3), ("cacheclip", 1.0)])
    def test_records_what_a_slow_comparison_finds(self, make: Make, method: str, ratio: float) -> None:
        engine = make(shadow_rate=1.0)
        ratios = {"recompute_ratio": ratio} if method == "cacheclip" else {}
        answer = engine.generate(rag_prompt(CHUNKS), PARAMS, method=method, **ratios)
        assert engine.wait_for_observers(30)
        values = engine.metrics.snapshot()
        kl, agreement = by_hand(engine, answer.token_ids, method, ratio)
        assert values["shadow_checks_total"] == 1
        assert values["shadow_first_token_kl_sum"] == pytest.approx(kl, abs=1e-4, rel=1e-3)
        assert values["shadow_first_token_kl_max"] == values["shadow_first_token_kl_sum"]
        assert values["shadow_agreement_sum"] == pytest.approx(agreement)
        if ratio == 1.0:
            assert agreement == 1.0 and kl < 1e-6
        else:
            assert kl > 1e-3

    def test_never_changes_the_answer(self, make: Make) -> None:
        texts = {make(shadow_rate=rate).generate(rag_prompt(CHUNKS), PARAMS).token_ids for rate in (0.0, 1.0)}
        assert len(texts) == 1

    def test_is_in_the_log(self, make: Make, caplog: Logs, monkeypatch: Patch) -> None:
        caplog.set_level(logging.INFO)
        engine = make(shadow_rate=1.0)
        engine.generate(rag_prompt(CHUNKS), PARAMS)
        assert engine.wait_for_observers(30)
        [record] = [r for r in caplog.records if r.getMessage().startswith("shadow:")]
        assert "nats" in record.getMessage() and "of 10 tokens agree" in record.getMessage()
        monkeypatch.setattr("cacheclip_rag.guards.shadow._ALARM_KL", 0.0)
        engine.generate(rag_prompt(CHUNKS), PARAMS)
        assert engine.wait_for_observers(30)
        assert caplog.records[-1].levelno == logging.WARNING

    def test_share(self, make: Make) -> None:
        """About a third of the answers, and none at rate 0."""
        engine = make(shadow_rate=0.3, method="direct")
        engine.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=1))
        for _ in range(30):
            engine.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=1))
            assert engine.wait_for_observers(30)
        assert 1 <= engine.metrics.snapshot().get("shadow_checks_total", 0) <= 22
        never = make(shadow_rate=0.0)
        never.generate(rag_prompt(CHUNKS), PARAMS)
        assert "shadow_checks_total" not in never.metrics.snapshot()

    def test_plain_answers_are_not_compared(self, make: Make) -> None:
        engine = make(shadow_rate=1.0)
        engine.generate(rag_prompt(CHUNKS), PARAMS, method="full")
        engine.generate("No chunk here at all.", PARAMS)
        assert engine.wait_for_observers(30)
        assert "shadow_checks_total" not in engine.metrics.snapshot()

    def test_a_failing_comparison_leaves_the_answer(
        self,
        make: Make,
        monkeypatch: Patch,
        caplog: Logs,
    ) -> None:
        engine = make(shadow_rate=1.0)

        def fail(*args: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(ShadowChecker, "_compare", fail)
        assert len(engine.generate(rag_prompt(CHUNKS), PARAMS).token_ids) == 10
        assert engine.wait_for_observers(10)
        assert engine.metrics.snapshot()["shadow_skipped_total"] == 1
        assert "out of memory" in caplog.text

    def test_a_full_queue_skips_and_close_ends_the_thread(self, make: Make, monkeypatch: Patch) -> None:
        engine = make(shadow_rate=1.0, method="direct")
        gate = threading.Event()

        def held(*args: object) -> tuple[float, float]:
            gate.wait(30)
            return 0.0, 1.0

        monkeypatch.setattr(ShadowChecker, "_compare", held)
        for _ in range(12):
            engine.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=1))
        assert not engine.wait_for_observers(0.05)
        assert engine.metrics.snapshot()["shadow_skipped_total"] >= 3
        threading.Timer(0.2, gate.set).start()
        engine.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("cacheclip-shadow")]
        values = engine.metrics.snapshot()
        assert values["shadow_skipped_total"] + values["shadow_checks_total"] == 12
        engine.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=1))  # and it goes on after close
        assert engine.wait_for_observers(10)
        assert engine.metrics.snapshot()["shadow_checks_total"] == values["shadow_checks_total"] + 1

    @pytest.mark.some(3)
    @pytest.mark.parametrize("options", NOT_GREEDY)
    def test_sampled_answers_have_no_agreement(self, make: Make, options: dict[str, Any]) -> None:
        """Even an exact answer's tokens are often not the likeliest: that says nothing."""
        engine = make(shadow_rate=1.0, recompute_ratio=1.0)
        engine.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=10, **options))
        assert engine.wait_for_observers(30)
        values = engine.metrics.snapshot()
        assert values["shadow_checks_total"] == 1 and values["shadow_first_token_kl_sum"] < 1e-6
        assert "shadow_agreement_sum" not in values and "shadow_greedy_checks_total" not in values
        engine.generate(rag_prompt(CHUNKS), PARAMS)
        assert engine.wait_for_observers(30)
        values = engine.metrics.snapshot()
        assert values["shadow_greedy_checks_total"] == values["shadow_agreement_sum"] == 1

    @pytest.mark.some(3)
    @pytest.mark.parametrize("rate", [0.0, 1.0])
    @pytest.mark.parametrize(("method", "ratio"), [("direct", 0.0), ("cacheclip", 0.3), ("cacheclip", 0.72)])
    def test_verified_answers_are_compared_without_a_prefill(
        self,
        make: Make,
        monkeypatch: Patch,
        method: str,
        ratio: float,
        rate: float,
    ) -> None:
        """At any rate, once, and with the figures of a slow comparison."""
        engine = make(shadow_rate=rate, finish="verify")
        engine.generate("Weights are loaded, and the shared prefix is stored.", PARAMS)
        assert engine.wait_for_observers(30)

        def refuse(*args: object, **options: object) -> None:
            raise AssertionError("a prefill for the comparison")

        ratios = {"recompute_ratio": ratio} if method == "cacheclip" else {}
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.primary), "prefill", refuse)
            patch.setattr(type(engine.primary), "prefill_from", refuse)
            patch.setattr(ShadowChecker, "_compare", refuse)
            answer = engine.generate(rag_prompt(CHUNKS), PARAMS, method=method, **ratios)
            assert engine.wait_for_observers(30)
        values = engine.metrics.snapshot()
        engine.prefixes.clear()
        kl, agreement = by_hand(engine, answer.token_ids, method, ratio)
        assert values["shadow_checks_total"] == values["shadow_greedy_checks_total"] == 1
        assert values.get("shadow_skipped_total", 0) == 0
        assert values["shadow_first_token_kl_sum"] == pytest.approx(kl, abs=1e-4, rel=1e-3)
        assert values["shadow_agreement_sum"] == pytest.approx(agreement)
        assert agreement < 1.0 or ratio == 1.0

    def test_a_revised_answer_counts_as_it_was_given(self, make: Make) -> None:
        """Its exact tokens say nothing about the method."""
        verified, revised = (make(finish=finish, method="direct") for finish in ("verify", "revise"))
        for engine in (verified, revised):
            engine.generate(rag_prompt(CHUNKS), PARAMS)
        expected, found = (engine.metrics.snapshot()["shadow_agreement_sum"] for engine in (verified, revised))
        assert found == expected < 1.0

    @pytest.mark.parametrize("options", NOT_GREEDY)
    def test_a_sampled_answer_that_was_completed_has_no_agreement(self, make: Make, options: dict[str, Any]) -> None:
        engine = make(finish="verify", recompute_ratio=0.72)
        engine.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=10, **options))
        values = engine.metrics.snapshot()
        assert values["shadow_checks_total"] == 1 and values["shadow_first_token_kl_sum"] < 0.1
        assert "shadow_agreement_sum" not in values

    @pytest.mark.parametrize(
        "options",
        [{"shadow_rate": 1.5}, {"shadow_rate": -0.1}, {"shadow_rate": "all"}, {"shadow_rate": True}]
        + [{"require_certificate": "yes"}, {"auxiliary_device": 3}],
    )
    def test_senseless_settings(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            CacheClipEngine(**options)


class TestPromise:
    """What comparisons say about the promise of a certificate."""

    @pytest.mark.some(2)
    @pytest.mark.parametrize("requires", [False, True])
    def test_a_broken_one_is_told_and_if_required_ends_reuse(
        self,
        make: Make,
        monkeypatch: Patch,
        tmp_path: Path,
        caplog: Logs,
        requires: bool,
    ) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        engine = make(shadow_rate=1.0, require_certificate=requires, prefix_cache_bytes=0)
        gates = (PromisedGate(0.2, 0.0, 0, 0.09, 0.3),)
        save(certificate_for(engine, guarantee=Guarantee(0.1, 0.95, 100, gates, None, None, None)))
        texts, warned = [], []
        for _ in range(7):
            answer = engine.generate(rag_prompt(CHUNKS), PARAMS, method="cacheclip")
            assert engine.wait_for_observers(30)
            texts.append(answer.text)
            warned.append(caplog.text.count("than its certificate promises (at most 10 %)"))
        values = engine.metrics.snapshot()
        # 1.5, 2 and 4 times the promised rate: (1.5 ** 5 + 2 ** 5 + 4 ** 5) / 3 is the first above 100
        assert warned == [0, 0, 0, 0, 1, 1, 1] and values["promise_broken_total"] == 1
        checked = 5 if requires else 7
        assert (values["promise_checks_total"], values["promise_differing_total"]) == (checked, checked)
        full = engine.generate(rag_prompt(CHUNKS), PARAMS, method="full").text
        assert texts == [*[texts[0]] * 5, *[full if requires else texts[0]] * 2] and full != texts[0]
        why = "comparisons with full prefill contradict the promise of the certificate"
        assert (answer.stats.bypassed, answer.stats.fallback) == ((True, why) if requires else (False, None))
        # another gate has no promise that could be broken
        other = replace(preset("cacheclip").at(1.0))
        assert engine.generate(rag_prompt(CHUNKS), PARAMS, method=other).stats.fallback is None

    @pytest.mark.parametrize("least", [0.0, 1.0])
    def test_answers_below_the_gate_count_as_equal(
        self, make: Make, monkeypatch: Patch, tmp_path: Path, least: float
    ) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        engine = make(shadow_rate=1.0)
        gates = (PromisedGate(0.2, 0.0, 0, 0.09, 0.3),)
        save(certificate_for(engine, guarantee=Guarantee(0.1, 0.95, 100, gates, None, None, None)))
        for temperature in (0.0, 1.0):  # of a sampled answer nothing is known
            params = SamplingParams(max_tokens=10, temperature=temperature, seed=0)
            engine.prefixes.clear()
            engine.generate(rag_prompt(CHUNKS), params, method=replace(preset("cacheclip"), min_confidence=least))
        assert engine.wait_for_observers(30)
        values = engine.metrics.snapshot()
        assert values["promise_checks_total"] == 1 and values["promise_differing_total"] == (least == 0.0)
        assert values["gated_total"] == 2 * least and values.get("shadow_checks_total", 0) == 2 * (least == 0.0)

    @pytest.mark.parametrize("agreement", [0.9, 1.0, None])
    def test_one_token_makes_an_answer_differ(
        self,
        make: Make,
        monkeypatch: Patch,
        tmp_path: Path,
        agreement: float | None,
    ) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        monkeypatch.setattr(ShadowChecker, "_compare", lambda *_: (0.0, agreement))
        engine = make(shadow_rate=1.0)
        gates = (PromisedGate(0.2, 0.0, 0, 0.09, 0.3),)
        save(certificate_for(engine, guarantee=Guarantee(0.1, 0.95, 100, gates, None, None, None)))
        engine.generate(rag_prompt(CHUNKS), PARAMS, method="cacheclip")
        assert engine.wait_for_observers(30)
        values = engine.metrics.snapshot()
        assert values.get("promise_checks_total", 0) == (agreement is not None)
        assert values.get("promise_differing_total", 0) == (agreement == 0.9)

    @pytest.mark.long
    @pytest.mark.parametrize("most", [0.02, 0.3])
    def test_false_alarms_are_few_and_true_ones_come(self, most: float, monkeypatch: Patch) -> None:
        """However long one looks; and a wrong limit is seen."""
        draw, gates = random.Random(5), (PromisedGate(0.2, 0.0, 0, 0.09, 0.3),)
        guarantee, method = Guarantee(most, 0.95, 100, gates, None, None, None), preset("cacheclip")

        def alarms(rate: float, streams: int, answers: int = 200) -> float:
            broken = 0
            for _ in range(streams):
                watch = PromiseWatch(Metrics())
                watch.begin(method, guarantee)
                for _ in range(answers):
                    watch.record(method, draw.random() < rate)
                broken += watch.is_broken(method)
            return broken / streams

        assert alarms(most, 100) <= 0.02
        assert alarms(2.5 * most, 20, round(60 / most)) == 1.0
        monkeypatch.setattr(promise, "FALSE_ALARM", 0.5)
        assert alarms(most, 100) > 0.1


class TestMetrics:
    def test_every_number(self) -> None:
        """Sums by hand, of answers that differ in each figure; then of two engines that share a store."""
        tiers = [TierStats("memory", 1, 2, 3, 4, 5, 0.5), TierStats("disk", 10, 20, 30, 40, 12_345_678_901, 1 / 3)]
        one, two = Metrics(lambda: tiers), Metrics(lambda: tiers)
        one.record_answer(stats("epic", cached_prefix_tokens=40))
        one.record_answer(stats("full", fallback="no chunk", hits=0, misses=5, ttft_s=1.5))
        one.record_answer(stats("full", fallback="unsure", gated=True, hits=11))
        one.record_answer(stats("full", fallback="soon enough", bypassed=True, hits=0, misses=0))
        one.record_answer(stats("epic", completed_at=0, prompt_tokens=2_345_678))
        for kl, agreement in ((0.5, 0.25), (0.75, None), (0.125, 1.0)):
            one.record_shadow(kl, agreement)
        two.record_shadow(None, 0.5, first_agrees=False)
        two.record_shadow(None, 1.0, first_agrees=True)
        two.record_shadow(2.0, None)
        two.record_shadow_skipped()
        two.record_answer(stats("epic", hits=100))
        expected = {
            'answers_total{method="epic"}': 3,
            'answers_total{method="full"}': 3,
            "fallbacks_total": 1,
            "bypassed_total": 1,
            "gated_total": 1,
            "completed_total": 1,
            "chunk_hits_total": 3 + 0 + 11 + 0 + 3 + 100,
            "chunk_misses_total": 2 + 5 + 2 + 0 + 2 + 2,
            'prompt_tokens_total{source="store"}': 6 * 750 - 40,
            'prompt_tokens_total{source="prefix_cache"}': 40,
            'prompt_tokens_total{source="moved"}': 0,
            'prompt_tokens_total{source="computed"}': 5 * 250 + 2_345_678 - 750,
            "ttft_seconds_sum": 2.75,
            "shadow_checks_total": 6,
            "shadow_greedy_checks_total": 4,
            "shadow_agreement_sum": 2.75,
            "shadow_other_first_token_total": 1,
            "shadow_first_token_kl_sum": 3.375,
            "shadow_first_token_kl_max": 2.0,
            "shadow_skipped_total": 1,
        }
        names = ("hits_total", "misses_total", "damaged_total", "evictions_total", "bytes", "read_seconds_total")
        for tier in tiers:
            for name, value in zip(names, list(tier.to_dict().values())[1:], strict=True):
                expected[f'store_{name}{{tier="{tier.name}"}}'] = value  # type: ignore[assignment]
        together = Metrics.together([one, two])
        assert together.snapshot() == expected
        assert Metrics.together([two, one]).snapshot() == expected
        assert one.snapshot()["shadow_first_token_kl_max"] == 0.75
        lines = [line for line in together.to_prometheus().splitlines() if not line.startswith("#")]
        told = {
            name.removeprefix("cacheclip_"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)
        }
        assert told == expected, "with all digits"

    def test_counts_add_up(self, make: Make) -> None:
        engine = make()
        first = engine.generate(rag_prompt(CHUNKS), PARAMS).stats
        second = engine.generate("Nothing stored in here.", PARAMS).stats
        values = engine.metrics.snapshot()
        assert values['answers_total{method="cacheclip"}'] == values[f'answers_total{{method="{second.method}"}}'] == 1
        assert values["fallbacks_total"] == 1 and values["chunk_hits_total"] == len(CHUNKS)
        assert values['prompt_tokens_total{source="store"}'] == first.reused_tokens
        total = sum(value for name, value in values.items() if name.startswith("prompt_tokens_total"))
        assert values['prompt_tokens_total{source="prefix_cache"}'] == second.cached_prefix_tokens
        assert total == first.prompt_tokens + second.prompt_tokens
        assert values["ttft_seconds_sum"] == pytest.approx(first.ttft_s + second.ttft_s)

    def test_prometheus_text(self, make: Make) -> None:
        metrics = Metrics()
        assert metrics.to_prometheus() == ""
        engine = make(shadow_rate=1.0)
        engine.generate(rag_prompt(CHUNKS), PARAMS)
        assert engine.wait_for_observers(30)
        lines = engine.metrics.to_prometheus().splitlines()
        assert 'cacheclip_answers_total{method="cacheclip"} 1' in lines
        assert "cacheclip_shadow_checks_total 1" in lines
        assert "# TYPE cacheclip_shadow_first_token_kl_max gauge" in lines
        named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
        assert all(line.startswith("#") or line.split("{")[0].split()[0] in named for line in lines)

    def test_from_many_threads(self) -> None:
        metrics = Metrics()
        threads = [
            threading.Thread(target=lambda: [metrics.record_shadow(0.5, 1.0) for _ in range(500)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert metrics.snapshot()["shadow_checks_total"] == 2000
        assert metrics.snapshot()["shadow_first_token_kl_sum"] == 1000.0


class TestFidelity:
    @pytest.mark.parametrize("count", [1, 2, 9])
    def test_reading_along_equals_decoding(self, make: Make, count: int) -> None:
        engine = make()
        runtime: Any = engine.primary
        one: Any = engine.prefill(rag_prompt(CHUNKS), method=preset("direct"))
        two: Any = engine.prefill(rag_prompt(CHUNKS), method=preset("direct"))
        ids, logits = greedy(runtime, one.cache, one.logits, count)
        along = read_along(runtime, two.cache, two.logits, ids)
        assert along.shape == logits.shape and float((along - logits).abs().max()) < 1e-4
