"""The report of a fine-tuning: a table, a verdict, and a JSON object."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from .finetune import IN_USE, SHIPPED, FineTuning
from .outcomes import SELECTOR, Outcome, f1_share, same_answers, same_first

Table = tuple[list[str], list[list[str]]]
"""Titles of columns, and rows."""

_TITLES = [
    "selector",
    "first-token KL, mean / median",
    "answer KL, mean / median",
    "equal first tokens",
    "equal answers",
    "F1, share of full's",
]


def finetuning_note(found: FineTuning) -> str:
    """Note under the table of selectors."""
    return (
        f"Head sets choose for {SELECTOR}. Questions that full prefill answers rightly are asked, and others if there "
        f"are too few: {found.about.get('right', 'none')}. All figures are of the distance from full prefill's answers."
    )


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    kls = [each.first_token_kl for each in outcomes], [each.answer_kl for each in outcomes]
    shares = [same(outcomes) / len(outcomes) for same in (same_first, same_answers)]
    return [
        *(f"{statistics.fmean(values):.3f} / {statistics.median(values):.3f}" for values in kls),
        *("" if share is None else f"{share:.0%}" for share in [*shares, f1_share(outcomes)]),
    ]


def _outcome_values(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of each prompt, and shares (0 to 1)."""
    names = [each.name for each in fields(Outcome)]
    return {
        **{name: [getattr(each, name) for each in outcomes] for name in names},
        "first_token_agreement": same_first(outcomes) / len(outcomes),
        "equal_answers": same_answers(outcomes) / len(outcomes),
        "f1_share_of_full": f1_share(outcomes),
    }


def finetuning_table(found: FineTuning) -> Table:
    """What chose the tokens, and how near answers to the test questions came to full prefill's."""
    return _TITLES, [[name, *_cells(outcomes)] for name, outcomes in found.outcomes.items()]


def finetuning_json(found: FineTuning) -> dict[str, Any]:
    """The result as a JSON object."""
    return {
        "is_accepted": found.is_accepted,
        "digest": found.heads.digest(),
        "figures": {name: _outcome_values(outcomes) for name, outcomes in found.outcomes.items()},
        "about": found.about,
        "seconds": found.seconds,
    }


def finetuning_verdict(found: FineTuning) -> str:
    """Verdict: the result of the head set on the test questions."""
    called = {SHIPPED: "what comes with the package", IN_USE: "the head set in use"}
    replaced = [called[name] for name in found.outcomes if name in called]
    no_worse = f", no worse than {' and '.join(replaced)}" if replaced else ""
    or_worse = f", worse than {' or '.join(replaced)}" if replaced else ""
    return {
        True: f"On the test questions, the fine-tuned heads are better than the untuned last layer and EPIC{no_worse}.",
        False: "On the test questions, the fine-tuned heads are not better than both the untuned last layer and "
        f"EPIC{or_worse}.",
        None: "The primary was not asked the test questions.",
    }[found.is_accepted]
