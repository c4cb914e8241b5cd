"""Fine-tuning as a job: record attention on samples, compute targets with the primary, fit a head set, and test it.

Recorded attention, targets, the head set and every test result are saved in a working folder at once, so that an
interrupted run can continue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...base.errors import ConfigurationError, ModelError
from ...base.paths import cache_home
from ...base.progress import progress_bar
from ...config import EngineConfig
from ...engine import CacheClipEngine
from ...models.load import concrete
from ...runtime.base import weights_digest
from ...selection.heads import HeadSet
from ..models import auxiliary_caches, transformers_model
from .families import FAMILIES, Sample, synthetic_samples
from .features import check_offsets
from .figures import IN_USE, OWN_ATTENTION, SHIPPED, TUNED, UNTUNED, Figures, figures_of
from .folder import Kept, digest_of, engine_inputs, resumable
from .outcomes import may_replace
from .targets import after_sinks, targets_of
from .tuning import SINKS, fitted, spaced

__all__ = ["FineTuning", "finetune", "open_engine"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Result of a fine-tuning."""

    heads: HeadSet
    is_accepted: bool | None
    """Whether the head set passes all tests on the test split: it is closer to full prefill than the untuned last layer
    and EPIC; it :func:`~cacheclip_rag.lab.training.outcomes.may_replace` the head set in use and the package's (without
    these, the last layer); and its recall is at most 0.02 below the primary's own attention. None if the primary was
    not asked."""
    figures: tuple[Figures, ...]
    """Figures on test families; the untuned last layer comes first."""
    seconds: float
    about: dict[str, Any]
    folder: Path
    """Working folder, from which an interrupted run continues; may be deleted."""


def open_engine(config: EngineConfig) -> CacheClipEngine:
    """An engine for fine-tuning: in memory, with models whose KV can be reused.

    Raises:
        ConfigurationError: no auxiliary model is set, or a model's KV cannot be reused.
        ModelError: the auxiliary's tokenizer has no character offsets.
    """
    if config.auxiliary is None:
        raise ConfigurationError("there is no auxiliary model to fine-tune. Name one with --auxiliary.")
    engine = CacheClipEngine(concrete(config), store=None, max_bytes=None, shadow_rate=0.0)
    engine.parts.use_heads(None)
    check_offsets(transformers_model(engine.auxiliary))
    return engine


def finetune(
    config: EngineConfig,
    *,
    num_samples: int = 96,
    num_targets: int = 36,
    num_tests: int = 36,
    num_prompts: int = 12,
    seed: int = 0,
    folder: Path | None = None,
    rival: HeadSet | None = None,
) -> FineTuning:
    """Fit a head set of ``config.auxiliary`` for ``config.primary``.

    Args:
        num_samples: number of synthetic training samples.
        num_targets: number of training samples, evenly spread, to which the head set is fitted: those for which the
            primary computes a target.
        num_tests: number of synthetic test samples.
        num_prompts: number of test samples that are also measured on the primary. Samples that full prefill answers
            rightly are preferred.
        seed: seed of the synthetic samples.
        folder: working folder; default a folder for these settings in ``$CACHECLIP_HOME/training``.
        rival: the head set that the new one would replace; None: the package's, if there is one.

    Raises:
        ConfigurationError: no auxiliary model is set, or there are too few samples.
        ModelError: the auxiliary cannot be used for training, or ``rival`` was made for another model.
        Interrupted: the user stopped the run; it can continue from the folder.
    """
    if num_samples < 10 or num_targets < 1 or num_tests < 1 or not 0 <= num_prompts <= num_tests:
        raise ConfigurationError(
            f"fine-tuning needs at least 10 training samples, 1 target, 1 test sample, and no more prompts than tests, "
            f"got {num_samples}, {num_targets}, {num_tests} and {num_prompts}."
        )
    started = time.perf_counter()
    engine = open_engine(config)
    if rival is not None:
        rival.check(engine.auxiliary)
    samples = synthetic_samples("train", num_samples, seed=seed)
    inputs = _inputs(engine, seed, samples)
    folder = folder or cache_home() / "training" / digest_of(inputs)[:16]
    kept = Kept(folder, engine_inputs(engine))
    with resumable(folder):
        targets = targets_of(engine, samples, spaced(range(len(samples)), num_targets), kept)
        found = _fitted(engine, samples, targets, kept, digest_of([inputs, list(targets)]))
        about = {
            **inputs,
            "targets": num_targets,
            "command": "finetune",
            "auxiliary": Path(str(config.auxiliary)).name,
            "primary": Path(config.primary).name,
            "tests": num_tests,
            "prompts": num_prompts,
            "data": "questions written by cacheclip_rag.lab.training.families (Apache-2.0)",
            "families": {split: list(of_split) for split, of_split in FAMILIES.items()},
        }
        figures, asked = figures_of(engine, found, num_tests, num_prompts, seed, kept, rival)
        if num_prompts:
            about["right"] = asked.summary
        return FineTuning(
            replace(found, about=about),
            _is_accepted({each.name: each for each in figures}),
            tuple(figures),
            time.perf_counter() - started,
            about,
            folder,
        )


def _is_accepted(figures: Mapping[str, Figures]) -> bool | None:
    """Whether the head set passes all tests; see :attr:`FineTuning.is_accepted`."""
    tuned, own = figures[TUNED], figures.get(OWN_ATTENTION)
    if tuned.kl is None or own is None:
        return None
    nearer = all((figures[name].kl or 0.0) > tuned.kl for name in (UNTUNED, "epic"))
    replaced = [figures[name] for name in (SHIPPED, IN_USE) if name in figures] or [figures[UNTUNED]]
    nearer = nearer and all(may_replace(tuned.outcomes, each.outcomes) for each in replaced)
    return nearer and tuned.recall_of_asked["0.2"] >= own.recall["0.2"] - 0.02


def _inputs(engine: CacheClipEngine, seed: int, samples: Sequence[Sample]) -> dict[str, Any]:
    """Everything on which recorded attention depends, without names and folders of models."""
    return {
        **engine_inputs(engine),
        "sinks": SINKS,
        "seed": seed,
        "samples": len(samples),
        "samples_sha256": digest_of([each.as_read() for each in samples]),
    }


def _fitted(
    engine: CacheClipEngine,
    samples: Sequence[Sample],
    targets: Mapping[int, torch.Tensor | None],
    kept: Kept,
    digest: str,
) -> HeadSet:
    """The head set, from an earlier run or fitted now."""
    path = kept.folder / "fitted.safetensors"
    if path.is_file():
        try:
            found = HeadSet.load(path)
            if found.about.get("inputs") == digest:
                return found
        except ModelError as error:
            logger.info("fitting again: %s", error)
    caches = auxiliary_caches(engine)
    runtime = transformers_model(caches.runtime)
    seen, aims = [], []
    with progress_bar("reading with every head", len(targets), "samples") as advance:
        for done, (number, target) in enumerate(targets.items(), 1):
            seen.append(kept.look(caches, samples[number], range(runtime.num_layers), sinks=SINKS))
            aims.append(after_sinks(target, seen[-1].lengths, SINKS))
            advance(done)
    found = replace(fitted(seen, aims, weights_digest(runtime.fingerprint)), about={"inputs": digest})
    found.save(path)
    return found
