"""What a confidence gate would have done, from answers without one.

A prompt whose first token is below the gate is prefilled in full: the answer is full prefill's and the cost is that of
both passes. If a later token is, the exact KV is completed before it: the answer is full prefill's unless an earlier
token differed, in which case it is counted as it was. No prompt has to be answered again to know what a value of
``min_confidence`` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .statistics import paired_bootstrap, paired_ratio

if TYPE_CHECKING:
    from .results import ItemResult

CONFIDENCES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Values of ``min_confidence`` that are tried."""


def gated(pairs: Sequence[tuple[ItemResult, ItemResult]], scores: Sequence[str]) -> list[dict[str, Any]]:
    """Figures for each of :data:`CONFIDENCES`, ready for JSON; none if no item has a confidence.

    Args:
        pairs: items of a method, each with full prefill's item of the same question.
        scores: metrics of which full prefill's share is given.
    """
    if all(item.confidence is None for item, _ in pairs):
        return []
    return [_at(least, pairs, scores) for least in CONFIDENCES]


def _at(least: float, pairs: Sequence[tuple[ItemResult, ItemResult]], scores: Sequence[str]) -> dict[str, Any]:
    each = [gate(item, full, least) for item, full in pairs]
    in_full, as_full = [one.in_full for one in each], [one.is_full for one in each]
    shown = [(full if same else item, full) for (item, full), same in zip(pairs, as_full, strict=True)]
    seconds = fmean(one.seconds for one in each)
    return {
        "min_confidence": least,
        "full_prefills": fmean(in_full),
        "completed_later": fmean(one.completed for one in each),
        "charged_ratio": fmean(one.charged_ratio for one in each),
        "mean_ttft_s": seconds,
        "speedup_of_means": fmean(full.ttft_s for _, full in pairs) / seconds if seconds else None,
        **_share("first_token_agreement", pairs, in_full, "first_token_agreement"),
        **_share("equal_answers", pairs, as_full, "equal_answer"),
        "share_of_full": shares_of_full(shown, scores),
    }


@dataclass(frozen=True, slots=True)
class Gated:
    """What a gate does with one answer."""

    in_full: bool
    """Whether the prompt is prefilled in full, because the first token is below the gate."""
    completed: bool
    """Whether a later token is, so that the exact KV is completed before it."""
    is_full: bool
    """Whether the answer is full prefill's for that."""
    charged_ratio: float
    seconds: float
    """To the first token."""


def gate(item: ItemResult, full: ItemResult, least: float) -> Gated:
    """What a gate of ``least`` does with an item."""
    in_full = _is_below(item.confidence, least)
    completed = not in_full and item.confidence is not None and _is_below(item.later_confidence, least)
    return Gated(
        in_full,
        completed,
        in_full or (completed and _is_below(item.confidence_to_difference, least)),
        item.charged_ratio + in_full,
        item.ttft_s + (full.ttft_s if in_full else 0.0),
    )


def _is_below(confidence: float | None, least: float) -> bool:
    return confidence is not None and confidence < least


def shares_of_full(
    pairs: Sequence[tuple[ItemResult, ItemResult]], scores: Sequence[str]
) -> dict[str, list[float | None]]:
    """Mean of each score divided by full prefill's, and its interval, over the pairs that have the score."""
    shares = {}
    for name in scores:
        values = [(a.scores[name], b.scores[name]) for a, b in pairs if name in a.scores and name in b.scores]
        if values and min(map(min, values)) >= 0 and (found := paired_ratio(*zip(*values, strict=True))):
            shares[name] = list(found)
    return shares


def _share(
    name: str, pairs: Sequence[tuple[ItemResult, ItemResult]], as_full: Sequence[bool], key: str
) -> dict[str, Any]:
    """Mean of a fidelity value, 1 where the answer is full prefill's, and its interval; None unless every item has
    it."""
    found = [1.0 if same else item.fidelity.get(key) for (item, _), same in zip(pairs, as_full, strict=True)]
    known = [value for value in found if value is not None]
    is_known = len(known) == len(found)
    return {
        name: fmean(known) if is_known else None,
        f"{name}_interval": list(paired_bootstrap(known)) if is_known else None,
    }
