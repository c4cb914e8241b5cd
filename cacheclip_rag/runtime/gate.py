"""The confidence gate: where the first token hangs in the balance, more of the prompt is recomputed.

A selective recompute changes answers mostly where full prefill itself hardly prefers one first token to another. Such
prompts are known by the probability of the likeliest first token. They are recomputed at twice the ratio, again and
again, and above :data:`MOST_RATIO` prefilled in full. Each pass is the method at that ratio and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..types import Plan
from .base import Fused, Runtime, Scored

if TYPE_CHECKING:
    from ..chunks.sources import Sources
    from ..clock import PhaseClock
    from ..methods.base import Method

__all__ = ["MOST_RATIO", "Gated", "confidence", "fuse_until_sure", "rounds"]

GROWTH = 2.0
"""Factor from one pass's ratio to the next."""
MOST_RATIO = 0.5
"""Full prefill follows a pass above half of this ratio."""


@dataclass(frozen=True, slots=True)
class Gated:
    """Result of the passes over one prompt."""

    fused: Fused | None
    """The last pass; None if the prompt must be prefilled in full."""
    passes: int
    """Passes that reused chunks."""
    charged_tokens: float
    """Chunk tokens that got fresh KV, summed over the passes."""
    fallback: str = ""
    """Why the prompt must be prefilled in full."""


def confidence(logits: torch.Tensor) -> float:
    """Probability of the likeliest token, from ``(vocab_size,)`` logits."""
    return float(logits.float().softmax(-1).max())


def rounds(method: Method) -> Iterator[Method]:
    """The method at increasing ratios, as long as a pass is asked for."""
    yield method
    while method.min_confidence and method.has_ratio and 0 < method.nominal_ratio <= MOST_RATIO / GROWTH:
        method = method.at(method.nominal_ratio * GROWTH)
        yield method


def fuse_until_sure(
    runtime: Runtime, plan: Plan, sources: Sources, *, capacity: int, clock: PhaseClock, trace: bool = False
) -> Gated:
    """Carry out a plan that reuses chunks, at higher ratios until the method's confidence is reached."""
    scored: Scored = {}
    charged, passes, sure = 0.0, 0, 0.0
    for method in rounds(plan.method):
        fused = runtime.fuse(
            replace(plan, method=method), sources, capacity=capacity, clock=clock, trace=trace, scored=scored
        )
        if fused is None:
            return Gated(None, passes, charged, f"no chunk of {len(plan.layout.chunks)} could be read")
        charged, passes = charged + fused.charged_tokens, passes + 1
        sure = confidence(fused.logits)
        is_exact = fused.plan.exact == fused.plan.reused
        if is_exact or sure >= method.min_confidence:
            asked = replace(fused, plan=replace(fused.plan, method=plan.method))
            return Gated(asked, passes, charged)
    why = f"confidence {sure:.2f} at recompute ratio {method.nominal_ratio:.2g}, below {method.min_confidence:.2g}"
    return Gated(None, passes, charged, why)
