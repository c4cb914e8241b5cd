"""Observers: what looks at every plan and every answer without the engine knowing it one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..chunks.sources import Sources
    from ..sampling import SamplingParams
    from ..types import Answer, Plan

__all__ = ["Answered", "Observer"]


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, and what it takes to check it."""

    plan: Plan | None
    """None for an answer made of several prompts."""
    answer: Answer
    params: SamplingParams
    logits: torch.Tensor | None = None
    """What the answer's first token was chosen from, ``(vocab_size,)``; None for an answer made of several prompts."""


class Observer:
    """Base of all observers; each method does nothing by default. Must be safe to share between threads."""

    def on_plan(self, plan: Plan, sources: Sources) -> None:
        """Called before a plan is carried out; may raise to refuse it."""

    def on_answer(self, answered: Answered) -> None:
        """Called once an answer is complete, before the caller gets its last piece. What it raises, the caller sees."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for work in the background; False if it took longer."""
        return True

    def close(self) -> None:
        """Stop work in the background."""
