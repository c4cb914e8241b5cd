"""Reports: figures worked out by hand, and files that show what they were given and nothing that it smuggles in."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.evaluation.page import to_html
from cacheclip_lab.evaluation.records import Record, SkippedRecord
from cacheclip_lab.evaluation.report import FILES, summarise, write_report
from cacheclip_lab.evaluation.results import Comparison, ItemResult, Run
from cacheclip_lab.evaluation.statistics import paired_bootstrap
from cacheclip_lab.evaluation.tables import console_tables, gate_table, notes, table

from cacheclip_rag import ConfigurationError

RUNS = [Run("full", "full", None), Run("direct", "direct", 0.0), Run("clip 0.2", "clip", 0.2), Run("clip 1", "clip", 1)]
QUESTIONS = [Record(f"q{n}", "", f"Who keeps lamp {n}?", ("Ada", "Ada Thornbury"), (), {}) for n in range(1, 6)]


def item(label: str, number: int, f1: float, ttft_s: float, kl: float | None = None) -> ItemResult:
    fidelity = {"answer_kl": kl, "first_token_kl": 2 * kl, "agreement": 1 - kl} if kl is not None else {}
    scores = {"f1": f1, "contains": float(f1 == 1)}
    ratio = {"full": 1.0, "direct": 0.0, "clip 0.2": 0.25, "clip 1": 1.0}[label]
    phases = {"read": 0.25, "recompute": ttft_s}
    return ItemResult(f"q{number}", label, "Ada", scores, fidelity, ratio, ratio, ratio, ttft_s, phases)


FIGURES: dict[str, list[tuple[Any, ...]]] = {
    "full": [(1, 1.0, 4.0), (2, 0.5, 4.0), (3, 0.0, 8.0), (4, 1.0, 2.0)],
    # question 5, which full does not have, and not question 4
    "direct": [(1, 0.5, 1.0, 0.5), (2, 0.5, 2.0, 0.25), (3, 0.25, 1.0, 0.0), (5, 1.0, 3.0, 0.25)],
    "clip 0.2": [(1, 1.0, 2.0, 0.0), (2, 0.5, 2.0, 0.25), (3, 0.0, 4.0, 0.0), (4, 0.5, 1.0, 0.25)],
    "clip 1": [(n, f1, 4.0, 0.0) for n, f1 in [(1, 1.0), (2, 0.5), (3, 0.0), (4, 1.0)]],
}
ITEMS = [item(label, *row) for label, rows in FIGURES.items() for row in rows]
SKIPPED = [SkippedRecord("line 3", "no answers")] + [
    SkippedRecord(f"question q{n}", f"the prompt has {n + 892} tokens, of 512") for n in (8, 9)
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
    sure = {"q1": (0.6, 1.0), "q2": (0.04, 0.0), "q3": (0.25, 1.0), "q4": (0.15, 0.0)}

    def told(one: ItemResult) -> ItemResult:
        confidence, same = sure[one.id]
        return replace(one, confidence=confidence, fidelity={"first_token_agreement": same, "equal_answer": same})

    items = [told(one) if one.label == "clip 0.2" else one for one in comparison.items]
    return replace(comparison, items=items)


@pytest.fixture
def mixed(comparison: Comparison) -> Comparison:
    """Of two tasks."""
    return replace(comparison, questions=[replace(q, task="far" if q.id < "q3" else "near<b>") for q in QUESTIONS])


def only(comparison: Comparison, *labels: str) -> Comparison:
    runs = [run for run in comparison.runs if run.label in labels]
    return replace(comparison, runs=runs, items=[one for one in comparison.items if one.label in labels])


class TestSummary:
    def test_means_are_over_the_runs_own_items(self, summary: dict[str, Any]) -> None:
        """With an interval beside every mean."""
        assert (summary["n"], summary["skipped"], summary["scores"]) == (5, 3, ["f1", "contains"])
        direct, clip = summary["methods"]["direct"], summary["methods"]["clip 0.2"]
        assert (direct["n"], direct["f1"], direct["contains"]) == (4, 0.5625, 0.25)
        assert (direct["kl_to_full"], direct["first_token_kl"]) == (0.25, 0.5)
        assert (direct["agreement_with_full"], direct["ttft_s"]) == (0.75, 1.5)
        assert direct["kl_interval"] == list(paired_bootstrap([0.5, 0.25, 0.0, 0.25]))
        assert direct["agreement_interval"] == list(paired_bootstrap([0.5, 0.75, 1.0, 0.75]))
        assert direct["first_token_kl_interval"] == list(paired_bootstrap([1.0, 0.5, 0.0, 0.5]))
        assert (clip["nominal_ratio"], clip["effective_ratio"], clip["charged_ratio"]) == (0.25, 0.25, 0.25)
        assert all(row["gate"] == [] for row in summary["methods"].values()) and gate_table(summary)[1] == []

    def test_figures_against_full_are_paired(self, summary: dict[str, Any]) -> None:
        direct, clip, full = (summary["methods"][label] for label in ("direct", "clip 0.2", "full"))
        assert direct["n_paired"] == 3
        assert direct["difference_to_full"]["f1"] == pytest.approx([-0.25 / 3, *paired_bootstrap([-0.5, 0.0, 0.25])])
        assert direct["speedup_vs_full"] == 4.0  # of 4, 2 and 8; the ratio of the medians is 2.7
        assert (clip["difference_to_full"]["f1"][0], clip["speedup_vs_full"]) == (-0.125, 2.0)
        assert (full["speedup_vs_full"], full["difference_to_full"], full["kl_to_full"]) == (1.0, {}, None)

    def test_gold_scores_are_judged_in_pairs(self) -> None:
        def row(lost: int, won: int, same: int) -> dict[str, Any]:
            """Of a method that loses and wins so many questions against full prefill."""
            pairs = {"full": (1.0, 0.0), "direct": (0.0, 1.0)}
            scores = {name: [a] * lost + [b] * won + [0.5] * same for name, (a, b) in pairs.items()}
            items = []
            for label, all_f1 in scores.items():
                for number, f1 in enumerate(all_f1):
                    items.append(replace(item(label, number, f1, 1.0), scores={"f1": f1}))
            questions = [Record(f"q{n}", "", "Who?", ("Ada",), (), {}) for n in range(lost + won + same)]
            runs = [Run("full", "full", None), Run("direct", "direct", None)]
            methods = summarise(Comparison("d", "p", None, runs, questions, items, {}, []))["methods"]
            assert (methods["full"]["no_worse"], methods["full"]["flips"]) == ({}, None)
            return dict(methods["direct"])

        few = row(lost=2, won=2, same=596)
        assert few["no_worse"] == {"f1": True} and few["flips"] == {"lost": 2, "won": 2, "p": 1.0}
        # the mean is 2 points below, the lower bound 6: not shown to be no worse
        more = row(lost=6, won=4, same=90)
        assert more["no_worse"] == {"f1": False} and more["difference_to_full"]["f1"][0] == pytest.approx(-0.02)
        assert row(lost=10, won=1, same=9)["flips"]["p"] == pytest.approx(24 / 2048)

    @pytest.mark.parametrize(
        ("scores", "right"),
        [
            ({"em": 1.0}, 1),
            ({"em": 0.0, "contains": 1.0}, 1),
            ({"string_match_all": 0.75}, 0),
            ({"f1": 0.5, "string_match_all": 1.0}, 1),
            ({"f1_zh": 1.0}, 1),
            ({"f1": 0.9, "f1_zh": 1.0}, 0),
        ],
    )
    def test_right_means_one_by_the_own_or_any_such_score(
        self, comparison: Comparison, scores: dict[str, float], right: int
    ) -> None:
        wrong = replace(ITEMS[4], scores=dict.fromkeys(scores, 0.0))
        pair = replace(only(comparison, "full", "direct"), items=[replace(ITEMS[0], scores=scores), wrong])
        assert summarise(pair)["methods"]["direct"]["flips"]["lost"] == right

    def test_all_ratios(self, comparison: Comparison) -> None:
        items = [replace(one, nominal_ratio=0.2, charged_ratio=0.5) for one in ITEMS]
        row = summarise(replace(comparison, items=items))["methods"]["clip 0.2"]
        assert [row[name] for name in ("nominal_ratio", "effective_ratio", "charged_ratio")] == [0.2, 0.25, 0.5]

    def test_without_full_or_items_there_is_nothing_to_hold_against(self, comparison: Comparison) -> None:
        row = summarise(only(comparison, "direct"))["methods"]["direct"]
        assert (row["difference_to_full"], row["speedup_vs_full"], row["flips"]) == ({}, None, None)
        assert row["n_paired"] == 0
        row = summarise(replace(comparison, items=ITEMS[:4]))["methods"]["direct"]
        assert row["n"] == 0 and row["ttft_s"] is row["f1"] is None

    def test_a_figure_that_is_no_number_is_refused(self, comparison: Comparison) -> None:
        """Leaving it out would flatter the method."""
        items = [*ITEMS[:4], replace(ITEMS[4], fidelity={"answer_kl": float("nan")}), *ITEMS[5:]]
        with pytest.raises(ConfigurationError, match="expected finite numbers, got nan"):
            summarise(replace(comparison, items=items))


class TestTasks:
    def test_figures_of_a_task_are_those_of_its_questions(self, mixed: Comparison) -> None:
        tasks = summarise(mixed)["tasks"]
        assert {name: found["n"] for name, found in tasks.items()} == {"far": 2, "near<b>": 3}
        alone = replace(mixed, questions=mixed.questions[:2], items=[i for i in ITEMS if i.id in ("q1", "q2")])
        assert tasks["far"]["methods"] == summarise(alone)["methods"]

    def test_one_task_is_no_breakdown(self, summary: dict[str, Any]) -> None:
        assert summary["tasks"] == {} and len(console_tables(summary)) == 1

    def test_every_own_metric_has_figures_and_columns(self, mixed: Comparison) -> None:
        """Two questions are scored by another metric than the rest, and lost by it."""
        items = [replace(one, scores={"f1_zh": one.scores["f1"]}) if one.id in ("q1", "q2") else one for one in ITEMS]
        several = replace(mixed, items=items)
        summary = summarise(several)
        assert summary["own_scores"] == ["f1_zh", "f1"]
        titles = {column.title for column in table(summary)[0]}
        assert {"F1", "F1 / full", "F1 (zh)", "F1 (zh) / full", "Contains"} <= titles
        assert "Contains / full" not in titles
        assert [column.title for column in table(summary, "far", brief=True)[0]].count("F1") == 0
        text = to_html(several, summary)
        assert order(text) == (["q1", "q4"], ["q2", "q3", "q5"])
        assert "<span>q1</span><span>F1 (zh) 0.50 to 1.00</span>" in text
        assert "<span>q4</span><span>F1 0.50 to 1.00</span>" in text


class TestFiles:
    def test_skipped_records_are_counted_by_reason_and_the_first_told(self, comparison: Comparison) -> None:
        def told(skipped: list[SkippedRecord]) -> tuple[Any, ...]:
            summary = summarise(replace(comparison, skipped=skipped))
            return summary["skipped"], summary["skipped_by_reason"], summary["skipped_first"]

        count, by_reason, first = told(SKIPPED)
        assert by_reason == {"the prompt has N tokens, of N": 2, "no answers": 1} and count == 3
        assert first[0] == {"where": "line 3", "reason": "no answers"}
        many = told([SkippedRecord(f"line {n}", "no answers") for n in range(1, 101)])
        assert (*many[:2], len(many[2])) == (100, {"no answers": 100}, 5)
        assert told([]) == (0, {}, [])

    def test_writes_both_over_an_earlier_report(self, comparison: Comparison, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "report"
        write_report(comparison, summarise(only(comparison, "full")), folder)
        (folder / "notes.txt").write_text("mine")
        written = write_report(comparison, summarise(comparison), folder)
        assert written == {kind: folder / name for kind, name in FILES.items()}
        assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES.values(), "notes.txt"])
        assert json.loads(written["summary"].read_text(encoding="utf-8")) == summarise(comparison)
        assert written["html"].read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


class TestTables:
    def test_cells(self, summary: dict[str, Any]) -> None:
        columns, cells = table(summary)
        titles = [column.title for column in columns]

        def shown(label: str, title: str) -> str:
            cell = cells[label][titles.index(title)]
            return f"{cell.text} {cell.interval}".rstrip()

        assert list(cells) == ["full", "direct", "clip 0.2", "clip 1"]
        assert [shown(label, "F1") for label in cells] == ["0.625", "0.562", "0.500", "0.625"]
        assert [shown(label, "TTFT (s)") for label in cells] == ["4.000", "1.500", "2.000", "4.000"]
        assert [shown(label, "Speed-up") for label in cells] == ["1.00x", "4.00x", "2.00x", "1.00x"]
        assert [shown(label, "Ratio") for label in cells] == ["-", "0", "0.2", "1"]
        assert shown("clip 0.2", "KL to full") == "0.125 [0.00, 0.250]" and shown("full", "KL to full") == "-"
        assert shown("clip 1", "F1 - full") == "+0.000 [+0.000, +0.000]"
        assert shown("clip 0.2", "F1 / full") == "80.0%", "no interval: some draws are of question 3 only"
        assert shown("clip 0.2", "Agreement") == "0.875 [0.750, 1.000]"

    def test_console(self, unsure: Comparison, mixed: Comparison) -> None:
        tables = console_tables(summarise(replace(unsure, questions=mixed.questions)))
        first, far, near, gate, _ = tables
        assert first == "lamps. Primary tiny-primary, auxiliary tiny-auxiliary. 5 questions, 3 skipped."
        assert (far, near, gate) == ("far: 2 questions", "near<b>: 3 questions", "With a confidence gate")
        titles, rows = tables[first]
        assert titles[:4] == ["Method", "n", "TTFT (s)", "Speed-up"]
        assert [row[0] for row in rows][1:3] == ["direct", "clip 0.2"]
        assert all(len(row) == len(titles) for titles, rows in tables.values() for row in rows)
        assert "50.0% [0.0%, 100.0%]" in rows[2], "equal answers with their interval"

    def test_notes(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        assert [note.partition(".")[0] for note in notes(summary)] == ["Not every method answered the same questions"]
        assert notes(summarise(only(comparison, "full", "clip 0.2"))) == []
        learning = replace(comparison, runs=[RUNS[0], replace(RUNS[1], learns=True), *RUNS[2:]])
        assert notes(summarise(learning))[0].startswith("direct: measured after one earlier prompt")


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


def order(text: str) -> tuple[list[str], list[str]]:
    """Questions that a method loses, and the others."""
    lost, _, others = text.rpartition("<h2>Other answers</h2>")
    return tuple(re.findall(r'class="item"><summary><span>(\w+)</span>', part) for part in (lost, others))  # type: ignore[return-value]


class TestPage:
    def test_holds_tables_and_answers(self, unsure: Comparison, mixed: Comparison) -> None:
        comparison = replace(unsure, questions=mixed.questions)
        text = to_html(comparison, summarise(comparison))
        page = Page(text)
        assert page.count("details", **{"class": "item"}) == 5
        # all questions, gates and promises, tasks, and each question's answers
        assert page.count("table") == 1 + 2 + 2 + 5
        assert page.count("td", **{"class": "text"}) == len(ITEMS)
        assert "<h2>far: 2 questions</h2>" in text and "<h2>near&lt;b&gt;: 3 questions</h2>" in text
        assert "<dt>Speed-up</dt>" in text and "Not every method answered the same questions" in text
        assert "<summary>3 skipped, and why</summary>" in text and "<li>2: the prompt has N tokens, of N</li>" in text
        # direct is worse on question 1, clip 0.2 on question 4
        assert order(text) == (["q1", "q4"], ["q2", "q3", "q5"])

    def test_needs_nothing_from_elsewhere(self, comparison: Comparison, summary: dict[str, Any]) -> None:
        text = to_html(comparison, summary)
        tags = Page(text).tags
        assert not [found for _, found in tags if {"src", "href", "srcset"} & found.keys()]
        assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
        policy = next(found["content"] for tag, found in tags if tag == "meta" and "content" in found)
        assert policy is not None and policy.startswith("default-src 'none'") and "script" not in policy

    def test_escapes_everything(self) -> None:
        bad = '<script>alert("1")</script><img src=x onerror=y>'
        own = replace(ITEMS[4], label=bad, answer=bad, scores={bad: 0.5}, confidence=0.5)
        runs, items = [RUNS[0], Run(bad, bad, 0.5)], [replace(ITEMS[0], scores={bad: 1.0}), own]
        questions = [Record("q1", bad, bad, (bad,), (), {})]
        hostile = Comparison(bad, bad, bad, runs, questions, items, {bad: bad}, [SkippedRecord(bad, bad)])
        text = to_html(hostile, summarise(hostile))
        page = Page(text)
        assert (page.count("script"), page.count("img")) == (0, 0)
        assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;" in text and bad not in text
        assert bad in page.text["td"]
