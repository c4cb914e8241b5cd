"""Distances to full prefill, recomputed number by number: of rows written by hand, along a model's answer, in a
certificate, and in a certificate of vLLM's answers."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cacheclip_lab.evaluation.certify as certifying
import pytest
import torch
from cacheclip_lab.commands.certify import _checks
from cacheclip_lab.evaluation import answering, exactness, served
from cacheclip_lab.evaluation.certify import PromptOutcome, figures_of
from cacheclip_lab.evaluation.fidelity import Fidelity, compare
from cacheclip_lab.evaluation.gating import CONFIDENCES, gated
from cacheclip_lab.evaluation.prompts import EvaluationPrompt
from cacheclip_lab.evaluation.questions import QuestionPrompt, ask
from cacheclip_lab.evaluation.records import Record, RecordChunk
from cacheclip_lab.evaluation.reference import Reference, ReferenceComparison
from cacheclip_lab.evaluation.results import ItemResult
from cacheclip_testing.plugin import CHUNKS, QUESTION, rag_prompt
from fake_stats import stats

from cacheclip_rag import CacheClipEngine, ConfigurationError
from cacheclip_rag.measuring import kl_divergence
from cacheclip_rag.methods import preset

INF = float("inf")
REFERENCE = [[3.0, 1.0, 0.0, -2.0], [0.0, 2.0, 1.5, 1.0], [1.0, 1.1, -3.0, 0.0], [0.0, -1.0, 4.0, 3.5]]
OTHER = [[1.0, 0.5, 1.5, -9.0], [0.1, 4.0, 1.0, 1.0], [6.0, 0.0, 1.0, 2.0], [0.0, -1.0, 3.0, 2.5]]
"""Rows that prefer other tokens, and are not as far from one another in both directions."""


def slow_kl(reference: list[float], other: list[float]) -> float:
    """Term by term."""

    def logs(row: list[float]) -> list[float]:
        total = math.log(sum(math.exp(value) for value in row))
        return [value - total for value in row]

    return sum(math.exp(p) * (p - q) for p, q in zip(logs(reference), logs(other), strict=True))


def slow(reference: list[list[float]], other: list[list[float]]) -> Fidelity:
    kls = [slow_kl(*pair) for pair in zip(reference, other, strict=True)]
    same = [a.index(max(a)) == b.index(max(b)) for a, b in zip(reference, other, strict=True)]
    return Fidelity(kls[0], statistics.fmean(kls), statistics.fmean(same), same[0])


def check(found: Fidelity, expected: Fidelity) -> None:
    assert found.first_token_kl == pytest.approx(expected.first_token_kl, rel=1e-3, abs=1e-5)
    assert found.answer_kl == pytest.approx(expected.answer_kl, rel=1e-3, abs=1e-5)
    assert (found.agreement, found.first_agrees) == (expected.agreement, expected.first_agrees)


class TestRows:
    @pytest.mark.parametrize(("left", "right"), [(REFERENCE, OTHER), (OTHER, REFERENCE)])
    def test_compare(self, left: list[list[float]], right: list[list[float]]) -> None:
        expected = slow(left, right)
        check(compare(torch.tensor(left), torch.tensor(right)), expected)
        assert abs(expected.first_token_kl - slow(right, left).first_token_kl) > 0.1, "the direction matters"
        assert abs(expected.answer_kl - slow(right, left).answer_kl) > 0.1

    def test_kl_of_tokens_ruled_out(self) -> None:
        p, everywhere = torch.tensor([0.0, 1.0, -INF]), torch.tensor([0.0, 1.0, -1.0])
        expected = math.log(1 + math.e + 1 / math.e) - math.log(1 + math.e)
        assert float(kl_divergence(p, everywhere)) == pytest.approx(expected) and float(kl_divergence(p, p)) == 0.0
        assert float(kl_divergence(everywhere, p)) == float(kl_divergence(p, torch.tensor([0.0, -INF, 1.0]))) == INF


def slow_rows(runtime: Any, prefilled: Any, ids: list[int]) -> list[list[float]]:
    """Logits at each token of an answer, by a forward pass a token."""
    rows = [prefilled.logits]
    for token in ids[:-1]:
        rows.append(runtime.decode_step(prefilled.cache, token))
    return torch.stack(rows).double().tolist()


def slow_answer(runtime: Any, prefilled: Any, count: int) -> tuple[list[int], list[list[float]]]:
    ids, rows = [int(prefilled.logits.argmax())], [prefilled.logits]
    while len(ids) < count and ids[-1] not in runtime.eos_ids:
        rows.append(runtime.decode_step(prefilled.cache, ids[-1]))
        ids.append(int(rows[-1].argmax()))
    return ids, torch.stack(rows).double().tolist()


@pytest.mark.some(2)
@pytest.mark.parametrize("method", ["direct", "cacheclip"])
def test_follow(engine: CacheClipEngine, method: str) -> None:
    engine.precompute(CHUNKS)
    runtime: Any = engine.primary

    def prefilled(name: str) -> Any:
        engine.prefixes.clear()
        return engine.prefill(rag_prompt(CHUNKS), method=preset(name))

    reference = Reference.of(engine, prefilled("full"), 8)
    ids, rows = slow_answer(runtime, prefilled("full"), 8)
    found = reference.follow(prefilled(method))
    own, own_rows = slow_answer(runtime, prefilled(method), 8)
    along = slow_rows(runtime, prefilled(method), ids)
    assert reference.ids == ids and own != ids and len(ids) > 3
    check(found.fidelity, slow(rows, along))
    assert abs(found.fidelity.answer_kl - slow(along, rows).answer_kl) > 0.01, "the direction matters"
    assert found.answer == runtime.decode_ids(own)
    assert found.differs_at == next(n for n in range(len(ids)) if own[n] != ids[n])
    sure = [sorted(torch.tensor(row).softmax(-1).tolist())[-2:] for row in own_rows]
    assert found.confidences == pytest.approx([first - second for second, first in sure], abs=1e-4)


def outcome(kl: float = 0.0, along: float = 0.0, agreement: float = 1.0, **given: Any) -> PromptOutcome:
    """Of a prompt without a needle, at an effective ratio of 0.2 with costs of 0.3."""
    fidelity = Fidelity(kl, along, agreement, given.pop("first", True))
    return replace(PromptOutcome(fidelity, 0.2, 0.3, None, 0.5), **given)


PASSED = {"passed": True, "noise_floor": {"kl": 1e-6}}
NEEDLES = [outcome(finds_needle=number < 19) for number in range(20)]


class TestVerdict:
    def test_figures_are_means_over_prompts(self) -> None:
        """Numbers of which no two figures are alike."""
        given = [
            outcome(0.1, 0.02, 0.9, effective_ratio=0.1, charged_ratio=0.5, finds_needle=True),
            outcome(0.2, 0.08, 0.7, effective_ratio=0.2, charged_ratio=0.6, finds_needle=None),
            outcome(0.6, 0.11, 0.2, effective_ratio=0.6, charged_ratio=1.0, finds_needle=False),
            outcome(0.3, 0.01, 0.6, effective_ratio=0.1, charged_ratio=0.5, finds_needle=False),
        ]
        found = figures_of(0.25, given, 1.0, PASSED)
        assert (found.ratio, found.verdict) == (0.25, "not faithful")
        assert found.first_token_kl == pytest.approx({"mean": 0.3, "median": 0.25, "max": 0.6})
        assert found.answer_kl == pytest.approx({"mean": 0.055, "median": 0.05, "max": 0.11})
        assert (found.agreement, found.effective_ratio) == pytest.approx((0.6, 0.25))
        assert (found.charged_ratio, found.needle_accuracy) == pytest.approx((0.65, 1 / 3))

    @pytest.mark.parametrize(
        ("given", "verdict"),
        [
            ([outcome(), outcome(9.0, 1e-4)], "exact"),  # the first token is one of the answer's
            ([outcome(), outcome(0.0, 1.01e-4)], "faithful"),
            ([outcome(0.2, 0.1), outcome(0.0, 0.0)], "faithful"),  # the means are the limits
            ([outcome(0.21, 0.1), outcome(0.0, 0.0)], "not faithful"),
            ([outcome(0.2, 0.101), outcome(0.0, 0.0)], "not faithful"),
            ([outcome(agreement=0.9), outcome()], "faithful"),
            ([outcome(agreement=0.899), outcome()], "not faithful"),
        ],
    )
    def test_limits(self, given: list[PromptOutcome], verdict: str) -> None:
        given = [replace(each, finds_needle=True) for each in given]
        assert figures_of(0.1, given, 1.0, PASSED).verdict == verdict
        assert figures_of(0.1, given, 1.0, {**PASSED, "passed": False}).verdict == "not faithful"

    def test_noise_makes_the_limit_of_exact(self) -> None:
        given = [outcome(along=0.004, finds_needle=True)]
        for noise, verdict in ((0.0019, "faithful"), (0.002, "exact")):
            assert figures_of(0.1, given, 1.0, {"passed": True, "noise_floor": {"kl": noise}}).verdict == verdict

    @pytest.mark.parametrize(("of_full", "verdict"), [(1.0, "faithful"), (1.01, "not faithful")])
    def test_needles_of_those_that_full_prefill_finds(self, of_full: float, verdict: str) -> None:
        given = [replace(each, fidelity=replace(each.fidelity, answer_kl=0.01)) for each in NEEDLES]
        assert figures_of(0.1, given, of_full, PASSED).verdict == verdict

    @pytest.mark.parametrize(
        ("answer", "found"), [("It is 4,711.", True), ("47 11", True), ("4711", True), ("471", False), ("", False)]
    )
    def test_a_needle_is_found(self, answer: str, found: bool) -> None:
        assert EvaluationPrompt(("a",), "b", "4711").finds(answer) is found
        assert EvaluationPrompt(("a",), "b", None).finds(answer) is None

    def test_gates(self) -> None:
        """Of four prompts, three of different confidence and one whose confidence is a gate's."""
        given = [
            outcome(0.4, 0.4, 0.0, first=False, confidence=0.04, finds_needle=False),
            outcome(0.0, 0.0, 1.0, confidence=0.1, finds_needle=True),
            outcome(0.8, 0.2, 0.5, first=False, confidence=0.25, finds_needle=False),
            outcome(0.0, 0.1, 0.9, confidence=0.9, finds_needle=None),
        ]
        found = {each.min_confidence: each for each in certifying._gate(0.2, given, [True, True, True, None], PASSED)}
        assert list(found) == list(CONFIDENCES)
        shares = {least: sum(each.confidence < least for each in given) / 4 for least in CONFIDENCES}
        assert {least: each.full_prefills for least, each in found.items()} == shares
        assert found[0.0].first_token_agreement == 0.5 and found[0.2].first_token_agreement == 0.75
        assert found[0.1].full_prefills == 0.25 and found[0.3].first_token_agreement == 1.0
        for least, each in found.items():
            assert each.charged_ratio == pytest.approx(0.3 + shares[least])
        verdicts = [found[least].verdict for least in (0.0, 0.2, 0.3, 0.7, 1.0)]
        assert verdicts == ["not faithful", "not faithful", "faithful", "faithful", "exact"]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("layers", "dtype", "limit"), [(23, "float32", 1e-4), (24, "float32", 1e-3), (24, "bfloat16", 2.0)]
)
def test_the_limit_of_differences(
    tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch, layers: int, dtype: str, limit: float
) -> None:
    """Absolute in float32, larger for deep models; else twice the noise floor."""
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None, method="direct", dtype=dtype)
    engine.precompute(CHUNKS[:2], method=exactness.DIRECT)
    monkeypatch.setattr(exactness, "noise_floor", lambda *_: {"logits": 1.0, "kl": 0.5})
    monkeypatch.setattr(exactness, "_DEEP", 24 - layers + engine.primary.num_layers)
    found = exactness.check_exactness(engine, EvaluationPrompt(tuple(CHUNKS[:2]), QUESTION, None))
    names = ("full_prefill", "ratio_1", "ratio_0", "first_chunk")
    assert {name: found["checks"][name]["limit"] for name in names} == dict.fromkeys(names, limit)


def test_the_noise_floor(engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in place of four computations: the largest difference of any two, and KL from the first only."""
    given = [torch.tensor(row) for row in REFERENCE]
    left, asked = [*given], []

    def reference_logits(*_: Any, **options: Any) -> torch.Tensor:
        asked.append(options)
        return left.pop(0)

    monkeypatch.setattr(exactness, "reference_logits", reference_logits)
    floor = exactness.noise_floor(engine.primary, torch.arange(5))  # type: ignore[arg-type]
    assert asked == [*({"shift": shift} for shift in exactness.SHIFTS), {"implementation": "sdpa"}]
    assert floor["logits"] == max(float((a - b).abs().max()) for a in given for b in given)
    assert floor["kl"] == pytest.approx(max(slow_kl(REFERENCE[0], row) for row in REFERENCE[1:]), rel=1e-5)


class TestItems:
    """From a prefilled prompt to the line of a results file, every figure under its own name."""

    def asked(self, engine: CacheClipEngine, **meta: Any) -> QuestionPrompt:
        record = Record("a", "set", QUESTION, ("at noon", "12"), tuple(RecordChunk("", text) for text in CHUNKS), meta)
        return replace(ask(engine, record), metrics=("em",))

    @pytest.mark.parametrize(("fallback", "exact", "sure"), [(None, 7, 0.75), ("no chunk", 7, None), (None, 850, None)])
    def test_a_line(self, engine: CacheClipEngine, fallback: str | None, exact: int, sure: float | None) -> None:
        """``confidence`` is None where nothing was recomputed that could be wrong."""
        told = stats("epic", ttft_s=0.125, fallback=fallback, exact_tokens=exact, confidence=0.75, charged_ratio=0.3)
        told_kl = Fidelity(0.1, 0.2, 0.4, False)
        distance = ReferenceComparison(told_kl, "at noon", (0.9, 0.6, 0.3, 0.1, 0.2), differs_at=2)
        prefilled: Any = SimpleNamespace(stats=replace(told, phases_s={"read": 0.0625}))
        for answer, equal in (("at noon", 1.0), ("at dusk", 0.0)):
            reference: Any = SimpleNamespace(follow=lambda *_, **__: distance, answer=answer)
            followed = answering.followed(reference, prefilled)
            found = answering.item_of(self.asked(engine), "mine", followed, "a machine")
            figures = {"first_token_kl": 0.1, "answer_kl": 0.2, "agreement": 0.4, "first_token_agreement": 0.0}
            assert found.fidelity == {**figures, "equal_answer": equal}
        assert (found.id, found.label, found.answer, found.measured_on) == ("a", "mine", "at noon", "a machine")
        ratios = (found.nominal_ratio, found.effective_ratio, found.charged_ratio, found.effective_ratio_of_stale)
        assert ratios == (0.2, 150 / 850, 0.3, 150 / (850 - exact) if exact < 850 else 1.0)
        assert (found.ttft_s, found.phases_s, found.fallback) == (0.125, {"read": 0.0625}, fallback)
        confidences = (found.confidence, found.later_confidence, found.confidence_to_difference)
        assert confidences == (sure, 0.1, 0.3) and found.scores == {"em": 1.0}


def test_what_a_gate_would_have_done() -> None:
    """Four items by hand, one whose confidences are gates', one that no gate looks at, and a score that some lack."""

    def item(ttft_s: float, charged: float, first: float, equal: float, f1: float | None, *sure: float | None) -> Any:
        fidelity = {"first_token_agreement": first, "equal_answer": equal}
        scores = {"em": f1 or 0.0, **({} if f1 is None else {"f1": f1})}
        confidence, later, before = sure or (None, None, None)
        known = {"confidence": confidence, "later_confidence": later, "confidence_to_difference": before}
        return ItemResult("q", "m", "a", scores, fidelity, 0.2, 0.2, charged, ttft_s, {}, **known)

    items = [
        item(1.0, 0.2, 0.0, 0.0, 0.25, 0.1, 0.3, None),  # another first token: of no use to complete later
        item(2.0, 0.3, 1.0, 0.0, 0.5, 0.5, 0.2, 0.2),
        item(3.0, 0.4, 1.0, 0.0, None, 0.6, 0.05, 0.3),  # unsure only behind the token that differs
        item(4.0, 0.7, 1.0, 1.0, 1.0),
    ]
    fulls = [item(ttft_s, 1.0, 1.0, 1.0, f1) for ttft_s, f1 in ((10.0, 1.0), (20.0, 0.75), (30.0, 1.0), (40.0, None))]
    found = {each["min_confidence"]: each for each in gated([*zip(items, fulls, strict=True)], ["f1"])}
    figures = ("full_prefills", "completed_later", "first_token_agreement", "equal_answers", "mean_ttft_s")
    expected = {
        0.0: (0.0, 0.0, 0.75, 0.25, 2.5),
        0.05: (0.0, 0.0, 0.75, 0.25, 2.5),
        0.1: (0.0, 0.25, 0.75, 0.25, 2.5),
        0.2: (0.25, 0.25, 1.0, 0.5, 5.0),
        0.3: (0.25, 0.5, 1.0, 0.75, 5.0),
        0.5: (0.25, 0.5, 1.0, 1.0, 5.0),
        0.7: (0.75, 0.0, 1.0, 1.0, 17.5),
        1.0: (0.75, 0.0, 1.0, 1.0, 17.5),
    }
    assert {least: tuple(each[name] for name in figures) for least, each in found.items()} == expected
    for each in found.values():
        assert each["charged_ratio"] == pytest.approx(0.4 + each["full_prefills"])
        assert each["speedup_of_means"] == pytest.approx(25.0 / each["mean_ttft_s"])
    shares = {0.0: 0.75 / 1.75, 0.2: 1.5 / 1.75, 0.3: 1.0}
    assert {least: found[least]["share_of_full"]["f1"][0] for least in shares} == pytest.approx(shares)


class TestServed:
    """What vLLM answered: a session that gives these rows, in place of one that starts vLLM."""

    PROMPT = EvaluationPrompt(("One.", "Two 4711."), QUESTION, "4711")

    def session(self, given: dict[str, Any], *, dtype: str = "float32") -> Any:
        """Answers by what they are asked for."""

        def ask(prompt: str, method: Any, tokens: int, **options: Any) -> Any:
            asked.append((method.name, method.nominal_ratio, tokens, options))
            key = method.name if prompt == self.PROMPT.text else f"{method.name} single"
            return given[key](options) if callable(given[key]) else given[key]

        asked: list[Any] = []
        engine = SimpleNamespace(primary=SimpleNamespace(decode_ids=lambda ids: "".join(map(str, ids))))
        planner = SimpleNamespace(config=SimpleNamespace(dtype=dtype), primary=SimpleNamespace(reuse_tokens=100))
        return SimpleNamespace(ask=ask, asked=asked, engine=engine, planner=planner)

    def answer(self, ids: list[int], rows: list[list[float]], ratio: float = 0.2) -> Any:
        planned = SimpleNamespace(token_ids=[1, 2, 3], effective_ratio=ratio)
        return SimpleNamespace(ids=ids, rows=torch.tensor(rows), planned=planned, not_reused=None)

    def test_measures(self) -> None:
        reference = self.answer([0, 1, 1, 2], REFERENCE)
        later = self.answer([47, 11], [])
        said = self.answer([9], OTHER, 0.35)
        session = self.session({"direct": lambda options: said if options.get("along") else later})
        found = served._measure(session, self.PROMPT, preset("direct"), reference)
        check(found.fidelity, slow(REFERENCE, OTHER))
        assert (found.effective_ratio, found.charged_ratio, found.finds_needle) == (0.35, 0.35, True)
        sure = sorted(torch.tensor(OTHER[0]).softmax(-1).tolist())
        assert found.confidence == pytest.approx(sure[-1] - sure[-2])
        assert session.asked[0][3]["along"] == [0, 1, 1, 2] and "along" not in session.asked[1][3]

    def test_what_agrees_is_not_asked_again(self) -> None:
        """What is not reused is no measurement."""
        reference, said = self.answer([47, 11], REFERENCE), self.answer([0], REFERENCE)
        session = self.session({"direct": said})
        found = served._measure(session, self.PROMPT, preset("direct"), reference)
        assert len(session.asked) == 1 and found.finds_needle and found.fidelity.agreement == 1.0
        said.not_reused = "some chunks were not found in the store"
        with pytest.raises(ConfigurationError, match="cannot be certified with vLLM, .* not found in the store"):
            served._measure(session, self.PROMPT, preset("direct"), said)

    @pytest.mark.parametrize(("dtype", "shift"), [("float32", 0.0), ("bfloat16", 0.0), ("bfloat16", 1.0)])
    def test_exactness(self, dtype: str, shift: float) -> None:
        """Two of four greedy tokens differ at ratio 1.0, and the noise floor is what differs between prefills."""
        answers = {
            "full single": self.answer([0], [[1.0, 2.0, 3.0, 4.0]]),
            "full": self.answer([0, 1, 1, 2], REFERENCE),
            "direct single": self.answer([0], [[1.0, 2.5, 3.0, 3.75]]),
            "epic": self.answer([0], [[3.0, 1.0, 0.0, -1.8], OTHER[0], OTHER[2], REFERENCE[3]]),
        }
        session = self.session(answers, dtype=dtype)
        base = torch.tensor([0.0, 1.0, 2.0, 3.0])
        seen: list[Any] = []

        def first_rows(*prompts: Any, forget: bool = True) -> torch.Tensor:
            seen.append((prompts, forget))
            return base + torch.tensor([0.1 * len(seen), 0.0, 0.0, 0.0])

        def shifted_rows(ids: Any, by: int) -> torch.Tensor:
            seen.append((ids, by))
            return base - torch.tensor([0.0, 0.0, 0.0, shift])

        session.first_rows, session.shifted_rows = first_rows, shifted_rows
        found = served._check_exactness(session, self.PROMPT)
        floor, checks = found["noise_floor"], found["checks"]
        # the third row is of the prompt's beginning, and none of the prompt's own
        rows = [base + torch.tensor([0.1 * n, 0.0, 0.0, 0.0]) for n in (1, 2, 4, 5)]
        rows += 2 * [base - torch.tensor([0.0, 0.0, 0.0, shift])]
        assert floor["logits"] == pytest.approx(max(float((a - b).abs().max()) for a in rows for b in rows))
        kl = max(slow_kl(rows[0].tolist(), each.tolist()) for each in rows[1:])
        assert floor["kl"] == pytest.approx(kl, rel=1e-4)
        limit = 1e-3 if dtype == "float32" else 2 * floor["logits"]
        for name, figure in (("ratio_1", 0.2), ("first_chunk", 0.5)):
            assert checks[name]["figure"] == pytest.approx(figure) and checks[name]["limit"] == pytest.approx(limit)
            assert checks[name]["passed"] == (figure <= limit)
        assert checks["greedy"]["figure"] == 0.5
        assert found["passed"] == (dtype == "bfloat16") == checks["greedy"]["passed"]
        shown = {row[0]: row[2] for row in _checks(found)[1]}
        assert shown["greedy"] == ("anything" if dtype == "bfloat16" else "at least 1")
        assert shown["ratio_1"] == f"at most {limit:.3g}"
        assert [by for _, by in seen[-2:]] == [shift for shift in exactness.SHIFTS if shift]
