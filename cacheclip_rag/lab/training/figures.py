"""Figures of a head set on test families, compared with other ways to choose tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ...base.progress import progress_bar
from ...engine import CacheClipEngine
from ...methods import preset
from ...methods.base import Method
from ...methods.recompute import Recompute
from ...runtime.base import weights_digest
from ...runtime.transformers.model import ModelRuntime
from ...selection.heads import HeadSet, shipped_set
from ...selection.scorers import QueryAttention
from ..models import auxiliary_caches, transformers_model
from ..variants import ORACLE, RANDOM
from .families import Sample, synthetic_samples
from .features import Seen, look
from .measures import chosen, rank_correlation, span_recall, token_recall
from .outcomes import RATIO, AnsweredSamples, Outcome, answered_rightly, capped_mean, downstream
from .targets import after_sinks, attended_and_stale, attended_when_stale
from .tuning import SINKS

__all__ = ["IN_USE", "OWN_ATTENTION", "SHIPPED", "TUNED", "UNTUNED", "Figures", "combined", "figures_of"]

SHIPPED = "comes with the package"
"""Name of the head set that engines use without tuning."""
UNTUNED, TUNED, OWN_ATTENTION = "last layer as it comes", "fine-tuned", "the primary's own attention"
IN_USE = "in use so far"
"""Name of the head set that the new one would replace, unless it is the package's."""
_BY_OWN_ATTENTION = Recompute(QueryAttention(layers="upper"), name=OWN_ATTENTION)


@dataclass(frozen=True, slots=True)
class Figures:
    """One selector on samples of the test split."""

    name: str
    recall: dict[str, float] = field(default_factory=dict)
    """Recall of evidence tokens, by ratio."""
    recall_of_asked: dict[str, float] = field(default_factory=dict)
    """The same over the samples for which the primary was asked; for the fine-tuned head set."""
    span_recall: dict[str, float] = field(default_factory=dict)
    """Recall of whole values, by ratio."""
    overlap: float | None = None
    """Jaccard index of the chosen tokens and the target's choice, at ratio 0.2."""
    correlation: float | None = None
    """Spearman's rank correlation with the target."""
    outcomes: tuple[Outcome, ...] = ()
    """Per prompt; empty if the primary was not asked."""

    @property
    def kl(self) -> float | None:
        """:func:`capped_mean` of the outcomes; None if the primary was not asked."""
        return capped_mean(self.outcomes) if self.outcomes else None


def figures_of(
    engine: CacheClipEngine,
    heads: HeadSet,
    num_tests: int,
    num_prompts: int,
    seed: int,
    rival: HeadSet | None,
) -> tuple[list[Figures], AnsweredSamples]:
    """Figures on the test split of the last layer, the package's head set, the head set in use (``rival``) and the
    fine-tuned ``heads``; on the primary, also of methods without an auxiliary model. And the samples that the primary
    was asked.
    """
    caches = auxiliary_caches(engine)
    runtime = transformers_model(caches.runtime)
    samples = synthetic_samples("test", num_tests, seed=seed)
    asked = answered_rightly(engine, samples, num_prompts)
    prompts = asked.samples
    sets: dict[str, HeadSet | Method] = {UNTUNED: _last_layer(runtime)}
    sets |= {name: each for name, each in ((SHIPPED, shipped_set(runtime)), (IN_USE, rival)) if each is not None}
    sets[TUNED] = heads
    scored = {name: each for name, each in sets.items() if isinstance(each, HeadSet) and each.sinks == SINKS}
    layers = sorted({layer for each in scored.values() for layer in each.layers})
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in scored}
    if num_prompts:
        measured[OWN_ATTENTION] = []
    with progress_bar("testing", len(samples), "samples") as advance:
        for number, sample in enumerate(samples):
            seen = look(caches, sample, layers, sinks=SINKS)
            target = None
            if sample in prompts:
                target, own = _asked(engine, sample)
                target = after_sinks(target, seen.lengths, SINKS)
                measured[OWN_ATTENTION].append(_measured(own, seen, target))
            for name, each in scored.items():
                measured[name].append(_measured(combined(seen, each), seen, target))
            advance(number + 1)
    figures = {name: _mean(name, rows) for name, rows in measured.items()}
    if prompts:  # the comparison with the primary's own attention needs the same questions
        rows = [row for row, sample in zip(measured[TUNED], samples, strict=True) if sample in prompts]
        figures[TUNED] = replace(figures[TUNED], recall_of_asked=_mean(TUNED, rows).recall)
        others = [preset("direct"), RANDOM, preset("cacheblend"), preset("epic")]
        others += [_BY_OWN_ATTENTION, preset("anchored"), ORACLE]
        sets |= {method.name: method for method in others}
        outcomes = downstream(engine, prompts, list(sets.values()))
        for name, of_set in zip(sets, outcomes, strict=True):
            figures[name] = replace(figures.get(name, Figures(name)), outcomes=tuple(of_set))
    return list(figures.values()), asked


def _last_layer(runtime: ModelRuntime) -> HeadSet:
    """The heads of the last layer with equal weights."""
    sha256, num_heads = weights_digest(runtime.fingerprint), runtime.model.config.num_attention_heads
    return replace(HeadSet.of_layers(sha256, "last", runtime.num_layers, num_heads), sinks=SINKS)


def _asked(engine: CacheClipEngine, sample: Sample) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Tokens that are attended and stale in the primary, and the primary's attention over the stale cache."""
    return attended_and_stale(engine, sample), attended_when_stale(engine, sample, _BY_OWN_ATTENTION)


def _measured(scores: torch.Tensor, seen: Seen, target: torch.Tensor | None) -> dict[str, float]:
    found = {}
    for ratio in (0.1, RATIO):
        mask = chosen(scores, seen.lengths, ratio)
        found[f"recall {ratio}"] = float(token_recall(mask, seen.evidence))
        found[f"span {ratio}"] = float(span_recall(mask, seen.values))
    if target is not None:
        ours, theirs = (chosen(each, seen.lengths, RATIO) for each in (scores, target))
        found["overlap"] = float((ours & theirs).sum() / (ours | theirs).sum())
        found["correlation"] = rank_correlation(scores, target)
    return found


def combined(seen: Seen, heads: HeadSet) -> torch.Tensor:
    """``(num_tokens,)`` scores of a head set, from recorded attention of its layers."""
    picked = torch.stack([seen.scores[seen.layers.index(layer), head] for layer, head in heads.heads])
    return heads.weights @ picked


def _mean(name: str, rows: Sequence[dict[str, float]]) -> Figures:
    def mean(key: str) -> float | None:
        values = [row[key] for row in rows if key in row]
        return statistics.fmean(values) if values else None

    def by_ratio(kind: str) -> dict[str, float]:
        return {str(ratio): mean(f"{kind} {ratio}") or 0.0 for ratio in (0.1, RATIO)}

    return Figures(
        name,
        recall=by_ratio("recall"),
        span_recall=by_ratio("span"),
        overlap=mean("overlap"),
        correlation=mean("correlation"),
    )
