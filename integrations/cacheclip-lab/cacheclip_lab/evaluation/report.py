"""From the answers of several methods to a report.

Every comparison with full prefill is paired: it is made per question, over the questions that both answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from cacheclip_rag.plugins import atomic_path

from .gating import gated, shares_of_full
from .page import to_html
from .promise import RISKS, promise_of
from .records import SkippedRecord
from .results import Comparison, ItemResult, Run
from .scores import ALL_WANTED
from .statistics import MARGIN, mcnemar, paired_bootstrap

_SKIPPED_SHOWN = 5
PROMISED = (0.05, 0.1, 0.2)
"""Shares of answers that may go wrong, for which the cheapest gate is sought."""
FILES = {"summary": "summary.json", "html": "report.html"}
"""Files that :func:`write_report` writes."""


def summarise(comparison: Comparison) -> dict[str, Any]:
    """Figures per run, ready for JSON; None for figures without data.

    Means are over the run's own items. ``difference_to_full``, ``share_of_full`` (mean score divided by full's) and
    ``speedup_vs_full`` are over the ``n_paired`` items that full prefill also answered. ``no_worse`` says per score
    whether the method is no worse than full prefill (non-inferiority with a margin of 3 points). ``flips`` counts
    questions that full prefill answers rightly and the method does not (``lost``), and the other way round (``won``),
    with McNemar's probability. A score is over the items that have it. ``gate`` says what a confidence gate would have
    given (:mod:`~cacheclip_lab.evaluation.gating`), ``promises`` which gate guarantees
    what (:mod:`~cacheclip_lab.evaluation.promise`). Intervals are from
    :mod:`~cacheclip_lab.evaluation.statistics`. ``tasks`` holds the figures per task, if there are several tasks.

    Raises:
        ConfigurationError: a figure with an interval is not a finite number.
    """
    by_task: dict[str, set[str]] = {}
    for question in comparison.questions:
        by_task.setdefault(question.task, set()).add(question.id)
    return {
        "dataset": comparison.dataset,
        "primary": comparison.primary,
        "auxiliary": comparison.auxiliary,
        "skipped": len(comparison.skipped),
        "skipped_by_reason": _by_reason(comparison.skipped),
        "skipped_first": [asdict(one) for one in comparison.skipped[:_SKIPPED_SHOWN]],
        "settings": comparison.settings,
        "measured_on": _measured_on(comparison),
        **_figures(comparison, {question.id for question in comparison.questions}),
        "tasks": {task: _figures(comparison, ids) for task, ids in by_task.items()} if len(by_task) > 1 else {},
    }


def _figures(comparison: Comparison, ids: set[str]) -> dict[str, Any]:
    """Figures of every run over the questions with these ids."""
    by_run: dict[str, dict[str, ItemResult]] = {run.label: {} for run in comparison.runs}
    items = [item for item in comparison.items if item.id in ids]
    for item in items:
        by_run[item.label][item.id] = item
    reference = next((run.label for run in comparison.runs if run.method == "full"), None)
    full = by_run[reference] if reference is not None else {}
    scores = list(dict.fromkeys(name for item in items for name in item.scores))
    return {
        "n": len(ids),
        "scores": scores,
        "own_scores": list(dict.fromkeys(item.own for item in items if item.own)),
        "methods": {run.label: _row(run, by_run[run.label], full, scores) for run in comparison.runs},
        "promises": _promises(comparison.runs, by_run, full),
    }


def _promises(
    runs: Sequence[Run], by_run: Mapping[str, Mapping[str, ItemResult]], full: Mapping[str, ItemResult]
) -> list[dict[str, Any]]:
    """Per method that a gate looks at: the cheapest ratio and gate for each of :data:`PROMISED` and each risk."""
    found = []
    for method in dict.fromkeys(run.method for run in runs):
        own = {run.label: by_run[run.label] for run in runs if run.method == method}
        ids = [id_ for id_ in full if all(id_ in items for items in own.values())]
        if all(items[id_].confidence is None for items in own.values() for id_ in ids):
            continue
        pairs = {label: [(items[id_], full[id_]) for id_ in ids] for label, items in own.items()}
        for risk in RISKS:
            for most in PROMISED:
                promise = promise_of(pairs, most, risk)
                row = {"method": method, "risk": risk, "at_most": most, "n": len(ids)}
                found.append({**row, "gate": asdict(promise) if promise else None})
    return found


def _measured_on(comparison: Comparison) -> dict[str, list[str]]:
    """Labels of the runs by machine, in order of appearance."""
    found: dict[str, dict[str, None]] = {}
    for item in comparison.items:
        found.setdefault(item.measured_on, {})[item.label] = None
    return {where: list(labels) for where, labels in found.items()}


def _by_reason(skipped: Sequence[SkippedRecord]) -> dict[str, int]:
    """Number of skipped records per reason, the most frequent first. Reasons that differ only in numbers are merged."""
    alike: dict[str, list[str]] = {}
    for one in skipped:
        alike.setdefault(re.sub(r"\d+", "N", one.reason), []).append(one.reason)
    named = {own[0] if len(set(own)) == 1 else name: len(own) for name, own in alike.items()}
    return dict(sorted(named.items(), key=lambda pair: -pair[1]))


def _row(
    run: Run,
    own: Mapping[str, ItemResult],
    full: Mapping[str, ItemResult],
    scores: list[str],
) -> dict[str, Any]:
    items = list(own.values())
    pairs = [(item, full[item.id]) for item in items if item.id in full]
    is_full = run.method == "full"
    differences = {} if is_full else _differences(pairs, scores)
    return {
        "method": run.method,
        "ratio": run.ratio,
        "learns": run.learns,
        "n": len(items),
        "n_paired": len(pairs),
        "answered_plainly": sum(item.fallback is not None for item in items) or None,
        "kl_to_full": _mean(_fidelity(items, "answer_kl")),
        "kl_interval": _interval(_fidelity(items, "answer_kl")),
        "first_token_kl": _mean(_fidelity(items, "first_token_kl")),
        "first_token_kl_interval": _interval(_fidelity(items, "first_token_kl")),
        "agreement_with_full": _mean(_fidelity(items, "agreement")),
        "agreement_interval": _interval(_fidelity(items, "agreement")),
        "first_token_agreement": _mean(_fidelity(items, "first_token_agreement")),
        "first_token_agreement_interval": _interval(_fidelity(items, "first_token_agreement")),
        "equal_answers": _mean(_fidelity(items, "equal_answer")),
        "equal_answers_interval": _interval(_fidelity(items, "equal_answer")),
        "nominal_ratio": _mean(item.nominal_ratio for item in items),
        "effective_ratio": _mean(item.effective_ratio for item in items),
        "charged_ratio": _mean(item.charged_ratio for item in items),
        "ttft_s": _median(item.ttft_s for item in items),
        "speedup_vs_full": _median(other.ttft_s / item.ttft_s for item, other in pairs if item.ttft_s > 0),
        "difference_to_full": differences,
        "no_worse": {name: low > -MARGIN for name, (_, low, _) in differences.items()},
        "flips": None if is_full or not pairs else _flips(pairs),
        "share_of_full": {} if is_full else shares_of_full(pairs, scores),
        "gate": [] if is_full else gated(pairs, scores),
        **_means(items, scores),
    }


def _fidelity(items: Iterable[ItemResult], name: str) -> list[float]:
    return [item.fidelity[name] for item in items if name in item.fidelity]


def _interval(values: list[float]) -> list[float] | None:
    return list(paired_bootstrap(values)) if values else None


def _means(items: Sequence[ItemResult], scores: Sequence[str]) -> dict[str, float | None]:
    return {name: _mean(item.scores[name] for item in items if name in item.scores) for name in scores}


def _differences(pairs: Sequence[tuple[ItemResult, ItemResult]], scores: Sequence[str]) -> dict[str, list[float]]:
    found = {name: _difference(pairs, lambda item: item.scores, name) for name in scores}
    return {name: difference for name, difference in found.items() if difference}


def _difference(
    pairs: Sequence[tuple[ItemResult, ItemResult]], figures: Callable[[ItemResult], Mapping[str, float]], name: str
) -> list[float] | None:
    """Mean of the differences of a figure over the pairs that have it, and its interval."""
    values = [(figures(a), figures(b)) for a, b in pairs]
    gaps = [a[name] - b[name] for a, b in values if name in a and name in b]
    return [fmean(gaps), *paired_bootstrap(gaps)] if gaps else None


def _flips(pairs: Sequence[tuple[ItemResult, ItemResult]]) -> dict[str, float]:
    """Questions that the method loses and wins against full prefill."""
    judged = [(_is_right(own), _is_right(full)) for own, full in pairs]
    lost, won = judged.count((False, True)), judged.count((True, False))
    return {"lost": lost, "won": won, "p": mcnemar(lost, won)}


def _is_right(item: ItemResult) -> bool:
    """Whether the answer is right. If full prefill's is wrong, a method's says little about the cost of reuse."""
    if item.own in ALL_WANTED:  # one of several values is not a right answer, although the answer contains it
        return item.scores[item.own] >= 1.0
    return any(item.scores.get(name, 0.0) >= 1.0 for name in (item.own, "contains", "string_match_all", "em") if name)


def _mean(values: Iterable[float]) -> float | None:
    return _over(fmean, values)


def _median(values: Iterable[float]) -> float | None:
    return _over(median, values)


def _over(figure: Callable[[list[float]], float], values: Iterable[float]) -> float | None:
    found = list(values)
    return float(figure(found)) if found else None


def write_report(comparison: Comparison, summary: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Write :data:`FILES` into ``folder``, each atomically, in place of an earlier report; returns their paths by kind.

    Args:
        summary: result of :func:`summarise` for the comparison.
    """
    contents = {
        "summary": json.dumps(summary, indent=2, ensure_ascii=False) + "\n",
        "html": to_html(comparison, summary),
    }
    written = {kind: folder / FILES[kind] for kind in contents}
    for kind, content in contents.items():
        with atomic_path(written[kind]) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return written
