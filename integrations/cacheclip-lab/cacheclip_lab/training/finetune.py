"""Fine-tuning as a job: compute targets with the primary, record attention on samples, and fit a head set to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig, __version__
from cacheclip_rag.measuring import auxiliary_caches, use_heads
from cacheclip_rag.models import concrete, loader_of, weights_digest
from cacheclip_rag.plugins import progress_bar
from cacheclip_rag.selection import HeadSet

from ..models import transformers_model
from .families import FAMILIES, Sample, synthetic_samples
from .features import look
from .targets import after_sinks, attended_and_stale
from .tuning import SINKS, fitted, spaced


def open_engine(config: EngineConfig) -> CacheClipEngine:
    """An engine for fine-tuning: in memory, with models whose KV can be reused.

    Raises:
        ConfigurationError: no auxiliary model is set, or a model's KV cannot be reused.
    """
    if config.auxiliary is None:
        raise ConfigurationError("there is no auxiliary model to fine-tune. Name one with --auxiliary.")
    if not loader_of(config.primary).can_score:
        raise ConfigurationError(
            f"expected a primary whose attention can be read, got {config.primary!r}, whose runtime does not "
            "show it. Fine-tune with its unquantised checkpoint, and name the file (--out) in a method's scorer: docs, "
            "how-to/auxiliary."
        )
    engine = CacheClipEngine(concrete(config), store=None, max_bytes=None, shadow_rate=0.0)
    use_heads(engine, None)
    return engine


def finetune(config: EngineConfig, *, num_samples: int = 96, num_targets: int = 36, seed: int = 0) -> HeadSet:
    """Fit a head set of ``config.auxiliary`` for ``config.primary``. ``about`` of the head set says from what.

    Args:
        num_samples: number of synthetic training samples.
        num_targets: number of training samples, evenly spread, to which the head set is fitted: those for which the
            primary computes a target.
        seed: seed of the synthetic samples.

    Raises:
        ConfigurationError: no auxiliary model is set, or there are too few samples.
        ModelError: the auxiliary cannot be used for training.
    """
    if num_samples < 10 or num_targets < 1:
        raise ConfigurationError(
            f"fine-tuning needs at least 10 training samples and 1 target, got {num_samples} and {num_targets}."
        )
    engine = open_engine(config)
    samples = synthetic_samples(num_samples, seed=seed)
    found = _fitted(engine, [samples[number] for number in spaced(range(len(samples)), num_targets)])
    about = {
        **_inputs(engine),
        "sinks": SINKS,
        "seed": seed,
        "samples": num_samples,
        "samples_sha256": hashlib.sha256(json.dumps([asdict(each) for each in samples]).encode()).hexdigest(),
        "targets": num_targets,
        "command": "finetune",
        "auxiliary": Path(str(config.auxiliary)).name,
        "primary": Path(config.primary).name,
        "data": "questions written by cacheclip_lab.training.families (Apache-2.0)",
        "families": list(FAMILIES),
    }
    return replace(found, about=about)


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
            recorded, target = look(caches, sample, sinks=SINKS), attended_and_stale(engine, sample)
            if target is not None and (left := after_sinks(target, recorded.lengths, SINKS)) is not None:
                seen.append(recorded)
                targets.append(left)
            advance(done)
    if not targets:
        raise ConfigurationError("no stored KV is stale in these models, so that there is nothing to choose.")
    return fitted(seen, targets, weights_digest(runtime.fingerprint))
