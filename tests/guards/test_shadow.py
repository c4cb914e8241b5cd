"""Comparing answers with full prefill in production, and the metrics that come of it."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_stats import stats

from cacheclip_rag import CacheClipEngine, ConfigurationError, SamplingParams
from cacheclip_rag.guards import Metrics
from cacheclip_rag.guards.shadow import ShadowChecker
from cacheclip_rag.measuring import greedy, read_along
from cacheclip_rag.methods import preset
from cacheclip_rag.models.load import load_model
from cacheclip_rag.store import TierStats
from tests.conftest import CACHECLIP, CHUNKS, Logs, Make, Models, Patch, rag_prompt, raising

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
    models, engines = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}, list[CacheClipEngine]()

    def build(**options: Any) -> CacheClipEngine:
        engines.append(engine := CacheClipEngine(**{**models, **CACHECLIP, **options}))
        engine.precompute(CHUNKS)
        return engine

    yield build
    for engine in engines:
        engine.close()


def asked(engine: CacheClipEngine, *prompts: str, params: SamplingParams = PARAMS, **options: Any) -> dict[str, Any]:
    """Metrics after these prompts were answered and compared; the usual one by default."""
    for prompt in prompts or (rag_prompt(CHUNKS),):
        engine.generate(prompt, params, **options)
    assert engine.wait_for_observers(30)
    return engine.metrics.snapshot()


def check(values: dict[str, Any], kl: float, agreement: float) -> None:
    """One comparison, with the figures of a slow one."""
    assert values["shadow_checks_total"] == 1 and values.get("shadow_skipped_total", 0) == 0
    assert values["shadow_first_token_kl_sum"] == pytest.approx(kl, abs=1e-4, rel=1e-3)
    assert values["shadow_first_token_kl_max"] == values["shadow_first_token_kl_sum"]
    assert values["shadow_agreement_sum"] == pytest.approx(agreement)


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
        check(values, kl, agreement)
        assert (agreement == 1.0 and kl < 1e-6) if ratio == 1.0 else kl > 1e-3

    def test_never_changes_the_answer(self, make: Make) -> None:
        texts = {make(shadow_rate=rate).generate(rag_prompt(CHUNKS), PARAMS).token_ids for rate in (0.0, 1.0)}
        assert len(texts) == 1

    def test_is_in_the_log(self, make: Make, caplog: Logs, monkeypatch: Patch) -> None:
        caplog.set_level(logging.INFO)
        engine = make(shadow_rate=1.0)
        asked(engine)
        [record] = [r for r in caplog.records if r.getMessage().startswith("shadow:")]
        assert "nats" in record.getMessage() and "of 10 tokens agree" in record.getMessage()
        monkeypatch.setattr("cacheclip_rag.guards.shadow._ALARM_KL", 0.0)
        asked(engine)
        assert caplog.records[-1].levelno == logging.WARNING

    def test_share(self, make: Make) -> None:
        """About a third of the answers, and none at rate 0, nor plain ones."""
        engine, one = make(shadow_rate=0.3, method="direct"), SamplingParams(max_tokens=1)
        for _ in range(31):
            asked(engine, params=one)
        assert 1 <= engine.metrics.snapshot().get("shadow_checks_total", 0) <= 22
        assert "shadow_checks_total" not in asked(make(shadow_rate=0.0))
        plain = make(shadow_rate=1.0)
        asked(plain, method="full")
        assert "shadow_checks_total" not in asked(plain, "No chunk here at all.")

    def test_a_failing_comparison_leaves_the_answer(self, make: Make, monkeypatch: Patch, caplog: Logs) -> None:
        engine = make(shadow_rate=1.0)
        monkeypatch.setattr(ShadowChecker, "_compare", raising(RuntimeError("out of memory")))
        assert len(engine.generate(rag_prompt(CHUNKS), PARAMS).token_ids) == 10
        assert engine.wait_for_observers(10)
        assert engine.metrics.snapshot()["shadow_skipped_total"] == 1 and "out of memory" in caplog.text

    def test_a_full_queue_skips_and_close_ends_the_thread(self, make: Make, monkeypatch: Patch) -> None:
        engine, gate, one = make(shadow_rate=1.0, method="direct"), threading.Event(), SamplingParams(max_tokens=1)
        monkeypatch.setattr(ShadowChecker, "_compare", lambda *_: gate.wait(30) and (0.0, 1.0))
        for _ in range(12):
            engine.generate(rag_prompt(CHUNKS), one)
        assert not engine.wait_for_observers(0.05)
        assert engine.metrics.snapshot()["shadow_skipped_total"] >= 3
        threading.Timer(0.2, gate.set).start()
        engine.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("cacheclip-shadow")]
        values = engine.metrics.snapshot()
        assert values["shadow_skipped_total"] + values["shadow_checks_total"] == 12
        assert asked(engine, params=one)["shadow_checks_total"] == values["shadow_checks_total"] + 1, "it goes on"

    @pytest.mark.parametrize("options", NOT_GREEDY)
    def test_sampled_answers_have_no_agreement(self, make: Make, options: dict[str, Any]) -> None:
        """Even an exact answer's tokens are often not the likeliest: that says nothing. Nor do a completed one's."""
        engine, params = make(shadow_rate=1.0, recompute_ratio=1.0), SamplingParams(max_tokens=10, **options)
        values = asked(engine, params=params)
        assert values["shadow_checks_total"] == 1 and values["shadow_first_token_kl_sum"] < 1e-6
        assert "shadow_agreement_sum" not in values and "shadow_greedy_checks_total" not in values
        values = asked(engine)
        assert values["shadow_greedy_checks_total"] == values["shadow_agreement_sum"] == 1
        values = asked(make(finish="verify", recompute_ratio=0.72), params=params)
        assert values["shadow_checks_total"] == 1 and values["shadow_first_token_kl_sum"] < 0.1
        assert "shadow_agreement_sum" not in values

    @pytest.mark.some(3)
    @pytest.mark.parametrize("rate", [0.0, 1.0])
    @pytest.mark.parametrize(("method", "ratio"), [("direct", 0.0), ("cacheclip", 0.3), ("cacheclip", 0.72)])
    def test_verified_answers_are_compared_without_a_prefill(
        self, make: Make, monkeypatch: Patch, method: str, ratio: float, rate: float
    ) -> None:
        """At any rate, once, and with the figures of a slow comparison."""
        engine = make(shadow_rate=rate, finish="verify")
        asked(engine, "Weights are loaded, and the shared prefix is stored.")
        ratios = {"recompute_ratio": ratio} if method == "cacheclip" else {}
        refuse = raising(AssertionError("a prefill"))
        with monkeypatch.context() as patch:
            for owner, name in ((type(engine.primary), "prefill"), (type(engine.primary), "prefill_from")):
                patch.setattr(owner, name, refuse)
            patch.setattr(ShadowChecker, "_compare", refuse)
            answer = engine.generate(rag_prompt(CHUNKS), PARAMS, method=method, **ratios)
            assert engine.wait_for_observers(30)
        values = engine.metrics.snapshot()
        engine.prefixes.clear()
        kl, agreement = by_hand(engine, answer.token_ids, method, ratio)
        check(values, kl, agreement)
        assert values["shadow_greedy_checks_total"] == 1 and (agreement < 1.0 or ratio == 1.0)

    def test_a_revised_answer_counts_as_it_was_given(self, make: Make) -> None:
        """Its exact tokens say nothing about the method."""
        engines = (make(finish=finish, method="direct") for finish in ("verify", "revise"))
        verified, revised = (asked(engine)["shadow_agreement_sum"] for engine in engines)
        assert revised == verified < 1.0

    @pytest.mark.parametrize(
        "options",
        [{"shadow_rate": 1.5}, {"shadow_rate": -0.1}, {"shadow_rate": "all"}, {"shadow_rate": True}]
        + [{"require_certificate": "yes"}, {"auxiliary_device": 3}],
    )
    def test_senseless_settings(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            CacheClipEngine(**options)


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
        assert Metrics().to_prometheus() == ""
        engine = make(shadow_rate=1.0)
        asked(engine)
        lines = engine.metrics.to_prometheus().splitlines()
        assert 'cacheclip_answers_total{method="cacheclip"} 1' in lines
        assert "cacheclip_shadow_checks_total 1" in lines
        assert "# TYPE cacheclip_shadow_first_token_kl_max gauge" in lines
        named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
        assert all(line.startswith("#") or line.split("{")[0].split()[0] in named for line in lines)

    def test_from_many_threads(self) -> None:
        metrics = Metrics()
        with ThreadPoolExecutor(4) as pool:
            [*pool.map(lambda _: [metrics.record_shadow(0.5, 1.0) for _ in range(500)], range(4))]
        values = metrics.snapshot()
        assert (values["shadow_checks_total"], values["shadow_first_token_kl_sum"]) == (2000, 1000.0)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_reading_along_equals_decoding(make: Make, count: int) -> None:
    engine = make()
    one, two = (engine.prefill(rag_prompt(CHUNKS), method=preset("direct")) for _ in range(2))
    ids, logits = greedy(engine.primary, one.cache, one.logits, count)
    along = read_along(engine.primary, two.cache, two.logits, ids)
    assert along.shape == logits.shape and float((along - logits).abs().max()) < 1e-4
