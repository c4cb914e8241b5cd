"""Observers: the engine shows them every plan and every answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..chunks.sources import Sources
    from ..runtime.verification import Verified
    from ..sampling import SamplingParams
    from ..types import Answer, Plan

__all__ = ["Answered", "Observer"]


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, with the data that a check needs."""

    plan: Plan
    answer: Answer
    params: SamplingParams
    logits: torch.Tensor
    """Logits of the answer's first token, ``(vocab_size,)``."""
    verified: Verified | None = None
    """What full prefill chooses along the answer, if the answer was verified (``finish``)."""


class Observer:
    """Base of all observers. Each method does nothing by default. Observers must be safe to share between threads."""

    def on_plan(self, plan: Plan, sources: Sources) -> None:
        """Called before a plan is carried out. An observer may raise an error to refuse it."""

    def on_answer(self, answered: Answered) -> None:
        """Called when an answer is complete, before the caller gets the last event. Errors are raised to the caller."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for background work; False after ``timeout_s`` seconds."""
        return True

    def close(self) -> None:
        """Stop background work."""
