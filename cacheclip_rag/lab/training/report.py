"""Reports of calibration and fine-tuning: Markdown, and one self-contained HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

from ...paths import atomic_path
from .calibrate import SHIPPED, Calibration
from .context import ContextTraining
from .figures import IN_USE
from .finetune import FineTuning
from .outcomes import SELECTOR, Outcome, f1_share, same_answers, same_first

__all__ = [
    "calibration_json",
    "calibration_note",
    "calibration_table",
    "context_json",
    "context_table",
    "context_verdict",
    "finetuning_json",
    "finetuning_note",
    "finetuning_table",
    "finetuning_verdict",
    "ranking_tables",
    "write_report",
]

Table = tuple[list[str], list[list[str]]]
"""Titles of columns, and rows."""

_AS_USED = f"of head sets: {SELECTOR}"
"""Method that uses the head sets on the primary. It spends half of its budget on chunk starts."""
_OUTCOME_TITLES = [
    f"first-token KL, mean / median ({_AS_USED})",
    f"answer KL, mean / median ({_AS_USED})",
    "equal first tokens",
    "equal answers",
    "F1, share of full's",
]
_SCORES_ALONE = f"Recall counts scores only, without the chunk starts on which {SELECTOR} spends half of its budget."

_SHOWN_HEADS, _SHOWN_LAYERS = 8, 5
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #8885; text-align: right; }
th:first-child, td:first-child, .plain td { text-align: left; overflow-wrap: anywhere; }
"""


def calibration_table(found: Calibration) -> Table:
    """Candidates, with the best candidate marked."""
    rows = []
    for each in found.candidates:
        rows.append(
            [
                f"{each.name} (chosen)" if each.name == found.chosen else each.name,
                f"{each.recall:.3f}",
                f"{each.span_recall:.3f}",
                *_outcome_cells(each.outcomes),
            ]
        )
    return ["heads", "evidence recall", "whole values", *_OUTCOME_TITLES], rows


def calibration_note(found: Calibration) -> str:
    """Note under the table of candidates."""
    return _note(found.heads.about.get("right"))


def finetuning_note(found: FineTuning) -> str:
    """Note under the table of selectors."""
    return _note(found.about.get("right"))


def _note(right: str | None) -> str:
    if right is None:
        return _SCORES_ALONE
    return (
        f"{_SCORES_ALONE} KL is measured on prompts that full prefill answers rightly; if there are too few, other "
        f"prompts fill up: {right}. First tokens, answers and F1 are compared with full prefill's on the same prompts."
    )


def ranking_tables(found: Calibration) -> dict[str, Table]:
    """Tables of the best heads and the best layers, by title."""
    heads = [[f"{each.layer}.{each.head}", f"{each.recall:.3f}"] for each in found.ranking[:_SHOWN_HEADS]]
    layers = [[f"{each.layer}", f"{each.recall:.3f}"] for each in found.layers[:_SHOWN_LAYERS]]
    return {
        "Best single heads": (["layer.head", "evidence recall"], heads),
        "Best layers (mean of all heads)": (["layer", "evidence recall"], layers),
    }


def _outcome_cells(outcomes: Sequence[Outcome]) -> list[str]:
    """Cells of :data:`_OUTCOME_TITLES`; empty if the primary was not asked."""
    if not outcomes:
        return [""] * len(_OUTCOME_TITLES)
    kls = [each.first_token_kl for each in outcomes], [each.answer_kl for each in outcomes]
    shares = [same(outcomes) / len(outcomes) for same in (same_first, same_answers)]
    return [
        *(f"{statistics.fmean(values):.3f} / {statistics.median(values):.3f}" for values in kls),
        *("" if share is None else f"{share:.0%}" for share in [*shares, f1_share(outcomes)]),
    ]


def _outcome_values(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of each prompt, and shares (0 to 1; None if the primary was not asked)."""
    names = [each.name for each in fields(Outcome)]
    return {
        **{name: [getattr(each, name) for each in outcomes] for name in names},
        "first_token_agreement": same_first(outcomes) / len(outcomes) if outcomes else None,
        "equal_answers": same_answers(outcomes) / len(outcomes) if outcomes else None,
        "f1_share_of_full": f1_share(outcomes),
    }


def finetuning_table(found: FineTuning) -> Table:
    """Selectors on the test split."""

    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    rows = [
        [
            each.name,
            *(text(each.recall.get(ratio)) for ratio in ("0.1", "0.2")),
            *(text(each.sentence_recall.get(ratio)) for ratio in ("0.1", "0.2")),
            *(text(each.span_recall.get(ratio)) for ratio in ("0.1", "0.2")),
            text(each.overlap),
            text(each.correlation),
            *_outcome_cells(each.outcomes),
        ]
        for each in found.figures
    ]
    titles = [
        "selector",
        "recall at 0.1",
        "at 0.2",
        "by whole sentences at 0.1",
        "at 0.2",
        "whole values at 0.1",
        "at 0.2",
        "overlap with target",
        "rank correlation",
    ]
    return [*titles, *_OUTCOME_TITLES], rows


def calibration_json(found: Calibration) -> dict[str, Any]:
    """The result as a JSON object."""
    return {
        "chosen": found.chosen,
        "about": found.heads.about,
        "heads": [[*pair, float(weight)] for pair, weight in zip(found.heads.heads, found.heads.weights, strict=True)],
        "digest": found.heads.digest(),
        "candidates": {
            each.name: {
                "recall": each.recall,
                "span_recall": each.span_recall,
                **_outcome_values(each.outcomes),
            }
            for each in found.candidates
        },
        "ranking": [[rank.layer, rank.head, rank.recall] for rank in found.ranking],
        "layers": [[rank.layer, rank.recall] for rank in found.layers],
        "folder": str(found.folder),
        "seconds": found.seconds,
    }


def finetuning_json(found: FineTuning) -> dict[str, Any]:
    """The result as a JSON object."""
    return {
        "is_tuned": found.is_tuned,
        "is_accepted": found.is_accepted,
        "digest": found.heads.digest(),
        "history": list(found.history),
        "figures": {
            each.name: {
                "recall": each.recall,
                "sentence_recall": each.sentence_recall,
                "recall_of_asked": each.recall_of_asked,
                "span_recall": each.span_recall,
                "overlap": each.overlap,
                "correlation": each.correlation,
                **_outcome_values(each.outcomes),
            }
            for each in found.figures
        },
        "about": found.about,
        "folder": str(found.folder),
        "seconds": found.seconds,
    }


def finetuning_verdict(found: FineTuning) -> str:
    """Verdict: which heads are kept, and their result on the test questions."""
    kept = "The tuned heads are kept."
    if not found.is_tuned:
        kept = "The tuned heads were not better: the initial heads are kept."
    called = {SHIPPED: "what comes with the package", IN_USE: "the head set in use"}
    replaced = [called[each.name] for each in found.figures if each.name in called]
    no_worse = f", no worse than {' and '.join(replaced)}" if replaced else ""
    or_worse = f", worse than {' or '.join(replaced)}" if replaced else ""
    said = {
        True: " On the test questions, the kept heads are better than the untuned last layer, words alone "
        f"and EPIC{no_worse}, and find as much as the primary's own attention.",
        False: " On the test questions, the kept heads are not better than all of the untuned last layer, "
        f"words alone and EPIC{or_worse}, or find less than the primary's own attention.",
        None: "",
    }
    return kept + said[found.is_accepted]


@dataclass(frozen=True, slots=True)
class _Page:
    """Content of a report, for any format."""

    title: str
    verdict: str
    figures: Table
    note: str
    sections: dict[str, Table]


def context_table(found: ContextTraining) -> Table:
    """Distance from full prefill before and after, one row per ratio."""
    titles = ["recomputed", "KL, in use", "KL, learned", "change (95 %)", "first token, in use", "learned"]
    titles += ["equal first tokens, in use", "learned"]
    return titles, [
        [
            f"{each.ratio:.0%}",
            *(f"{statistics.fmean(values):.4f}" for values in (each.before, each.after)),
            _change(each.change),
            *(f"{statistics.fmean(values):.4f}" for values in (each.first_before, each.first_after)),
            *(f"{sum(values)}" for values in (each.same_before, each.same_after)),
        ]
        for each in found.figures
    ]


def _change(change: tuple[float, float | None, float | None] | None) -> str:
    """A ratio as a change in percent, with its interval."""
    if change is None:
        return "-"
    ratio, low, high = (None if each is None else f"{each - 1:+.0%}" for each in change)
    return str(ratio) if low is None or high is None else f"{ratio} ({low} to {high})"


def context_verdict(found: ContextTraining) -> str:
    """What the held-out check says."""
    count = len(found.figures[0].before) if found.figures else 0
    measured = f"KL from full prefill along right answers, in nats, on {count} prompts that were not trained on."
    if found.is_better:
        return f"The learned context is better than the one in use. {measured}"
    return (
        "The learned context is not better: the interval of the change must be below 0 where nothing is recomputed, "
        "the mean must not rise where something is, and no fewer first tokens may equal full prefill's. "
        f"{measured}"
    )


def context_json(found: ContextTraining) -> dict[str, Any]:
    return {
        "steps_done": found.step,
        "steps": found.steps,
        "is_complete": found.context is not None,
        "is_better": found.is_better if found.figures else None,
        "sha256": found.context.sha256 if found.context is not None else None,
        "num_tokens": found.context.num_tokens if found.context is not None else None,
        "held_out": [{**asdict(each), "change": each.change} for each in found.figures],
        "seconds": found.seconds,
        "folder": str(found.folder),
    }


def write_report(found: FineTuning, folder: Path) -> list[Path]:
    """Write ``report.md`` and ``report.html`` into ``folder``; returns their paths."""
    models = f"{found.about['auxiliary']} for {found.about['primary']}"
    page = _Page(
        title=f"Fine-tuning of {models}",
        verdict=finetuning_verdict(found),
        figures=finetuning_table(found),
        note=finetuning_note(found),
        sections={"Training": _epochs(found.history), **_sections(found.about)},
    )
    pages = {"report.md": _markdown(page), "report.html": _html(page)}
    for name, text in pages.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [folder / name for name in pages]


def _epochs(history: Sequence[dict[str, float]]) -> Table:
    rows = [
        [f"{each['epoch']:.0f}", *(f"{each[name]:.3f}" for name in ("loss", "held_out_loss", "held_out_found"))]
        for each in history
    ]
    return ["epoch", "loss", "held-out loss", "found in held-out questions"], rows


def _sections(about: dict[str, Any]) -> dict[str, Table]:
    """Tables of data, settings, and other inputs of the result."""
    about = dict(about)
    families, files = about.pop("families"), about.pop("given_from")
    numbers = {
        "samples": "synthetic training questions",
        "given": "given training questions",
        "targets": "training questions with a target from the primary",
        "tests": "test questions",
        "prompts": "test questions asked of the primary",
        "right": "test questions answered rightly by full prefill",
        "held_out_right": "held-out questions answered rightly by full prefill",
        "seed": "seed",
    }
    data = [["questions and licence", about.pop("data")]]
    data += [[f"families, {split}", ", ".join(names)] for split, names in families.items()]
    data += [["files given", ", ".join(files) or "none"]]
    data += [[title, str(about.pop(name))] for name, title in numbers.items() if name in about]
    settings = [[name, str(value)] for name, value in about.pop("settings").items()]
    about.pop("prefix_ids", None)  # token ids of the system prompt
    rest = [[name, str(value)] for name, value in about.items()]
    return {
        "Data": (["data", ""], data),
        "Settings": (["setting", "value"], settings),
        "Models and versions": (["of", "value"], rest),
    }


def _markdown(page: _Page) -> str:
    lines = [f"# {page.title}", "", page.verdict, "", *_markdown_table(page.figures), "", page.note, ""]
    for name, table in page.sections.items():
        lines += [f"## {name}", "", *_markdown_table(table), ""]
    return "\n".join(lines)


def _markdown_table(table: Table) -> list[str]:
    titles, rows = table
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return [
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def _html(page: _Page) -> str:
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(page.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            f"<h1>{escape(page.title)}</h1>\n<p>{escape(page.verdict)}</p>",
            _html_table(page.figures),
            f"<p>{escape(page.note)}</p>",
            *(f"<h2>{name}</h2>\n{_html_table(table, 'plain')}" for name, table in page.sections.items()),
            "</body>\n</html>\n",
        ]
    )


def _html_table(table: Table, style: str = "figures") -> str:
    titles, rows = table
    header = "".join(f"<th>{escape(title)}</th>" for title in titles)
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{style}"><tr>{header}</tr>{cells}</table></div>'
