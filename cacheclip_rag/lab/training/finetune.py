"""Fine-tuning as a job: record attention on samples, compute targets with the primary, train, and test.

The initial heads, recorded attention, targets, every epoch and every test result are saved in a working folder at once,
so that an interrupted run can continue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...config import EngineConfig
from ...engine import CacheClipEngine
from ...errors import ConfigurationError, ModelError
from ...paths import cache_home
from ...progress import progress_bar
from ...selection.heads import HeadSet, weights_digest
from ..models import transformers_model
from .calibrate import SHIPPED, SINKS, TRIES, in_turn, open_engine
from .families import Sample, synthetic_samples
from .features import look
from .figures import IN_USE, OWN_ATTENTION, UNTUNED, WORDS, Figures, figures_of, last_layer
from .folder import Kept, digest_of, engine_inputs, load_trainee, resumable, save_trainee, train_kept
from .given import data_of
from .outcomes import answered_rightly, downstream, may_replace
from .targets import after_sinks, targets_of
from .tuning import Trainee, Tuned, TuningSettings, check_trainable, fitted, learning_and_held_out, spaced

__all__ = ["FineTuning", "finetune"]

logger = logging.getLogger(__name__)

_FITTED = 24
"""Samples to which heads are fitted if no sample has a target."""


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Result of a fine-tuning."""

    heads: HeadSet
    """Head set to use: the tuned set if it :func:`~cacheclip_rag.lab.training.outcomes.may_replace` the initial set on
    held-out prompts, else the initial set."""
    is_tuned: bool
    is_accepted: bool | None
    """Whether the head set to use passes all tests on the test split: it is closer to full prefill than the untuned
    last layer and EPIC; it :func:`~cacheclip_rag.lab.training.outcomes.may_replace` the head set in use and the
    package's (without these, the last layer); it finds more than words alone (by sentences); and its recall is at most
    0.02 below the primary's own attention. None if the primary was not asked."""
    history: tuple[dict[str, float], ...]
    """Per epoch loss and held-out figures; epoch 0 is before training."""
    figures: tuple[Figures, ...]
    """Figures on test families; the untuned last layer comes first."""
    seconds: float
    about: dict[str, Any]
    folder: Path
    """Working folder, from which an interrupted run continues; may be deleted."""


def finetune(
    config: EngineConfig,
    settings: TuningSettings | None = None,
    *,
    heads: HeadSet | None = None,
    num_samples: int = 96,
    num_targets: int = 36,
    num_tests: int = 36,
    num_prompts: int = 12,
    given: Sequence[Sample] = (),
    given_from: Sequence[str] = (),
    folder: Path | None = None,
    rival: HeadSet | None = None,
) -> FineTuning:
    """Train a head set of ``config.auxiliary`` for ``config.primary``.

    Args:
        heads: initial head set; default the heads whose untrained attention is nearest to the targets.
        num_samples: number of synthetic training samples. A fifth of all training samples is held out.
        num_targets: number of training samples for which the primary computes a target.
        num_tests: number of synthetic test samples.
        num_prompts: number of test samples that are also measured on the primary. As many held-out samples decide
            whether the tuned set is kept. Samples that full prefill answers rightly are preferred.
        given: further training samples.
        given_from: names of the files of the given samples, for the report.
        folder: working folder; default a folder for these settings in ``$CACHECLIP_HOME/training``.
        rival: the head set that the new one would replace; None: the package's, if there is one.

    Raises:
        ConfigurationError: no auxiliary model is set, or there are too few samples.
        ModelError: a model cannot be used for training, or ``rival`` was made for another model.
        Interrupted: the user stopped the run; it can continue from the folder.
    """
    settings = settings or TuningSettings(sinks=SINKS)
    if num_samples + len(given) < 10 or num_tests < 1 or not 0 <= num_prompts <= num_tests:
        raise ConfigurationError(
            f"fine-tuning needs at least 10 training samples, 1 test sample, and no more prompts than tests, got "
            f"{num_samples + len(given)}, {num_tests} and {num_prompts}."
        )
    started = time.perf_counter()
    engine = open_engine(config)
    runtime = transformers_model(engine.auxiliary)
    last = last_layer(runtime, settings.sinks)
    check_trainable(runtime, last if heads is None else heads)
    if rival is not None:
        rival.check(runtime)
    samples = [*synthetic_samples("train", num_samples, seed=settings.seed), *given]
    inputs = _inputs(engine, settings, heads, samples, len(given))
    folder = folder or cache_home() / "training" / digest_of(inputs)[:16]
    kept = Kept(folder, engine_inputs(engine))
    with resumable(folder):
        asked = spaced(range(len(samples)), num_targets)
        targets = targets_of(engine, samples, asked, kept)
        if heads is None:
            heads = _begun(engine, settings, samples, targets, kept, digest_of(inputs))
        looks = {**inputs, "begins_with": heads.digest()}
        _, held_out = learning_and_held_out(len(samples))
        trainees = _trainees(engine, heads, samples, targets, folder, digest_of(looks), settings.sinks)
        tuned = _new(engine, heads, settings)
        whole = {**looks, "settings": asdict(settings), "targets": num_targets}
        state = train_kept(tuned, trainees, folder, digest_of(whole), title="training")
        about = {
            **whole,
            "command": "finetune",
            "auxiliary": Path(str(config.auxiliary)).name,
            "primary": Path(config.primary).name,
            "tests": num_tests,
            "prompts": num_prompts,
            **data_of(len(given), given_from),
        }
        found = tuned.head_set()
        is_tuned = state.best_epoch > 0
        if is_tuned and num_prompts:
            tried = in_turn(held_out, num_samples, TRIES * num_prompts)
            deciding = answered_rightly(engine, [samples[number] for number in tried], num_prompts, kept=kept)
            about["held_out_right"] = deciding.summary
            before, after = downstream(engine, deciding.samples, [heads, found], kept=kept)
            is_tuned = may_replace(after, before)
        if not is_tuned:
            logger.warning("the tuned heads are not better than the initial heads, which are kept")
        figures, asked_of_tests = figures_of(engine, heads, tuned, found, num_tests, num_prompts, kept, rival)
        if num_prompts:
            about["right"] = asked_of_tests.summary
        return FineTuning(
            replace(found if is_tuned else heads, about=about),
            is_tuned,
            _is_accepted({each.name: each for each in figures}, is_tuned),
            tuple(state.history),
            tuple(figures),
            time.perf_counter() - started,
            about,
            folder,
        )


def _is_accepted(figures: Mapping[str, Figures], is_tuned: bool) -> bool | None:
    """Whether the kept head set passes all tests; see :attr:`FineTuning.is_accepted`."""
    kept, own = figures["after" if is_tuned else "before"], figures.get(OWN_ATTENTION)
    if kept.kl is None or own is None:
        return None
    nearer = all((figures[name].kl or 0.0) > kept.kl for name in (UNTUNED, "epic"))
    replaced = [figures[name] for name in (SHIPPED, IN_USE) if name in figures] or [figures[UNTUNED]]
    nearer = nearer and all(may_replace(kept.outcomes, each.outcomes) for each in replaced)
    # words score whole sentences, so both are compared by sentences
    finds = kept.sentence_recall["0.2"] > figures[WORDS].sentence_recall["0.2"]
    return nearer and finds and kept.recall_of_asked["0.2"] >= own.recall["0.2"] - 0.02


def _new(engine: CacheClipEngine, heads: HeadSet, settings: TuningSettings) -> Tuned:
    runtime = transformers_model(engine.auxiliary)
    return Tuned(heads, runtime.model.config.num_attention_heads, runtime.num_kv_heads, runtime.head_dim, settings)


def _inputs(
    engine: CacheClipEngine,
    settings: TuningSettings,
    heads: HeadSet | None,
    samples: Sequence[Sample],
    num_given: int,
) -> dict[str, Any]:
    """Everything on which recorded attention depends, without names and folders of models."""
    return {
        **engine_inputs(engine),
        "heads_sha256": heads.digest() if heads else None,
        "sinks": settings.sinks,
        "seed": settings.seed,
        "samples": len(samples) - num_given,
        "given": num_given,
        "samples_sha256": digest_of([each.as_read() for each in samples]),
    }


def _begun(
    engine: CacheClipEngine,
    settings: TuningSettings,
    samples: Sequence[Sample],
    targets: Mapping[int, torch.Tensor | None],
    kept: Kept,
    digest: str,
) -> HeadSet:
    """The initial heads, from an interrupted run or fitted now."""
    path = kept.folder / "begun.safetensors"
    made_by = [digest, settings.target_weight, list(targets)]
    if path.is_file():
        try:
            begun = HeadSet.load(path)
            if begun.about.get("inputs") == made_by:
                return begun
        except ModelError as error:
            logger.info("fitting again: %s", error)
    caches = engine.parts.auxiliary_caches
    runtime = transformers_model(caches.runtime)
    numbers = list(targets) or spaced(range(len(samples)), _FITTED)
    seen = []
    with progress_bar("reading with every head", len(numbers), "samples") as advance:
        for done, number in enumerate(numbers, 1):
            seen.append(kept.look(caches, samples[number], range(runtime.num_layers), sinks=settings.sinks))
            advance(done)
    aims = [
        after_sinks(targets.get(number), each.lengths, settings.sinks)
        for number, each in zip(numbers, seen, strict=True)
    ]
    found = fitted(seen, aims, weights_digest(runtime.fingerprint), settings)
    found = replace(found, about={"inputs": made_by})
    found.save(path)
    return found


def _trainees(
    engine: CacheClipEngine,
    heads: HeadSet,
    samples: Sequence[Sample],
    targets: Mapping[int, torch.Tensor | None],
    folder: Path,
    digest: str,
    sinks: int,
) -> list[Trainee]:
    """Training data of each sample, from the folder if it is there."""
    caches = engine.parts.auxiliary_caches
    found, made = [], 0
    with progress_bar("reading", len(samples), "samples") as advance:
        for number, sample in enumerate(samples):
            path = folder / f"sample-{number:05d}.safetensors"
            trainee = load_trainee(path, digest)
            if trainee is None:
                made += 1
                seen = look(caches, sample, heads.layers, sinks=sinks, keep=heads.layers[-1])
                trainee = Trainee.of(seen, heads)
                save_trainee(trainee, path, digest)
            found.append(replace(trainee, target=after_sinks(targets.get(number), trainee.lengths, sinks)))
            advance(number + 1)
    logger.info("%d of %d samples were already in %s", len(samples) - made, len(samples), folder)
    return found
