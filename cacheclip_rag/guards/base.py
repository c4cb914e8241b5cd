"""Observers: the engine shows them every plan and every answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..base.closing import Closing
from ..base.guests import ask_guest, fitting, guests

if TYPE_CHECKING:
    from ..base.sampling import SamplingParams
    from ..config import EngineConfig
    from ..fusion.answer import Answer
    from ..plan.plan import KVSources, Plan


@dataclass(frozen=True, slots=True)
class Verified:
    """The tokens of an answer that were chosen from approximate KV, beside full prefill's choices."""

    logits: torch.Tensor
    """Full prefill's logits of the answer's first token, ``(vocab_size,)``."""
    given: tuple[int, ...]
    """Tokens of the answer that were chosen from the approximate KV."""
    choices: tuple[int, ...]
    """At each of them, full prefill's likeliest token after the same prompt and the same tokens before."""

    @property
    def diverged_at(self) -> int | None:
        """Number of the first token that full prefill would not choose; None if there is none."""
        pairs = zip(self.given, self.choices, strict=True)
        return next((number for number, (token, choice) in enumerate(pairs) if token != choice), None)


@dataclass(frozen=True, slots=True)
class ObservedAnswer:
    """An answer, with the data that a check needs."""

    plan: Plan
    answer: Answer
    params: SamplingParams
    logits: torch.Tensor
    """Logits of the answer's first token, ``(vocab_size,)``."""
    verified: Verified | None = None
    """What full prefill chooses along the answer, if the answer was verified (``finish``)."""


class Observer(Closing):
    """Base of all observers. Each method does nothing by default. Observers must be safe to share between threads."""

    def on_plan(self, plan: Plan, kv_sources: KVSources) -> Plan | None:
        """Called before a plan is carried out. An observer may raise an error to refuse it, or return another plan."""
        return None

    def on_answer(self, answered: ObservedAnswer) -> None:
        """Called when an answer is complete, before the caller gets the last event. Errors are raised to the caller."""

    def on_cancelled(self, answer: Answer) -> None:
        """Called in the place of :meth:`on_answer`, by the same thread, when an answer's reader has left before its
        end: with what there is of it."""

    def on_compared(self, token_ids: Sequence[int], choices: Sequence[int]) -> None:
        """Called when an answer was compared with full prefill, by another thread: at each of its first tokens,
        ``choices`` has full prefill's likeliest one after the same tokens before."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for background work; False after ``timeout_s`` seconds."""
        return True

    def close(self) -> None:
        """Stop background work."""


GROUP = "cacheclip.observers"


def brought_observers(config: EngineConfig) -> list[Observer]:
    """Observers that other distributions bring for an engine with these settings, in the order of their names.

    Raises:
        ConfigurationError: one cannot be imported, fails, or is no observer. It may be there to refuse plans or to keep
            records, so that no engine goes without it.
    """
    observers = []
    for name in guests(GROUP):
        made = ask_guest(GROUP, name, lambda make: make(config), "a function of an engine's config")
        if fitting(GROUP, name, made, "an Observer or None", lambda each: each is None or isinstance(each, Observer)):
            observers.append(made)
    return observers
