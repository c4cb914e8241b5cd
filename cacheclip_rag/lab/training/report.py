"""The report of a fine-tuning: a table, a verdict, and a JSON object."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from .figures import IN_USE, SHIPPED
from .finetune import FineTuning
from .outcomes import SELECTOR, Outcome, f1_share, same_answers, same_first

__all__ = [
    "finetuning_json",
    "finetuning_note",
    "finetuning_table",
    "finetuning_verdict",
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
        "whole values at 0.1",
        "at 0.2",
        "overlap with target",
        "rank correlation",
    ]
    return [*titles, *_OUTCOME_TITLES], rows


def finetuning_json(found: FineTuning) -> dict[str, Any]:
    """The result as a JSON object."""
    return {
        "is_accepted": found.is_accepted,
        "digest": found.heads.digest(),
        "figures": {
            each.name: {
                "recall": each.recall,
                "recall_of_asked": each.recall_of_asked,
                "span_recall": each.span_recall,
                "overlap": each.overlap,
                "correlation": each.correlation,
                **_outcome_values(each.outcomes),
            }
            for each in found.figures
        },
        "about": found.about,
        "seconds": found.seconds,
    }


def finetuning_verdict(found: FineTuning) -> str:
    """Verdict: the result of the head set on the test questions."""
    called = {SHIPPED: "what comes with the package", IN_USE: "the head set in use"}
    replaced = [called[each.name] for each in found.figures if each.name in called]
    no_worse = f", no worse than {' and '.join(replaced)}" if replaced else ""
    or_worse = f", worse than {' or '.join(replaced)}" if replaced else ""
    return {
        True: f"On the test questions, the fine-tuned heads are better than the untuned last layer and EPIC{no_worse}, "
        "and find as much as the primary's own attention.",
        False: "On the test questions, the fine-tuned heads are not better than both the untuned last layer and "
        f"EPIC{or_worse}, or find less than the primary's own attention.",
        None: "The primary was not asked the test questions.",
    }[found.is_accepted]
