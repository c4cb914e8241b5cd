"""Certificates: what they cover, what engines do without, and what damage does."""

import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import cacheclip_lab.certificates.promise as promises
import cacheclip_lab.certificates.verdicts as certificates
import pytest
from cacheclip_lab.certificates.identity import Identity
from cacheclip_lab.certificates.promise import Guarantee, PromisedGate, PromiseWatch
from cacheclip_lab.certificates.verdicts import THRESHOLDS, RatioVerdict, Verdicts, find_certificate
from certificate_files import save, verdicts_for

from cacheclip_rag import (
    CacheClipEngine,
    CertificateError,
    ConfigurationError,
    EngineConfig,
    ModelError,
    SamplingParams,
)
from cacheclip_rag.methods import Recompute, preset
from cacheclip_rag.models import load_model
from cacheclip_rag.selection import AuxiliaryAttention, Budget
from tests.conftest import CACHECLIP, CHUNKS, Logs, Make, Models, Patch, rag_prompt

ONE = SamplingParams(max_tokens=1)
GATES = (PromisedGate(0.1, 0.4, 3, 0.09, 0.5), PromisedGate(0.3, 0.15, 2, 0.08, 0.6))
PROMISE = Guarantee(0.1, 0.95, 100, GATES, (900, 1200), (5, 5), (2, 32))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(certificates, "_warned", set())
    return tmp_path / "home"


@pytest.fixture
def make(tiny_models: Models) -> Make:
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}

    def build(*, stored: Sequence[str] = (), **options: Any) -> CacheClipEngine:
        engine = CacheClipEngine(**{**models, **CACHECLIP, **options})
        if stored:
            engine.precompute(stored)
        return engine

    return build


def certificate_for(engine: CacheClipEngine, **changes: Any) -> Verdicts:
    return verdicts_for(engine.parts.certificates.identity(preset("cacheclip")), **changes)


class TestFile:
    @pytest.mark.parametrize("guarantee", [None, PROMISE, replace(PROMISE, prompt_tokens=None, gates=())])
    def test_round_trip(self, make: Make, home: Path, guarantee: Guarantee | None) -> None:
        made = certificate_for(make(), **({"guarantee": guarantee} if guarantee else {}))
        path = save(made)
        assert path.parent == home / "certificates"
        assert find_certificate(made.identity) == (made, "")
        assert json.loads(path.read_text())["identity"]["method"] == "cacheclip"

    def test_damaged_is_none(self, make: Make) -> None:
        made = certificate_for(make())
        path = save(made)
        text = path.read_text()
        verdict, version = text.replace('"not faithful"', '"faithful"', 1), text.replace('"format": 5', '"format": 4')
        assert len({text, verdict, version}) == 3
        for damaged in (text[: len(text) // 2], "", "[]", verdict, version):
            path.write_text(damaged)
            found, why = find_certificate(made.identity)
            assert found is None and "damaged" in why and str(path) in why, damaged[:40]

    @pytest.mark.some(4)
    @pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
    def test_covers_nothing_else(self, make: Make, name: str) -> None:
        made = certificate_for(make())
        save(made)
        other = {**made.identity.settings, "system_prompt": "Else."} if name == "settings" else "other"
        found, why = find_certificate(replace(made.identity, **{name: other}))
        assert found is None
        name = "system prompt" if name == "settings" else name
        if name == "primary_sha256":
            assert why == "it has not been certified"
        else:
            assert why == f"its certificate is for other {name.replace('_sha256', '').replace('_', ' ')}"

    @pytest.mark.parametrize("field", ["settings", "auxiliary_heads_sha256", "auxiliary_codec", "transformers"])
    def test_one_of_an_older_version_covers_nothing(self, make: Make, field: str) -> None:
        """It does not say all that an identity says now. The warning says what it lacks."""
        made = certificate_for(make())
        path = save(made)
        content = json.loads(path.read_text())
        path.unlink()
        del content["identity"][field]
        path.with_name("older.json").write_text(json.dumps({**content, "format": 4}))
        found, why = find_certificate(made.identity)
        lacking = "prefix cache bytes, system prompt" if field == "settings" else field.replace("_", " ")
        assert found is None and why == f"its certificate is for other {lacking.replace(' sha256', '')}"

    def test_covers_what_chunks_are_computed_behind(self, make: Make, monkeypatch: Patch) -> None:
        engine, direct = make(chunk_context="passages"), preset("direct")
        before = engine.parts.certificates.identity(direct)
        same = replace(direct, chunk_context="passages")
        assert engine.parts.certificates.identity(same) == before, "however it is said"
        assert make(chunk_context="prefix").parts.certificates.identity(direct) != before
        contexts = import_module("cacheclip_rag.chunks.context")
        monkeypatch.setitem(contexts.CONTEXTS, "passages", contexts.ChunkContext(text="Another passage.\n\n"))
        assert engine.parts.certificates.identity(direct) != before

    def test_verdict_at_a_ratio(self, make: Make) -> None:
        made = certificate_for(make())
        verdicts = [made.at(ratio) for ratio in (0.0, 0.15, 0.2, 0.3, 0.5, 0.9, 1.0)]
        assert verdicts == ["not faithful", "not faithful", "faithful", "faithful", "exact", "exact", "exact"]
        noisy = replace(made, exactness={"passed": True, "checks": {"greedy": {"figure": 0.9}}})
        assert noisy.at(1.0) == "faithful"
        measured = replace(made, ratios=(*made.ratios, RatioVerdict(1.0, "faithful")))
        assert measured.at(1.0) == "faithful" and measured.at(0.9) == "exact"
        failed = replace(made, exactness={"passed": False})
        assert {failed.at(ratio) for ratio in (0.0, 0.5, 1.0)} == {"not faithful"}

    def test_other_thresholds_are_no_certificate(self, make: Make, monkeypatch: Patch) -> None:
        made = certificate_for(make())
        save(made)
        monkeypatch.setattr(certificates, "THRESHOLDS", {**THRESHOLDS, "agreement": 0.99})
        found, why = find_certificate(made.identity)
        assert found is None and "thresholds" in why


def test_thresholds_are_those_of_the_documentation() -> None:
    said = (
        "mean KL at most {first_token_kl:g} at the first token and {answer_kl:g} along the answer, {agreement:.0%} "
        "equal greedy tokens, and {needle_accuracy_of_full:.0%} of the needles"
    ).format(**THRESHOLDS)
    page = Path(__file__).parents[3] / "docs/pages/how-to/certify.md"
    assert said.replace("95%", "95 %") in page.read_text(encoding="utf-8")


class TestGate:
    def test_auto_is_what_the_certificate_promises(self, make: Make) -> None:
        """The cheapest ratio and gate; at a ratio that is given, its own; if one is chosen later, the strictest."""
        save(certificate_for(make(), guarantee=PROMISE))
        engine = make(min_confidence="auto")
        found = engine.make_method("cacheclip")
        assert (found.nominal_ratio, found.min_confidence) == (0.1, 0.4)
        given = engine.make_method("cacheclip", 0.3)
        assert (given.nominal_ratio, given.min_confidence) == (0.3, 0.15)
        assert make(min_confidence="auto", recompute_ratio=0.3).make_method("cacheclip") == given
        later = engine.parts.choose_method("cacheclip", None, any_ratio=True)
        assert (later.nominal_ratio, later.min_confidence) == (0.2, 0.4)
        assert engine.make_method("full").min_confidence == 0.0
        assert engine.make_method(preset("cacheclip")).min_confidence == 0.0, "an instance has its own"

    @pytest.mark.parametrize(
        ("verdict", "guarantee", "ratio", "expected"),
        [
            (None, None, None, (0.2, 0.1)),
            ("not faithful", None, None, (0.2, 0.1)),
            ("faithful", None, None, (0.2, 0.0)),
            ("not faithful", PROMISE, None, (0.1, 0.4)),
            ("not faithful", PROMISE, 0.3, (0.3, 0.15)),
            ("not faithful", PROMISE, 0.25, (0.25, 0.1)),
        ],
    )
    def test_the_default_method_has_the_gate_that_its_certificate_says(
        self,
        make: Make,
        monkeypatch: pytest.MonkeyPatch,
        verdict: str | None,
        guarantee: Guarantee | None,
        ratio: float | None,
        expected: Any,
    ) -> None:
        """Without a certificate that of the worst model which was measured. One that is made meanwhile is found."""
        engine = make(method="auto")
        monkeypatch.setattr(type(engine.parts.head_sets), "has_default", True)
        assert engine.make_method(None, ratio).min_confidence == 0.1
        if verdict:
            made = certificate_for(make(), guarantee=guarantee)
            save(replace(made, ratios=tuple(RatioVerdict(row.ratio, verdict) for row in made.ratios)))
        found = engine.make_method(None, ratio)
        assert (found.nominal_ratio, found.min_confidence) == expected
        assert (found.name, engine.make_method("cacheclip").min_confidence) == ("cacheclip", 0.0)
        assert make(method="auto", min_confidence=0.05).make_method(None, ratio).min_confidence == 0.05

    def test_a_promise_is_a_verdict_of_its_own(self, make: Make) -> None:
        """Engines that require a certificate take it, whatever the verdict is; a stricter gate keeps it, too."""
        engine = make(require_certificate=True)
        made = certificate_for(engine, guarantee=PROMISE)
        save(replace(made, ratios=tuple(RatioVerdict(row.ratio, "not faithful") for row in made.ratios)))
        engine.precompute(CHUNKS)
        low, may_be = preset("cacheclip").at(0.1), engine.parts.certificates.may_be
        for least, is_covered in ((0.4, True), (0.9, True), (0.35, False)):
            method = replace(low, min_confidence=least)
            assert may_be(method)(0.1) is is_covered and not may_be(method)(0.2)  # type: ignore[misc]
            if is_covered:
                assert engine.generate(rag_prompt(CHUNKS), ONE, method=method).stats.hits
        with pytest.raises(CertificateError, match="'not faithful' at recompute ratio 0.1 with min_confidence 0.35"):
            engine.generate(rag_prompt(CHUNKS), ONE, method=method)

    def test_the_verdict_is_that_of_the_gate(self, make: Make) -> None:
        """A ratio that is not faithful by itself may be with a gate, and engines that require a certificate take it."""
        engine = make(require_certificate=True)
        made = certificate_for(engine)
        save(made)
        verdicts = [made.at(0.1, least) for least in (0.0, 0.1, 0.3, 1.0)]
        assert verdicts == ["not faithful", "not faithful", "faithful", "faithful"]
        assert made.at(0.2, 1.0) == "exact" and made.at(0.5, 0.3) == "exact"
        low = preset("cacheclip").at(0.1)
        engine.precompute(CHUNKS)
        assert engine.generate(rag_prompt(CHUNKS), ONE, method=replace(low, min_confidence=0.3)).stats.hits
        with pytest.raises(CertificateError, match=r"'not faithful' at recompute ratio 0.1 with min_confidence 0.2"):
            engine.generate(rag_prompt(CHUNKS), ONE, method=replace(low, min_confidence=0.2))

    @pytest.mark.parametrize(
        ("guarantee", "why"),
        [
            (None, "promises nothing, because it was made without --max-differ"),
            (
                replace(PROMISE, gates=()),
                "its 100 prompts do not show of any gate .* at most 10% of the answers differ",
            ),
            (PROMISE, "promises nothing at recompute ratio 0.25, only at 0.1, 0.3"),
        ],
    )
    def test_auto_needs_a_promise(self, make: Make, guarantee: Guarantee | None, why: str) -> None:
        engine = make(min_confidence="auto")
        with pytest.raises(
            CertificateError, match=r"and it has not been certified. Measure it: cacheclip certify .*or"
        ):
            engine.generate("What is kept?", method="cacheclip")
        save(certificate_for(engine, guarantee=guarantee))
        with pytest.raises(CertificateError, match=rf"{why}. Measure it: .* --max-differ 0.1 .*or set a number"):
            engine.make_method("cacheclip", 0.25)
        save(certificate_for(engine, guarantee=PROMISE))
        assert engine.make_method("cacheclip").min_confidence == 0.4, "a later certificate is found"

    @pytest.mark.parametrize("value", ["most", 1.5, -0.1, True])
    def test_nothing_else_is_taken(self, value: object) -> None:
        with pytest.raises(ConfigurationError, match="min_confidence must be a probability, 0 to 1, or 'auto'"):
            EngineConfig(min_confidence=value)


@dataclass(frozen=True, slots=True)
class Mine(Recompute):
    """Somebody's own method under a name that is taken, with settings that are neither hashable nor JSON."""

    notes: Any = field(default_factory=lambda: [Path("x")])


PARTS = AuxiliaryAttention(), Budget(chunk_starts=0.5)


class TestEngine:
    def test_without_it_warns_once_in_one_line_and_tells_the_command(
        self, make: Make, chunks: list[str], caplog: Logs, tiny_models: Models
    ) -> None:
        """A line for whoever runs a demo; the whole command is in the log, one level below."""
        caplog.set_level(logging.INFO, "cacheclip_lab.certificates.verdicts")
        for engine in (make(), make()):
            engine.precompute(chunks)
            for _ in range(2):
                engine.generate(rag_prompt(chunks), ONE)
        said = [record for record in caplog.records if record.name == "cacheclip_lab.certificates.verdicts"]
        [warning] = [record.getMessage() for record in said if record.levelno == logging.WARNING]
        assert "not measured" in warning and warning.endswith("cacheclip certify") and len(warning) < 100
        information = [record.getMessage() for record in said if record.levelno == logging.INFO]
        assert "has not been certified" in information[0]
        command = f"cacheclip certify --primary {tiny_models['llama']} --auxiliary {tiny_models['auxiliary']}"
        options = "--method cacheclip --ratio 0.2 --dtype float32 --device cpu"
        assert f"{command} {options} (and --settings FILE" in information[0]

    def test_required(self, make: Make, chunks: list[str], caplog: Logs) -> None:
        engine = make(stored=chunks, require_certificate=True)
        with pytest.raises(CertificateError, match="cacheclip certify") as error:
            engine.generate(rag_prompt(chunks), ONE)
        assert isinstance(error.value, ModelError)
        engine.generate(rag_prompt(chunks), ONE, method="full")  # reuses nothing: needs none
        save(certificate_for(engine))
        engine.generate(rag_prompt(chunks), ONE)
        engine.generate(rag_prompt(chunks), ONE, recompute_ratio=1.0)
        assert "certificate" not in caplog.text, "with it is silent"

    def test_quick_is_not_enough_where_one_is_required(self, make: Make, chunks: list[str], caplog: Logs) -> None:
        engine, strict = make(stored=chunks), make(stored=chunks, require_certificate=True)
        save(certificate_for(engine, quick=True))
        engine.generate(rag_prompt(chunks), ONE)
        assert "certificate" not in caplog.text
        with pytest.raises(CertificateError, match="quick certificate"):
            strict.generate(rag_prompt(chunks), ONE)
        strict.generate(rag_prompt(chunks), ONE, recompute_ratio=0.5)  # exact there

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"recompute_ratio": 0.1}, r"says 'not faithful' at recompute ratio 0\.1"),
            ({"method": "direct"}, "method 'direct'"),
            ({"method": Mine(*PARTS, 0.5, name="cacheclip")}, r"evaluation\.certify.*method=Mine"),
        ],
        ids=["ratio", "method", "class"],
    )
    def test_of_something_else(self, make: Make, chunks: list[str], options: dict[str, Any], match: str) -> None:
        engine = make(stored=chunks, require_certificate=True)
        save(certificate_for(engine))
        with pytest.raises(CertificateError, match=match):
            engine.generate(rag_prompt(chunks), ONE, **options)

    def test_what_reuses_nothing_needs_none(self, make: Make, chunks: list[str]) -> None:
        engine = make(require_certificate=True)
        assert engine.generate("Hello there.", ONE).stats.method == "full"
        assert engine.generate(rag_prompt(chunks), ONE, documents=chunks).stats.misses == len(chunks)
        with pytest.raises(CertificateError):  # now they are stored
            engine.generate(rag_prompt(chunks), ONE)


TEN = SamplingParams(max_tokens=10)
KEPT_UNGATED = Guarantee(0.1, 0.95, 100, (PromisedGate(0.2, 0.0, 0, 0.09, 0.3),), None, None, None)


class TestPromise:
    """What comparisons say about the promise of a certificate."""

    @pytest.fixture
    def promising(self, make: Make, tiny_models: Models, monkeypatch: Patch) -> Iterator[Make]:
        """Engines that have one. Their answers do not end early."""
        monkeypatch.setattr(load_model(tiny_models["llama"]), "eos_ids", frozenset())
        engines = list[CacheClipEngine]()

        def build(**options: Any) -> CacheClipEngine:
            engine: CacheClipEngine = make(stored=CHUNKS, shadow_rate=1.0, **options)
            engines.append(engine)
            save(certificate_for(engine, guarantee=KEPT_UNGATED))
            return engine

        yield build
        for engine in engines:
            engine.close()

    @pytest.mark.some(2)
    @pytest.mark.parametrize("requires", [False, True])
    def test_a_broken_one_is_told_and_if_required_ends_reuse(
        self, promising: Make, caplog: Logs, requires: bool
    ) -> None:
        engine = promising(require_certificate=requires, prefix_cache_bytes=0)
        texts, warned = [], []
        for _ in range(7):
            answer = engine.generate(rag_prompt(CHUNKS), TEN, method="cacheclip")
            assert engine.wait_for_observers(30)
            texts.append(answer.text)
            warned.append(caplog.text.count("than its certificate promises (at most 10 %)"))
        values = engine.metrics.snapshot()
        # 1.5, 2 and 4 times the promised rate: (1.5 ** 5 + 2 ** 5 + 4 ** 5) / 3 is the first above 100
        assert warned == [0, 0, 0, 0, 1, 1, 1] and values["promise_broken_total"] == 1
        checked = 5 if requires else 7
        assert (values["promise_checks_total"], values["promise_differing_total"]) == (checked, checked)
        full = engine.generate(rag_prompt(CHUNKS), TEN, method="full").text
        assert texts == [*[texts[0]] * 5, *[full if requires else texts[0]] * 2] and full != texts[0]
        why = "comparisons with full prefill contradict the promise of the certificate"
        assert (answer.stats.bypassed, answer.stats.fallback) == ((True, why) if requires else (False, None))
        # another gate has no promise that could be broken
        other = replace(preset("cacheclip").at(1.0))
        assert engine.generate(rag_prompt(CHUNKS), TEN, method=other).stats.fallback is None

    @pytest.mark.parametrize("least", [0.0, 1.0])
    def test_answers_below_the_gate_count_as_equal(self, promising: Make, least: float) -> None:
        engine = promising()
        for temperature in (0.0, 1.0):  # of a sampled answer nothing is known
            params = SamplingParams(max_tokens=10, temperature=temperature, seed=0)
            engine.prefixes.clear()
            engine.generate(rag_prompt(CHUNKS), params, method=replace(preset("cacheclip"), min_confidence=least))
        assert engine.wait_for_observers(30)
        values = engine.metrics.snapshot()
        assert values["promise_checks_total"] == 1 and values["promise_differing_total"] == (least == 0.0)
        assert values["gated_total"] == 2 * least and values.get("shadow_checks_total", 0) == 2 * (least == 0.0)

    @pytest.mark.parametrize("agreement", [0.9, 1.0, None])
    def test_one_token_makes_answer_differ(self, promising: Make, monkeypatch: Patch, agreement: float | None) -> None:
        monkeypatch.setattr("cacheclip_rag.guards.shadow.ShadowChecker._compare", lambda *_: (0.0, agreement))
        engine = promising()
        engine.generate(rag_prompt(CHUNKS), TEN)
        assert engine.wait_for_observers(30)
        values = engine.metrics.snapshot()
        assert values.get("promise_checks_total", 0) == (agreement is not None)
        assert values.get("promise_differing_total", 0) == (agreement == 0.9)

    @pytest.mark.long
    @pytest.mark.parametrize("most", [0.02, 0.3])
    def test_false_alarms_are_few_and_true_ones_come(self, most: float, monkeypatch: Patch) -> None:
        """However long one looks; and a wrong limit is seen."""
        draw, guarantee, method = random.Random(5), replace(KEPT_UNGATED, most=most), preset("cacheclip")

        def alarms(rate: float, streams: int, answers: int = 200) -> float:
            broken = 0
            for _ in range(streams):
                watch = PromiseWatch()
                watch.begin(method, guarantee)
                for _ in range(answers):
                    watch.record(method, draw.random() < rate)
                broken += watch.is_broken(method)
            return broken / streams

        assert alarms(most, 100) <= 0.02
        assert alarms(2.5 * most, 20, round(60 / most)) == 1.0
        monkeypatch.setattr(promises, "FALSE_ALARM", 0.5)
        assert alarms(most, 100) > 0.1
