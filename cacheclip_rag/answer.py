"""What comes back from an engine: an answer, piece by piece or whole."""

from __future__ import annotations

from dataclasses import dataclass

from .stats import FusionStats

__all__ = ["Answer", "Event"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    """New tokens, the ending one included."""
    finish_reason: str
    """``stop`` (end of turn or a stop string) or ``length``."""
    stats: FusionStats


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a streamed answer."""

    text: str
    """New text since the last event; joined over all events it is the answer."""
    answer: Answer | None = None
    """Set on the last event only."""


StreamEvent = Event
"""Older name, until the modules that import it follow."""
