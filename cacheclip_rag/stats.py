"""What happened while answering: on every answer, in each framework's response object and in the DEBUG log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["PHASES", "FusionStats", "PhaseClock", "combined"]

PHASES = ("lookup", "read", "select", "assemble", "recompute")
"""Parts of the time to the first token, in order: find and tokenise the chunks, read their KV, score and choose tokens
with the auxiliary model, write KV at true positions, run the primary (for plain prefill all of it)."""


@dataclass(frozen=True, slots=True)
class FusionStats:
    """Tokens, ratios and seconds of one answer."""

    method: str
    """Method that produced the answer. Where chunks could not be reused: ``prefix`` if the prefix cache had a start of
    the prompt, else ``full``."""
    fallback: str | None
    """Why the answer came by plain prefill although another method was asked for; None otherwise."""
    prompt_tokens: int
    """Tokens of the whole prompt = prefix + fresh + chunk tokens."""
    prefix_tokens: int
    """Leading tokens reused exactly: the shared prefix, or what the prefix cache had, but for stored chunks in it."""
    fresh_tokens: int
    """Tokens of glue, question and chunks that were not stored: computed."""
    chunk_tokens: int
    """Tokens of the chunks found in the store."""
    exact_tokens: int
    """Chunk tokens among these right behind the very prefix they were encoded behind, or taken from the prefix cache:
    exact, never computed again."""
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
    cached_prefix_tokens: int = 0
    """Prompt tokens taken from the prefix cache. They count among ``prefix_tokens`` and ``chunk_tokens`` too."""
    missed_tokens: int = 0
    """Tokens of the chunks that were not found."""
    generated_tokens: int = 0
    decode_s: float = 0.0
    """Seconds from the first to the last new token."""

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose KV came from the store or the prefix cache and was kept as it is."""
        return self.prefix_tokens + self.chunk_tokens - self.recomputed_tokens

    @property
    def effective_ratio(self) -> float:
        """Recomputed over chunk tokens. Where no chunk was reused, the share of the prompt that was computed: 1.0 for
        plain prefill, less if the prefix cache had its start."""
        if not self.chunk_tokens:
            return self.fresh_tokens / self.prompt_tokens
        return self.recomputed_tokens / self.chunk_tokens

    @property
    def effective_ratio_of_stale(self) -> float:
        """Recomputed over the chunk tokens that are not exact anyway: 1.0 means that nothing stale is left."""
        stale = self.chunk_tokens - self.exact_tokens
        return self.recomputed_tokens / stale if stale else 1.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and ratios, ready for JSON."""
        names = ("effective_ratio", "effective_ratio_of_stale")
        ratios = {name: getattr(self, name) for name in names}
        return {**asdict(self), "reused_tokens": self.reused_tokens, **ratios}


_SUMS = (
    *("prompt_tokens", "prefix_tokens", "fresh_tokens", "chunk_tokens", "exact_tokens", "recomputed_tokens"),
    *("hits", "misses", "missed_tokens", "cached_prefix_tokens", "generated_tokens", "decode_s"),
)


def combined(parts: Sequence[FusionStats], method: str, ttft_s: float) -> FusionStats:
    """Numbers of one answer made of several: sums, those of decoding included; ``ttft_s`` to the final one's first
    token. The seconds of the phases do not add up to it, since most of it may be decoding."""
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    phases = {phase: sum(part.phases_s[phase] for part in parts) for phase in PHASES}
    charged = sum(part.charged_ratio * part.chunk_tokens for part in parts)
    return replace(
        parts[0],
        method=method,
        fallback=None,
        nominal_ratio=0.0,
        phases_s=phases,
        ttft_s=ttft_s,
        charged_ratio=charged / sums["chunk_tokens"] if sums["chunk_tokens"] else 0.0,
        **sums,
    )


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
