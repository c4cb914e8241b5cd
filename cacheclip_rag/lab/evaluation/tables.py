"""The table of a comparison: its columns, their meanings, and the best value of each column."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = [
    "Cell",
    "Column",
    "first_skipped",
    "headline",
    "notes",
    "number_text",
    "score_title",
    "table",
    "task_title",
    "to_markdown",
]

Better = Literal["high", "low"]

_SCORES = {
    "f1": ("F1", "bag-of-words F1 with the nearest right answer"),
    "f1_zh": ("F1 (zh)", "F1 over Chinese words"),
    "em": ("EM", "share of answers equal to a right one, normalised"),
    "contains": ("Contains", "share of answers that hold a right one as whole words"),
    "rouge_l": ("ROUGE-L", "ROUGE-L F with the nearest right answer"),
    "string_match_all": ("String match", "share of the right strings that occur in the answer"),
}
_SAME = ("equal_answers", "first_token_agreement")
_DIFFERENCE = "mean difference to full over the questions that both answered (with its 95 % interval)"


@dataclass(frozen=True, slots=True)
class Column:
    """One figure per run."""

    title: str
    meaning: str
    value: Callable[[dict[str, Any]], float | None]
    """Reads the figure from a run's row of the summary."""
    show: Callable[[float], str]
    better: Better | None = None
    interval: Callable[[dict[str, Any]], Sequence[float] | None] | None = None
    count: Callable[[dict[str, Any]], int] | None = None
    """Number of questions of the figure, if it may be smaller than the row's."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    """The figure, or ``-``."""
    note: str = ""
    """A 95 % interval in brackets, and the number of questions if it differs from the row's."""
    best: bool = False
    """Whether no run except full prefill has a better figure, to the digits shown."""


def table(summary: dict[str, Any], task: str | None = None) -> tuple[list[Column], dict[str, list[Cell]]]:
    """Columns with at least one figure, and each run's cells. For one task, fewer columns."""
    if task is not None:
        summary = {**summary, **summary["tasks"][task]}
    rows: dict[str, dict[str, Any]] = summary["methods"]
    columns = [
        c
        for c in (_columns if task is None else _task_columns)(summary)
        if any(c.value(row) is not None for row in rows.values())
    ]
    cells: dict[str, list[Cell]] = {label: [] for label in rows}
    for column in columns:
        best = _best(column, rows)
        for label, row in rows.items():
            value = column.value(row)
            text = "-" if value is None else column.show(value)
            bounds = column.interval(row) if column.interval else None
            note = f"[{', '.join(column.show(bound) for bound in bounds if bound is not None)}]" if bounds else ""
            notes = ["" if note == "[]" else note]
            if column.count and value is not None and column.count(row) != row["n"]:
                notes.append(f"(n {column.count(row)})")
            cells[label].append(Cell(text, " ".join(filter(None, notes)), row["method"] != "full" and text == best))
    return columns, cells


def to_markdown(summary: dict[str, Any]) -> str:
    """A heading, one table with the best figure of each column in bold, and the columns' meanings."""
    columns, cells = table(summary)
    lines = [f"# {_plain(summary['dataset'])}", "", _plain(headline(summary)), "", *_markdown_table(columns, cells)]
    lines += ["", *(f"- **{_plain(column.title)}**: {_plain(column.meaning)}." for column in columns)]
    for note in notes(summary):
        lines += ["", _plain(note)]
    lines += _gate_lines(summary)
    for task in summary["tasks"]:
        lines += ["", f"## {_plain(task_title(summary, task))}", "", *_markdown_table(*table(summary, task))]
    if summary["skipped"]:
        counts = (f"- {count}: {_plain(reason)}" for reason, count in summary["skipped_by_reason"].items())
        lines += ["", f"{summary['skipped']} skipped, by reason:", "", *counts]
        lines += ["", "The first of them:", "", *(f"- {_plain(line)}" for line in first_skipped(summary))]
    if summary["settings"]:
        dumped = json.dumps(summary["settings"], indent=2, ensure_ascii=False)
        lines += ["", "Settings:", "", *(f"    {line}" for line in dumped.splitlines())]
    return "\n".join(lines) + "\n"


def _markdown_table(columns: list[Column], cells: dict[str, list[Cell]]) -> list[str]:
    titles = ["Method", *(_plain(column.title) for column in columns)]
    return _markdown_rows(titles, [[_plain(label), *map(_markdown_cell, row)] for label, row in cells.items()])


def _markdown_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose first column is aligned to the left."""
    head = ["| " + " | ".join(titles) + " |", "|:--" + "|--:" * (len(titles) - 1) + "|"]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows)]


def _gate_lines(summary: dict[str, Any]) -> list[str]:
    """A table of what a confidence gate would have given, for each method that a gate would look at."""
    own: list[str] = summary["own_scores"]
    titles = ["Method", "min_confidence", "Full prefills", "Completed later", "Mean TTFT (s)", "Full's mean over it"]
    titles += ["Equal answers", "Equal first token", *(f"{score_title(name)} / full" for name in own)]
    lines = []
    for label, row in summary["methods"].items():
        for each in row["gate"]:
            shares = [each["share_of_full"].get(name) for name in own]
            cells = [
                _plain(label),
                number_text(each["min_confidence"]),
                f"{each['full_prefills']:.0%}",
                f"{each['completed_later']:.0%}",
                f"{each['mean_ttft_s']:.3f}",
                _shown(each["speedup_of_means"], "{:.2f}x"),
                *(_with_interval([each[name], *(each[f"{name}_interval"] or ())]) for name in _SAME),
                *map(_with_interval, shares),
            ]
            lines.append(cells)
    if not lines:
        return []
    heading = [
        "",
        "## With a confidence gate",
        "",
        "Prompts whose first token is less sure than `min_confidence` are prefilled in full after all, and cost both. "
        "If a later token is, the exact KV is completed before it: a full prefill's cost, after the first token.",
        "",
    ]
    return [*heading, *_markdown_rows(titles, lines)]


def _with_interval(share: Sequence[float | None] | None) -> str:
    """A mean with the bounds of its interval, as far as known."""
    mean, *bounds = share or [None]
    if mean is None:
        return "-"
    inside = ", ".join(f"{bound:.1%}" for bound in bounds if bound is not None)
    return f"{mean:.1%}" + (f" [{inside}]" if inside else "")


def _shown(value: float | None, shown: str) -> str:
    return "-" if value is None else shown.format(value)


def task_title(summary: dict[str, Any], task: str) -> str:
    """A task's name and its number of questions."""
    return f"{task or 'no task'}: {summary['tasks'][task]['n']} questions"


def headline(summary: dict[str, Any]) -> str:
    """Models and numbers of questions, in one line."""
    auxiliary = f", auxiliary {summary['auxiliary']}" if summary["auxiliary"] else ""
    skipped = f", {summary['skipped']} skipped" if summary["skipped"] else ""
    return f"Primary {summary['primary']}{auxiliary}. {summary['n']} questions{skipped}."


def notes(summary: dict[str, Any]) -> list[str]:
    """Notes on how the runs were measured."""
    found = []
    learning = [label for label, row in summary["methods"].items() if row["learns"]]
    if learning:
        found.append(
            f"{', '.join(learning)}: measured after one earlier prompt, the same question with its chunks in reverse "
            "order, whose cost is not counted; all others are measured without any."
        )
    machines = {where or "what was not recorded": labels for where, labels in summary["measured_on"].items()}
    if len(machines) > 1:
        (first, _), *others = machines.items()
        later = "; ".join(f"{', '.join(labels)} (also) on {where}" for where, labels in others)
        found.append(
            f"Times were measured on different machines: the first ones on {first}, those of {later}. TTFT and "
            "speed-up of these methods cannot be compared with the others'."
        )
    elif any(summary["measured_on"]):
        found.append(f"Measured on {next(iter(machines))}. Chunk caches are read from memory.")
    if _num_right(summary) == 0:
        found.append(
            "Full prefill answers no question rightly (own metric at 1.0, or, where any right answer counts, an answer "
            "that equals or contains one), so there are no figures for rightly answered questions."
        )
    if _has_gaps(summary) or len({row["n"] for row in summary["methods"].values()}) > 1:
        found.append(
            "Not every method answered the same questions. Means are over the n of each row and cannot be compared; "
            "differences to full and speed-ups are over the questions that both answered."
        )
    return found


def first_skipped(summary: dict[str, Any]) -> list[str]:
    """The first skipped records, each with its reason in one line."""
    return [f"{one['where']}: {one['reason']}" for one in summary["skipped_first"]]


def number_text(value: float) -> str:
    """The shortest exact text of a number: ``0.2``, ``1``."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def score_title(name: str) -> str:
    """A metric's name for people."""
    return _SCORES.get(name, (name, ""))[0]


def _num_right(summary: dict[str, Any]) -> int | None:
    """Number of questions that full answers rightly; None without answers of full."""
    full = [row for row in summary["methods"].values() if row["method"] == "full" and row["n"]]
    return full[0]["answerable"]["n"] if full and summary["scores"] else None


def _has_gaps(summary: dict[str, Any]) -> bool:
    rows = summary["methods"].values()
    return any(row["method"] == "full" for row in rows) and any(row["n"] != row["n_paired"] for row in rows)


def _columns(summary: dict[str, Any]) -> list[Column]:
    scores: list[str] = summary["scores"]
    return [
        Column("Ratio", "nominal recompute ratio", lambda row: row["ratio"], number_text),
        _figure("n", "n", "questions answered", "{}"),
        *([_figure("n_paired", "Paired", "of them also by full", "{}")] if _has_gaps(summary) else []),
        _figure("answered_plainly", "Plain", "of them answered by plain prefill instead: the method did not fit", "{}"),
        _figure("ttft_s", "TTFT (s)", "time to the first token, median over questions", "{:.3f}", "low"),
        _figure("speedup_vs_full", "Speed-up", "full's TTFT over this one's, median over questions", "{:.2f}x", "high"),
        *(_score(name, summary) for name in scores),
        *(column for score in summary["own_scores"] for column in _against_full(score, summary)),
        *_same_answers(summary),
        *_divergence(summary),
        _figure("kl_to_full_median", "KL median", "the same, median over questions", "{:#.3g}", "low"),
        _figure("kl_to_full_trimmed", "KL trimmed", "the same, mean without a tenth at each end", "{:#.3g}", "low"),
        _figure(
            "first_token_kl",
            "First-token KL",
            "divergence at the answer's first token, nats",
            "{:#.3g}",
            "low",
            "first_token_kl_interval",
        ),
        _figure("first_token_kl_median", "First-token KL median", "the same, median", "{:#.3g}", "low"),
        _figure("first_token_kl_trimmed", "First-token KL trimmed", "the same, trimmed mean", "{:#.3g}", "low"),
        _agreement(),
        *_where_right(
            summary,
            ("kl_to_full", "KL", "{:#.3g}", "low"),
            ("agreement_with_full", "Agreement", "{:.3f}", "high"),
        ),
        _figure(
            "gold_logprob", "Gold log-prob", "mean log-probability of a right answer's tokens, nats", "{:.3f}", "high"
        ),
        _estimate(
            "Gold log-prob - full",
            _DIFFERENCE,
            lambda row: row["gold_logprob_difference"],
            "{:+.3f}",
            "high",
        ),
        _figure("effective_ratio", "Effective ratio", "recomputed over chunk tokens", "{:.3f}"),
        _figure("effective_ratio_of_stale", "Ratio of stale", "the same without the tokens that are exact", "{:.3f}"),
        _figure("charged_ratio", "Charged ratio", "share of (layer, chunk token) pairs given fresh KV", "{:.3f}"),
    ]


def _task_columns(summary: dict[str, Any]) -> list[Column]:
    own: list[str] = summary["own_scores"]
    return [
        _figure("n", "n", "questions answered", "{}"),
        *(_score(name, summary) for name in own),
        *(column for score in own for column in _against_full(score, summary)),
        *_same_answers(summary),
        *_divergence(summary),
        _agreement(),
    ]


def _same_answers(summary: dict[str, Any]) -> list[Column]:
    return [
        _figure(
            "equal_answers",
            "Equal answers",
            "share of answers that equal full's, character by character (with its 95 % interval)",
            "{:.1%}",
            "high",
            "equal_answers_interval",
        ),
        _figure(
            "first_token_agreement",
            "Equal first token",
            "share of answers whose first token is full's (with its 95 % interval)",
            "{:.1%}",
            "high",
            "first_token_agreement_interval",
        ),
        *_where_right(
            summary,
            ("equal_answers", "Equal answers", "{:.1%}", "high"),
            ("first_token_agreement", "Equal first token", "{:.1%}", "high"),
        ),
    ]


def _divergence(summary: dict[str, Any]) -> list[Column]:
    return [
        _figure(
            "kl_to_full",
            "KL to full",
            "divergence from full prefill along its answer, nats a token, mean over questions (with its 95 % interval)",
            "{:#.3g}",
            "low",
            "kl_interval",
        ),
        _estimate(
            f"KL / {summary['against']}",
            f"mean KL over that of {summary['against']}, on the questions that both answered (with its 95 % interval)",
            lambda row: row["kl_ratio"],
            "{:.3f}x",
            "low",
        ),
    ]


def _agreement() -> Column:
    meaning = "share of full's greedy tokens also chosen here (with its 95 % interval)"
    return _figure("agreement_with_full", "Agreement", meaning, "{:.3f}", "high", "agreement_interval")


def _figure(
    key: str, title: str, meaning: str, shown: str, better: Better | None = None, interval: str | None = None
) -> Column:
    bounds = (lambda row: row[interval]) if interval else None
    return Column(title, meaning, lambda row: row[key], shown.format, better, bounds)


def _score(name: str, summary: dict[str, Any]) -> Column:
    title, meaning = _SCORES.get(name, (name, "mean of this score"))
    if any(row["n_of_scores"][name] != row["n"] for row in summary["methods"].values()):
        meaning += " (over the n questions that are scored so)"
    column = _figure(name, title, meaning, "{:.3f}", "high")
    return replace(column, count=lambda row: row["n_of_scores"][name])


def _estimate(
    title: str,
    meaning: str,
    value: Callable[[dict[str, Any]], Sequence[float] | None],
    shown: str,
    better: Better,
) -> Column:
    """Column of a figure with its interval."""
    return Column(
        title,
        meaning,
        lambda row: next(iter(value(row) or ()), None),
        shown.format,
        better,
        lambda row: (value(row) or ())[1:],
    )


def _against_full(score: str, summary: dict[str, Any]) -> list[Column]:
    title = score_title(score)
    return [
        _estimate(
            f"{title} - full",
            _DIFFERENCE,
            lambda row: row["difference_to_full"].get(score),
            "{:+.3f}",
            "high",
        ),
        _estimate(
            f"{title} / full",
            "mean over full's, in percent, over the questions that both answered (with its 95 % interval)",
            lambda row: row["share_of_full"].get(score),
            "{:.1%}",
            "high",
        ),
        *_where_right(summary, (score, title, "{:.3f}", "high")),
    ]


def _where_right(summary: dict[str, Any], *figures: tuple[str, str, str, Better]) -> list[Column]:
    """Columns of figures (key, title, format, direction) over the questions that full prefill answers rightly."""

    def column(key: str, title: str, shown: str, better: Better) -> Column:
        rows = [row for row in summary["methods"].values() if row["answerable"]]
        count = max((row["answerable_n_of_scores"].get(key, row["answerable"]["n"]) for row in rows), default=0)
        return Column(
            f"{title} where full is right",
            f"over the {count} questions where full's own score is 1.0, or, where any right answer counts, its answer "
            "equals or contains one",
            lambda row: row["answerable"].get(key) if row["answerable"] else None,
            shown.format,
            better,
            lambda row: row["answerable_intervals"].get(key),
        )

    return [column(*figure) for figure in figures]


def _best(column: Column, rows: dict[str, dict[str, Any]]) -> str | None:
    """The best figure as shown, among the runs other than full; None without a competitor."""
    values = [column.value(row) for row in rows.values() if row["method"] != "full"]
    found = [value for value in values if value is not None]
    if column.better is None or len(found) < 2:
        return None
    return column.show(max(found) if column.better == "high" else min(found))


def _markdown_cell(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.best else cell.text
    return f"{text} {cell.note}".rstrip()


def _plain(text: str) -> str:
    """Escape a user's text, so that it cannot end a table cell or begin markup."""
    return re.sub(r"([\\|*`<\[\]])", r"\\\1", " ".join(text.split()))
