"""Figures of a head set on test families, compared with other ways to choose tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ...engine import CacheClipEngine
from ...methods import preset
from ...methods.base import Method
from ...methods.recompute import Recompute
from ...methods.settings import describe
from ...progress import progress_bar
from ...runtime.transformers.model import ModelRuntime
from ...selection.heads import HeadSet, shipped_set, weights_digest
from ...selection.scorers import QueryAttention
from ...selection.sentences import sentence_numbers
from ..models import transformers_model
from ..variants import ORACLE, RANDOM
from .calibrate import SHIPPED, combined, is_combined
from .families import Sample, synthetic_samples
from .features import Seen
from .folder import Kept
from .lexical import lexical_scores
from .measures import chosen, chosen_sentences, rank_correlation, span_recall, token_recall
from .outcomes import RATIO, Asked, Outcome, answered_rightly, capped_mean, downstream
from .targets import after_sinks, attended_and_stale, attended_when_stale
from .tuning import Trainee, Tuned

__all__ = ["IN_USE", "OWN_ATTENTION", "UNTUNED", "WORDS", "Figures", "figures_of", "last_layer"]

UNTUNED, WORDS, OWN_ATTENTION = "last layer as it comes", "words alone", "the primary's own attention"
IN_USE = "in use so far"
"""Name of the head set that the new one would replace, unless it is the package's."""
_BY_OWN_ATTENTION = Recompute(QueryAttention(layers="upper"), name=OWN_ATTENTION)


@dataclass(frozen=True, slots=True)
class Figures:
    """One selector on samples of the test split."""

    name: str
    recall: dict[str, float] = field(default_factory=dict)
    """Recall of evidence tokens, by ratio."""
    sentence_recall: dict[str, float] = field(default_factory=dict)
    """Recall of evidence tokens if whole sentences are taken by their best token, by ratio."""
    recall_of_asked: dict[str, float] = field(default_factory=dict)
    """The same over the samples for which the primary was asked; for the head sets before and after training."""
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


def last_layer(runtime: ModelRuntime, sinks: int) -> HeadSet:
    """The heads of the last layer with equal weights."""
    sha256, num_heads = weights_digest(runtime.fingerprint), runtime.model.config.num_attention_heads
    return replace(HeadSet.of_layers(sha256, "last", runtime.num_layers, num_heads), sinks=sinks)


def figures_of(
    engine: CacheClipEngine,
    heads: HeadSet,
    tuned: Tuned,
    found: HeadSet,
    num_tests: int,
    num_prompts: int,
    kept: Kept,
    rival: HeadSet | None,
) -> tuple[list[Figures], Asked]:
    """Figures on the test split of the last layer, the package's head set, the head set in use (``rival``), the head
    sets before and after training, and words alone; on the primary, also of methods without an auxiliary model. And the
    samples that the primary was asked.
    """
    caches, sinks = engine.parts.auxiliary_caches, tuned.settings.sinks
    runtime = transformers_model(caches.runtime)
    samples = synthetic_samples("test", num_tests, seed=tuned.settings.seed)
    asked = answered_rightly(engine, samples, num_prompts, kept=kept)
    prompts = asked.samples
    last = last_layer(runtime, sinks)
    sets: dict[str, HeadSet | Method] = {UNTUNED: last}
    layers = {*heads.layers, runtime.num_layers - 1}
    scorers: dict[str, Callable[[Sample, Seen], torch.Tensor]] = {UNTUNED: lambda _, seen: combined(seen, last)}
    for name, replaced in ((SHIPPED, shipped_set(runtime)), (IN_USE, rival)):
        if replaced is not None:
            sets[name] = replaced
            if is_combined(replaced, sinks):
                scorers[name] = partial(_combined_of, replaced)
                layers |= set(replaced.layers)
    scorers |= {
        "before": lambda _, seen: combined(seen, heads),
        "after": lambda _, seen: tuned(Trainee.of(seen, heads)).detach(),
        WORDS: lambda sample, _: lexical_scores(
            sample.chunks, [caches.tokenize(chunk).offsets for chunk in sample.chunks], sample.question
        ),
    }
    names = (*scorers, *([OWN_ATTENTION] if num_prompts else []))
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with progress_bar("testing", len(samples), "samples") as advance:
        for number, sample in enumerate(samples):
            seen = kept.look(caches, sample, sorted(layers), sinks=sinks, keep=heads.layers[-1])
            target = None
            sentences = [sentence_numbers(chunk, caches.tokenize(chunk).offsets) for chunk in sample.chunks]
            if sample in prompts:
                target, own = _asked(engine, sample, kept)
                target = after_sinks(target, seen.lengths, sinks)
                measured[OWN_ATTENTION].append(_measured(own, seen, target, sentences))
            for name, score in scorers.items():
                measured[name].append(_measured(score(sample, seen), seen, target, sentences))
            advance(number + 1)
    figures = {name: _mean(name, rows) for name, rows in measured.items()}
    if prompts:  # the comparison with the primary's own attention needs the same questions
        for name in ("before", "after"):
            rows = [row for row, sample in zip(measured[name], samples, strict=True) if sample in prompts]
            figures[name] = replace(figures[name], recall_of_asked=_mean(name, rows).recall)
        sets |= {"before": heads, "after": found}
        others = [preset("direct"), RANDOM, preset("cacheblend"), preset("epic")]
        others += [_BY_OWN_ATTENTION, preset("anchored"), ORACLE]
        sets |= {method.name: method for method in others}
        outcomes = downstream(engine, prompts, list(sets.values()), kept=kept)
        for name, of_set in zip(sets, outcomes, strict=True):
            figures[name] = replace(figures.get(name, Figures(name)), outcomes=tuple(of_set))
    return list(figures.values()), asked


def _combined_of(heads: HeadSet, _: Sample, seen: Seen) -> torch.Tensor:
    return combined(seen, heads)


def _asked(engine: CacheClipEngine, sample: Sample, kept: Kept) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Tokens that are attended and stale in the primary, and the primary's attention over the stale cache."""

    def ask() -> dict[str, torch.Tensor]:
        target, own = attended_and_stale(engine, sample), attended_when_stale(engine, sample, _BY_OWN_ATTENTION)
        return {"own": own} | ({} if target is None else {"target": target})

    found = kept.tensors("asked", {"sample": sample.as_read(), "own": describe(_BY_OWN_ATTENTION)}, ask)
    return found.get("target"), found["own"]


def _measured(
    scores: torch.Tensor, seen: Seen, target: torch.Tensor | None, sentences: Sequence[torch.Tensor]
) -> dict[str, float]:
    found = {}
    for ratio in (0.1, RATIO):
        mask = chosen(scores, seen.lengths, ratio)
        found[f"recall {ratio}"] = float(token_recall(mask, seen.evidence))
        whole = chosen_sentences(scores, seen.lengths, sentences, ratio)
        found[f"sentence {ratio}"] = float(token_recall(whole, seen.evidence))
        found[f"span {ratio}"] = float(span_recall(mask, seen.values))
    if target is not None:
        ours, theirs = (chosen(each, seen.lengths, RATIO) for each in (scores, target))
        found["overlap"] = float((ours & theirs).sum() / (ours | theirs).sum())
        found["correlation"] = rank_correlation(scores, target)
    return found


def _mean(name: str, rows: Sequence[dict[str, float]]) -> Figures:
    def mean(key: str) -> float | None:
        values = [row[key] for row in rows if key in row]
        return statistics.fmean(values) if values else None

    def by_ratio(kind: str) -> dict[str, float]:
        return {str(ratio): mean(f"{kind} {ratio}") or 0.0 for ratio in (0.1, RATIO)}

    return Figures(
        name,
        recall=by_ratio("recall"),
        sentence_recall=by_ratio("sentence"),
        span_recall=by_ratio("span"),
        overlap=mean("overlap"),
        correlation=mean("correlation"),
    )
