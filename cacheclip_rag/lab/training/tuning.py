"""Fine-tuning of a head set: weights of its heads, and low-rank updates of the last layer in use. Plain torch.

The paper (arXiv:2510.10129v1, section 3.5) only says that the auxiliary is fine-tuned. A quarter of our loss is the
marginal likelihood of the evidence, ``-log sum_E p(t)``. The rest is ``KL(target || p)``; the target is the primary's
attention to stale tokens. DeepSeek-V3.2 (arXiv:2512.02556) trains its indexer on attention in the same way. All layers
below the last layer in use are frozen.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ...checks import check_whole_number
from ...errors import ConfigurationError, ModelError
from ...runtime.transformers.model import ModelRuntime
from ...runtime.transformers.rotary import rotate
from ...selection.auxiliary import without_sinks
from ...selection.heads import HeadSet, LowRank
from .features import LastLayer, Seen
from .measures import chosen, token_recall

__all__ = [
    "Learner",
    "Trainee",
    "TrainingState",
    "Tuned",
    "TuningSettings",
    "check_trainable",
    "fitted",
    "learning_and_held_out",
    "loss_of",
    "spaced",
    "target_scale",
    "train",
]

_HELD_OUT = 5
_FIT_STEPS = 300
_MOST_HEADS = 16
_MOST_GRADIENT = 1.0
"""Largest norm of gradients; larger ones are clipped."""
_SAME = 1e-3
"""Shares that differ by less than this count as equal."""


@dataclass(frozen=True, slots=True)
class TuningSettings:
    """Settings of training. Invalid values raise ConfigurationError."""

    rank: int = 8
    """Rank of the low-rank updates."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW, above 0."""
    weight_decay: float = 0.01
    """Weight decay of the updates."""
    batch: int = 8
    """Samples per step."""
    epochs: int = 60
    """At most."""
    patience: int = 10
    """Training ends after so many epochs without improvement: a higher share found in held-out samples, or an equal
    share and a lower loss."""
    target_weight: float = 0.75
    """Mean share of the KL to the target in the loss, independent of the number of samples with a target."""
    ratio: float = 0.2
    """Share of chosen tokens when held-out samples are measured."""
    sinks: int = 4
    """First tokens of each chunk that get no score."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "batch", "epochs", "patience"):
            check_whole_number(name, getattr(self, name), least=1)
        check_whole_number("sinks", self.sinks, of="tokens")
        rate = self.learning_rate
        if not isinstance(rate, int | float) or not 0.0 < rate < float("inf"):
            raise ConfigurationError(f"learning_rate must be a number above 0, got {rate!r}.")
        for name, most in (("weight_decay", None), ("target_weight", 1.0), ("ratio", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0.0 <= value <= (most or float("inf")):
                bound = f"from 0 to {most:g}" if most else "0 or more"
                raise ConfigurationError(f"{name} must be a number {bound}, got {value!r}.")


@dataclass(frozen=True, slots=True, eq=False)
class Trainee:
    """A training sample: attention of the head set's heads, evidence and target."""

    lengths: tuple[int, ...]
    fixed: torch.Tensor
    """``(num_lower_heads, num_tokens)``: fixed scores of the heads below the last layer in use."""
    last: LastLayer
    evidence: torch.Tensor
    """``(num_tokens,)`` bool."""
    target: torch.Tensor | None = None
    """``(num_tokens,)``, sum 1: attended and stale in the primary; None if the primary was not asked."""

    @classmethod
    def of(cls, seen: Seen, heads: HeadSet, target: torch.Tensor | None = None) -> Trainee:
        """Make a training sample from recorded attention of a head set's layers, with queries and keys of the last."""
        assert seen.last is not None, "training needs queries and keys of the last layer in use"
        lower = [seen.scores[seen.layers.index(of), head] for of, head in heads.heads if of != heads.layers[-1]]
        fixed = torch.stack(lower) if lower else torch.zeros(0, seen.scores.shape[-1])
        last = seen.last
        tables = None if last.tables is None else (last.tables[0].clone(), last.tables[1].clone())
        # clones, because autograd refuses tensors made in inference mode
        last = replace(last, queries=last.queries.clone(), keys=last.keys.clone(), tables=tables)
        return cls(seen.lengths, fixed.clone(), last, seen.evidence.clone(), None if target is None else target.clone())


def check_trainable(runtime: ModelRuntime, heads: HeadSet) -> None:
    """Raise ModelError if training cannot compute the model's attention, or the head set was trained already."""
    config = runtime.model.config
    heads.check(runtime)
    if heads.is_updated:
        raise ModelError("the head set was fine-tuned already. Start from a head set of 'cacheclip calibrate'.")
    layers = getattr(config, "layer_types", None) or []
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    special = {
        "soft-capped attention logits": getattr(config, "attn_logit_softcapping", None),
        "attention sinks": config.model_type == "gpt_oss",
        "sliding windows": slides and (not layers or "sliding_attention" in layers[: heads.layers[-1] + 1]),
    }
    found = [name for name, value in special.items() if value]
    if found:
        raise ModelError(
            f"model {runtime.name!r} has {' and '.join(found)}, which fine-tuning does not support. Calibrate it "
            "('cacheclip calibrate'), or fine-tune another auxiliary model."
        )


def loss_of(
    scores: torch.Tensor, evidence: torch.Tensor, target: torch.Tensor | None, target_weight: float, scale: float = 1.0
) -> torch.Tensor:
    """``(1 - w) * -log sum_E p(t) + w * scale * KL(target || p)``. Without a target, only the first term is used. With
    ``scale`` 0 (no sample has a target), the first term has weight 1.

    Args:
        scores: ``(num_tokens,)``, sum 1.
        evidence: ``(num_tokens,)`` bool.
        target: ``(num_tokens,)``, sum 1 or 0.
    """
    found = scores.clamp(min=1e-9)
    likelihood = -found[evidence].sum().log()
    if not scale:
        return likelihood
    if target is None or not bool(target.any()):
        return (1 - target_weight) * likelihood
    divergence = (target * (target.clamp(min=1e-9).log() - found.log())).sum()
    return (1 - target_weight) * likelihood + target_weight * scale * divergence


def target_scale(targets: Sequence[torch.Tensor | None]) -> float:
    """Factor that compensates for samples without a target; 0 if no sample has a target."""
    asked = sum(target is not None and bool(target.any()) for target in targets)
    return len(targets) / asked if asked else 0.0


def fitted(
    seen: Sequence[Seen], targets: Sequence[torch.Tensor | None], auxiliary_sha256: str, settings: TuningSettings
) -> HeadSet:
    """The heads whose weighted sum is nearest to the targets: the initial head set of training.

    Args:
        seen: recorded attention of all layers that may be used.
        targets: as in :attr:`Trainee.target`, one per sample.
    """
    layers, (_, num_heads, _) = seen[0].layers, seen[0].scores.shape
    scale = target_scale(targets)
    looks = [(each.scores.flatten(0, 1).clone(), each.evidence.clone()) for each in seen]
    # clones: autograd refuses what was made in inference mode
    mix = torch.zeros(len(layers) * num_heads, requires_grad=True)
    optimizer = torch.optim.Adam([mix], lr=0.05)
    for _ in range(_FIT_STEPS):
        optimizer.zero_grad()
        for (scores, evidence), target in zip(looks, targets, strict=True):
            loss = loss_of(mix.softmax(0) @ scores, evidence, target, settings.target_weight, scale) / len(looks)
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()
    weights = mix.detach().softmax(0)
    best = sorted(weights.argsort(descending=True, stable=True)[:_MOST_HEADS].tolist())
    heads = tuple((layers[index // num_heads], index % num_heads) for index in best)
    return HeadSet(auxiliary_sha256, heads, weights[best] / weights[best].sum(), sinks=settings.sinks)


class Tuned(torch.nn.Module):
    """A head set with trainable parameters. Before training, it scores like the initial head set."""

    def __init__(
        self, heads: HeadSet, num_heads: int, num_kv_heads: int, head_dim: int, settings: TuningSettings
    ) -> None:
        super().__init__()
        assert not heads.is_updated, "training needs an initial head set without updates"
        self.heads, self.settings = heads, settings
        self.target_scale = 1.0
        self.groups = num_heads // num_kv_heads
        self.mix = torch.nn.Parameter(heads.weights.clamp(min=1e-4).log())
        generator = torch.Generator().manual_seed(settings.seed)
        for name, width in (("queries", num_heads * head_dim), ("keys", num_kv_heads * head_dim)):
            down = torch.randn(settings.rank, width, generator=generator) / width**0.5
            self.register_parameter(f"{name}_down", torch.nn.Parameter(down))
            self.register_parameter(f"{name}_up", torch.nn.Parameter(torch.zeros(width, settings.rank)))

    @property
    def last_heads(self) -> list[int]:
        """Used heads of the last layer in use; they come last in the set."""
        return [head for layer, head in self.heads.heads if layer == self.heads.layers[-1]]

    def forward(self, sample: Trainee) -> torch.Tensor:
        """``(num_tokens,)``: the score of every token, sum 1."""
        maps = torch.cat((sample.fixed, self._last_layer(sample)))
        scores: torch.Tensor = self.mix.softmax(0) @ maps
        return scores

    def _update(self, name: str) -> LowRank:
        return LowRank(self.get_parameter(f"{name}_down"), self.get_parameter(f"{name}_up"))

    def _last_layer(self, sample: Trainee) -> torch.Tensor:
        """``(num_last_heads, num_tokens)``: a softmax over all chunks, mean over question tokens."""
        last = sample.last
        queries, keys = self._update("queries"), self._update("keys")(last.keys)
        logits, start = [], 0
        for number, length in enumerate(sample.lengths):
            asked = queries(last.queries[number])  # (num_heads, num_question_tokens, head_dim)
            own = keys[:, start : start + length]
            if last.tables is not None:
                cos, sin = last.tables
                first, behind = last.num_prefix, last.num_prefix + length
                own = rotate(own, (cos[first:behind], sin[first:behind]))
                stop = behind + asked.shape[1]
                asked = rotate(asked, (cos[behind:stop], sin[behind:stop]))
            by_head = own.repeat_interleave(self.groups, 0)[self.last_heads]
            found = asked[self.last_heads] @ by_head.transpose(-1, -2) * last.scaling
            logits.append(without_sinks(found, self.settings.sinks))
            start += length
        return torch.cat(logits, dim=-1).softmax(-1).mean(1)

    def loss(self, sample: Trainee) -> torch.Tensor:
        return loss_of(self(sample), sample.evidence, sample.target, self.settings.target_weight, self.target_scale)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters for the optimizer, without weight decay for the heads' weights."""
        updates = [parameter for name, parameter in self.named_parameters() if name != "mix"]
        return [
            {"params": [self.mix], "weight_decay": 0.0},
            {"params": updates, "weight_decay": self.settings.weight_decay},
        ]

    def head_set(self, about: dict[str, Any] | None = None) -> HeadSet:
        """The trained head set; zero updates are left out."""
        updates = [
            LowRank(update.down.detach().clone(), update.up.detach().clone()) if bool(update.up.any()) else None
            for update in map(self._update, ("queries", "keys"))
        ]
        weights = self.mix.detach().softmax(0).clone()
        return replace(
            self.heads,
            weights=weights,
            queries=updates[0],
            keys=updates[1],
            sinks=self.settings.sinks,
            about=about or self.heads.about,
        )


@dataclass(slots=True)
class TrainingState:
    """State of training after an epoch, from which training can continue."""

    epoch: int
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    best: dict[str, torch.Tensor]
    best_epoch: int
    history: list[dict[str, float]]


class Learner(Protocol):
    """A module that :func:`train` can train: it scores the tokens of a sample (with ``lengths``, ``evidence`` and
    ``target``) and computes its loss."""

    target_scale: float

    @property
    def settings(self) -> TuningSettings: ...
    def __call__(self, sample: Any) -> torch.Tensor: ...
    def loss(self, sample: Any) -> torch.Tensor: ...
    def parameter_groups(self) -> list[dict[str, Any]]: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def train(
    learner: Learner,
    samples: Sequence[Any],
    held_out: Sequence[Any],
    *,
    state: TrainingState | None = None,
    after_epoch: Callable[[TrainingState], None] = lambda _: None,
) -> TrainingState:
    """Train until held-out samples do not improve any more. The learner ends with its best parameters.

    Args:
        state: state from which to continue.
        after_epoch: called with the state after each epoch.

    Returns:
        The last state. Its ``history`` has for each epoch ``epoch``, ``loss`` (mean over samples), ``held_out_found``
        and ``held_out_loss``; epoch 0 is before training. ``held_out_found`` is the found share of the evidence, mixed
        by the target's weight with the found share of the target (relative to the most that as many tokens can have).
    """
    settings = learner.settings
    learner.target_scale = target_scale([each.target for each in samples])
    groups = learner.parameter_groups()
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
    if state is None:
        first = {"epoch": 0.0, "loss": _mean_loss(learner, samples), **_held_out(learner, held_out)}
        state = TrainingState(0, {}, {}, copy.deepcopy(learner.state_dict()), 0, [first])
    else:
        learner.load_state_dict(state.parameters)
        optimizer.load_state_dict(state.optimizer)
    while state.epoch < settings.epochs and state.epoch - state.best_epoch < settings.patience:
        epoch = state.epoch + 1
        order = list(range(len(samples)))
        random.Random(f"{settings.seed}/{epoch}").shuffle(order)
        total = 0.0
        for start in range(0, len(order), settings.batch):
            batch = order[start : start + settings.batch]
            optimizer.zero_grad()
            for number in batch:  # one sample at a time saves memory
                loss = learner.loss(samples[number]) / len(batch)
                loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
                total += float(loss.detach()) * len(batch)
            torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], _MOST_GRADIENT)
            optimizer.step()
        state.history.append({"epoch": float(epoch), "loss": total / len(samples), **_held_out(learner, held_out)})
        state.epoch = epoch
        if _is_better(state.history, state.best_epoch):
            state.best, state.best_epoch = copy.deepcopy(learner.state_dict()), epoch
        state.parameters, state.optimizer = learner.state_dict(), optimizer.state_dict()
        after_epoch(state)
    learner.load_state_dict(state.best)
    return state


@torch.no_grad()
def _mean_loss(learner: Learner, samples: Sequence[Any]) -> float:
    return sum(float(learner.loss(each)) for each in samples) / len(samples)


def _held_out(learner: Learner, samples: Sequence[Any]) -> dict[str, float]:
    return {"held_out_found": _found(learner, samples), "held_out_loss": _mean_loss(learner, samples)}


@torch.no_grad()
def _found(learner: Learner, samples: Sequence[Any]) -> float:
    """Mean share of evidence and target that the default grouping would take; see ``held_out_found`` in
    :func:`train`."""
    settings, total = learner.settings, 0.0
    for each in samples:
        mask = chosen(learner(each).cpu(), each.lengths, settings.ratio)
        found = float(token_recall(mask, each.evidence))
        if each.target is not None and bool(each.target.any()):
            most = each.target[chosen(each.target, each.lengths, settings.ratio)].sum()
            share = float(each.target[mask].sum() / most)
            found = (1 - settings.target_weight) * found + settings.target_weight * share
        total += found
    return total / len(samples)


def _is_better(history: Sequence[dict[str, float]], best_epoch: int) -> bool:
    """Whether the last epoch is better than the best epoch before. Shares within a thousandth of the highest share so
    far count as equal, and then the loss decides. The highest share is used, not the best epoch's, because many small
    decreases would add up."""
    last, best = history[-1], history[best_epoch]
    most = max(each["held_out_found"] for each in history)
    if last["held_out_found"] > best["held_out_found"] + _SAME:
        return True
    return last["held_out_found"] >= most - _SAME and last["held_out_loss"] < best["held_out_loss"]


def learning_and_held_out(count: int) -> tuple[list[int], list[int]]:
    """Numbers of the training samples, and of every fifth sample, which is held out."""
    return [n for n in range(count) if n % _HELD_OUT], list(range(0, count, _HELD_OUT))


def spaced(numbers: Sequence[int], count: int) -> list[int]:
    """``count`` of the numbers, evenly spread; all of them if there are fewer."""
    count = min(count, len(numbers))
    return [numbers[round(n * (len(numbers) - 1) / max(1, count - 1))] for n in range(count)]
