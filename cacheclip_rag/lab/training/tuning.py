"""Fine-tuning of a head set: weights of its heads, and low-rank updates of the last layer in use. Plain torch.

The paper (arXiv:2510.10129v1, section 3.5) only says that the auxiliary is fine-tuned. The loss is for a quarter the
marginal likelihood of the evidence, ``-log sum_E p(t)``, and else ``KL(target || p)`` where the primary told what it
attends to and holds stale, as DeepSeek-V3.2 (arXiv:2512.02556) trains its indexer on the attention it stands in for.
Everything below the last layer in use is frozen: only what is looked for may change.
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
"""Norm that gradients are clipped to."""
_SAME = 1e-3
"""Shares found that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class TuningSettings:
    """How to train. Senseless ones raise ConfigurationError."""

    rank: int = 8
    """Of the low-rank updates."""
    learning_rate: float = 1e-3
    """Of AdamW, above 0."""
    weight_decay: float = 0.01
    """Pulls the updates towards nothing."""
    batch: int = 8
    """Samples a step."""
    epochs: int = 60
    """At most."""
    patience: int = 10
    """Epochs after which training ends if none of them found more of what is wanted in held-out samples (or, of as
    much, had a lower loss)."""
    target_weight: float = 0.75
    """Share of the loss that is the KL to the target, on average over samples, however few have one."""
    ratio: float = 0.2
    """Share of the tokens that what is found in held-out samples is measured at."""
    sinks: int = 4
    """Tokens at the start of each chunk that nobody scores."""
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
    """A sample to train on: what the head set's heads see, and what they should."""

    lengths: tuple[int, ...]
    fixed: torch.Tensor
    """``(num_lower_heads, num_tokens)``: scores of the heads below the last layer in use, which do not change."""
    last: LastLayer
    evidence: torch.Tensor
    """``(num_tokens,)`` bool."""
    target: torch.Tensor | None = None
    """``(num_tokens,)``, sum 1: attended and stale in the primary; None where it was not asked."""

    @classmethod
    def of(cls, seen: Seen, heads: HeadSet, target: torch.Tensor | None = None) -> Trainee:
        """From a look at the layers of a head set that kept the last of them."""
        assert seen.last is not None, "training needs queries and keys of the last layer in use"
        lower = [seen.scores[seen.layers.index(of), head] for of, head in heads.heads if of != heads.layers[-1]]
        fixed = torch.stack(lower) if lower else torch.zeros(0, seen.scores.shape[-1])
        last = seen.last
        tables = None if last.tables is None else (last.tables[0].clone(), last.tables[1].clone())
        # clones: autograd refuses what was made in inference mode
        last = replace(last, queries=last.queries.clone(), keys=last.keys.clone(), tables=tables)
        return cls(seen.lengths, fixed.clone(), last, seen.evidence.clone(), None if target is None else target.clone())


def check_trainable(runtime: ModelRuntime, heads: HeadSet) -> None:
    """Raise ModelError for what training does not compute as the model does, or a set that was trained already."""
    config = runtime.model.config
    heads.check(runtime)
    if heads.is_updated:
        raise ModelError("the head set was fine-tuned already. Begin with one of 'cacheclip calibrate'.")
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
            f"model {runtime.name!r} has {' and '.join(found)}, which fine-tuning does not compute. Calibrate it "
            "('cacheclip calibrate'), or fine-tune another auxiliary model."
        )


def loss_of(
    scores: torch.Tensor, evidence: torch.Tensor, target: torch.Tensor | None, target_weight: float, scale: float = 1.0
) -> torch.Tensor:
    """``(1 - w) * -log sum_E p(t) + w * scale * KL(target || p)``, the first part alone without a target; ``scale`` 0
    says that no sample has one, and that the first part is all.

    Args:
        scores: ``(num_tokens,)``, sum 1; ``evidence`` likewise, bool; ``target`` likewise, sum 1 or 0.
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
    """What makes up for samples without a target; 0 where none has one."""
    asked = sum(target is not None and bool(target.any()) for target in targets)
    return len(targets) / asked if asked else 0.0


def fitted(
    seen: Sequence[Seen], targets: Sequence[torch.Tensor | None], auxiliary_sha256: str, settings: TuningSettings
) -> HeadSet:
    """The heads that together come nearest to what is wanted, and how much each counts: what training begins with.

    Args:
        seen: looks at all layers that may be used.
        targets: as in :attr:`Trainee.target`, one for each.
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
    """A head set with parameters. Untrained it scores like the set it comes from."""

    def __init__(
        self, heads: HeadSet, num_heads: int, num_kv_heads: int, head_dim: int, settings: TuningSettings
    ) -> None:
        super().__init__()
        assert not heads.is_updated, "training begins with heads as they come"
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
        """Heads in use of the last layer in use; they come last in the set."""
        return [head for layer, head in self.heads.heads if layer == self.heads.layers[-1]]

    def forward(self, sample: Trainee) -> torch.Tensor:
        """``(num_tokens,)``: the score of every token, sum 1."""
        maps = torch.cat((sample.fixed, self._last_layer(sample)))
        scores: torch.Tensor = self.mix.softmax(0) @ maps
        return scores

    def _update(self, name: str) -> LowRank:
        return LowRank(self.get_parameter(f"{name}_down"), self.get_parameter(f"{name}_up"))

    def _last_layer(self, sample: Trainee) -> torch.Tensor:
        """``(num_last_heads, num_tokens)``: means over question tokens of a softmax over all chunks."""
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
        """Parameters for the optimizer: the mix is not pulled towards nothing."""
        updates = [parameter for name, parameter in self.named_parameters() if name != "mix"]
        return [
            {"params": [self.mix], "weight_decay": 0.0},
            {"params": updates, "weight_decay": self.settings.weight_decay},
        ]

    def head_set(self, about: dict[str, Any] | None = None) -> HeadSet:
        """What was learned, to be saved; an update of nothing is left out."""
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
    """Where training stands after an epoch; enough to go on from."""

    epoch: int
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    best: dict[str, torch.Tensor]
    best_epoch: int
    history: list[dict[str, float]]


class Learner(Protocol):
    """What :func:`train` trains: a module that scores the tokens of a sample (which has ``lengths``, ``evidence`` and
    ``target``), and has a loss for it."""

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
    """Train until no more is found in held-out samples for a while; the learner ends as it was at its best.

    Args:
        state: to go on from.
        after_epoch: called after each epoch, to keep where training stands.

    Returns:
        The last state. Its ``history`` has for each epoch ``epoch``, ``loss`` (mean over samples), ``held_out_found``
        (share of what is wanted: of the evidence, and where there is a target, by its weight, of as much of the target
        as so many tokens can have) and ``held_out_loss``; epoch 0 is before training.
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
            for number in batch:  # one at a time: memory for one
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
    """Mean share of what is wanted among the tokens that the default grouping would take: of the evidence, and of as
    much of the target as so many tokens can have."""
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
    """Whether the last epoch finds more than the best before it. What is within a thousandth of the most that any epoch
    found is the same, and the loss decides: of the most, not of the best, or many small losses would add up."""
    last, best = history[-1], history[best_epoch]
    most = max(each["held_out_found"] for each in history)
    if last["held_out_found"] > best["held_out_found"] + _SAME:
        return True
    return last["held_out_found"] >= most - _SAME and last["held_out_loss"] < best["held_out_loss"]


def learning_and_held_out(count: int) -> tuple[list[int], list[int]]:
    """Numbers of the samples to learn from, and of every fifth, which says when to stop."""
    return [n for n in range(count) if n % _HELD_OUT], list(range(0, count, _HELD_OUT))


def spaced(numbers: Sequence[int], count: int) -> list[int]:
    """``count`` of them, or as many as there are, evenly spread."""
    count = min(count, len(numbers))
    return [numbers[round(n * (len(numbers) - 1) / max(1, count - 1))] for n in range(count)]
