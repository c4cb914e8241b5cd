"""Fine-tuning as a job: look at samples, ask the primary what matters, train, and measure what it was worth.

Everything slow is kept in a working folder as it comes, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .. import __version__
from ..config import EngineConfig
from ..engine import CacheClipEngine
from ..errors import ConfigurationError
from ..models.runtime import ModelRuntime
from ..paths import atomic_path, cache_home
from ..progress import progress_bar
from ..selection.heads import HeadSet, weights_digest
from .calibrate import RATIO, SINKS, calibrate, combined, downstream, open_engine
from .families import Sample, synthetic_samples
from .features import LastLayer, Seen, look
from .lexical import lexical_scores
from .measures import chosen, rank_correlation, span_recall, token_recall
from .targets import attended_and_stale
from .tuning import Trainee, TrainingState, Tuned, TuningSettings, train

__all__ = ["Figures", "FineTuning", "finetune"]

logger = logging.getLogger(__name__)

_HELD_OUT = 5
"""Every fifth sample is held out to stop by."""
_OTHERS = ("epic", "query_attention:layers=upper")
"""Methods beside the auxiliary's, on the primary."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One selector on samples of the test split."""

    name: str
    recall: dict[str, float] = field(default_factory=dict)
    """Of evidence tokens, by ratio."""
    span_recall: dict[str, float] = field(default_factory=dict)
    """Of whole values, by ratio."""
    overlap: float | None = None
    """Jaccard index of what is chosen with what the target would choose, at 0.2."""
    correlation: float | None = None
    """Spearman's with the target."""
    first_token_kl: tuple[float, ...] = ()
    answer_kl: tuple[float, ...] = ()

    @property
    def kl(self) -> float | None:
        """Mean KL along the answer, no prompt counting more than a nat; None where the primary was not asked."""
        return statistics.fmean(min(each, 1.0) for each in self.answer_kl) if self.answer_kl else None


@dataclass(frozen=True, slots=True)
class FineTuning:
    """What fine-tuning found."""

    heads: HeadSet
    """What to use: the tuned set if it is worth more on the primary, else the one it began with."""
    is_tuned: bool
    history: tuple[dict[str, float], ...]
    """Per epoch loss and held-out figures; epoch 0 is before training."""
    figures: tuple[Figures, ...]
    """On families and words never trained on: the untuned last layer first."""
    seconds: float
    about: dict[str, Any]


def finetune(
    config: EngineConfig,
    settings: TuningSettings | None = None,
    *,
    heads: HeadSet | None = None,
    num_samples: int = 120,
    num_targets: int = 24,
    num_tests: int = 42,
    num_prompts: int = 14,
    given: Sequence[Sample] = (),
    folder: Path | None = None,
) -> FineTuning:
    """Train a head set of ``config.auxiliary`` for ``config.primary``.

    Args:
        heads: to begin with; default what calibration finds.
        num_samples: synthetic ones to train on; given ones come on top. A fifth is held out.
        num_targets: of all, those for which the primary is asked what it attends to and holds stale.
        num_tests: synthetic ones of the other split, to measure by; ``num_prompts`` of them on the primary.
        folder: where looks, targets and the state of training are kept; default one by these settings in
            ``$CACHECLIP_HOME/training``.

    Raises:
        ConfigurationError: no auxiliary model, too few samples.
        ModelError: models that cannot be used so.
    """
    settings = settings or TuningSettings(sinks=SINKS)
    if num_samples + len(given) < 2 * _HELD_OUT or num_tests < 1 or not 0 <= num_prompts <= num_tests:
        raise ConfigurationError(
            f"fine-tuning needs at least {2 * _HELD_OUT} samples to train on, 1 to test by and no more prompts than "
            f"tests, got {num_samples + len(given)}, {num_tests} and {num_prompts}."
        )
    started = time.perf_counter()
    engine = open_engine(config)
    if heads is None:
        heads = calibrate(config, given=given, seed=settings.seed).heads
    heads.check(engine.auxiliary)
    samples = [*synthetic_samples("train", num_samples, seed=settings.seed), *given]
    about = _about(engine, settings, heads, num_samples, num_targets, given)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    folder = folder or cache_home() / "training" / digest[:16]
    trainees = _trainees(engine, heads, samples, num_targets, folder, digest, settings.sinks)
    tuned = _new(engine, heads, settings)
    held_out, learning = trainees[::_HELD_OUT], [t for n, t in enumerate(trainees) if n % _HELD_OUT]
    with progress_bar("training", settings.epochs, "epochs") as advance:

        def after_epoch(state: TrainingState) -> None:
            _save_state(state, folder, digest)
            advance(state.epoch)

        history = train(tuned, learning, held_out, state=_load_state(folder, digest, tuned), after_epoch=after_epoch)
    found = tuned.head_set(about)
    figures = _figures(engine, heads, tuned, found, num_tests, num_prompts)
    before, after = (next(f for f in figures if f.name == name) for name in ("before", "after"))
    is_tuned = after.kl is None or before.kl is None or after.kl <= before.kl
    if not is_tuned:
        logger.warning("on the primary the tuned heads are worth less than those they began with: these are kept")
    kept = found if is_tuned else replace(heads, about=about)
    return FineTuning(kept, is_tuned, tuple(history), tuple(figures), time.perf_counter() - started, about)


def _new(engine: CacheClipEngine, heads: HeadSet, settings: TuningSettings) -> Tuned:
    runtime = engine.auxiliary
    assert isinstance(runtime, ModelRuntime)
    return Tuned(heads, runtime.model.config.num_attention_heads, runtime.num_kv_heads, runtime.head_dim, settings)


def _about(
    engine: CacheClipEngine,
    settings: TuningSettings,
    heads: HeadSet,
    num_samples: int,
    num_targets: int,
    given: Sequence[Sample],
) -> dict[str, Any]:
    """Everything that decides what is learned."""
    assert engine.auxiliary is not None
    return {
        "primary": engine.config.primary,
        "primary_sha256": weights_digest(engine.primary.fingerprint),
        "auxiliary": engine.config.auxiliary,
        "auxiliary_sha256": weights_digest(engine.auxiliary.fingerprint),
        "behind": engine.config.behind,
        "heads_sha256": heads.digest(),
        "settings": asdict(settings),
        "samples": num_samples,
        "targets": num_targets,
        "given": len(given),
        "given_sha256": hashlib.sha256(json.dumps([asdict(each) for each in given]).encode()).hexdigest(),
        "cacheclip_rag": __version__,
        "data": "synthetic questions written by cacheclip_rag.training.families (Apache-2.0)"
        + (", and questions that were given" if given else ""),
    }


def _trainees(
    engine: CacheClipEngine,
    heads: HeadSet,
    samples: Sequence[Sample],
    num_targets: int,
    folder: Path,
    digest: str,
    sinks: int,
) -> list[Trainee]:
    """What there is to learn from each sample, from the folder where it is there."""
    caches = engine.auxiliary_caches
    step = max(1, len(samples) // max(1, num_targets))
    asked = set(list(range(0, len(samples), step))[:num_targets])
    found = []
    with progress_bar("reading", len(samples), "samples") as advance:
        for number, sample in enumerate(samples):
            path = folder / f"sample-{number:05d}.safetensors"
            trainee = _load_trainee(path, digest)
            if trainee is None:
                seen = look(caches, sample, heads.layers, sinks=sinks, keep=heads.layers[-1])
                target = attended_and_stale(engine, sample) if number in asked else None
                trainee = Trainee.of(seen, heads, target)
                _save_trainee(trainee, path, digest)
            found.append(trainee)
            advance(number + 1)
    return found


# -- the working folder -----------------------------------------------------------------------------------------


def _save_trainee(trainee: Trainee, path: Path, digest: str) -> None:
    last = trainee.last
    tensors = {"fixed": trainee.fixed, "queries": last.queries, "keys": last.keys, "evidence": trainee.evidence}
    if trainee.target is not None:
        tensors["target"] = trainee.target
    if last.tables is not None:
        tensors |= {"cos": last.tables[0], "sin": last.tables[1]}
    numbers = {"lengths": trainee.lengths, "num_prefix": last.num_prefix, "scaling": last.scaling}
    _save(tensors, {"digest": digest, "numbers": json.dumps(numbers)}, path)


def _load_trainee(path: Path, digest: str) -> Trainee | None:
    loaded = _load(path, digest)
    if loaded is None:
        return None
    tensors, header = loaded
    numbers = json.loads(header["numbers"])
    tables = (tensors["cos"], tensors["sin"]) if "cos" in tensors else None
    last = LastLayer(tensors["queries"], tensors["keys"], tables, numbers["num_prefix"], numbers["scaling"])
    return Trainee(tuple(numbers["lengths"]), tensors["fixed"], last, tensors["evidence"], tensors.get("target"))


def _save_state(state: TrainingState, folder: Path, digest: str) -> None:
    tensors = {f"parameters.{name}": tensor for name, tensor in state.parameters.items()}
    tensors |= {f"best.{name}": tensor for name, tensor in state.best.items()}
    for number, moments in state.optimizer["state"].items():
        tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(value) for name, value in moments.items()}
    header = {
        "digest": digest,
        "numbers": json.dumps(
            {
                "epoch": state.epoch,
                "best_epoch": state.best_epoch,
                "history": state.history,
                "groups": state.optimizer["param_groups"],
            }
        ),
    }
    _save({name: tensor.detach().clone() for name, tensor in tensors.items()}, header, folder / "state.safetensors")


def _load_state(folder: Path, digest: str, tuned: Tuned) -> TrainingState | None:
    loaded = _load(folder / "state.safetensors", digest)
    if loaded is None:
        return None
    tensors, header = loaded
    numbers = json.loads(header["numbers"])
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, key = name.split(".")
            moments.setdefault(int(number), {})[key] = tensor
    parts = [{name: tensors[f"{kind}.{name}"] for name in tuned.state_dict()} for kind in ("parameters", "best")]
    optimizer = {"state": moments, "param_groups": numbers["groups"]}
    return TrainingState(numbers["epoch"], parts[0], optimizer, parts[1], numbers["best_epoch"], numbers["history"])


def _save(tensors: dict[str, torch.Tensor], header: dict[str, str], path: Path) -> None:
    with atomic_path(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=header)


def _load(path: Path, digest: str) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
    """None unless the file is there and belongs to these settings; what cannot be read is made again."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
        return (load_file(path), header) if header.get("digest") == digest else None
    except (OSError, SafetensorError):
        return None


# -- before and after -------------------------------------------------------------------------------------------


def _figures(
    engine: CacheClipEngine, heads: HeadSet, tuned: Tuned, found: HeadSet, num_tests: int, num_prompts: int
) -> list[Figures]:
    """On the test split: the untuned last layer, the set before and after, words alone; on the primary also methods
    that ask no auxiliary."""
    runtime = engine.auxiliary
    assert isinstance(runtime, ModelRuntime)
    caches = engine.auxiliary_caches
    samples = synthetic_samples("test", num_tests, seed=tuned.settings.seed)
    untuned = HeadSet.of_layers(
        found.auxiliary_sha256, "last", runtime.num_layers, runtime.model.config.num_attention_heads
    )
    layers = sorted({*heads.layers, runtime.num_layers - 1})
    scorers: dict[str, Callable[[Sample, Seen], torch.Tensor]] = {
        "untuned last layer": lambda _, seen: combined(seen, untuned),
        "before": lambda _, seen: combined(seen, heads),
        "after": lambda _, seen: tuned(Trainee.of(seen, heads)).detach(),
        "words alone": lambda sample, _: lexical_scores(
            sample.chunks, [caches.tokenize(chunk).offsets for chunk in sample.chunks], sample.question
        ),
    }
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in scorers}
    with progress_bar("testing", len(samples), "samples") as advance:
        for number, sample in enumerate(samples):
            seen = look(caches, sample, layers, sinks=tuned.settings.sinks, keep=heads.layers[-1])
            target = attended_and_stale(engine, sample) if number < num_prompts else None
            for name, score in scorers.items():
                measured[name].append(_measured(score(sample, seen), seen, target))
            advance(number + 1)
    figures = {name: _mean(name, rows) for name, rows in measured.items()}
    if num_prompts:
        sets: dict[str, HeadSet | str] = {"untuned last layer": untuned, "before": heads, "after": found}
        sets |= {name: name for name in ("direct", *_OTHERS)}
        outcomes = downstream(engine, samples[:num_prompts], list(sets.values()))
        for name, of_set in zip(sets, outcomes, strict=True):
            first, along = zip(*of_set, strict=True)
            figures[name] = replace(figures.get(name, Figures(name)), first_token_kl=first, answer_kl=along)
    return list(figures.values())


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


def _mean(name: str, rows: Sequence[dict[str, float]]) -> Figures:
    def mean(key: str) -> float | None:
        values = [row[key] for row in rows if key in row]
        return statistics.fmean(values) if values else None

    def by_ratio(kind: str) -> dict[str, float]:
        return {str(ratio): mean(f"{kind} {ratio}") or 0.0 for ratio in (0.1, RATIO)}

    return Figures(name, by_ratio("recall"), by_ratio("span"), mean("overlap"), mean("correlation"))
