"""Fine-tuning of a head set: weights of its heads, and low-rank updates of the last layer in use. Plain torch.

The paper (arXiv:2510.10129v1, section 3.5) only says that the auxiliary is fine-tuned. The loss is half the marginal
likelihood of the evidence, ``-log sum_E p(t)``, half ``KL(target || p)`` where the primary told what it attends to and
holds stale, as DeepSeek-V3.2 (arXiv:2512.02556) trains its indexer on the attention it stands in for. Everything below
the last layer in use is frozen: only what is looked for may change.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..models.rotary import rotate
from ..selection.heads import HeadSet, LowRank
from .features import LastLayer, Seen
from .measures import chosen, token_recall

__all__ = ["Trainee", "Tuned", "TuningSettings", "loss_of", "train"]


@dataclass(frozen=True, slots=True)
class TuningSettings:
    """How to train."""

    rank: int = 8
    """Of the low-rank updates."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    """Pulls the updates towards nothing."""
    batch: int = 8
    """Samples a step."""
    epochs: int = 30
    """At most."""
    patience: int = 5
    """Epochs without a better held-out recall (or, at the same recall, a lower held-out loss) after which training
    ends."""
    target_weight: float = 0.5
    """Share of the loss that is the KL to the target, where there is one."""
    ratio: float = 0.2
    """Share of the tokens that held-out recall is measured at."""
    sinks: int = 4
    """Tokens at the start of each chunk that nobody scores."""
    seed: int = 0


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


def loss_of(
    scores: torch.Tensor, evidence: torch.Tensor, target: torch.Tensor | None, target_weight: float
) -> torch.Tensor:
    """``(1 - w) * -log sum_E p(t) + w * KL(target || p)``; the first alone without a target.

    Args:
        scores: ``(num_tokens,)``, sum 1; ``evidence`` likewise, bool; ``target`` likewise, sum 1 or 0.
    """
    found = scores.clamp(min=1e-9)
    likelihood = -found[evidence].sum().log()
    if target is None or not bool(target.any()):
        return likelihood
    divergence = (target * (target.clamp(min=1e-9).log() - found.log())).sum()
    return (1 - target_weight) * likelihood + target_weight * divergence


class Tuned(torch.nn.Module):
    """A head set with parameters. Untrained it scores like the set it comes from."""

    def __init__(
        self, heads: HeadSet, num_heads: int, num_kv_heads: int, head_dim: int, settings: TuningSettings
    ) -> None:
        super().__init__()
        self.heads, self.settings = heads, settings
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
        last, sinks = sample.last, self.settings.sinks
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
            if length > sinks:
                found = torch.cat((torch.full_like(found[..., :sinks], float("-inf")), found[..., sinks:]), dim=-1)
            logits.append(found)
            start += length
        return torch.cat(logits, dim=-1).softmax(-1).mean(1)

    def loss(self, sample: Trainee) -> torch.Tensor:
        return loss_of(self(sample), sample.evidence, sample.target, self.settings.target_weight)

    def head_set(self, about: dict[str, Any] | None = None) -> HeadSet:
        """What was learned, to be saved."""
        with torch.no_grad():
            updates = [
                LowRank(update.down.detach().clone(), update.up.detach().clone())
                for update in map(self._update, ("queries", "keys"))
            ]
            weights = self.mix.softmax(0).detach().clone()
        return replace(
            self.heads, weights=weights, queries=updates[0], keys=updates[1], about=about or self.heads.about
        )

    @torch.no_grad()
    def recall(self, samples: Sequence[Trainee]) -> float:
        """Mean share of the evidence among the tokens that the default grouping would take."""
        settings = self.settings
        return sum(
            float(token_recall(chosen(self(each), each.lengths, settings.ratio), each.evidence)) for each in samples
        ) / len(samples)

    @torch.no_grad()
    def mean_loss(self, samples: Sequence[Trainee]) -> float:
        return sum(float(self.loss(each)) for each in samples) / len(samples)


def _held_out(tuned: Tuned, samples: Sequence[Trainee]) -> dict[str, float]:
    return {"held_out_recall": tuned.recall(samples), "held_out_loss": tuned.mean_loss(samples)}


def _is_better(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether an epoch finds more than another; recalls within a thousandth are the same."""
    gained = one["held_out_recall"] - other["held_out_recall"]
    return gained > 1e-3 or (gained >= -1e-3 and one["held_out_loss"] < other["held_out_loss"])


@dataclass(slots=True)
class TrainingState:
    """Where training stands after an epoch; enough to go on from."""

    epoch: int
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    best: dict[str, torch.Tensor]
    best_epoch: int
    history: list[dict[str, float]]


def train(
    tuned: Tuned,
    samples: Sequence[Trainee],
    held_out: Sequence[Trainee],
    *,
    state: TrainingState | None = None,
    after_epoch: Any = None,
) -> list[dict[str, float]]:
    """Train until held-out recall has stood still for a while; ``tuned`` ends as it was at its best.

    Args:
        state: to go on from.
        after_epoch: called with the :class:`TrainingState` after each epoch.

    Returns:
        Per epoch ``epoch``, ``loss`` (mean over samples), ``held_out_recall`` and ``held_out_loss``; epoch 0 is before
        training.
    """
    settings = tuned.settings
    groups = [
        {"params": [tuned.mix], "weight_decay": 0.0},
        {"params": [p for n, p in tuned.named_parameters() if n != "mix"], "weight_decay": settings.weight_decay},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
    if state is None:
        first = {"epoch": 0.0, "loss": tuned.mean_loss(samples), **_held_out(tuned, held_out)}
        state = TrainingState(0, {}, {}, copy.deepcopy(tuned.state_dict()), 0, [first])
    else:
        tuned.load_state_dict(state.parameters)
        optimizer.load_state_dict(state.optimizer)
    while state.epoch < settings.epochs and state.epoch - state.best_epoch < settings.patience:
        epoch = state.epoch + 1
        order = list(range(len(samples)))
        random.Random(f"{settings.seed}/{epoch}").shuffle(order)
        total = 0.0
        for start_of in range(0, len(order), settings.batch):
            batch = [samples[number] for number in order[start_of : start_of + settings.batch]]
            optimizer.zero_grad()
            loss_of = torch.stack([tuned.loss(each) for each in batch]).mean()
            loss_of.backward()
            optimizer.step()
            total += float(loss_of.detach()) * len(batch)
        state.history.append({"epoch": float(epoch), "loss": total / len(samples), **_held_out(tuned, held_out)})
        state.epoch = epoch
        if _is_better(state.history[epoch], state.history[state.best_epoch]):
            state.best, state.best_epoch = copy.deepcopy(tuned.state_dict()), epoch
        state.parameters, state.optimizer = tuned.state_dict(), optimizer.state_dict()
        if after_epoch is not None:
            after_epoch(state)
    tuned.load_state_dict(state.best)
    return state.history
