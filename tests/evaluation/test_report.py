"""Reports: figures worked out by hand, and files that show what they were given and nothing that it smuggles in."""

from __future__ import annotations

import base64
import json
import logging
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag.errors import ConfigurationError, MissingExtraError
from cacheclip_rag.lab.evaluation.gating import CONFIDENCES
from cacheclip_rag.lab.evaluation.plots import linear_ticks, look, plots, tick_text, to_png
from cacheclip_rag.lab.evaluation.records import Skipped
from cacheclip_rag.lab.evaluation.report import (
    FILES,
    Comparison,
    ItemResult,
    Question,
    Run,
    summarise,
    to_html,
    to_markdown,
    write_report,
)
from cacheclip_rag.lab.evaluation.scores import METRICS
from cacheclip_rag.lab.evaluation.statistics import paired_bootstrap, paired_ratio

RUNS = [Run("full", "full", None), Run("direct", "direct", 0.0), Run("clip 0.2", "clip", 0.2), Run("clip 1", "clip", 1)]
QUESTIONS = [Question(f"q{n}", f"Who keeps lamp {n}?", ["Ada", "Ada Thornbury"]) for n in range(1, 6)]


def item(label: str, number: int, f1: float, ttft_s: float, kl: float | None = None, answer: str = "Ada") -> ItemResult:
    fidelity = {"answer_kl": kl, "first_token_kl": 2 * kl, "agreement": 1 - kl} if kl is not None else {}
    scores = {"f1": f1, "contains": float(f1 == 1)}
    ratio = {"full": 1.0, "direct": 0.0, "clip 0.2": 0.25, "clip 1": 1.0}[label]
    return ItemResult(
        f"q{number}", label, answer, scores, fidelity, ratio, ratio, ratio, ttft_s, {"read": 0.25, "recompute": ttft_s}
    )


ITEMS = [
    *(item("full", n, f1, ttft) for n, f1, ttft in [(1, 1.0, 4.0), (2, 0.5, 4.0), (3, 0.0, 8.0), (4, 1.0, 2.0)]),
    # question 5, which full does not have, and not question 4
    *(
        item("direct", n, f1, ttft, kl)
        for n, f1, ttft, kl in [(1, 0.5, 1.0, 0.5), (2, 0.5, 2.0, 0.25), (3, 0.25, 1.0, 0.0), (5, 1.0, 3.0, 0.25)]
    ),
    *(
        item("clip 0.2", n, f1, ttft, kl)
        for n, f1, ttft, kl in [(1, 1.0, 2.0, 0.0), (2, 0.5, 2.0, 0.25), (3, 0.0, 4.0, 0.0), (4, 0.5, 1.0, 0.25)]
    ),
    *(item("clip 1", n, f1, 4.0, 0.0) for n, f1 in [(1, 1.0), (2, 0.5), (3, 0.0), (4, 1.0)]),
]
SKIPPED = [
    Skipped("line 3", "no answers"),
    Skipped("question q8", "the prompt has 900 tokens, of 512"),
    Skipped("question q9", "the prompt has 901 tokens, of 512"),
]


@pytest.fixture
def comparison() -> Comparison:
    settings = {"seed": 0, "dtype": "float32"}
    return Comparison("lamps", "tiny-primary", "tiny-auxiliary", RUNS, QUESTIONS, ITEMS, settings, SKIPPED)


@pytest.fixture
def summary(comparison: Comparison) -> dict[str, Any]:
    return summarise(comparison)


@pytest.fixture
def unsure(comparison: Comparison) -> Comparison:
    """With a confidence of each answer of ``clip 0.2``."""
    sure = {"q1": 0.6, "q2": 0.04, "q3": 0.25, "q4": 0.15}
    agreeing = {"q1": 1.0, "q2": 0.0, "q3": 1.0, "q4": 0.0}
    items = [
        replace(
            one,
            confidence=sure[one.id],
            fidelity={"first_token_agreement": agreeing[one.id], "equal_answer": agreeing[one.id]},
        )
        if one.label == "clip 0.2"
        else one
        for one in comparison.items
    ]
    return replace(comparison, items=items)


def only(comparison: Comparison, *labels: str) -> Comparison:
    return replace(
        comparison,
        runs=[run for run in comparison.runs if run.label in labels],
        items=[one for one in comparison.items if one.label in labels],
    )


class TestSummary:
    def test_means_are_over_the_runs_own_items(self, summary: dict[str, Any]) -> None:
        assert (summary["n"], summary["skipped"], summary["scores"]) == (5, 3, ["f1", "contains"])
        direct, clip = summary["methods"]["direct"], summary["methods"]["clip 0.2"]
        assert (direct["n"], direct["f1"], direct["contains"]) == (4, 0.5625, 0.25)
        assert (direct["kl_to_full"], direct["kl_to_full_median"], direct["kl_to_full_trimmed"]) == (0.25, 0.25, 0.25)
        assert (direct["first_token_kl"], direct["agreement_with_full"], direct["ttft_s"]) == (0.5, 0.75, 1.5)
        assert direct["kl_interval"] == list(paired_bootstrap([0.5, 0.25, 0.0, 0.25]))
        assert (clip["nominal_ratio"], clip["effective_ratio"], clip["charged_ratio"]) == (0.25, 0.25, 0.25)
        assert clip["phases_s"] == {"read": 0.25, "recompute": 2.0}
        assert direct["gold_logprob"] is None

    def test_figures_against_full_are_paired(self, summary: dict[str, Any]) -> None:
        direct, clip, full = (summary["methods"][label] for label in ("direct", "clip 0.2", "full"))
        assert direct["n_paired"] == 3
        assert direct["difference_to_full"]["f1"] == pytest.approx([-0.25 / 3, *paired_bootstrap([-0.5, 0.0, 0.25])])
        assert direct["speedup_vs_full"] == 4.0  # of 4, 2 and 8; the ratio of the medians is 2.7
        assert clip["difference_to_full"]["f1"][0] == -0.125
        assert clip["speedup_vs_full"] == 2.0
        assert (full["speedup_vs_full"], full["difference_to_full"], full["kl_to_full"]) == (1.0, {}, None)

    def test_answerable_is_where_full_is_right(self, summary: dict[str, Any]) -> None:
        rows = summary["methods"]
        same = {"first_token_agreement": None, "equal_answers": None}  # not recorded
        nothing = {"kl_to_full": None, "agreement_with_full": None, **same}
        assert rows["full"]["answerable"] == {"n": 2, "f1": 1.0, "contains": 1.0, **nothing}
        found = {"kl_to_full": 0.125, "agreement_with_full": 0.875, **same}
        assert rows["clip 0.2"]["answerable"] == {"n": 2, "f1": 0.75, "contains": 0.5, **found}
        found = {"kl_to_full": 0.5, "agreement_with_full": 0.5, **same}
        assert rows["direct"]["answerable"] == {"n": 1, "f1": 0.5, "contains": 0.0, **found}
        assert rows["clip 0.2"]["answerable_intervals"]["kl_to_full"] == list(paired_bootstrap([0.0, 0.25]))
        assert "| KL where full is right |" in to_markdown(summary)
        assert "| Agreement where full is right |" in to_markdown(summary)

    def test_same_answers_where_full_is_right(self, unsure: Comparison) -> None:
        found = summarise(unsure)
        clip = found["methods"]["clip 0.2"]  # full is right on questions 1 and 4
        assert (clip["answerable"]["equal_answers"], clip["answerable"]["first_token_agreement"]) == (0.5, 0.5)
        assert clip["answerable_intervals"]["equal_answers"] == list(paired_bootstrap([1.0, 0.0]))
        assert "| Equal answers where full is right |" in to_markdown(found)
        assert "| Equal first token where full is right |" in to_markdown(found)

    @pytest.mark.parametrize(
        ("scores", "right"),
        [
            ({"em": 1.0}, 1),
            ({"em": 0.0, "contains": 1.0}, 1),
            ({"string_match_all": 0.75}, 0),
            ({"f1": 0.5, "string_match_all": 1.0}, 1),
            ({"rouge_l": 1.0}, 1),
            ({"f1": 0.9, "rouge_l": 1.0}, 0),
        ],
    )
    def test_right_means_one_by_the_own_or_any_such_score(
        self, comparison: Comparison, scores: dict[str, float], right: int
    ) -> None:
        alone = replace(only(comparison, "full"), items=[replace(ITEMS[0], scores=scores)])
        assert summarise(alone)["methods"]["full"]["answerable"]["n"] == right

    @pytest.mark.parametrize(("answer", "right"), [("It is 1234567.", 0), ("1234567, 7654321, 1111111 and 2222222", 1)])
    def test_where_all_must_be_named_one_of_them_is_not_right(
        self, comparison: Comparison, answer: str, right: int
    ) -> None:
        wanted = ["1234567", "7654321", "1111111", "2222222"]
        scores = {name: METRICS[name](answer, wanted) for name in ("string_match_all", "em", "contains")}
        assert scores["contains"] == 1.0
        alone = replace(only(comparison, "full"), items=[replace(ITEMS[0], scores=scores)])
        assert summarise(alone)["methods"]["full"]["answerable"]["n"] == right

    def test_gold_logprob_is_held_against_full(self, comparison: Comparison) -> None:
        gold = {"full": [-1.0, -2.0, -3.0, -4.0], "clip 0.2": [-1.5, -2.0, -4.0, -3.0]}
        items = [
            replace(one, fidelity={**one.fidelity, "gold_logprob": gold[one.label][int(one.id[1:]) - 1]})
            for one in ITEMS
            if one.label in gold
        ]
        summary = summarise(replace(only(comparison, *gold), items=items))
        differences = [-0.5, 0.0, -1.0, 1.0]
        expected = [-0.125, *paired_bootstrap(differences)]
        assert summary["methods"]["clip 0.2"]["gold_logprob_difference"] == expected
        assert summary["methods"]["full"]["gold_logprob_difference"] is None
        assert "| Gold log-prob - full |" in to_markdown(summary) and "| -0.125 [-" in to_markdown(summary)

    def test_all_ratios(self, comparison: Comparison) -> None:
        items = [replace(one, nominal_ratio=0.2, charged_ratio=0.5, effective_ratio_of_stale=0.75) for one in ITEMS]
        other = replace(comparison, items=items)
        summary = summarise(other)
        row = summary["methods"]["clip 0.2"]
        names = ("nominal_ratio", "effective_ratio", "effective_ratio_of_stale", "charged_ratio")
        assert [row[name] for name in names] == [0.2, 0.25, 0.75, 0.5]
        made, page = to_markdown(summary), to_html(other, summary)
        for title in ("Ratio", "Effective ratio", "Ratio of stale", "Charged ratio"):
            assert f"| {title} |" in made
        assert "<td>0.200</td><td>0.250</td><td>0.500</td>" in page, "beside an answer"
        assert summarise(comparison)["methods"]["direct"]["effective_ratio_of_stale"] is None

    def test_without_full_there_is_nothing_to_hold_against(self, comparison: Comparison) -> None:
        row = summarise(only(comparison, "direct"))["methods"]["direct"]
        assert (row["difference_to_full"], row["speedup_vs_full"], row["answerable"]) == ({}, None, None)
        assert row["n_paired"] == 0

    def test_runs_without_items_are_empty_rows(self, comparison: Comparison) -> None:
        made = summarise(replace(comparison, items=ITEMS[:4]))
        assert made["methods"]["direct"]["n"] == 0
        assert made["methods"]["direct"]["ttft_s"] is made["methods"]["direct"]["f1"] is None
        assert "| direct | 0 | 0 | - |" in to_markdown(made)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"runs": [*RUNS, RUNS[1]]}, "each run once, got 'direct' twice"),
            ({"questions": [*QUESTIONS, QUESTIONS[0]]}, "each question once, got 'q1' twice"),
            ({"items": [*ITEMS, ITEMS[0]]}, "each answer once"),
            ({"runs": RUNS[:2]}, "known runs"),
            ({"questions": QUESTIONS[1:]}, "known questions"),
            ({"items": [replace(ITEMS[4], fidelity={"answer_kl": float("nan")})]}, "answer_kl=nan .* 'q1' by 'direct'"),
            ({"items": [replace(ITEMS[0], scores={"ratio": 1.0})]}, "names of their own, got ratio"),
        ],
    )
    def test_contradictions_are_refused(self, comparison: Comparison, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            summarise(replace(comparison, **change))


class TestAgainst:
    def test_kl_is_a_multiple_of_the_named_one(self, comparison: Comparison) -> None:
        summary = summarise(comparison, against="direct")
        rows = summary["methods"]
        # question 4 has no KL by direct, question 5 none by clip: 0.25 of three over 0.75 of three
        expected = paired_ratio([0.0, 0.25, 0.0], [0.5, 0.25, 0.0])
        assert expected is not None and rows["clip 0.2"]["kl_ratio"] == list(expected)
        assert rows["clip 0.2"]["kl_ratio"][0] == pytest.approx(1 / 3)
        assert rows["direct"]["kl_ratio"][0] == 1.0 and rows["full"]["kl_ratio"] is None
        assert "| KL / direct |" in to_markdown(summary) and "<td>0.333x</td>" in to_html(comparison, summary)

    def test_against_full_there_is_none(self, summary: dict[str, Any]) -> None:
        assert all(row["kl_ratio"] is None for row in summary["methods"].values())
        assert "KL / " not in to_markdown(summary)

    def test_unknown_label(self, comparison: Comparison) -> None:
        with pytest.raises(ConfigurationError, match="one of full, direct, clip 0.2, clip 1, got 'clip'"):
            summarise(comparison, against="clip")

    def test_score_as_a_share_of_fulls(self, summary: dict[str, Any]) -> None:
        found = summary["methods"]["clip 0.2"]["share_of_full"]
        assert found["f1"] == list(paired_ratio([1.0, 0.5, 0.0, 0.5], [1.0, 0.5, 0.0, 1.0]) or ())
        assert found["f1"][0] == 0.8 and summary["methods"]["full"]["share_of_full"] == {}

    def test_intervals_beside_every_mean(self, summary: dict[str, Any]) -> None:
        row = summary["methods"]["direct"]
        assert row["agreement_interval"] == list(paired_bootstrap([0.5, 0.75, 1.0, 0.75]))
        assert row["first_token_kl_interval"] == list(paired_bootstrap([1.0, 0.5, 0.0, 0.5]))
        assert (row["first_token_kl_median"], row["first_token_kl_trimmed"]) == (0.5, 0.5)
        clip = summary["methods"]["clip 0.2"]
        assert clip["answerable_intervals"]["f1"] == list(paired_bootstrap([1.0, 0.5]))

    def test_equal_answers_and_first_tokens(self, comparison: Comparison) -> None:
        """Shares of what the items say; no figure where none says it."""
        names = ("first_token_agreement", "equal_answer")
        said = {"q1": (1.0, 1.0), "q2": (1.0, 0.0), "q3": (0.0, 0.0), "q5": (1.0, 1.0)}
        items = [
            replace(one, fidelity={**one.fidelity, **dict(zip(names, said[one.id], strict=True))})
            if one.label == "direct"
            else one
            for one in comparison.items
        ]
        summary = summarise(replace(comparison, items=items))
        row = summary["methods"]["direct"]
        assert (row["first_token_agreement"], row["equal_answers"]) == (0.75, 0.5)
        assert row["equal_answers_interval"] == list(paired_bootstrap([1.0, 0.0, 0.0, 1.0]))
        assert row["first_token_agreement_interval"] == list(paired_bootstrap([1.0, 1.0, 0.0, 1.0]))
        assert summary["methods"]["full"]["equal_answers"] is None
        assert "Equal answers" in to_markdown(summary) and "50.0%" in to_markdown(summary)

    def test_a_gate_takes_fulls_answer_where_the_method_is_unsure(self, unsure: Comparison) -> None:
        found = summarise(unsure)
        gate = {each["min_confidence"]: each for each in found["methods"]["clip 0.2"]["gate"]}
        assert list(gate) == list(CONFIDENCES)
        assert [each["full_prefills"] for each in gate.values()] == [0.0, 0.25, 0.25, 0.5, 0.75, 0.75, 1.0, 1.0]
        assert gate[0.0]["first_token_agreement"] == 0.5 and gate[0.05]["first_token_agreement"] == 0.75
        assert gate[0.2]["equal_answers"] == 1.0
        assert gate[0.05]["equal_answers_interval"] == list(paired_bootstrap([1.0, 1.0, 1.0, 0.0]))
        assert gate[0.0]["first_token_agreement_interval"] == list(paired_bootstrap([1.0, 0.0, 1.0, 0.0]))
        assert "| 75.0% [25.0%, 100.0%] | 75.0% [25.0%, 100.0%] |" in to_markdown(found)
        # F1 by hand: 1, .5, 0, .5 without a gate; question 4 becomes full's 1.0 at 0.2
        assert gate[0.0]["share_of_full"]["f1"][0] == pytest.approx(2.0 / 2.5)
        assert gate[0.2]["share_of_full"]["f1"][0] == pytest.approx(1.0)
        assert gate[0.0]["mean_ttft_s"] == (2 + 2 + 4 + 1) / 4 and gate[0.05]["mean_ttft_s"] == (2 + 6 + 4 + 1) / 4
        assert gate[0.05]["speedup_of_means"] == pytest.approx(18 / 13)
        assert gate[0.2]["charged_ratio"] == pytest.approx(0.25 + 0.5)
        assert "## With a confidence gate" in to_markdown(found) and "| clip 0.2 | 0.05 | 25% | 0% |" in to_markdown(
            found
        )

    def test_a_gate_completes_before_a_later_unsure_token(self, unsure: Comparison) -> None:
        """Only what differs from full prefill no sooner than at the unsure token is full prefill's answer."""
        later = {"q1": (0.15, 0.15), "q2": (None, None), "q3": (0.15, None), "q4": (0.15, 0.5)}
        items = [
            replace(one, later_confidence=later[one.id][0], confidence_to_difference=later[one.id][1])
            if one.label == "clip 0.2"
            else one
            for one in unsure.items
        ]
        said = {one.id: one for one in items if one.label == "clip 0.2"}
        gate = {
            each["min_confidence"]: each
            for each in summarise(replace(unsure, items=items))["methods"]["clip 0.2"]["gate"]
        }
        for least, each in gate.items():
            first = {id_ for id_, one in said.items() if one.confidence is not None and one.confidence < least}
            completed = {id_ for id_ in ("q1", "q3", "q4") if id_ not in first and least > 0.15}
            rescued = {id_ for id_ in completed if later[id_][1] is not None and later[id_][1] < least}
            equal = [id_ in first | rescued or one.fidelity["equal_answer"] == 1.0 for id_, one in said.items()]
            assert each["completed_later"] == len(completed) / 4
            assert each["equal_answers"] == sum(equal) / 4
        assert gate[0.2]["completed_later"] > 0

    def test_a_gate_does_not_look_at_answers_that_are_full_prefills(self, comparison: Comparison) -> None:
        sure = {"q1": 0.6, "q2": None, "q3": 0.25, "q4": None}
        items = [replace(one, confidence=sure[one.id]) if one.label == "clip 0.2" else one for one in comparison.items]
        gate = summarise(replace(comparison, items=items))["methods"]["clip 0.2"]["gate"]
        assert [each["full_prefills"] for each in gate] == [0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.5, 0.5]

    def test_no_gate_without_confidences(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        assert all(row["gate"] == [] for row in summary["methods"].values())
        assert "confidence gate" not in to_markdown(summary)

    def test_where_full_is_never_right_that_is_said(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        told = "Full prefill answers no question rightly"
        assert told not in to_markdown(summary)
        wrong = replace(comparison, items=[replace(one, scores={"rouge_l": 0.4}) for one in ITEMS])
        assert told in to_markdown(summarise(wrong)) and told in to_html(wrong, summarise(wrong))


class TestTasks:
    @pytest.fixture
    def mixed(self, comparison: Comparison) -> Comparison:
        questions = [replace(one, task="far" if n < 2 else "near<b>") for n, one in enumerate(QUESTIONS)]
        return replace(comparison, questions=questions)

    def test_figures_of_a_task_are_those_of_its_questions(self, mixed: Comparison) -> None:
        tasks = summarise(mixed, against="direct")["tasks"]
        assert {name: found["n"] for name, found in tasks.items()} == {"far": 2, "near<b>": 3}
        alone = replace(mixed, questions=mixed.questions[:2], items=[i for i in ITEMS if i.id in ("q1", "q2")])
        assert tasks["far"]["methods"] == summarise(alone, against="direct")["methods"]

    def test_are_shown(self, mixed: Comparison) -> None:
        summary = summarise(mixed, against="direct")
        made, page = to_markdown(summary), to_html(mixed, summary)
        assert "\n## far: 2 questions\n\n| Method | n | F1 |" in made and made.count("| KL / direct |") == 3
        assert "<h2>far: 2 questions</h2>" in page and "<h2>near&lt;b&gt;: 3 questions</h2>" in page
        assert Page(page).count("table") == 3 + 5

    def test_one_task_is_no_breakdown(self, summary: dict[str, Any]) -> None:
        assert summary["tasks"] == {} and "\n## " not in to_markdown(summary)

    @pytest.fixture
    def several(self, mixed: Comparison) -> Comparison:
        """Two questions are scored by another metric than the rest."""
        items = [replace(one, scores={"rouge_l": one.scores["f1"]}) if one.id in ("q1", "q2") else one for one in ITEMS]
        return replace(mixed, items=items)

    def test_every_tasks_own_metric_is_held_against_full(self, several: Comparison) -> None:
        summary = summarise(several)
        assert set(summary["own_scores"]) == {"f1", "rouge_l"}
        assert "| F1 / full |" in to_markdown(summary) and "| ROUGE-L / full |" in to_markdown(summary)

    def test_every_own_metric_says_how_many_questions_have_it(self, several: Comparison) -> None:
        summary = summarise(several)
        assert summary["methods"]["direct"]["n_of_scores"] == {"rouge_l": 2, "f1": 2, "contains": 2}
        made, page = to_markdown(summary), to_html(several, summary)
        assert "| 0.750 (n 2) |" in made and "0.750<small>(n 2)</small>" in page, "of full, by ROUGE-L"
        assert "over the n questions that are scored so" in made
        told = made.partition("## far")[2].partition("## near")[0]
        assert "ROUGE-L |" in told and "(n " not in told, "all of a task's questions are scored alike"
        assert "(n " not in to_markdown(summarise(replace(several, items=ITEMS)))

    def test_every_own_metric_is_plotted(self, several: Comparison) -> None:
        assert [plot.y_label for plot in plots(summarise(several))[1:]] == ["ROUGE-L", "F1"]

    def test_a_question_is_lost_by_its_own_metric(self, several: Comparison) -> None:
        text = to_html(several, summarise(several))
        lost = ["data-lost" in found for _, found in Page(text).tags if found.get("class") == "item"]
        assert lost == [True, False, False, True, False]
        assert "<span>q1</span><span>ROUGE-L 0.50 to 1.00</span>" in text
        assert "<span>q4</span><span>F1 0.50 to 1.00</span>" in text


class TestSkipped:
    def test_counts_by_reason_and_the_first(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        assert summary["skipped_by_reason"] == {"the prompt has N tokens, of N": 2, "no answers": 1}
        assert summary["skipped_first"][0] == {"where": "line 3", "reason": "no answers"}
        many = summarise(replace(comparison, skipped=[Skipped(f"line {n}", "no answers") for n in range(1, 101)]))
        assert (many["skipped"], many["skipped_by_reason"], len(many["skipped_first"])) == (100, {"no answers": 100}, 5)
        none = summarise(replace(comparison, skipped=[]))
        assert (none["skipped"], none["skipped_by_reason"], none["skipped_first"]) == (0, {}, [])

    def test_markdown(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        made = to_markdown(summary)
        assert "3 skipped, by reason:\n\n- 2: the prompt has N tokens, of N\n- 1: no answers\n" in made
        assert "- line 3: no answers\n- question q8: the prompt has 900 tokens, of 512\n" in made
        assert "skipped" not in to_markdown(summarise(replace(comparison, skipped=[])))

    def test_page(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        page = to_html(comparison, summary)
        assert "<summary>3 skipped, and why</summary>" in page and "<li>2: the prompt has N tokens, of N</li>" in page
        assert "<li>question q8: the prompt has 900 tokens, of 512</li>" in page
        whole = replace(comparison, skipped=[])
        assert "skipped" not in to_html(whole, summarise(whole))


class TestLearning:
    def test_is_told(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        told = "direct: measured after one earlier prompt, the same question with its chunks in reverse order"
        assert told not in to_markdown(summary) + to_html(comparison, summary)
        learning = replace(comparison, runs=[RUNS[0], replace(RUNS[1], learns=True), *RUNS[2:]])
        assert told in to_markdown(summarise(learning)) and told in to_html(learning, summarise(learning))


class TestMarkdown:
    def test_table(self, summary: dict[str, Any]) -> None:
        lines = to_markdown(summary).splitlines()
        assert lines[0] == "# lamps"
        assert lines[2] == "Primary tiny-primary, auxiliary tiny-auxiliary. 5 questions, 3 skipped."
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        titles, _, *body = rows
        assert len({len(row) for row in rows}) == 1
        cells = {row[0]: dict(zip(titles, row, strict=True)) for row in body}
        assert list(cells) == ["full", "direct", "clip 0.2", "clip 1"]
        # the best in bold: never full's, lowest of KL and time, highest of the rest
        assert [cells[label]["F1"] for label in cells] == ["0.625", "0.562", "0.500", "**0.625**"]
        assert [cells[label]["TTFT (s)"] for label in cells] == ["4.000", "**1.500**", "2.000", "4.000"]
        assert [cells[label]["KL median"] for label in cells] == ["-", "0.250", "0.125", "**0.00**"]
        assert [cells[label]["Speed-up"] for label in cells] == ["1.00x", "**4.00x**", "2.00x", "1.00x"]
        assert cells["clip 0.2"]["KL to full"] == "0.125 [0.00, 0.250]"
        assert cells["clip 1"]["F1 - full"] == "**+0.000** [+0.000, +0.000]"
        where_right = [cells[label]["F1 where full is right"].split(" [")[0] for label in cells]
        assert where_right == ["1.000", "0.500", "0.750", "**1.000**"]
        assert cells["clip 0.2"]["F1 where full is right"] == "0.750 [0.500, 1.000]"
        assert cells["clip 0.2"]["F1 / full"] == "80.0%", "no interval: some draws are of question 3 only"
        assert cells["clip 1"]["F1 / full"] == "**100.0%**"
        assert cells["clip 0.2"]["First-token KL median"] == "0.250"
        assert cells["clip 0.2"]["Agreement"] == "0.875 [0.750, 1.000]"
        assert [cells[label]["Ratio"] for label in cells] == ["-", "0", "0.2", "1"]

    def test_only_columns_with_figures_each_of_them_explained(
        self, comparison: Comparison, summary: dict[str, Any]
    ) -> None:
        made = to_markdown(summary)
        assert "Gold log-prob" not in made and "ROUGE" not in made
        assert "- **Speed-up**: " in made and "- **KL trimmed**: " in made
        alone = to_markdown(summarise(only(comparison, "full")))
        assert "KL" not in alone and "- full" not in alone and "**1.00x**" not in alone

    def test_says_where_methods_answered_other_questions(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        made = to_markdown(summary)
        assert "Not every method answered the same questions" in made and "| Paired |" in made
        made = to_markdown(summarise(only(comparison, "full", "clip 0.2")))
        assert "Not every method" not in made and "Paired" not in made

    def test_names_cannot_break_the_table(self, comparison: Comparison) -> None:
        run, one = Run("a|b\n*c* <i>", "full", None), replace(ITEMS[0], label="a|b\n*c* <i>")
        made = to_markdown(summarise(replace(comparison, runs=[run], items=[one])))
        assert r"| a\|b \*c\* \<i> | 1 |" in made


class Page(HTMLParser):
    """Tags with their attributes, and a check that all of them are closed in order."""

    VOID = ("meta", "input", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self.open[-1] if self.open else ""
        self.text[tag] = self.text.get(tag, "") + data

    def count(self, tag: str, **attributes: str | None) -> int:
        return sum(name == tag and attributes.items() <= found.items() for name, found in self.tags)


class TestPage:
    def test_holds_table_plots_and_answers(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        page = Page(to_html(comparison, summary, b"a picture"))
        assert [found["src"] for tag, found in page.tags if tag == "img"] == [
            f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}"
        ]
        assert page.count("details", **{"class": "item"}) == 5
        assert page.count("td", **{"class": "answer"}) == len(ITEMS)
        assert page.count("td", **{"class": "best"}) == to_markdown(summary).split("\n\n- ")[0].count("**") / 2
        assert page.count("input", type="search") == 1
        # direct is worse on question 1, clip 0.2 on question 4
        lost = ["data-lost" in found for _, found in page.tags if found.get("class") == "item"]
        assert lost == [True, False, False, True, False]

    def test_items_can_be_found_by_their_kl(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        text = to_html(comparison, summary)
        page = Page(text)
        worst = [found.get("data-kl") for _, found in page.tags if found.get("class") == "item"]
        assert worst == ["0.5", "0.25", "0", "0.25", "0.25"]
        assert page.count("select", id="order") == page.count("input", id="least") == 1
        assert "<span>KL up to 0.500</span>" in text
        alone = only(comparison, "full")
        assert 'id="order"' not in to_html(alone, summarise(alone))

    def test_needs_nothing_from_elsewhere(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        text = to_html(comparison, summary, b"a picture")
        page = Page(text)
        sources = [found for _, found in page.tags if {"src", "href", "srcset"} & found.keys()]
        assert len(sources) == 1 and str(sources[0]["src"]).startswith("data:image/png;base64,")
        assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
        policy = next(found["content"] for tag, found in page.tags if tag == "meta" and "content" in found)
        assert policy is not None and policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy

    def test_escapes_everything(self, comparison: Comparison) -> None:
        bad = '<script>alert("1")</script><img src=x onerror=y>'
        run = Run(bad, bad, 0.5)
        hostile = Comparison(
            bad,
            bad,
            bad,
            [RUNS[0], run],
            [Question("q1", bad, [bad])],
            [replace(ITEMS[0], scores={bad: 1.0}), replace(ITEMS[4], label=bad, answer=bad, scores={bad: 0.5})],
            {bad: bad},
            [Skipped(bad, bad)],
        )
        text = to_html(hostile, summarise(hostile))
        page = Page(text)
        assert (page.count("script"), page.count("img")) == (1, 0)
        assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;" in text and bad not in text
        assert bad in page.text["td"]

    def test_without_full_and_without_answers(self, comparison: Comparison) -> None:
        alone = only(comparison, "direct")
        page = Page(to_html(alone, summarise(alone)))
        assert page.count("input", type="checkbox") == 0
        empty = replace(comparison, items=[])
        assert Page(to_html(empty, summarise(empty))).count("img") == 0


class TestPlots:
    def test_one_line_a_method_over_its_ratios(self, summary: dict[str, Any]) -> None:
        kl, f1 = plots(summary)
        assert [(one.method, [(p.x, p.y, p.label) for p in one.points]) for one in kl.series] == [
            ("direct", [(1.5, 0.25, "0")]),
            ("clip", [(2.0, 0.125, "0.2"), (4.0, 0.0, "1")]),
        ]
        assert (kl.log, f1.log) == (True, False)
        assert f1.full is not None and (f1.full.x, f1.full.y) == (4.0, 0.625)
        assert [one.joined for one in kl.series] == [True, True]

    def test_what_a_gate_gives_against_its_mean_time(self, unsure: Comparison) -> None:
        *_, equal, f1 = plots(summarise(unsure))
        assert equal.title == "Equal answers, with and without a confidence gate" and f1.y_label == "F1 / full"
        without, gated = equal.series
        assert (without.method, [(p.x, p.y, p.label) for p in without.points]) == ("clip", [(2.25, 0.5, "0.2")])
        assert gated.method == "clip 0.2 with min_confidence"
        assert [(p.x, p.y, p.label) for p in gated.points[:3]] == [
            (2.25, 0.5, "0"),
            (3.25, 0.75, "0.05"),
            (3.25, 0.75, "0.1"),
        ]
        assert equal.full is not None and (equal.full.x, equal.full.y) == (4.5, 1.0)
        assert f1.series[1].points[3].y == pytest.approx(1.0)
        assert to_png(summarise(unsure)) is not None

    def test_zero_stands_below_the_powers_of_ten(self, summary: dict[str, Any]) -> None:
        kl, _ = plots(summary)
        assert [tick_text(kl, tick) for tick in kl.y_ticks] == ["0", "0.1", "1"]
        del summary["methods"]["clip 1"]
        kl, _ = plots(summary)
        assert [tick_text(kl, tick) for tick in kl.y_ticks] == ["0.1", "1"]

    def test_runs_that_differ_in_more_than_the_ratio_are_not_joined(self, summary: dict[str, Any]) -> None:
        summary["methods"]["clip 1"]["ratio"] = 0.2
        series = plots(summary)[0].series[1]
        assert not series.joined
        assert [point.label for point in series.points] == ["clip 0.2", "clip 1"]

    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [
            (0.0, 4.0, [0, 1, 2, 3, 4]),
            (0.5, 0.625, [0.5, 0.52, 0.54, 0.56, 0.58, 0.6, 0.62, 0.64]),
            (0.0, 0.0, [0, 0.2]),
            (0.0, 137.0, [0, 20, 40, 60, 80, 100, 120, 140]),
        ],
    )
    def test_ticks_are_round_and_cover_the_values(self, low: float, high: float, expected: list[float]) -> None:
        assert linear_ticks(low, high) == pytest.approx(expected)

    def test_no_two_methods_look_alike(self) -> None:
        assert len({look(number) for number in range(160)}) == 160

    def test_png(self, summary: dict[str, Any]) -> None:
        summary["methods"]["clip 1"] |= {"method": "$_蓝色", "ratio": None}
        made = to_png(summary)
        assert made is not None and made.startswith(b"\x89PNG")
        assert to_png({**summary, "methods": {}}) is None

    def test_lines_join_the_runs_of_one_method_alone(
        self, summary: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from matplotlib.axes import Axes

        styles: list[tuple[str, str]] = []
        draw = Axes.plot

        def plot(axes: Any, *args: Any, **options: Any) -> Any:
            styles.append((options.get("label", ""), options.get("linestyle", "")))
            return draw(axes, *args, **options)

        monkeypatch.setattr(Axes, "plot", plot)
        to_png(summary)
        assert ("clip", "-") in styles
        styles.clear()
        summary["methods"]["clip 1"]["ratio"] = 0.2
        to_png(summary)
        assert ("clip", "") in styles and ("clip", "-") not in styles

    def test_png_says_how_to_get_matplotlib(self, summary: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingExtraError, match=r"cacheclip-rag\[lab\]"):
            to_png(summary)


class TestFiles:
    def test_writes_all_and_nothing_else(self, comparison: Comparison, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "report"
        written = write_report(comparison, folder)
        assert written == {kind: folder / name for kind, name in FILES.items()}
        assert sorted(path.name for path in folder.iterdir()) == sorted(FILES.values())
        assert json.loads(written["summary"].read_text(encoding="utf-8")) == summarise(comparison)
        page = written["html"].read_text(encoding="utf-8")
        assert page.startswith("<!DOCTYPE html>")
        assert base64.b64encode(written["png"].read_bytes()).decode() in page

    def test_does_not_replace_a_report_unasked(self, comparison: Comparison, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "report.md").write_text("old")
        with pytest.raises(ConfigurationError, match=r"with report\.md\. Choose another folder, or pass overwrite"):
            write_report(comparison, tmp_path)
        assert (tmp_path / "report.md").read_text() == "old"
        write_report(comparison, tmp_path, overwrite=True)
        assert (tmp_path / "report.md").read_text().startswith("# lamps")
        assert (tmp_path / "notes.txt").read_text() == "mine"

    def test_a_refused_comparison_leaves_the_old_report(self, comparison: Comparison, tmp_path: Path) -> None:
        written = write_report(comparison, tmp_path)
        before = {kind: path.read_bytes() for kind, path in written.items()}
        with pytest.raises(ConfigurationError):
            write_report(replace(comparison, runs=RUNS[:1]), tmp_path, overwrite=True)
        assert {kind: path.read_bytes() for kind, path in written.items()} == before

    def test_without_matplotlib_there_is_no_picture_not_even_an_old_one(
        self,
        comparison: Comparison,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / FILES["png"]).write_bytes(b"old")
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with caplog.at_level(logging.WARNING):
            written = write_report(comparison, tmp_path, overwrite=True)
        assert set(written) == {"summary", "markdown", "html"}
        assert not (tmp_path / FILES["png"]).exists()
        assert "quality_ttft.png is left out" in caplog.text and "cacheclip-rag[lab]" in caplog.text
