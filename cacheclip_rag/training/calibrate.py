"""Calibration: which of the auxiliary's heads look at evidence. No gradients.

Ours; that few heads of a model retrieve is known since Retrieval Head (arXiv:2404.15574). Every head scores synthetic
questions (and given ones) by itself; heads are ranked by the evidence among the tokens that the default grouping would
take; sets of the best are then tried on the primary itself, where what counts is how far the answer is from full
prefill's.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .. import __version__
from ..chunks import ChunkCaches
from ..config import EngineConfig
from ..engine import CacheClipEngine
from ..errors import ConfigurationError
from ..evaluation.reference import Reference
from ..methods import create
from ..models.runtime import ModelRuntime
from ..progress import progress_bar
from ..selection.heads import HeadSet, weights_digest
from .families import Sample, synthetic_samples
from .features import Seen, check_offsets, look
from .measures import chosen, span_recall, token_recall
from .prompts import segments_of
from .tuning import spaced

__all__ = [
    "Calibration",
    "Candidate",
    "HeadRank",
    "best_of",
    "calibrate",
    "capped_mean",
    "combined",
    "downstream",
    "open_engine",
    "recall_of",
]

logger = logging.getLogger(__name__)

RATIO = 0.2
"""Share of the tokens that heads are ranked at."""
SELECTOR = "anchored:first=cacheclip"
"""What a head set is asked for: its scores, mixed with places in the chunk. Alone it finds what the question asks for,
which does not keep the rest from misleading."""
SINKS = 4
"""Tokens at the start of each chunk that nobody scores here."""
_SIZES = (4, 8, 16, 32)
_ANSWER_TOKENS = 16
_ABOUT = 1.1
"""A few prompts tell KLs apart no better than this."""
_MOST_KL = 1.0
"""A prompt counts no more than this, nats: none may decide alone."""


@dataclass(frozen=True, slots=True)
class HeadRank:
    """One head on the ranking samples."""

    layer: int
    head: int
    recall: float
    """Mean share of the evidence among the tokens it would choose."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of heads, and what it is worth on samples it was not chosen by."""

    name: str
    heads: HeadSet
    recall: float
    """Of evidence tokens."""
    span_recall: float
    """Of whole values: a number that lacks a digit does not count."""
    first_token_kl: tuple[float, ...]
    """Per prompt, nats."""
    answer_kl: tuple[float, ...]

    @property
    def kl(self) -> float:
        """:func:`capped_mean` of the KL along the answer; 0 where the primary was not asked."""
        return capped_mean(self.answer_kl) if self.answer_kl else 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What calibration found."""

    heads: HeadSet
    """Of the best candidate."""
    ranking: tuple[HeadRank, ...]
    """Every head, the best first."""
    candidates: tuple[Candidate, ...]
    """The untuned last layer first."""
    chosen: str
    """Name of the best candidate."""
    seconds: float


def capped_mean(kl: Sequence[float]) -> float:
    """Mean KL, no prompt counting more than a nat."""
    return statistics.fmean(min(each, _MOST_KL) for each in kl)


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Of those that bring answers about as near to full prefill as the best does, the one that finds most."""
    nearest = min(candidate.kl for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.kl <= _ABOUT * nearest]
    return max(near, key=lambda candidate: candidate.recall)


def open_engine(config: EngineConfig) -> CacheClipEngine:
    """An engine to calibrate with: in memory, with models whose KV can be reused.

    Raises:
        ConfigurationError: no auxiliary model, or one of the models cannot reuse.
        ModelError: an auxiliary without character offsets.
    """
    if config.auxiliary is None:
        raise ConfigurationError("there is no auxiliary model to calibrate. Name one with --auxiliary.")
    engine = CacheClipEngine(config, store=None, max_bytes=None, heads="none", fallback="error", shadow_rate=0.0)
    auxiliary = engine.auxiliary
    assert isinstance(auxiliary, ModelRuntime) and isinstance(engine.primary, ModelRuntime), "fallback is error"
    check_offsets(auxiliary)
    return engine


def calibrate(
    config: EngineConfig,
    *,
    num_samples: int = 90,
    num_prompts: int = 10,
    given: Sequence[Sample] = (),
    seed: int = 0,
) -> Calibration:
    """Rank the heads of ``config.auxiliary``, and try the best on ``config.primary``.

    Args:
        num_samples: synthetic ones; two thirds rank, the others check. Given ones come on top, and are shared out
            alike.
        num_prompts: of those that check, for the primary; 0 asks it nothing, and evidence alone decides.

    Raises:
        ConfigurationError: no auxiliary model, or too few samples.
    """
    if num_samples + len(given) < 6 or num_prompts < 0:
        raise ConfigurationError(
            f"calibration needs at least 6 samples, and prompts from 0 on; got {num_samples + len(given)} and "
            f"{num_prompts}."
        )
    started = time.perf_counter()
    engine = open_engine(config)
    auxiliary = engine.auxiliary
    assert isinstance(auxiliary, ModelRuntime)
    caches = engine.auxiliary_caches
    samples = [*synthetic_samples("train", num_samples, seed=seed), *given]
    layers = range(auxiliary.num_layers)
    with progress_bar("reading", len(samples), "samples") as advance:
        seen = list(_looked(caches, samples, layers, advance))
    ranking_on = [each for number, each in enumerate(seen) if number % 3]
    ranking = _ranked(ranking_on)
    check = list(range(0, len(seen), 3))
    sha256 = weights_digest(auxiliary.fingerprint)
    num_heads = seen[0].scores.shape[1]
    sets = {}
    for name, layers_of in (("last layer", "last"), ("middle third", "middle"), ("upper half", "upper")):
        sets[name] = replace(HeadSet.of_layers(sha256, layers_of, auxiliary.num_layers, num_heads), sinks=SINKS)
    for size in (size for size in _SIZES if size <= len(ranking)):
        best = sorted((each.layer, each.head) for each in ranking[:size])
        sets[f"best {size}"] = HeadSet(sha256, tuple(best), torch.full((size,), 1.0 / size), sinks=SINKS)
    prompts = [samples[number] for number in spaced(check, num_prompts)]
    found = downstream(engine, prompts, list(sets.values()))
    candidates = []
    for (name, heads), outcomes in zip(sets.items(), found, strict=True):
        recalls = [recall_of(combined(seen[number], heads), seen[number]) for number in check]
        candidates.append(
            Candidate(
                name,
                heads,
                statistics.fmean(recall for recall, _ in recalls),
                statistics.fmean(whole for _, whole in recalls),
                tuple(first for first, _ in outcomes),
                tuple(along for _, along in outcomes),
            )
        )
    best_one = best_of(candidates)
    about = {
        "command": "calibrate",
        "auxiliary": Path(str(config.auxiliary)).name,
        "primary": Path(config.primary).name,
        "chosen": best_one.name,
        "samples": num_samples,
        "given": len(given),
        "seed": seed,
        "cacheclip_rag": __version__,
    }
    heads = replace(best_one.heads, about=about)
    return Calibration(heads, tuple(ranking), tuple(candidates), best_one.name, time.perf_counter() - started)


def _looked(
    caches: ChunkCaches, samples: Sequence[Sample], layers: Sequence[int], advance: Callable[[float], None]
) -> Iterator[Seen]:
    for number, sample in enumerate(samples, 1):
        yield look(caches, sample, layers, sinks=SINKS)
        advance(number)


def _ranked(seen: Sequence[Seen]) -> list[HeadRank]:
    """Every head by its mean recall of evidence, ties by layer and head."""
    recall = torch.stack([token_recall(chosen(each.scores, each.lengths, RATIO), each.evidence) for each in seen]).mean(
        0
    )
    found = [
        HeadRank(layer, head, float(recall[layer, head]))
        for layer in range(recall.shape[0])
        for head in range(recall.shape[1])
    ]
    return sorted(found, key=lambda rank: (-rank.recall, rank.layer, rank.head))


def combined(seen: Seen, heads: HeadSet) -> torch.Tensor:
    """``(num_tokens,)`` scores of a head set without updates, from a look at its layers at least."""
    picked = torch.stack([seen.scores[seen.layers.index(layer), head] for layer, head in heads.heads])
    return heads.weights @ picked


def recall_of(scores: torch.Tensor, seen: Seen, ratio: float = RATIO) -> tuple[float, float]:
    """Share of evidence tokens, and of whole values, among the tokens that the default grouping takes."""
    mask = chosen(scores, seen.lengths, ratio)
    return float(token_recall(mask, seen.evidence)), float(span_recall(mask, seen.values))


def downstream(
    engine: CacheClipEngine, samples: Sequence[Sample], sets: Sequence[HeadSet | str], ratio: float = RATIO
) -> list[list[tuple[float, float]]]:
    """First-token KL and mean KL along full prefill's answer, for each set of heads and each sample.

    Args:
        engine: keeps its chunk caches in memory; those of the samples are released.
        sets: head sets that score for :data:`SELECTOR`, or specifications of other methods.
    """
    assert engine.config.store is None, "an engine to train with, not a user's own"
    settings = {"recompute_ratio": ratio, "behind": engine.config.behind}
    found: list[list[tuple[float, float]]] = [[] for _ in sets]
    before = engine.head_set
    try:
        with progress_bar("asking the primary", len(samples), "prompts") as advance, torch.inference_mode():
            for number, sample in enumerate(samples, 1):
                segments = segments_of(engine, sample)
                engine.prefixes.clear()
                full = engine.prefill(segments, method=create("full", {}))
                reference = Reference.of(engine, full, _ANSWER_TOKENS)
                del full
                for outcomes, heads in zip(found, sets, strict=True):
                    method = create(SELECTOR if isinstance(heads, HeadSet) else heads, settings)
                    engine.use_heads(heads if isinstance(heads, HeadSet) else None)
                    engine.precompute(sample.chunks, method=method)
                    engine.prefixes.clear()
                    prefilled = engine.prefill(segments, method=method, question=sample.question)
                    fidelity = reference.follow(prefilled, answers=False).fidelity
                    outcomes.append((fidelity.first_token_kl, fidelity.answer_kl))
                engine.release(sample.chunks)
                advance(number)
    finally:
        engine.use_heads(before)
        engine.release([chunk for sample in samples for chunk in sample.chunks])
    return found
