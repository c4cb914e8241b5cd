"""The controller: ratios chosen by measured lines. No model is needed."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.comparators import FixedStarts
from cacheclip_lab.timing.controller import Controller, Cost, Profile, ReadTime, TimedPrediction, Work, find_profile
from cacheclip_testing import FakeRuntime, ThrottledBackend

from cacheclip_rag import CacheClipEngine, ConfigurationError, FusionStats, Plan
from cacheclip_rag.measuring import PHASES, known_kv
from cacheclip_rag.methods import Recompute
from cacheclip_rag.models import register_runtime
from cacheclip_rag.selection import ChunkStart
from cacheclip_rag.store import Backend, Catalog, ChunkStore, DiskBackend, MemoryBackend, Tiers, disk

SLOW = ThrottledBackend.name
IDENTITY = {"primary": "a", "threads": 2}
PROFILE = Profile(IDENTITY, Cost(0.1, 1e-3, 1e-7), Cost(0.1, 1.2e-3, 2e-7), Cost(0.1, 5e-5, 0.01))
FIXED = Recompute(ChunkStart(), FixedStarts())
LONG = " ".join(f"The keeper of lamp {n} lived on the rock for {n} weeks." for n in range(40))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def engine() -> CacheClipEngine:
    register_runtime("fake", FakeRuntime)
    engine = CacheClipEngine(primary="fake:timed", auxiliary=None, method="epic")
    engine.precompute(texts(4))
    return engine


@pytest.fixture
def plan(engine: CacheClipEngine) -> Plan:
    return plan_of(engine)


def texts(count: int) -> list[str]:
    return [f"Chapter {n}. {LONG}" for n in range(count)]


PROMPT = "\n\n".join(texts(4)) + "\n\nWho kept lamp 3?"


@lru_cache(maxsize=4)
def plan_of(engine: CacheClipEngine, ratio: float = 0.1) -> Plan:
    return engine.plan(PROMPT, recompute_ratio=ratio)


def stats_of(engine: CacheClipEngine, before_s: float, recompute_s: float, **changes: Any) -> FusionStats:
    phases = {**dict.fromkeys(PHASES, 0.0), "select": before_s, "recompute": recompute_s}
    return replace(fused(engine), **{"phases_s": phases, **changes})


@lru_cache(maxsize=1)
def fused(engine: CacheClipEngine) -> FusionStats:
    return replace(engine.generate("Hello", max_tokens=1).stats, chunk_tokens=plan_of(engine).chunk_tokens)


class TestWork:
    def test_rows_and_pairs(self) -> None:
        work = Work(tokens=1000, known=0, exact=100, stale=800, chunks=4)
        assert work.plain() == (1000, 500_000)
        assert work.fused(0.0) == (100, 100_000) and work.fused(1.0) == (900, 900_000)
        assert replace(work, known=600).plain() == (400, 400 * 800)

    def test_of_a_plan(self, plan: Plan) -> None:
        work = Work.of(plan, 0)
        assert (work.tokens, work.chunks) == (plan.layout.num_tokens, 4)
        assert work.stale == plan.chunk_tokens and work.exact == plan.layout.num_prefix
        rows, _ = work.fused(0.0)
        assert rows == plan.layout.num_tokens - plan.layout.num_prefix - plan.chunk_tokens

    @pytest.mark.parametrize("number", range(4))
    def test_a_known_start_that_ends_inside_a_chunk(self, plan: Plan, number: int) -> None:
        """A fused prefill takes the whole chunk from the store; plain prefill computes the rest of it."""
        span = plan.reused[number]
        before = Work.of(plan, span.start)
        assert before.stale == plan.chunk_tokens - sum(len(each.tokens) for each in plan.reused[:number])
        for known in (span.start + 1, span.start + 18, span.stop - 1):
            assert Work.of(plan, known) == replace(before, known=known)
        after = Work.of(plan, span.stop)
        assert (after.stale, after.exact) == (before.stale - len(span.tokens), span.stop)

    def test_an_exact_chunk_of_which_the_start_is_known(self, plan: Plan) -> None:
        """It follows the shared prefix it was computed with."""
        layout, first = plan.layout, plan.reused[0]
        assert first.start == layout.num_prefix and not plan.exact
        layout = replace(layout, exact_from=first.start)
        plan = replace(plan, layout=layout, known=known_kv(layout, plan.reused))
        assert plan.exact == (first,)
        for known in (0, 18, first.stop):
            work = Work.of(plan, known)
            assert (work.exact, work.stale) == (first.stop, plan.chunk_tokens - len(first.tokens))


LINE = '{"constant": %s, "first": 0.1, "second": 0.1}'
LINES = f'"identity": {{}}, "plain": {LINE}, "fused": {LINE % 1}, "before": {LINE % 1}'


class TestProfile:
    def test_saved_and_found(self) -> None:
        assert find_profile(IDENTITY) is None
        PROFILE.save()
        assert find_profile(IDENTITY) == PROFILE
        slow = replace(PROFILE, media={"disk at /": Cost(0.1, 1e-3, 1e-8)})
        slow.save()
        assert find_profile(IDENTITY) == slow
        assert find_profile({**IDENTITY, "threads": 8}) is None

    @pytest.mark.parametrize(
        "content",
        ["", "[]", '{"format": 2}', '{"format": 2, "identity": {}, "plain": 3}', "{" + LINES % 1 + "}"]
        + ['{"format": 2, "media": {}, ' + LINES % number + "}" for number in ("NaN", "-1", "Infinity")]
        + [
            f'{{"format": 2, "media": {media}, {LINES % 1}}}'
            for media in ("[]", '{"slow": 3}', f'{{"slow": {LINE % "NaN"}}}', f'{{"slow": {LINE % "-1"}}}')
        ],
    )
    def test_damaged(self, content: str, caplog: pytest.LogCaptureFixture) -> None:
        PROFILE.save().write_text(content)
        assert find_profile(IDENTITY) is None
        assert "cannot be read" in caplog.text and "cacheclip profile" in caplog.text

    def test_a_folder_that_cannot_be_written(self, home: Path) -> None:
        home.write_text("a file")
        with pytest.raises(ConfigurationError, match="CACHECLIP_HOME"):
            PROFILE.save()

    @pytest.mark.parametrize("version", [1, 99])
    def test_of_another_format(self, version: int, caplog: pytest.LogCaptureFixture) -> None:
        """It is not used, and the user is told why and what to do."""
        path = PROFILE.save()
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
        assert find_profile(IDENTITY) is None
        assert f"format {version}" in caplog.text and "cacheclip profile" in caplog.text


class TestDecide:
    def test_the_least_ratio_without_a_limit(self, engine: CacheClipEngine) -> None:
        plan = Controller(PROFILE).decide(plan_of(engine, ratio=0.15), 0)
        assert plan.bypass is None and plan.method.nominal_ratio == 0.15 and plan.prediction is not None
        work = Work.of(plan, 0)
        assert plan.prediction.seconds == pytest.approx(sum(PROFILE.fused_s(work, 0.15)))
        assert plan.prediction.plain_s == pytest.approx(PROFILE.plain_s(work))

    def test_a_limit_gets_the_largest_ratio_that_keeps_to_it(self, plan: Plan) -> None:
        """Or plain prefill, if it is soon enough."""
        work, controller = Work.of(plan, 0), Controller(PROFILE)
        plain_s = PROFILE.plain_s(work)
        for share in (0.3, 0.5, 0.7, 0.85, 0.99):
            decided = controller.decide(plan, 0, share * plain_s)
            fits = [n / 20 for n in range(21) if sum(PROFILE.fused_s(work, n / 20)) <= share * plain_s and n >= 2]
            assert decided.bypass is None and decided.method.nominal_ratio == pytest.approx(max(fits))
        assert controller.decide(plan, 0, plain_s * 1.01).bypass is not None

    def test_plain_prefill_where_reuse_saves_little(self, plan: Plan) -> None:
        decided = Controller(replace(PROFILE, before=Cost(5.0, 0.0, 0.0))).decide(plan, 0)
        assert decided.bypass is not None and "plain prefill is predicted" in decided.bypass
        assert decided.reused, "the plan still says what is stored"

    def test_reuse_where_the_prefix_cache_has_the_start_of_a_chunk(self, engine: CacheClipEngine) -> None:
        plan = engine.plan(f"{texts(1)[0]}\n\nWho kept lamp 3?", recompute_ratio=0.1)
        (chunk,) = plan.reused
        assert len(chunk.tokens) > 0.9 * plan.layout.num_tokens
        decided = Controller(replace(PROFILE, before=Cost(0.0, 0.0, 0.0))).decide(plan, chunk.start + 18)
        assert decided.bypass is None and decided.prediction is not None
        assert decided.prediction.seconds < 0.5 * decided.prediction.plain_s

    def test_only_ratios_that_may_be_chosen(self, plan: Plan) -> None:
        """A certificate may call a larger ratio less faithful than a smaller one."""
        certified = Controller(PROFILE, lambda ratio: 0.15 <= ratio < 0.3 or ratio >= 0.8)
        assert certified.decide(plan, 0).method.nominal_ratio == 0.15
        plain_s = PROFILE.plain_s(Work.of(plan, 0))
        assert certified.decide(plan, 0, 0.7 * plain_s).method.nominal_ratio == 0.25
        nothing = Controller(PROFILE, lambda ratio: False).decide(plan, 0)
        assert nothing.bypass is not None, "only 1.0 is left, and plain prefill is sooner"

    def test_a_method_without_a_ratio(self, engine: CacheClipEngine) -> None:
        engine.precompute(texts(4), method="direct")
        plan = engine.plan(PROMPT, method="direct")
        decided = Controller(PROFILE).decide(plan, 0, 0.2)
        assert decided.bypass is None and decided.method == plan.method


class TestObserve:
    def observed(self, plan: Plan, engine: CacheClipEngine, times: float, reading: float, count: int = 20) -> Plan:
        """What is decided after answers that took so many times as long as predicted."""
        controller = Controller(PROFILE)
        for _ in range(count):
            decided = controller.decide(plan, 0)
            before, compute = PROFILE.fused_s(Work.of(plan, 0), 0.1)
            if decided.bypass is not None:
                before, compute = 0.0, PROFILE.plain_s(Work.of(plan, 0))
            controller.observe(decided, stats_of(engine, reading * before, times * compute))
        return controller.decide(plan, 0)

    def test_a_busy_machine_is_predicted(self, engine: CacheClipEngine, plan: Plan) -> None:
        """One slow answer changes little."""
        quiet = Controller(PROFILE).decide(plan, 0).prediction
        busy, once = (self.observed(plan, engine, *each).prediction for each in [(2.0, 2.0), (3.0, 3.0, 1)])
        assert quiet is not None and busy is not None and once is not None
        assert busy.seconds == pytest.approx(2 * quiet.seconds, rel=0.02)
        assert busy.plain_s == pytest.approx(2 * quiet.plain_s, rel=0.02)
        assert once.seconds < 1.4 * quiet.seconds

    @pytest.mark.parametrize("large", [0.7, 1.4])
    @pytest.mark.parametrize("load", [1.0, 2.0])
    def test_sizes_are_learned_apart(
        self, engine: CacheClipEngine, plan: Plan, monkeypatch: pytest.MonkeyPatch, large: float, load: float
    ) -> None:
        """The line is wrong for large prompts. Prompts of other sizes are predicted as well as they were, and other
        load counts for sizes that were not asked yet."""
        controller = Controller(PROFILE)
        plan = controller.decide(plan, 0)
        sizes = [Work(tokens, stale=tokens - 40, chunks=tokens // 250) for tokens in (1_000, 4_000, 16_000)]
        times = {work: PROFILE.fused_s(work, 0.1) for work in sizes}
        times = {work: (s, c * load * (large if work.tokens > 4_000 else 1.0)) for work, (s, c) in times.items()}
        for work in sizes * 20:
            monkeypatch.setattr(Work, "of", lambda *_, work=work: work)
            controller.observe(plan, stats_of(engine, *times[work]))
        for work in sizes:
            assert controller._fused_s(work, 0.1) == pytest.approx(sum(times[work]), rel=0.03)
        assert 0.9 * load**0.6 < controller._computing(Work(400)) < 1.1 * load

    def test_a_slow_store_leads_to_plain_prefill(self, engine: CacheClipEngine, plan: Plan) -> None:
        assert self.observed(plan, engine, 1.0, 1.0).bypass is None
        assert self.observed(plan, engine, 1.0, 15.0).bypass is not None

    def test_reading_beside_the_recompute(self, engine: CacheClipEngine, plan: Plan) -> None:
        """The longer of both counts, so that smaller ratios are not sooner, and larger ones cost nothing."""
        controller, work = Controller(PROFILE), Work.of(plan, 0)
        left = PROFILE.fused_s(work, 0.5)[1]
        for _ in range(60):
            decided = controller.decide(plan, 0)
            before, compute = PROFILE.fused_s(work, decided.method.nominal_ratio)
            waited = max(0.0, left - compute)
            controller.observe(decided, stats_of(engine, before + waited, compute, left_to_read_s=left))
        seconds = before + left
        assert [controller._fused_s(work, ratio) for ratio in (0.0, 0.2, 0.5)] == pytest.approx([seconds] * 3, rel=0.01)
        assert controller._fused_s(work, 1.0) > seconds
        chosen = controller.decide(plan, 0, max_ttft_s=1.01 * seconds)
        assert chosen.bypass is None and chosen.method.nominal_ratio >= 0.5
        free = controller.decide(plan, 0).method.nominal_ratio  # without a limit: as much as costs no time
        own = Controller(PROFILE).decide(plan, 0).method.nominal_ratio
        assert own < free < 1.0 and controller._fused_s(work, free) == controller._fused_s(work, own)

    def test_ratio_0_is_learned_apart(self, engine: CacheClipEngine, plan: Plan) -> None:
        """Nothing is scored there, so that it says nothing about what comes before a recompute at other ratios."""
        unscored = Controller(PROFILE, lambda ratio: True)
        before, compute = PROFILE.fused_s(Work.of(plan, 0), 0.0)
        for _ in range(20):
            unscored.observe(unscored.decide(plan, 0), stats_of(engine, 0.3 * before, compute))
        prediction = unscored.decide(plan, 0).prediction
        assert prediction is not None and prediction.seconds == pytest.approx(0.3 * before + compute, rel=0.01)
        unscored._may_be = None
        assert unscored.decide(plan, 0) == Controller(PROFILE).decide(plan, 0)

    def test_reuse_is_tried_again(self, engine: CacheClipEngine, plan: Plan) -> None:
        """Plain prefills say nothing about a store that was slow, so its slowness is forgotten."""
        controller, bypassed = Controller(PROFILE), 0
        before, compute = PROFILE.fused_s(Work.of(plan, 0), 0.1)
        plain = stats_of(engine, 0.0, PROFILE.plain_s(Work.of(plan, 0)), bypassed=True)
        for _ in range(200):
            decided = controller.decide(plan, 0)
            if bypassed and decided.bypass is None:
                return
            bypassed += decided.bypass is not None
            controller.observe(decided, plain if decided.bypass else stats_of(engine, 15.0 * before, compute))
        pytest.fail(f"a slow store was never tried again, after {bypassed} plain prefills")

    def test_an_answer_without_its_chunks_counts_for_nothing(self, engine: CacheClipEngine, plan: Plan) -> None:
        """They could not be read, and the prompt was computed in full."""
        controller = Controller(PROFILE)
        decided = controller.decide(plan, 0)
        controller.observe(decided, stats_of(engine, 0.0, 50.0, chunk_tokens=0))
        assert controller.decide(plan, 0) == decided


class Tiered:
    """An engine whose chunks are in a slow tier. Reading a byte from it takes ``second_per_byte``, by its profile."""

    def __init__(
        self, folder: Path, second_per_byte: float, *near: Backend, in_parts: bool = True, chunks: Sequence[str] = ()
    ) -> None:
        register_runtime("fake", FakeRuntime)
        self.disk = DiskBackend(folder)
        store = ChunkStore(Catalog(folder), Tiers([*near, ThrottledBackend(self.disk, in_parts=in_parts)]))
        settings: Any = {"primary": "fake:timed", "auxiliary": None, "method": "epic", "recompute_ratio": "auto"}
        self.engine = CacheClipEngine(**settings, store=store)
        chunks = chunks or texts(4)
        self.engine.precompute(chunks)
        self.prompt = "\n\n".join(chunks) + "\n\nWho kept lamp 3?"
        store.tiers.drop_copies(self.disk.list())
        self.use(SLOW, Cost(0.0, 0.0, second_per_byte))

    def use(self, medium: str, line: Cost) -> None:
        profile = replace(PROFILE, media={medium: line})
        self.engine.parts.controllers.use_profile(self.engine.make_method(None, "auto"), profile)

    @property
    def num_bytes(self) -> int:
        """Of the prompt's chunks, in whole blocks."""
        return sum(map(self.disk.occupied, self.engine.plan(self.prompt, recompute_ratio=0.2).keys))

    def plan(self) -> Plan:
        return self.engine.plan(self.prompt)

    def read(self, chunks: Sequence[str]) -> None:
        """So that faster tiers have them."""
        assert None not in [self.engine.chunk_caches()[0].read(chunk) for chunk in chunks]

    def first(self) -> tuple[Plan, TimedPrediction, FusionStats]:
        """What is decided first, and done."""
        plan = self.plan()
        assert plan.prediction is not None
        return plan, plan.prediction, self.engine.generate(self.prompt, max_tokens=1).stats


def seconds_per_byte(folder: Path, share: float) -> float:
    """So that reading the prompt's chunks takes ``share`` of what plain prefill of it takes."""
    tiered = Tiered(folder / "measured", 0.0)
    return share * PROFILE.plain_s(Work.of(tiered.plan(), 0)) / tiered.num_bytes


class TestReading:
    """Slow tiers count from the first decision on."""

    def test_chunks_are_computed_in_full_where_reading_is_slower_than_the_recompute(self, tmp_path: Path) -> None:
        """The first ones, which no statistic calls missing, and which are not stored again."""
        tiered = Tiered(tmp_path, seconds_per_byte(tmp_path, 0.7))
        plan, prediction, stats = tiered.first()
        assert [span.whole for span in (*plan.in_full, *plan.reused)] == texts(4) and len(plan.in_full) == 1
        assert plan.missing_texts == () and len(plan.keys) == 3
        assert (stats.hits, stats.misses, stats.missed_tokens) == (4, 0, 0) and not stats.bypassed
        assert stats.chunk_tokens == plan.chunk_tokens < 0.8 * (plan.layout.num_tokens - 100)
        assert prediction.seconds < 0.7 * prediction.plain_s, "as long as reading all takes"

    @pytest.mark.some(3)
    @pytest.mark.parametrize(("gigabits", "kind"), [(0.1, "plain"), (0.6, "some"), (1.0, ""), (10.0, "all")])
    @pytest.mark.parametrize("count", [4, 20])
    def test_nothing_else_is_a_tenth_sooner(self, tmp_path: Path, gigabits: float, kind: str, count: int) -> None:
        """Than what is chosen: no ratio, no set of chunks that are computed in full, no plain prefill. A token's KV has
        100 kB, and computing it takes a millisecond."""
        latency_s = 0.05 if count == 4 else 0.001
        tiered = Tiered(tmp_path, 0.0, chunks=[text[: len(text) * 4 // count] for text in texts(count)])
        plan = tiered.engine.plan(tiered.prompt, recompute_ratio=0.2)
        second_per_byte = 8 / (gigabits * 1e9) * 1e5 * plan.chunk_tokens / tiered.num_bytes
        tiered.use(SLOW, Cost(latency_s, latency_s / 16, second_per_byte))
        chosen = tiered.plan()
        assert chosen.prediction is not None
        every = itertools.product(*[(False, True)] * count)
        sets = every if count < 5 else ([n < k for n in range(count)] for k in range(count))
        seconds = [PROFILE.plain_s(Work.of(plan, 0))]
        for is_computed in sets:
            computed = [len(span.tokens) for span, one in zip(plan.reused, is_computed, strict=True) if one]
            left = [tiered.disk.occupied(key) for key, one in zip(plan.keys, is_computed, strict=True) if not one]
            if not left:
                continue
            read_s = latency_s * (1 + len(left) / 16) + second_per_byte * sum(left)
            in_full = sum(computed)
            before_s = PROFILE.before.seconds(plan.chunk_tokens - in_full, len(left))
            for ratio in (0.2, 0.25, 0.5, 1.0):
                rows = plan.layout.num_tokens - 4 - (plan.chunk_tokens - in_full) * (1 - ratio)
                compute_s = PROFILE.fused.seconds(rows, rows * plan.layout.num_tokens)
                seconds.append(max(before_s + compute_s, read_s))
        assert min(seconds) >= 0.9 * chosen.prediction.seconds
        assert kind in ("", "plain" if chosen.bypass is not None else "some" if chosen.in_full else "all")

    def test_whole_payloads_are_read_before_the_recompute(self, tmp_path: Path) -> None:
        """So that a larger ratio is not free."""
        second_per_byte = seconds_per_byte(tmp_path, 0.4)
        plan, prediction, _ = Tiered(tmp_path / "whole", second_per_byte, in_parts=False).first()
        before, compute = PROFILE.fused_s(Work.of(plan, 0), 0.2)
        assert prediction.seconds == pytest.approx(max(before, 0.4 * prediction.plain_s) + compute)
        assert plan.method.nominal_ratio == 0.2

    def test_what_is_in_memory_is_not_read(self, tmp_path: Path) -> None:
        tiered = Tiered(tmp_path, seconds_per_byte(tmp_path, 3.0), MemoryBackend())
        assert tiered.plan().bypass is not None
        tiered.read(texts(4)[:3])
        prediction = tiered.plan().prediction
        assert [span.whole for span in tiered.plan().in_full] == texts(4)[3:], "the others are there"
        assert prediction is not None and prediction.reading.medium == ""
        tiered.read(texts(4))
        plan, prediction, stats = tiered.first()
        assert plan.bypass is None and not stats.bypassed and prediction.reading.medium == ""

    def test_what_the_prefix_cache_has_is_not_read(self, tmp_path: Path) -> None:
        tiered = Tiered(tmp_path, 1.0)
        plan = tiered.engine.plan(PROMPT, recompute_ratio=0.2)
        kv_sources = tiered.engine.parts.kv_sources(plan.method)
        profile = replace(PROFILE, media={SLOW: Cost(0.0, 1.0, 0.0)})
        known = [0, plan.reused[0].stop - 1, plan.reused[0].stop, plan.reused[2].stop]
        assert [profile.reading(plan, kv_sources, each).primary_s for each in known] == [4, 4, 3, 1]

    def test_files_in_the_page_cache_change_no_prediction(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other lines were measured with such files."""
        shares, number = dict.fromkeys(range(4), 1.0), itertools.count()
        monkeypatch.setattr(disk, "_cached_share", lambda file, size: shares[next(number) % 4])
        engine = CacheClipEngine(primary="fake:timed", auxiliary=None, method="epic", store=str(tmp_path))
        engine.precompute(texts(4))
        medium = f"disk at {DiskBackend(tmp_path)._mount}"

        def predicted(**media: Cost) -> TimedPrediction | None:
            engine.parts.controllers.use_profile(engine.make_method(None, "auto"), replace(PROFILE, media=media))
            return engine.plan(PROMPT, recompute_ratio="auto").prediction

        media = {"page cache": Cost(0.0, 0.0, 1e-9), medium: Cost(0.0, 1.0, 0.0)}
        assert predicted(**media) == predicted() is not None
        shares[2] = 0.3
        prediction = predicted(**media)
        assert prediction is not None and prediction.reading.medium == medium
        assert prediction.reading.seconds == pytest.approx(1.0, rel=0.01)

    def test_a_tier_that_was_not_measured_is_learned(self, tmp_path: Path) -> None:
        tiered = Tiered(tmp_path, 1.0)
        tiered.use("another", Cost(0.0, 0.0, 1.0))
        plan, prediction, _ = tiered.first()
        assert plan.bypass is None and prediction.reading.medium == ""

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        ("beside", "auxiliary_s", "primary_s", "expected"),
        [
            ("recompute", 0.1, 0.1, 3.0),  # all is hidden
            ("recompute", 1.5, 0.1, 3.5),  # scoring waits for the auxiliary's KV
            ("recompute", 0.5, 4.0, 4.5),  # the primary's KV is read last
            ("recompute", 1.5, 4.0, 5.5),
            ("scoring", 0.5, 0.5, 3.5),
            ("scoring", 0.5, 4.0, 6.5),
            ("", 0.5, 4.0, 7.5),
        ],
    )
    def test_what_is_read_beside_what(
        self, plan: Plan, beside: str, auxiliary_s: float, primary_s: float, expected: float
    ) -> None:
        """One second before the recompute, two of it."""
        profile = replace(PROFILE, before=Cost(1.0, 0.0, 0.0), fused=Cost(2.0, 0.0, 0.0), plain=Cost(100.0, 0.0, 0.0))
        reading = ReadTime(SLOW, auxiliary_s, primary_s, beside)
        found = Controller(profile).decide(plan, 0, None, reading).prediction
        assert found is not None and found.seconds == pytest.approx(expected) and found.reading == reading

    def test_at_ratio_0_the_auxiliarys_is_not_read(self, engine: CacheClipEngine, plan: Plan) -> None:
        controller, reading = Controller(PROFILE, lambda ratio: True), ReadTime(SLOW, 1e6, 0.0, "recompute")
        decided = controller.decide(plan, 0, None, reading)
        assert decided.bypass is None and decided.prediction is not None
        assert decided.prediction.seconds == pytest.approx(sum(PROFILE.fused_s(Work.of(plan, 0), 0.0)))
        assert decided.prediction.reading.seconds == 0.0
        fixed = engine.plan(PROMPT, method=FIXED)
        assert not fixed.method.has_ratio and fixed.method.nominal_ratio == 0.0
        assert controller.decide(fixed, 0, None, reading).bypass is not None

    @pytest.mark.parametrize("times", [0.1, 4.0])
    def test_the_speed_is_learned_for_its_medium_alone(self, engine: CacheClipEngine, plan: Plan, times: float) -> None:
        controller = Controller(PROFILE)
        before, compute = PROFILE.fused_s(Work.of(plan, 0), 0.1)
        reading = ReadTime(SLOW, 0.0, 1.2 * (before + compute), "recompute")
        other = replace(reading, medium="another")
        first = controller.decide(plan, 0, None, other)
        assert first.bypass is None and first.prediction is not None
        decided = replace(plan, prediction=replace(first.prediction, reading=reading))
        left = max(0.0, times * reading.seconds - before)
        stats = stats_of(engine, before, compute, reading_s=times * reading.seconds, left_to_read_s=left)
        for _ in range(20):
            controller.observe(decided, stats)
        assert controller._reading[SLOW] == pytest.approx(times, rel=0.02)
        assert (controller.decide(plan, 0, None, reading).bypass is not None) == (times > 1)
        assert controller.decide(plan, 0, None, other) == first

    def test_plain_prefill_brings_back_the_measured_speed(self, engine: CacheClipEngine, plan: Plan) -> None:
        controller, reading = Controller(PROFILE), ReadTime(SLOW, 0.0, 1e6, "recompute")
        controller._reading[SLOW] = 8.0
        decided = controller.decide(plan, 0, None, reading)
        stats = stats_of(engine, 0.0, PROFILE.plain_s(Work.of(plan, 0)), bypassed=True)
        for _ in range(200):
            controller.observe(decided, stats)
        assert controller._reading[SLOW] == pytest.approx(1.0, rel=0.01)
        again = controller.decide(plan, 0, None, reading)
        assert again.bypass is not None, "what was measured to be slow is not tried again"


class TestEngine:
    def make(self, *, with_profile: bool = True, **options: Any) -> CacheClipEngine:
        register_runtime("fake", FakeRuntime)
        engine = CacheClipEngine(**{"primary": "fake:timed", "auxiliary": None, "method": "epic", **options})
        engine.precompute(texts(4))
        if with_profile:
            engine.parts.controllers.use_profile(engine.make_method(None, "auto"), PROFILE)
        return engine

    def test_without_a_profile_it_is_the_methods_ratio(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = self.make(with_profile=False, recompute_ratio="auto")
        stats = [engine.generate(PROMPT, max_tokens=1).stats for _ in range(2)]
        assert [each.nominal_ratio for each in stats] == [0.2, 0.2] and stats[0].predicted_ttft_s is None
        warned = [each for each in caplog.records if each.levelno == logging.WARNING and "profile" in each.message]
        assert len(warned) == 1 and "cacheclip profile" in warned[0].message

    def test_bypassed(self) -> None:
        engine = self.make(max_ttft_s=1000.0)
        full = engine.generate(PROMPT, max_tokens=8, method="full")
        answer = engine.generate(PROMPT, max_tokens=8)
        stats = answer.stats
        assert answer.token_ids == full.token_ids
        assert stats.bypassed and stats.method in ("full", "prefix") and (stats.hits, stats.misses) == (4, 0)
        assert stats.fallback is not None and "1000.00 s are allowed" in stats.fallback
        assert stats.recomputed_tokens == 0 and stats.chunk_tokens == 0
        text = engine.metrics.to_prometheus()
        assert "bypassed_total 1" in text and "fallbacks_total 0" in text

    def test_a_missing_chunk_is_stored_although_bypassed(self) -> None:
        engine = self.make(max_ttft_s=1000.0)
        other = "The harbour of Oxmoor freezes in January, and the ferry then lands at the northern pier instead. " * 2
        prompt = f"{PROMPT}\n\n{other}\n\nWho?"
        plan = engine.plan(prompt, documents=[other])
        assert plan.bypass is not None and plan.budget_tokens == 0
        assert not any(piece["reused"] for piece in plan.to_dict()["pieces"])
        stats = engine.generate(prompt, max_tokens=1, documents=[other]).stats
        assert (stats.hits, stats.misses) == (4, 1) and stats.bypassed and engine.is_stored(other)

    def test_a_call_takes_the_place_of_the_settings(self) -> None:
        engine = self.make(max_ttft_s=1000.0)
        stats = engine.generate(PROMPT, max_tokens=1, recompute_ratio=0.4).stats
        assert (stats.nominal_ratio, stats.predicted_ttft_s, stats.bypassed) == (0.4, None, False)
        engine = self.make(recompute_ratio=0.4)
        assert engine.generate(PROMPT, max_tokens=1, max_ttft_s=1e-6).stats.nominal_ratio == 0.4, "the least"
        assert engine.generate(PROMPT, max_tokens=1, recompute_ratio="auto").stats.nominal_ratio == 0.2
        assert engine.generate(PROMPT, max_tokens=1).stats.predicted_ttft_s is None

    def test_with_a_profile_an_instance_has_its_own_ratio(self) -> None:
        engine = self.make(recompute_ratio="auto")
        plan = engine.plan(PROMPT)
        assert plan.prediction is not None and plan.to_dict()["predicted_ttft_s"] == plan.prediction.seconds
        stats = engine.generate(PROMPT, max_tokens=1).stats
        assert stats.hits == 4 and not stats.bypassed and stats.nominal_ratio == 0.2
        assert stats.predicted_ttft_s is not None
        method = engine.make_method("epic", 0.7)
        for ratio in (0.7, 0.05):
            stats = engine.generate(PROMPT, max_tokens=1, method=method.at(ratio)).stats
            assert (stats.nominal_ratio, stats.predicted_ttft_s) == (ratio, None)
            stats = engine.generate(PROMPT, max_tokens=1, method=method.at(ratio), max_ttft_s=1e-6).stats
            assert stats.nominal_ratio == ratio and stats.predicted_ttft_s is not None
