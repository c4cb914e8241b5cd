"""Training of a chunk context: the KV after which chunks are encoded, so that full prefill's answers follow from them.

Source: SemPIC (arXiv:2607.28069) and KV Packet (arXiv:2604.13226) train parameters that act only while chunks are
encoded. Departure: here they are the KV of the neutral passages' tokens, so that ingestion runs the unmodified model
after another stored prefix. The model that reads, answers and decodes is unchanged, and so is its full prefill.

Loss: KL from full prefill along right answers, the first token counting half, plus a small loss of hidden states. An
error of KV is no part of it: most of it depends on the other chunks and cannot be mended; KV can only be made to read
better.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...chunks.context import CONTEXTS
from ...chunks.trained import TrainedContext
from ...config import EngineConfig
from ...errors import ConfigurationError, ModelError
from ...paths import cache_home
from ...progress import progress_bar
from ...runtime.base import weights_digest
from ..evaluation.statistics import paired_ratio
from .folder import digest_of, load, resumable, save
from .reading import Readings
from .teaching import TaughtPrompt, Teacher, choose_some, distances

__all__ = ["ContextSettings", "ContextTraining", "HeldOut", "Learned", "train_context"]

logger = logging.getLogger(__name__)

CHECKED_RATIOS = (0.0, 0.2)
"""Shares of chunk tokens that are computed again in checks: none, and the engine's default."""
_CONTEXT_TOKENS = 450
"""Most tokens of a training prompt's chunks."""
_JUDGED_TOKENS = 1200
"""Most tokens of the chunks of the prompts that decide. What helps short prompts need not help those that people
have."""


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """Settings of a training."""

    steps: int = 160
    batch: int = 4
    """Prompts per step."""
    learning_rate: float = 1e-2
    """Of Adam, in standard deviations of each layer's keys and values; falls by a cosine."""
    warmup: int = 5
    """Steps in which the learning rate rises."""
    average: float = 0.97
    """Decay of the moving average of the parameters, which is what is kept."""
    hidden_weight: float = 0.02
    """Weight of the loss of hidden states."""
    correction: float = 0.5
    """Share of the mean change that stale tokens get, as in the engine's default method."""
    held_out: int = 24
    """Prompts that decide whether the learned context is kept."""
    check_every: int = 40
    """Steps between checks."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "warmup", "held_out", "check_every"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be 1 or more, got {getattr(self, name)}.")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Distance from full prefill on held-out prompts, for chunks after the context in use and after the learned one.
    In use is the trained context that would be replaced, or the passages."""

    ratio: float
    """Share of chunk tokens that are computed again."""
    before: tuple[float, ...]
    """Per prompt the mean KL along its answers, in nats, with the context in use."""
    after: tuple[float, ...]
    """The same with the learned context, as it is kept (bfloat16)."""
    first_before: tuple[float, ...]
    """The same as ``before``, at the first tokens of answers."""
    first_after: tuple[float, ...]
    same_before: tuple[int, ...]
    """Per prompt the number of answers whose first token is the likeliest one of full prefill, with the context in
    use."""
    same_after: tuple[int, ...]

    @property
    def change(self) -> tuple[float, float | None, float | None] | None:
        """Mean of ``after`` divided by the mean of ``before``, and its 95 % interval; see
        :func:`~cacheclip_rag.lab.evaluation.statistics.paired_ratio`."""
        return paired_ratio(self.after, self.before)


@dataclass(frozen=True, slots=True)
class ContextTraining:
    """Result of :func:`train_context`."""

    context: TrainedContext | None
    """What was learned; None if steps are left."""
    figures: tuple[HeldOut, ...]
    """Held-out check, one item per ratio; empty if steps are left."""
    step: int
    """Steps done."""
    steps: int
    history: list[dict[str, Any]]
    """Checks while training."""
    seconds: float
    """Of this run."""
    folder: Path
    """The same call continues from this folder."""

    @property
    def is_better(self) -> bool:
        """Whether the learned context is closer to full prefill than the one in use: with nothing recomputed, beyond
        doubt (the 95 % interval of the ratio is below 1); with recomputation, in the mean; and no fewer first tokens
        are equal in either case."""
        if not self.figures:
            return False
        alone, *others = self.figures
        change = alone.change
        is_closer = change is not None and change[2] is not None and change[2] < 1
        keeps_first = all(sum(each.same_after) >= sum(each.same_before) for each in self.figures)
        return is_closer and keeps_first and all(sum(each.after) <= sum(each.before) for each in others)


class Learned(torch.nn.Module):
    """The context's KV as parameters: a change in units of each layer's standard deviation."""

    def __init__(self, begin: torch.Tensor) -> None:
        """``begin``: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE."""
        super().__init__()
        self.begin = begin.float()
        centred = self.begin - self.begin.mean(3, keepdim=True)
        self.unit = centred.std(dim=(2, 3, 4), keepdim=True)
        self.change = torch.nn.Parameter(torch.zeros_like(self.begin))

    def kv(self, change: torch.Tensor | None = None) -> torch.Tensor:
        """KV with ``change`` (default the parameters), float32, in the shape of ``begin``."""
        return self.begin + self.unit * (self.change if change is None else change)


class _HeldOutPrompts:
    """Prompts to judge by, each read once by the teacher."""

    def __init__(self, teacher: Teacher, readings: Readings) -> None:
        self.readings, self._teacher, self._read = readings, teacher, list[TaughtPrompt]()

    def first(self, count: int) -> list[TaughtPrompt]:
        for number in range(len(self._read), count):
            self._read.append(self._teacher.read(self.readings[number], number))
        return self._read[:count]


class _Training:
    """A training in progress: parameters, their moving average, the optimizer, and the file that keeps them."""

    def __init__(
        self,
        teacher: Teacher,
        readings: Readings,
        held_out: Readings,
        judged: Readings,
        settings: ContextSettings,
        path: Path,
        digest: str,
    ) -> None:
        """
        Args:
            readings: to learn from.
            held_out: for checks while training, as long as those to learn from.
            judged: for the check that decides.
        """
        self.teacher, self.runtime, self.readings = teacher, teacher.runtime, readings
        self.settings, self.path, self._digest = settings, path, digest
        self.learned = Learned(teacher.passages(0))
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self._mean = torch.zeros_like(self.learned.change)
        self._optimizer = torch.optim.Adam([self.learned.change], lr=settings.learning_rate, betas=(0.9, 0.98))
        self.held_out, self.judged = _HeldOutPrompts(teacher, held_out), _HeldOutPrompts(teacher, judged)
        self._load()

    @property
    def kv(self) -> torch.Tensor:
        """The moving average, as KV."""
        return self.learned.kv(self._average).detach()

    @property
    def _average(self) -> torch.Tensor:
        """The moving average of the parameters. It began at 0, which is corrected as in Adam."""
        return self._mean / (1 - self.settings.average**self.step) if self.step else self._mean

    # -- steps --------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """One step: the gradient of a batch of prompts, and an update."""
        settings, step = self.settings, self.step
        rate = min(1.0, (step + 1) / settings.warmup) * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        self._optimizer.param_groups[0]["lr"] = settings.learning_rate * rate
        self._optimizer.zero_grad()
        losses = [self._backward(number) for number in range(step * settings.batch, (step + 1) * settings.batch)]
        norm = torch.nn.utils.clip_grad_norm_([self.learned.change], 1.0)
        if not norm.isfinite():
            raise ModelError(
                f"expected finite gradients at step {step + 1}, got {float(norm)}: {self.runtime.dtype} has too small "
                "a range for this model. Train with --dtype bfloat16 or float32; the result serves all dtypes."
            )
        self._optimizer.step()
        self._mean = settings.average * self._mean + (1 - settings.average) * self.learned.change.detach()
        self.step += 1
        logger.info("step %d, gradient %.3f, losses %s", self.step, norm, [round(loss, 3) for loss in losses])

    def _backward(self, number: int) -> float:
        """Add the gradient of prompt ``number``; returns its loss. Half of the prompts recompute nothing."""
        settings, rng = self.settings, random.Random(f"{self.settings.seed}/{number}/tokens")
        prompt = self.teacher.read(self.readings[number], number)
        ratio = 0.0 if rng.random() < 0.5 else rng.uniform(0.05, 0.3)
        chosen = choose_some(prompt, ratio, rng)
        kl, error, _ = distances(self.runtime, prompt, self.learned.kv(), chosen, settings.correction)
        # half for the first tokens of answers, half for all
        loss = 0.5 * kl[prompt.first].mean() + 0.5 * kl.mean() + settings.hidden_weight * error
        (loss / settings.batch).backward()
        return float(loss.detach())

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Add a check of the moving average to the history."""
        found: dict[str, Any] = {}
        for ratio in CHECKED_RATIOS:
            along, first, _ = self.measure(self.held_out, lambda prompt: self.kv, ratio)
            found[f"kl@{ratio}"], found[f"first@{ratio}"] = ([round(kl, 5) for kl in each] for each in (along, first))
        self.history.append({"step": self.step, **found})
        logger.info("step %d: %s", self.step, {name: round(sum(each) / len(each), 4) for name, each in found.items()})

    @torch.no_grad()
    def measure(
        self, prompts: _HeldOutPrompts, context_of: Callable[[TaughtPrompt], torch.Tensor], ratio: float
    ) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
        """Per held-out prompt the mean KL along answers, and at their first tokens, and the number of equal first
        tokens, after ``context_of(prompt)``."""
        along, first, same_first = [], [], []
        for number, prompt in enumerate(prompts.first(self.settings.held_out)):
            chosen = choose_some(prompt, ratio, random.Random(number))
            kl, _, same = distances(self.runtime, prompt, context_of(prompt), chosen, self.settings.correction)
            along.append(float(kl.mean()))
            first.append(float(kl[prompt.first].mean()))
            same_first.append(int(same[prompt.first].sum()))
        return tuple(along), tuple(first), tuple(same_first)

    def figures(self, rival: TrainedContext | None) -> tuple[HeldOut, ...]:
        """The held-out check that decides, saved once it is done. ``rival``: the context in use; None: the passages."""
        path = self.path.with_name(self.path.name.replace("context-", "figures-"))
        used = rival.sha256 if rival is not None else ""
        names = [each.name for each in fields(HeldOut)]
        judged = [self.settings.held_out, self.judged.readings.sha256, _JUDGED_TOKENS]
        digest = digest_of([self._digest, *judged, used, names])
        loaded = load(path, digest)
        if loaded is not None:
            return tuple(_held_out(each) for each in json.loads(loaded[1]["figures"]))
        found, kept = [], self.kv.bfloat16()
        for ratio in CHECKED_RATIOS:
            before, first_before, same_before = self.measure(
                self.judged, lambda prompt: self.teacher.passages(prompt.number) if rival is None else rival.kv, ratio
            )
            after, first_after, same_after = self.measure(self.judged, lambda prompt: kept, ratio)
            found.append(HeldOut(ratio, before, after, first_before, first_after, same_before, same_after))
        save({}, {"digest": digest, "figures": json.dumps([asdict(each) for each in found])}, path)
        return tuple(found)

    # -- file ---------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Save everything that the next step needs."""
        state = self._optimizer.state[self.learned.change]
        tensors = {
            "change": self.learned.change.detach(),
            "mean": self._mean,
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
            "kv": self.kv,
        }
        numbers = json.dumps({"step": self.step, "history": self.history})
        on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
        save(on_cpu, {"digest": self._digest, "numbers": numbers}, self.path)

    def _load(self) -> None:
        loaded = load(self.path, self._digest)
        if loaded is None:
            return
        tensors, numbers = loaded[0], json.loads(loaded[1]["numbers"])
        tensors = {name: tensor.to(self.learned.change.device) for name, tensor in tensors.items()}
        self.step, self.history = numbers["step"], numbers["history"]
        self.learned.change.data.copy_(tensors["change"])
        self._mean = tensors["mean"]
        self._optimizer.state[self.learned.change] = {
            "step": torch.tensor(float(self.step)),
            "exp_avg": tensors["exp_avg"],
            "exp_avg_sq": tensors["exp_avg_sq"],
        }


def train_context(
    config: EngineConfig,
    settings: ContextSettings | None = None,
    *,
    data: Sequence[str | Path] = (),
    folder: Path | None = None,
    minutes: float | None = None,
    rival: TrainedContext | None = None,
) -> ContextTraining:
    """Learn a chunk context for ``config.primary``. A training that was stopped continues from ``folder``.

    Args:
        data: records (``.jsonl``, ``.jsonl.gz``) and documents to learn from, besides synthetic texts.
        folder: working folder; default ``training/`` and the first 16 digits of the primary in the cache folder.
        minutes: stop after this time, between two steps, but not before the first. The same call continues.
        rival: the trained context that the learned one would replace; None: it is compared with the passages.

    Raises:
        Interrupted: KeyboardInterrupt; the work so far is saved.
        ConfigurationError: a setting is out of range, the data holds no text, or the model's KV cannot be reused.
        ModelError: ``rival`` was made for another model, or a gradient is not finite.
    """
    settings, started = settings or ContextSettings(), time.perf_counter()
    if minutes is not None and not minutes > 0:
        raise ConfigurationError(f"minutes must be above 0, got {minutes}. Leave it out for no limit.")
    teacher = Teacher(config)
    runtime = teacher.runtime
    if rival is not None:
        rival.check(runtime)
    folder = folder or cache_home() / "training" / weights_digest(runtime.fingerprint)[:16]
    short, long = (min(most, runtime.reuse_tokens // 2) for most in (_CONTEXT_TOKENS, _JUDGED_TOKENS))
    readings, held_out, judged = (
        Readings(runtime, data, seed=settings.seed, context_tokens=room, held_out=part)
        for part, room in ((False, short), (True, short), (True, long))
    )
    learning = {name: value for name, value in asdict(settings).items() if name not in ("held_out", "check_every")}
    digest = digest_of(
        {
            "primary_sha256": runtime.fingerprint,
            "settings": learning,
            "texts_sha256": readings.sha256,
            "cacheclip_rag": __version__,
            "begin": CONTEXTS["passages"].sha256,
        }
    )
    with resumable(folder):
        path = folder / f"context-{digest[:20]}.safetensors"
        training = _Training(teacher, readings, held_out, judged, settings, path, digest)
        _train(training, until=None if minutes is None else started + 60 * minutes)
        figures = training.figures(rival) if training.step >= settings.steps else ()
    found = None
    if figures:
        about = _about(settings, data, figures)
        found = TrainedContext(weights_digest(runtime.fingerprint), training.kv.bfloat16().cpu(), about)
    seconds = time.perf_counter() - started
    return ContextTraining(found, figures, training.step, settings.steps, training.history, seconds, folder)


def _train(training: _Training, until: float | None) -> None:
    """All steps that are left, or one and as many more as begin before the time ``until``. Every step is saved."""
    settings, begun = training.settings, training.step
    with progress_bar("training", settings.steps, "steps", done=training.step) as advance:
        if not training.step and not training.history:
            training.check()
        while training.step < settings.steps:
            if until is not None and training.step > begun and time.perf_counter() >= until:
                break
            training.advance()
            if training.step % settings.check_every == 0 or training.step == settings.steps:
                training.check()
            training.keep()
            advance(training.step)


def _about(settings: ContextSettings, data: Sequence[str | Path], figures: Sequence[HeldOut]) -> dict[str, Any]:
    return {
        "command": "train-context",
        "data": [Path(path).name for path in data],
        "settings": asdict(settings),
        "held_out": [{"ratio": each.ratio, "change": each.change} for each in figures],
        "cacheclip_rag": __version__,
    }


def _held_out(values: dict[str, Any]) -> HeldOut:
    return HeldOut(float(values.pop("ratio")), **{name: tuple(each) for name, each in values.items()})
