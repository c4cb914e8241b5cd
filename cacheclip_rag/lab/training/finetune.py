"""Fine-tuning as a job: compute targets with the primary, record attention on samples, fit a head set, and test it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...base.errors import ConfigurationError
from ...base.progress import progress_bar
from ...config import EngineConfig
from ...engine import CacheClipEngine
from ...models.load import concrete
from ...runtime.base import weights_digest
from ...selection.heads import HeadSet
from ..models import auxiliary_caches, transformers_model
from .families import FAMILIES, Sample, synthetic_samples
from .features import check_offsets, look
from .figures import IN_USE, OWN_ATTENTION, SHIPPED, TUNED, UNTUNED, Figures, figures_of
from .outcomes import may_replace
from .targets import after_sinks, attended_and_stale
from .tuning import SINKS, fitted, spaced

__all__ = ["FineTuning", "finetune", "open_engine"]


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
        rival: the head set that the new one would replace; None: the package's, if there is one.

    Raises:
        ConfigurationError: no auxiliary model is set, or there are too few samples.
        ModelError: the auxiliary cannot be used for training, or ``rival`` was made for another model.
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
    asked = spaced(range(len(samples)), num_targets)
    found = _fitted(engine, [samples[number] for number in asked])
    about = {
        **_inputs(engine),
        "sinks": SINKS,
        "seed": seed,
        "samples": num_samples,
        "samples_sha256": hashlib.sha256(json.dumps([each.as_read() for each in samples]).encode()).hexdigest(),
        "targets": num_targets,
        "command": "finetune",
        "auxiliary": Path(str(config.auxiliary)).name,
        "primary": Path(config.primary).name,
        "tests": num_tests,
        "prompts": num_prompts,
        "data": "questions written by cacheclip_rag.lab.training.families (Apache-2.0)",
        "families": {split: list(of_split) for split, of_split in FAMILIES.items()},
    }
    figures, answered = figures_of(engine, found, num_tests, num_prompts, seed, rival)
    if num_prompts:
        about["right"] = answered.summary
    return FineTuning(
        replace(found, about=about),
        _is_accepted({each.name: each for each in figures}),
        tuple(figures),
        time.perf_counter() - started,
        about,
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


def _inputs(engine: CacheClipEngine) -> dict[str, Any]:
    """Everything of an engine on which its models' outputs depend, without names and folders of models."""
    config, auxiliary = engine.config, auxiliary_caches(engine)
    return {
        "primary_sha256": engine.primary.fingerprint,
        "primary_tokenizer_sha256": engine.primary.tokenizer_sha256,
        "auxiliary_sha256": auxiliary.runtime.fingerprint,
        "auxiliary_tokenizer_sha256": auxiliary.runtime.tokenizer_sha256,
        "prefix_ids": list(auxiliary.prefix_ids),
        "system_prompt": config.system_prompt,
        "chunk_context": config.chunk_context,
        "codecs": [config.codec, config.auxiliary_codec],
        "device": [config.device, config.auxiliary_device],
        "cacheclip_rag": __version__,
    }


def _fitted(engine: CacheClipEngine, samples: Sequence[Sample]) -> HeadSet:
    """The head set that is fitted to these samples."""
    caches = auxiliary_caches(engine)
    runtime = transformers_model(caches.runtime)
    seen, targets = [], []
    with progress_bar("asking the primary", len(samples), "samples") as advance:
        for done, sample in enumerate(samples, 1):
            seen.append(look(caches, sample, range(runtime.num_layers), sinks=SINKS))
            targets.append(after_sinks(attended_and_stale(engine, sample), seen[-1].lengths, SINKS))
            advance(done)
    return fitted(seen, targets, weights_digest(runtime.fingerprint))
