"""Fine-tuning as a job: compute targets with the primary, record attention on samples, fit a head set, and test it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...base.errors import ConfigurationError
from ...base.progress import progress_bar
from ...config import EngineConfig
from ...engine import CacheClipEngine
from ...methods import preset
from ...methods.base import Method
from ...methods.recompute import Recompute
from ...models.load import concrete
from ...runtime.base import weights_digest
from ...selection.heads import HeadSet, shipped_set
from ...selection.scorers import QueryAttention
from ..models import auxiliary_caches, transformers_model
from ..variants import ORACLE, RANDOM
from .families import FAMILIES, Sample, synthetic_samples
from .features import look
from .outcomes import Outcome, answered_rightly, capped_mean, downstream, may_replace
from .targets import after_sinks, attended_and_stale
from .tuning import SINKS, fitted, spaced

UNTUNED, TUNED, OWN_ATTENTION = "last layer as it comes", "fine-tuned", "the primary's own attention"
SHIPPED, IN_USE = "comes with the package", "in use so far"
"""Names of the head sets that the new one would replace: the package's, and one that an earlier run wrote."""
_TRIES = 3
"""Most questions tried for one that the primary answers rightly."""


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Result of a fine-tuning."""

    heads: HeadSet
    is_accepted: bool | None
    """Whether answers to the test questions are closer to full prefill's than with the untuned last layer and EPIC, and
    the head set :func:`~cacheclip_rag.lab.training.outcomes.may_replace` the one in use and the package's (without
    these, the last layer). None if the primary was not asked."""
    outcomes: dict[str, tuple[Outcome, ...]]
    """Per test question, by what chose the tokens; the untuned last layer comes first. Empty if the primary was not
    asked."""
    seconds: float
    about: dict[str, Any]


def open_engine(config: EngineConfig) -> CacheClipEngine:
    """An engine for fine-tuning: in memory, with models whose KV can be reused.

    Raises:
        ConfigurationError: no auxiliary model is set, or a model's KV cannot be reused.
    """
    if config.auxiliary is None:
        raise ConfigurationError("there is no auxiliary model to fine-tune. Name one with --auxiliary.")
    engine = CacheClipEngine(concrete(config), store=None, max_bytes=None, shadow_rate=0.0)
    engine.parts.use_heads(None)
    return engine


def finetune(
    config: EngineConfig,
    *,
    num_samples: int = 96,
    num_targets: int = 36,
    num_prompts: int = 12,
    seed: int = 0,
    rival: HeadSet | None = None,
) -> FineTuning:
    """Fit a head set of ``config.auxiliary`` for ``config.primary``.

    Args:
        num_samples: number of synthetic training samples.
        num_targets: number of training samples, evenly spread, to which the head set is fitted: those for which the
            primary computes a target.
        num_prompts: number of test samples. Samples that full prefill answers rightly are preferred.
        seed: seed of the synthetic samples.
        rival: the head set that the new one would replace; None: the package's, if there is one.

    Raises:
        ConfigurationError: no auxiliary model is set, or there are too few samples.
        ModelError: the auxiliary cannot be used for training, or ``rival`` was made for another model.
    """
    if num_samples < 10 or num_targets < 1 or num_prompts < 0:
        raise ConfigurationError(
            "fine-tuning needs at least 10 training samples, 1 target, and prompts from 0 on, got "
            f"{num_samples}, {num_targets} and {num_prompts}."
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
        "samples_sha256": hashlib.sha256(json.dumps([asdict(each) for each in samples]).encode()).hexdigest(),
        "targets": num_targets,
        "command": "finetune",
        "auxiliary": Path(str(config.auxiliary)).name,
        "primary": Path(config.primary).name,
        "prompts": num_prompts,
        "data": "questions written by cacheclip_rag.lab.training.families (Apache-2.0)",
        "families": {split: list(of_split) for split, of_split in FAMILIES.items()},
    }
    outcomes: dict[str, tuple[Outcome, ...]] = {}
    if num_prompts:
        tests = synthetic_samples("test", _TRIES * num_prompts, seed=seed)
        answered = answered_rightly(engine, tests, num_prompts)
        outcomes = _tested(engine, found, answered.samples, rival)
        about["right"] = answered.summary
    return FineTuning(
        replace(found, about=about),
        _is_accepted(outcomes),
        outcomes,
        time.perf_counter() - started,
        about,
    )


def _tested(
    engine: CacheClipEngine, heads: HeadSet, samples: Sequence[Sample], rival: HeadSet | None
) -> dict[str, tuple[Outcome, ...]]:
    """Outcomes of the samples with the last layer, the head sets that the new one would replace, the new one, and other
    methods."""
    runtime = transformers_model(engine.auxiliary)
    sha256, num_heads = weights_digest(runtime.fingerprint), runtime.model.config.num_attention_heads
    last = replace(HeadSet.of_last_layer(sha256, runtime.num_layers, num_heads), sinks=SINKS)
    sets: dict[str, HeadSet | Method] = {UNTUNED: last}
    sets |= {name: each for name, each in ((SHIPPED, shipped_set(runtime)), (IN_USE, rival)) if each is not None}
    sets[TUNED] = heads
    others = [preset("direct"), RANDOM, preset("cacheblend"), preset("epic"), preset("anchored"), ORACLE]
    others.append(Recompute(QueryAttention(layers="upper"), name=OWN_ATTENTION))
    sets |= {method.name: method for method in others}
    found = downstream(engine, samples, list(sets.values()))
    return {name: tuple(outcomes) for name, outcomes in zip(sets, found, strict=True)}


def _is_accepted(outcomes: Mapping[str, Sequence[Outcome]]) -> bool | None:
    """See :attr:`FineTuning.is_accepted`."""
    if not outcomes:
        return None
    tuned = outcomes[TUNED]
    nearer = all(capped_mean(outcomes[name]) > capped_mean(tuned) for name in (UNTUNED, "epic"))
    replaced = [outcomes[name] for name in (SHIPPED, IN_USE) if name in outcomes] or [outcomes[UNTUNED]]
    return nearer and all(may_replace(tuned, each) for each in replaced)


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
