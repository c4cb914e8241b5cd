"""Seconds per phase of the time to the first token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES = ("lookup", "read", "select", "assemble", "recompute", "first")
"""Phases of the time to the first token, in order: find and tokenise the chunks, read their KV, score and choose
tokens, write KV at true positions, run the primary (plain prefill counts here completely), keep KV for later prompts
and choose the first token (with ``finish="revise"``, until one stays). Reading goes on beside the others: only the time
in which the request waits for it counts. With the time in the queue they are the whole time."""


@dataclass(slots=True)
class PhaseClock:
    """Adds up seconds per phase since its creation."""

    started: float = field(default_factory=lambda: time.perf_counter())
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    left_to_read_s: float = 0.0
    """Seconds for which the store was still read after the recompute had begun."""
    reading_s: float = 0.0
    """Seconds for which the store was read, whether anybody waited for it or not."""
    queued_s: float = 0.0
    """Seconds of waiting for other requests."""

    @contextmanager
    def phase(self, name: str, *, within: str | None = None) -> Iterator[None]:
        """The block's time counts for ``name``, and not for the running phase ``within`` which it is."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self.seconds[name] += seconds
            if within is not None:
                self.seconds[within] -= seconds

    def elapsed(self) -> float:
        return time.perf_counter() - self.started
