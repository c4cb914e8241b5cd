"""Fine-tuning of a head set: which heads of the auxiliary model score, and with what weights. Plain torch.

The paper (arXiv:2510.10129v1, section 3.5) only says that the auxiliary is fine-tuned. A quarter of our loss is the
marginal likelihood of the evidence, ``-log sum_E p(t)``. The rest is ``KL(target || p)``; the target is the primary's
attention to stale tokens. DeepSeek-V3.2 (arXiv:2512.02556) trains its indexer on attention in the same way. The model
itself is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheclip_rag.selection import HeadSet

from .features import SampleAttention

SINKS = 4
"""First tokens of each chunk that get no score."""
TARGET_WEIGHT = 0.75
"""Share of the KL to the target in the loss."""
_FIT_STEPS = 300
_LEARNING_RATE = 0.05
_MOST_HEADS = 16


def loss_of(scores: torch.Tensor, evidence: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``(1 - w) * -log sum_E p(t) + w * KL(target || p)`` with the :data:`TARGET_WEIGHT` w.

    Args:
        scores: ``(num_tokens,)``, sum 1.
        evidence: ``(num_tokens,)`` bool.
        target: ``(num_tokens,)``, sum 1.
    """
    found = scores.clamp(min=1e-9)
    likelihood = -found[evidence].sum().log()
    divergence = (target * (target.clamp(min=1e-9).log() - found.log())).sum()
    return (1 - TARGET_WEIGHT) * likelihood + TARGET_WEIGHT * divergence


def fitted(seen: Sequence[SampleAttention], targets: Sequence[torch.Tensor], auxiliary_sha256: str) -> HeadSet:
    """The heads whose weighted sum is nearest to the targets.

    Args:
        seen: recorded attention.
        targets: one per sample: ``(num_tokens,)``, sum 1, attended and stale in the primary.
    """
    num_layers, num_heads, _ = seen[0].scores.shape
    looks = [(each.scores.flatten(0, 1).clone(), each.evidence.clone()) for each in seen]
    # clones: autograd refuses what was made in inference mode
    mix = torch.zeros(num_layers * num_heads, requires_grad=True)
    optimizer = torch.optim.Adam([mix], lr=_LEARNING_RATE)
    for _ in range(_FIT_STEPS):
        optimizer.zero_grad()
        for (scores, evidence), target in zip(looks, targets, strict=True):
            loss = loss_of(mix.softmax(0) @ scores, evidence, target) / len(looks)
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
