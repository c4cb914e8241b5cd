"""A comparison as one self-contained HTML page: no network, no scripts, no external fonts.

Text from models and datasets is escaped, and the page's content security policy allows no script.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from html import escape
from typing import TYPE_CHECKING, Any

from cacheclip_rag.adapters import html_table, whole_page

from .records import Record
from .tables import (
    Cell,
    Column,
    Rows,
    first_skipped,
    gate_table,
    headline,
    notes,
    promise_table,
    score_title,
    table,
    task_title,
)

if TYPE_CHECKING:
    from .results import Comparison, ItemResult

_STYLE = """
tbody th { white-space: nowrap; font-weight: 600; }
td.text { min-width: 16rem; width: 100%; } .item td.text { white-space: pre-wrap; }
small { display: block; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; color: var(--faint); }
dt { color: var(--ink); } dd { margin: 0; }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; }
summary span { color: var(--faint); margin-right: .6rem; }
"""


def to_html(comparison: Comparison, summary: dict[str, Any]) -> str:
    """The whole page: tables, and all answers to each question. ``summary`` is what
    :func:`~cacheclip_lab.evaluation.report.summarise` makes of ``comparison``."""
    return report_page(
        f"Comparison on {summary['dataset']}",
        f"<p>{escape(headline(summary))}</p>",
        _summary_table(summary),
        _gate(summary),
        _tasks(summary),
        _skipped(summary),
        _settings(summary["settings"]),
        _items(comparison, summary),
    )


def report_page(title: str, *parts: str) -> str:
    """A page of these parts of HTML."""
    return whole_page(title, *parts, style=_STYLE)


def _summary_table(summary: dict[str, Any]) -> str:
    columns, cells = table(summary)
    legend = "".join(f"<dt>{escape(c.title)}</dt><dd>{escape(c.meaning)}</dd>" for c in columns)
    return "\n".join(
        [
            _table(columns, cells),
            *(f"<p>{escape(note)}</p>" for note in notes(summary)),
            f"<details><summary>What the columns mean</summary><dl>{legend}</dl></details>",
        ]
    )


def _table(columns: list[Column], cells: dict[str, list[Cell]]) -> str:
    rows = [(escape(label), *map(_cell, row)) for label, row in cells.items()]
    return html_table(["Method", *(column.title for column in columns)], rows)


def _cell(cell: Cell) -> str:
    interval = f"<small>{escape(cell.interval)}</small>" if cell.interval else ""
    return f"{escape(cell.text)}{interval}"


def _gate(summary: dict[str, Any]) -> str:
    return text_table(
        "With a confidence gate",
        "Prompts whose first token is less sure than <code>min_confidence</code> are prefilled in full after all, and "
        "cost both. If a later token is, the exact KV is completed before it: a full prefill's cost, after the first "
        "token.",
        gate_table(summary),
    ) + text_table(
        "Guaranteed",
        "The cheapest ratio and gate of which these questions show, with 95 % confidence, that no more answers go "
        "wrong over questions like these (learn then test, exact binomial tests).",
        promise_table(summary),
    )


def text_table(title: str, says: str, table: Rows, texts: Collection[str] = ()) -> str:
    """A heading, HTML under it, and a table, in which columns with a title in ``texts`` are no figures; empty without
    rows."""
    titles, rows = table
    if not rows:
        return ""
    shown = html_table(titles, [[*map(escape, row)] for row in rows], texts)
    return f"<h2>{title}</h2>\n{f'<p>{says}</p>' * bool(says)}\n{shown}"


def _tasks(summary: dict[str, Any]) -> str:
    return "\n".join(
        f"<h2>{escape(task_title(summary, task))}</h2>\n{_table(*table(summary, task, brief=True))}"
        for task in summary["tasks"]
    )


def _skipped(summary: dict[str, Any]) -> str:
    if not summary["skipped"]:
        return ""
    counts = "".join(f"<li>{count}: {escape(reason)}</li>" for reason, count in summary["skipped_by_reason"].items())
    first = "".join(f"<li>{escape(line)}</li>" for line in first_skipped(summary))
    return (
        f"<details><summary>{summary['skipped']} skipped, and why</summary>"
        f"<ul>{counts}</ul><p>The first of them:</p><ul>{first}</ul></details>"
    )


def _settings(settings: dict[str, Any]) -> str:
    dumped = escape(json.dumps(settings, indent=2, ensure_ascii=False))
    return f"<details><summary>Settings</summary><pre>{dumped}</pre></details>"


def _items(comparison: Comparison, summary: dict[str, Any]) -> str:
    answered: dict[str, dict[str, ItemResult]] = {record.id: {} for record in comparison.questions}
    for item in comparison.items:
        answered[item.id][item.label] = item
    full = next((run.label for run in comparison.runs if run.method == "full"), None)
    order = [run.label for run in comparison.runs]
    items: dict[bool, list[str]] = {True: [], False: []}
    for record in comparison.questions:
        if found := answered[record.id]:
            results = [found[label] for label in order if label in found]
            lost, answers = _item(record, results, found.get(full or ""), summary["scores"])
            items[lost].append(answers)
    titles = {True: "Answers of which a method's scores below full prefill's", False: "Other answers"}
    return "\n".join(f"<h2>{titles[lost]}</h2>\n" + "\n".join(each) for lost, each in items.items() if each)


def _item(record: Record, results: list[ItemResult], full: ItemResult | None, scores: list[str]) -> tuple[bool, str]:
    """Whether a method scores below full prefill, and all answers to the question."""
    main = (full or results[0]).own or ""
    found = [result.scores[main] for result in results if main in result.scores]
    extent = f"<span>{escape(score_title(main))} {min(found):.2f} to {max(found):.2f}</span>" if found else ""
    columns = [name for name in scores if any(name in result.scores for result in results)]
    titles = ["Method", "Answer", *map(score_title, columns), "KL", "Effective ratio", "TTFT (s)"]
    return bool(full and main in full.scores and min(found) < full.scores[main]), (
        f'<details class="item"><summary><span>{escape(record.id)}</span>{extent}'
        f"<bdi>{escape(record.question)}</bdi></summary>\n<p>Right: <bdi>{escape(' | '.join(record.answers))}</bdi>"
        f"</p>\n{html_table(titles, [_answer(result, columns) for result in results], {'Answer'})}</details>"
    )


def _answer(result: ItemResult, columns: list[str]) -> list[str]:
    figures = [f"{result.scores[name]:.2f}" if name in result.scores else "-" for name in columns]
    figures.append(f"{result.fidelity['answer_kl']:#.3g}" if "answer_kl" in result.fidelity else "-")
    figures += [f"{result.effective_ratio:.3f}", f"{result.ttft_s:.3f}"]
    return [escape(result.label), escape(result.answer), *figures]
