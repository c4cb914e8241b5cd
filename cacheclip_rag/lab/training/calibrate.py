"""Calibration: finds heads and layers of the auxiliary model that attend to evidence, without gradients.

Our own method; Retrieval Head (arXiv:2404.15574) showed that few heads of a model retrieve. Each head scores synthetic
and given questions. Heads are ranked by the share of evidence among the tokens that the default grouping would take.
Sets of the best heads are then tested on the primary, by the distance of its answers from full prefill's. Attention and
answers are saved in a working folder at once, so that an interrupted run can continue.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ... import __version__
from ...base.errors import ConfigurationError
from ...base.paths import cache_home
from ...base.progress import progress_bar
from ...config import EngineConfig
from ...engine import CacheClipEngine
from ...models.load import concrete
from ...runtime.base import weights_digest
from ...runtime.transformers.model import ModelRuntime
from ...selection.heads import HeadSet, shipped_set
from ..models import auxiliary_caches, transformers_model
from .families import Sample, synthetic_samples
from .features import Seen, check_offsets
from .folder import Kept, digest_of, engine_inputs, resumable
from .measures import chosen, span_recall, token_recall
from .outcomes import RATIO, Outcome, answered_rightly, capped_mean, downstream, f1_share, same_answers, same_first
from .tuning import SINKS, spaced

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
]


SHIPPED = "comes with the package"
"""Name of the head set that engines use without calibration or tuning."""
_SIZES = (4, 8, 16, 32)
TRIES = 3
"""Most samples tried per sample that the primary should answer rightly."""
_ABOUT = 1.1
"""KLs that differ by less than this factor count as equal, because there are few prompts."""


@dataclass(frozen=True, slots=True)
class HeadRank:
    """One head on the ranking samples."""

    layer: int
    head: int
    recall: float
    """Mean share of the evidence tokens that the head would choose."""


@dataclass(frozen=True, slots=True)
class LayerRank:
    """One layer on the ranking samples."""

    layer: int
    recall: float
    """Like a head's recall, with the mean attention of all heads of the layer."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of heads, and its figures on samples that were not used to choose it."""

    name: str
    heads: HeadSet
    recall: float
    """Recall of evidence tokens."""
    span_recall: float
    """Recall of whole values: a number with a missing digit does not count."""
    outcomes: tuple[Outcome, ...]
    """Per prompt; empty if the primary was not asked."""

    @property
    def kl(self) -> float:
        """:func:`capped_mean` of the outcomes; 0 if the primary was not asked."""
        return capped_mean(self.outcomes) if self.outcomes else 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of a calibration."""

    heads: HeadSet
    """Head set of the best candidate."""
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
    """Working folder, from which an interrupted run continues; may be deleted."""


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the most answers equal to full prefill's, then the most equal first tokens, then the highest
    F1 of answers, then the highest recall, among those whose answers are about as close to full prefill by KL as the
    nearest.

    Candidates with fewer equal first tokens than the package's head set, which they would replace, are left out. KL
    comes first, and counts are no objective: see :func:`~cacheclip_rag.lab.training.outcomes.may_replace`.
    """
    fewest = max((same_first(each.outcomes) for each in candidates if each.name == SHIPPED), default=0)
    allowed = [each for each in candidates if same_first(each.outcomes) >= fewest]
    nearest = min(each.kl for each in allowed)
    near = [each for each in allowed if each.kl <= _ABOUT * nearest]
    return max(
        near,
        key=lambda each: (
            same_answers(each.outcomes),
            same_first(each.outcomes),
            f1_share(each.outcomes) or 0.0,
            each.recall,
        ),
    )


def open_engine(config: EngineConfig) -> CacheClipEngine:
    """An engine for calibration: in memory, with models whose KV can be reused.

    Raises:
        ConfigurationError: no auxiliary model is set, or a model's KV cannot be reused.
        ModelError: the auxiliary's tokenizer has no character offsets.
    """
    if config.auxiliary is None:
        raise ConfigurationError("there is no auxiliary model to calibrate. Name one with --auxiliary.")
    engine = CacheClipEngine(concrete(config), store=None, max_bytes=None, shadow_rate=0.0)
    engine.parts.use_heads(None)
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
    """Rank the heads and layers of ``config.auxiliary``, and test the best on ``config.primary``.

    Args:
        num_samples: number of synthetic samples. Two thirds of each family rank heads, the others test them.
        num_prompts: test samples for the primary, preferably samples that full prefill answers rightly
            (:func:`answered_rightly`). With 0, only the recall of evidence decides.
        given: further samples, divided in the same way.
        folder: working folder; default a folder for these settings in ``$CACHECLIP_HOME/training``.

    Raises:
        ConfigurationError: no auxiliary model is set, or there are too few samples.
        Interrupted: the user stopped the run; it can continue from the folder.
    """
    if num_samples + len(given) < 6 or num_prompts < 0:
        raise ConfigurationError(
            f"calibration needs at least 6 samples, and prompts from 0 on; got {num_samples + len(given)} and "
            f"{num_prompts}."
        )
    started = time.perf_counter()
    engine = open_engine(config)
    auxiliary = transformers_model(engine.auxiliary)
    caches = auxiliary_caches(engine)
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
                tuple(outcomes),
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
    """Numbers of the ranking samples, and of the test samples, a third of each family. Each family takes another third,
    so that few samples are divided evenly too."""
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
    """``count`` of the samples, evenly spread, in the order in which to try them. Given samples (numbers from
    ``num_synthetic`` on) are mixed evenly with synthetic ones."""
    picked = spaced(numbers, count)
    kinds = [n for n in picked if n < num_synthetic], [n for n in picked if n >= num_synthetic]
    return [n for _, n in sorted(((rank + 0.5) / len(kind), n) for kind in kinds for rank, n in enumerate(kind))]


def is_combined(heads: HeadSet) -> bool:
    """Whether :func:`combined` can compute the scores of these heads from recorded attention."""
    return heads.sinks == SINKS


def _sets(auxiliary: ModelRuntime, ranking: Sequence[HeadRank]) -> dict[str, HeadSet]:
    """Candidates: the last layer, some other layers, the best heads, and the head set of the package."""
    sha256, num_heads = weights_digest(auxiliary.fingerprint), auxiliary.model.config.num_attention_heads
    sets = {}
    for name, layers in (("last layer", "last"), ("middle third", "middle"), ("upper half", "upper")):
        sets[name] = replace(HeadSet.of_layers(sha256, layers, auxiliary.num_layers, num_heads), sinks=SINKS)
    for size in (size for size in _SIZES if size <= len(ranking)):
        best = sorted((each.layer, each.head) for each in ranking[:size])
        sets[f"best {size}"] = HeadSet(sha256, tuple(best), torch.full((size,), 1.0 / size), sinks=SINKS)
    shipped = shipped_set(auxiliary)
    if shipped is not None and is_combined(shipped):
        sets[SHIPPED] = shipped
    return sets


def _ranked(seen: Sequence[Seen]) -> tuple[list[HeadRank], list[LayerRank]]:
    """Heads and layers ordered by mean recall of evidence; ties by number."""
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
    """``(num_tokens,)`` scores of a head set, from recorded attention of its layers."""
    picked = torch.stack([seen.scores[seen.layers.index(layer), head] for layer, head in heads.heads])
    return heads.weights @ picked


def recall_of(scores: torch.Tensor, seen: Seen, ratio: float = RATIO) -> tuple[float, float]:
    """Shares of the evidence tokens, and of the whole values, that the default grouping takes."""
    mask = chosen(scores, seen.lengths, ratio)
    return float(token_recall(mask, seen.evidence)), float(span_recall(mask, seen.values))
