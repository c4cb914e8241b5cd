"""Calibration: which of the auxiliary's heads and layers look at evidence. No gradients.

Ours; that few heads of a model retrieve is known since Retrieval Head (arXiv:2404.15574). Every head scores synthetic
questions (and given ones) by itself; heads are ranked by the evidence among the tokens that the default grouping would
take; sets of the best are then tried on the primary itself, where what counts is how far the answer is from full
prefill's. Looks and answers are kept in a working folder as they come: an interrupted run goes on where it was.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ... import __version__
from ...config import EngineConfig
from ...engine import CacheClipEngine
from ...errors import ConfigurationError, ModelError
from ...paths import cache_home
from ...progress import progress_bar
from ...runtime.transformers.model import ModelRuntime
from ...selection.heads import HeadSet, shipped_path, weights_digest
from ..models import transformers_model
from .families import Sample, synthetic_samples
from .features import Seen, check_offsets
from .folder import Kept, digest_of, engine_inputs, resumable
from .measures import chosen, span_recall, token_recall
from .outcomes import RATIO, answered_rightly, capped_mean, downstream
from .tuning import spaced

__all__ = [
    "SHIPPED",
    "Calibration",
    "Candidate",
    "HeadRank",
    "LayerRank",
    "best_of",
    "calibrate",
    "combined",
    "in_turn",
    "is_combined",
    "open_engine",
    "ranking_and_checking",
    "recall_of",
    "shipped_set",
]

logger = logging.getLogger(__name__)

SHIPPED = "comes with the package"
"""Name of the set that engines take where nothing was calibrated or tuned."""
SINKS = 4
"""Tokens at the start of each chunk that nobody scores here."""
_SIZES = (4, 8, 16, 32)
TRIES = 3
"""Samples tried, at most, for each that the primary should answer rightly."""
_ABOUT = 1.1
"""A few prompts tell KLs apart no better than this."""


@dataclass(frozen=True, slots=True)
class HeadRank:
    """One head on the ranking samples."""

    layer: int
    head: int
    recall: float
    """Mean share of the evidence among the tokens it would choose."""


@dataclass(frozen=True, slots=True)
class LayerRank:
    """One layer on the ranking samples."""

    layer: int
    recall: float
    """As of a head, by the mean of the attention of all its heads."""


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
    layers: tuple[LayerRank, ...]
    """Every layer, the best first."""
    candidates: tuple[Candidate, ...]
    """The untuned last layer first."""
    chosen: str
    """Name of the best candidate."""
    seconds: float
    folder: Path
    """Where an interrupted run would have gone on from; may be deleted."""


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
    auxiliary = transformers_model(engine.auxiliary)
    check_offsets(auxiliary)
    return engine


def calibrate(
    config: EngineConfig,
    *,
    num_samples: int = 90,
    num_prompts: int = 10,
    given: Sequence[Sample] = (),
    seed: int = 0,
    folder: Path | None = None,
) -> Calibration:
    """Rank the heads and layers of ``config.auxiliary``, and try the best on ``config.primary``.

    Args:
        num_samples: synthetic ones; two thirds of each family rank, the others check. Given ones come on top, and are
            shared out alike.
        num_prompts: of those that check, for the primary, as far as it answers so many rightly by itself
            (:func:`answered_rightly`); 0 asks it nothing, and evidence alone decides.
        folder: where looks at samples and answers are kept; default one by these settings in
            ``$CACHECLIP_HOME/training``.

    Raises:
        ConfigurationError: no auxiliary model, or too few samples.
        Interrupted: the user stopped it; it goes on from the folder.
    """
    if num_samples + len(given) < 6 or num_prompts < 0:
        raise ConfigurationError(
            f"calibration needs at least 6 samples, and prompts from 0 on; got {num_samples + len(given)} and "
            f"{num_prompts}."
        )
    started = time.perf_counter()
    engine = open_engine(config)
    auxiliary = transformers_model(engine.auxiliary)
    caches = engine.parts.auxiliary_caches
    samples = [*synthetic_samples("train", num_samples, seed=seed), *given]
    inputs = engine_inputs(engine)
    digest = digest_of([inputs, [each.as_read() for each in samples]])
    kept = Kept(folder or cache_home() / "training" / digest[:16], inputs)
    rank, check = ranking_and_checking(samples)
    with resumable(kept.folder):
        seen = []
        with progress_bar("reading", len(samples), "samples") as advance:
            for done, sample in enumerate(samples, 1):
                seen.append(kept.look(caches, sample, range(auxiliary.num_layers), sinks=SINKS))
                advance(done)
        ranking, layers = _ranked([seen[number] for number in rank])
        sets = _sets(auxiliary, ranking)
        tried = in_turn(check, num_samples, TRIES * num_prompts)
        asked = answered_rightly(engine, [samples[number] for number in tried], num_prompts, kept=kept)
        found = downstream(engine, asked.samples, list(sets.values()), kept=kept)
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
        "prompts": len(asked.samples),
        "seed": seed,
        "cacheclip_rag": __version__,
    }
    if asked.samples:
        about["right"] = asked.summary
    heads = replace(best_one.heads, about=about)
    return Calibration(
        heads,
        tuple(ranking),
        tuple(layers),
        tuple(candidates),
        best_one.name,
        time.perf_counter() - started,
        kept.folder,
    )


def ranking_and_checking(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Numbers of the samples that rank, and of a third of each family, which check: of each another third, so that few
    samples are shared out evenly too."""
    seen: dict[str, int] = {}
    order: dict[str, int] = {}
    rank: list[int] = []
    check: list[int] = []
    for number, sample in enumerate(samples):
        turn = seen.get(sample.family, 0) + order.setdefault(sample.family, len(order))
        seen[sample.family] = seen.get(sample.family, 0) + 1
        (rank if turn % 3 else check).append(number)
    return rank, check


def in_turn(numbers: Sequence[int], num_synthetic: int, count: int) -> list[int]:
    """``count`` of the samples, evenly spread, in the order to try them in: given ones, which are those from
    ``num_synthetic`` on, evenly among the others, so that the first few are some of both."""
    picked = spaced(numbers, count)
    kinds = [n for n in picked if n < num_synthetic], [n for n in picked if n >= num_synthetic]
    return [n for _, n in sorted(((rank + 0.5) / len(kind), n) for kind in kinds for rank, n in enumerate(kind))]


def shipped_set(auxiliary: ModelRuntime) -> HeadSet | None:
    """The head set that comes with the package for this auxiliary; None where there is none that fits."""
    path = shipped_path(weights_digest(auxiliary.fingerprint))
    if not path.is_file():
        return None
    try:
        found = HeadSet.load(path)
        found.check(auxiliary)
    except ModelError as error:
        logger.warning("left out: %s", error)
        return None
    return found


def is_combined(heads: HeadSet, sinks: int) -> bool:
    """Whether looks with so many sinks show what these heads score (:func:`combined`)."""
    return not heads.is_updated and heads.sinks == sinks


def _sets(auxiliary: ModelRuntime, ranking: Sequence[HeadRank]) -> dict[str, HeadSet]:
    """What may be chosen: the last layer, some layers of the model as they come, the best heads, and what comes with
    the package."""
    sha256, num_heads = weights_digest(auxiliary.fingerprint), auxiliary.model.config.num_attention_heads
    sets = {}
    for name, layers in (("last layer", "last"), ("middle third", "middle"), ("upper half", "upper")):
        sets[name] = replace(HeadSet.of_layers(sha256, layers, auxiliary.num_layers, num_heads), sinks=SINKS)
    for size in (size for size in _SIZES if size <= len(ranking)):
        best = sorted((each.layer, each.head) for each in ranking[:size])
        sets[f"best {size}"] = HeadSet(sha256, tuple(best), torch.full((size,), 1.0 / size), sinks=SINKS)
    shipped = shipped_set(auxiliary)
    if shipped is not None and is_combined(shipped, SINKS):
        sets[SHIPPED] = shipped
    return sets


def _ranked(seen: Sequence[Seen]) -> tuple[list[HeadRank], list[LayerRank]]:
    """Every head and every layer by its mean recall of evidence, ties by number."""
    scores = [torch.cat((each.scores, each.scores.mean(1, keepdim=True)), dim=1) for each in seen]  # the mean last
    recalls = [
        token_recall(chosen(found, each.lengths, RATIO), each.evidence)
        for found, each in zip(scores, seen, strict=True)
    ]
    recall = torch.stack(recalls).mean(0)  # (num_layers, num_heads + 1)
    heads = [
        HeadRank(layer, head, float(recall[layer, head]))
        for layer in range(recall.shape[0])
        for head in range(recall.shape[1] - 1)
    ]
    layers = [LayerRank(layer, float(row[-1])) for layer, row in enumerate(recall)]
    return (
        sorted(heads, key=lambda rank: (-rank.recall, rank.layer, rank.head)),
        sorted(layers, key=lambda rank: (-rank.recall, rank.layer)),
    )


def combined(seen: Seen, heads: HeadSet) -> torch.Tensor:
    """``(num_tokens,)`` scores of a head set without updates, from a look at its layers at least."""
    picked = torch.stack([seen.scores[seen.layers.index(layer), head] for layer, head in heads.heads])
    return heads.weights @ picked


def recall_of(scores: torch.Tensor, seen: Seen, ratio: float = RATIO) -> tuple[float, float]:
    """Share of evidence tokens, and of whole values, among the tokens that the default grouping takes."""
    mask = chosen(scores, seen.lengths, ratio)
    return float(token_recall(mask, seen.evidence)), float(span_recall(mask, seen.values))
