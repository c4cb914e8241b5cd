"""What happened while answering: on every answer, in each framework's response object and in the DEBUG log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PHASES", "FusionStats", "PhaseClock"]

PHASES = ("lookup", "read", "select", "assemble", "recompute")
"""Parts of the time to the first token, in order: find and tokenise the chunks, read their KV, score and choose tokens
with the auxiliary model, write KV at true positions, run the primary (for plain prefill all of it)."""


@dataclass(frozen=True, slots=True)
class FusionStats:
    """Tokens, ratios and seconds of one answer."""

    method: str
    """Method that produced the answer; ``full`` when reuse was impossible."""
    fallback: str | None
    """Why the answer came by plain prefill although another method was asked for; None otherwise."""
    prompt_tokens: int
    """Tokens of the whole prompt = prefix + fresh + chunk tokens."""
    prefix_tokens: int
    """Shared prefix, reused exactly."""
    fresh_tokens: int
    """Tokens of glue, question and chunks that were not stored: computed."""
    chunk_tokens: int
    """Tokens of the chunks found in the store."""
    exact_tokens: int
    """Chunk tokens among these right behind the very prefix they were encoded behind: exact, never computed again."""
    recomputed_tokens: int
    """Chunk tokens among these that were computed again."""
    nominal_ratio: float
    """Recompute ratio that was asked for."""
    hits: int
    """Chunks found in the store."""
    misses: int
    """Chunks not found: computed as fresh text for this answer and (``on_miss="store"``) stored after it."""
    phases_s: dict[str, float]
    """Seconds per phase of the time to the first token, keys as in :data:`PHASES`."""
    ttft_s: float
    """Seconds from the call to the first new token, everything included."""
    charged_ratio: float = 0.0
    """Share of (layer, chunk token) pairs given fresh KV: what a method costs. Above the effective ratio where layers
    run in full only to choose; 1.0 for plain prefill."""
    generated_tokens: int = 0
    decode_s: float = 0.0
    """Seconds from the first to the last new token."""

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose KV came from the store and was kept as it is."""
        return self.prefix_tokens + self.chunk_tokens - self.recomputed_tokens

    @property
    def effective_ratio(self) -> float:
        """Recomputed over chunk tokens; 1.0 for plain prefill, 0.0 without chunks."""
        if self.method == "full":
            return 1.0
        return self.recomputed_tokens / self.chunk_tokens if self.chunk_tokens else 0.0

    @property
    def effective_ratio_of_stale(self) -> float:
        """Recomputed over the chunk tokens that are not exact anyway: 1.0 means that nothing stale is left."""
        if self.method == "full":
            return 1.0
        stale = self.chunk_tokens - self.exact_tokens
        return self.recomputed_tokens / stale if stale else 1.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and ratios, ready for JSON."""
        names = ("effective_ratio", "effective_ratio_of_stale")
        ratios = {name: getattr(self, name) for name in names}
        return {**asdict(self), "reused_tokens": self.reused_tokens, **ratios}


@dataclass(slots=True)
class PhaseClock:
    """Adds up seconds per phase since its creation."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin

    @contextmanager
    def phase_within(self, name: str, outer: str) -> Iterator[None]:
        """A phase inside a running one: its time counts for ``name`` and not for ``outer``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self.seconds[name] += seconds
            self.seconds[outer] -= seconds

    def elapsed(self) -> float:
        return time.perf_counter() - self.started
