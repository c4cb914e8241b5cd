"""Fine-tuning of a head set: which heads of the auxiliary model score, and with what weights. Plain torch.

The paper (arXiv:2510.10129v1, section 3.5) only says that the auxiliary is fine-tuned. A quarter of our loss is the
marginal likelihood of the evidence, ``-log sum_E p(t)``. The rest is ``KL(target || p)``; the target is the primary's
attention to stale tokens. DeepSeek-V3.2 (arXiv:2512.02556) trains its indexer on attention in the same way. The model
itself is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...selection.heads import HeadSet
from .features import Seen

__all__ = ["SINKS", "TARGET_WEIGHT", "fitted", "loss_of", "spaced", "target_scale"]

SINKS = 4
"""First tokens of each chunk that get no score."""
TARGET_WEIGHT = 0.75
"""Mean share of the KL to the target in the loss, independent of the number of samples with a target."""
_FIT_STEPS = 300
_LEARNING_RATE = 0.05
_MOST_HEADS = 16


def loss_of(
    scores: torch.Tensor, evidence: torch.Tensor, target: torch.Tensor | None, scale: float = 1.0
) -> torch.Tensor:
    """``(1 - w) * -log sum_E p(t) + w * scale * KL(target || p)`` with the :data:`TARGET_WEIGHT` w. Without a target,
    only the first term is used. With ``scale`` 0 (no sample has a target), the first term has weight 1.

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
        return (1 - TARGET_WEIGHT) * likelihood
    divergence = (target * (target.clamp(min=1e-9).log() - found.log())).sum()
    return (1 - TARGET_WEIGHT) * likelihood + TARGET_WEIGHT * scale * divergence


def target_scale(targets: Sequence[torch.Tensor | None]) -> float:
    """Factor that compensates for samples without a target; 0 if no sample has a target."""
    asked = sum(target is not None and bool(target.any()) for target in targets)
    return len(targets) / asked if asked else 0.0


def fitted(seen: Sequence[Seen], targets: Sequence[torch.Tensor | None], auxiliary_sha256: str) -> HeadSet:
    """The heads whose weighted sum is nearest to the targets.

    Args:
        seen: recorded attention.
        targets: one per sample: ``(num_tokens,)``, sum 1, attended and stale in the primary; None if nothing is.
    """
    num_layers, num_heads, _ = seen[0].scores.shape
    scale = target_scale(targets)
    looks = [(each.scores.flatten(0, 1).clone(), each.evidence.clone()) for each in seen]
    # clones: autograd refuses what was made in inference mode
    mix = torch.zeros(num_layers * num_heads, requires_grad=True)
    optimizer = torch.optim.Adam([mix], lr=_LEARNING_RATE)
    for _ in range(_FIT_STEPS):
        optimizer.zero_grad()
        for (scores, evidence), target in zip(looks, targets, strict=True):
            loss = loss_of(mix.softmax(0) @ scores, evidence, target, scale) / len(looks)
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()
    weights = mix.detach().softmax(0)
    best = sorted(weights.argsort(descending=True, stable=True)[:_MOST_HEADS].tolist())
    heads = tuple((index // num_heads, index % num_heads) for index in best)
    return HeadSet(auxiliary_sha256, heads, weights[best] / weights[best].sum(), sinks=SINKS)


def spaced(numbers: Sequence[int], count: int) -> list[int]:
    """``count`` of the numbers, evenly spread; all of them if there are fewer."""
    count = min(count, len(numbers))
    return [numbers[round(n * (len(numbers) - 1) / max(1, count - 1))] for n in range(count)]
