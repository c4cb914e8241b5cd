"""The tables of a comparison: columns with their meanings, and what a gate would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .statistics import MARGIN

Rows = tuple[list[str], list[list[str]]]
"""The titles of a table's columns, and its rows."""

_SCORES = {
    "f1": ("F1", "bag-of-words F1 with the nearest right answer"),
    "f1_zh": ("F1 (zh)", "F1 over Chinese words"),
    "em": ("EM", "share of answers equal to a right one, normalised"),
    "contains": ("Contains", "share of answers that hold a right one as whole words"),
    "string_match_all": ("String match", "share of the right strings that occur in the answer"),
}
_SAME = ("equal_answers", "first_token_agreement")
_PAIRED = "over the questions that both answered"


@dataclass(frozen=True, slots=True)
class Column:
    """One figure per run."""

    title: str
    meaning: str
    figure: Callable[[dict[str, Any]], Sequence[Any]]
    """Reads the figure (a number or a word) and, if it has one, its 95 % interval from a run's row of the summary."""
    shown: str
    """Format of the figure and of its interval."""
    brief: bool = False
    """Whether the console and the tables of tasks show it."""

    def value(self, row: dict[str, Any]) -> Any:
        """The figure alone."""
        return self.figure(row)[0]


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one run, as text."""

    text: str
    """The figure, or ``-``."""
    interval: str = ""
    """In brackets; empty without one."""


def table(
    summary: dict[str, Any], task: str | None = None, *, brief: bool = False
) -> tuple[list[Column], dict[str, list[Cell]]]:
    """Columns with at least one figure, and each run's cells, of all questions or of those of one task."""
    if task is not None:
        summary = {**summary, **summary["tasks"][task]}
    rows: dict[str, dict[str, Any]] = summary["methods"]
    columns = [
        column
        for column in _columns(summary)
        if (column.brief or not brief) and any(column.value(row) is not None for row in rows.values())
    ]
    return columns, {label: [_cell(column, row) for column in columns] for label, row in rows.items()}


def console_tables(summary: dict[str, Any]) -> dict[str, Rows]:
    """The brief tables, by title: of all questions, of each task, and of gates."""
    tables = {f"{summary['dataset']}. {headline(summary)}": _as_text(*table(summary, brief=True))}
    tables |= {task_title(summary, task): _as_text(*table(summary, task, brief=True)) for task in summary["tasks"]}
    gate = gate_table(summary)
    tables |= {"With a confidence gate": gate} if gate[1] else {}
    promised = promise_table(summary)
    return tables | ({"Guaranteed with 95 % confidence, for questions like these": promised} if promised[1] else {})


def gate_table(summary: dict[str, Any]) -> Rows:
    """What a confidence gate would have given, for each method that a gate would look at."""
    own: list[str] = summary["own_scores"]
    titles = ["Method", "min_confidence", "Full prefills", "Completed later", "Mean TTFT (s)", "Full's mean over it"]
    titles += ["Equal answers", "Equal first token", *(f"{score_title(name)} / full" for name in own)]
    rows = [
        [
            label,
            number_text(each["min_confidence"]),
            f"{each['full_prefills']:.0%}",
            f"{each['completed_later']:.0%}",
            f"{each['mean_ttft_s']:.3f}",
            "-" if each["speedup_of_means"] is None else f"{each['speedup_of_means']:.2f}x",
            *(_share([each[name], *(each[f"{name}_interval"] or ())]) for name in _SAME),
            *(_share(each["share_of_full"].get(name)) for name in own),
        ]
        for label, row in summary["methods"].items()
        for each in row["gate"]
    ]
    return titles, rows


def promise_table(summary: dict[str, Any]) -> Rows:
    """The cheapest gate that guarantees that few answers go wrong."""
    meanings = {"differs": "differ from full's", "loses": "score lower than full's"}
    titles = ["Method", "At most", "Run", "min_confidence", "Of these questions", "Cost / full's", "Mean TTFT (s)"]
    rows = []
    for each in summary["promises"]:
        promised = f"{each['at_most']:.0%} {meanings[each['risk']]}"
        gate = each["gate"]
        figures = ["-", "-", "nothing cheaper than full prefill", *"--"]
        if gate:
            seen = f"{gate['wrong']} of {gate['n']}"
            figures = [gate["label"], number_text(gate["min_confidence"]), seen]
            figures += [f"{gate['cost']:.2f}", f"{gate['seconds']:.3f}"]
        rows.append([each["method"], promised, *figures])
    return titles, rows


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
    rows = summary["methods"]
    learning = [label for label, row in rows.items() if row["learns"]]
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
    full = next((row for row in rows.values() if row["method"] == "full" and row["n"]), None)
    if len({row["n"] for row in rows.values()}) > 1 or (full and any(r["n"] != r["n_paired"] for r in rows.values())):
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


def _columns(summary: dict[str, Any]) -> list[Column]:
    own = summary["own_scores"]
    where = "mean over questions"
    return [
        Column("Ratio", "nominal recompute ratio", _read("ratio"), "{:g}"),
        Column("n", "questions answered", _read("n"), "{}", brief=True),
        Column("Plain", "of them answered by plain prefill: the method did not fit", _read("answered_plainly"), "{}"),
        Column("TTFT (s)", "time to the first token, median over questions", _read("ttft_s"), "{:.3f}", True),
        Column("Speed-up", "full's TTFT over this one's, median", _read("speedup_vs_full"), "{:.2f}x", True),
        *(column for name in own for column in _own_score(name)),
        Column("Lost", "full is right and this is wrong, questions", _read("flips", "lost"), "{}", True),
        Column("Won", "the other way round", _read("flips", "won"), "{}", True),
        Column("p", "McNemar's: that chance alone splits lost and won so unevenly", _read("flips", "p"), "{:.2g}"),
        *(column for name in summary["scores"] if name not in own for column in (_score(name), _difference(name))),
        Column("Equal answers", f"share that equal full's, {where}", _read("equal_answers"), "{:.1%}", True),
        Column("Equal first token", "the same of first tokens", _read("first_token_agreement"), "{:.1%}", True),
        Column("KL to full", f"along full's answer, nats a token, {where}", _read("kl_to_full"), "{:#.3g}", True),
        Column("First-token KL", f"at the answer's first token, nats, {where}", _read("first_token_kl"), "{:#.3g}"),
        Column("Agreement", "share of full's greedy tokens also chosen here", _read("agreement_with_full"), "{:.3f}"),
        Column("Effective ratio", "recomputed over chunk tokens", _read("effective_ratio"), "{:.3f}"),
        Column("Charged ratio", "share of (layer, chunk token) pairs given fresh KV", _read("charged_ratio"), "{:.3f}"),
    ]


def _own_score(name: str) -> list[Column]:
    """A metric that is some question's own: its mean, and what full prefill's is to it."""
    title = score_title(name)
    return [
        _score(name, brief=True),
        _difference(name, brief=True),
        Column(f"{title}: no worse", f"whether its lower bound is above {-MARGIN}", _no_worse(name), "{}", True),
        Column(f"{title} / full", f"mean over full's {_PAIRED}", _read("share_of_full", name), "{:.1%}"),
    ]


def _score(name: str, *, brief: bool = False) -> Column:
    title, meaning = _SCORES.get(name, (name, "mean of this score"))
    return Column(title, f"{meaning}, over the questions scored so", _read(name), "{:.3f}", brief)


def _difference(name: str, *, brief: bool = False) -> Column:
    title = f"{score_title(name)} - full"
    return Column(title, f"mean difference {_PAIRED}", _read("difference_to_full", name), "{:+.3f}", brief)


_INTERVALS = {
    "kl_to_full": "kl_interval",
    "agreement_with_full": "agreement_interval",
    **{key: f"{key}_interval" for key in ("first_token_kl", "first_token_agreement", "equal_answers")},
}
"""The key of a figure's interval in a row of the summary."""


def _read(key: str, score: str = "") -> Callable[[dict[str, Any]], Sequence[float | None]]:
    """Reader of a row's figure, with its interval if there is one; of one score, if it is a figure per score."""

    def figure(row: dict[str, Any]) -> Sequence[float | None]:
        found = (row[key] or {}).get(score) if score else row[key]
        return [*(found if isinstance(found, list) else [found]), *(row.get(_INTERVALS.get(key, "")) or ())]

    return figure


def _no_worse(score: str) -> Callable[[dict[str, Any]], Sequence[str | None]]:
    return lambda row: [{True: "yes", False: "no"}.get(row["no_worse"].get(score))]


def _cell(column: Column, row: dict[str, Any]) -> Cell:
    value, *bounds = column.figure(row)
    if value is None:
        return Cell("-")
    text = column.shown.format(value)
    shown = ", ".join(column.shown.format(bound) for bound in bounds if bound is not None)
    return Cell(text, f"[{shown}]" if shown else "")


def _as_text(columns: list[Column], cells: dict[str, list[Cell]]) -> Rows:
    titles = ["Method", *(column.title for column in columns)]
    return titles, [[label, *(f"{c.text} {c.interval}".rstrip() for c in row)] for label, row in cells.items()]


def _share(figures: Sequence[float | None] | None) -> str:
    """A share in percent, with the bounds of its interval as far as known."""
    value, *bounds = figures or [None]
    inside = ", ".join(f"{bound:.1%}" for bound in bounds if bound is not None)
    return "-" if value is None else f"{value:.1%}" + (f" [{inside}]" if inside else "")
