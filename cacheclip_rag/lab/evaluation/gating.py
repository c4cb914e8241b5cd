"""What a confidence gate would have done, from answers without one.

A prompt whose first token is below the gate is prefilled in full: the answer is full prefill's and the cost is that of
both passes. If a later token is, the exact KV is completed before it: the answer is full prefill's unless an earlier
token differed, in which case it is counted as it was. No prompt has to be answered again to know what a value of
``min_confidence`` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .statistics import paired_bootstrap, paired_ratio

if TYPE_CHECKING:
    from .results import ItemResult

__all__ = ["CONFIDENCES", "gated", "shares_of_full"]

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
    in_full = [item.confidence is not None and item.confidence < least for item, _ in pairs]
    completed = [
        not first and item.confidence is not None and _is_below(item.later_confidence, least)
        for (item, _), first in zip(pairs, in_full, strict=True)
    ]
    as_full = [
        first or (later and _is_below(item.confidence_to_difference, least))
        for (item, _), first, later in zip(pairs, in_full, completed, strict=True)
    ]
    shown = [(full if same else item, full) for (item, full), same in zip(pairs, as_full, strict=True)]
    seconds = [
        item.ttft_s + (full.ttft_s if unsure else 0.0) for (item, full), unsure in zip(pairs, in_full, strict=True)
    ]
    return {
        "min_confidence": least,
        "full_prefills": fmean(in_full),
        "completed_later": fmean(completed),
        "charged_ratio": fmean(item.charged_ratio for item, _ in pairs) + fmean(in_full),
        "mean_ttft_s": fmean(seconds),
        "speedup_of_means": fmean(full.ttft_s for _, full in pairs) / fmean(seconds) if fmean(seconds) else None,
        **_share("first_token_agreement", pairs, in_full, "first_token_agreement"),
        **_share("equal_answers", pairs, as_full, "equal_answer"),
        "share_of_full": shares_of_full(shown, scores),
    }


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
