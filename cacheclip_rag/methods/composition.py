"""Answering one prompt by several: what methods that do so work with, and how their numbers are added up.

Each prompt of theirs is answered exactly: with its chunk's stored KV where the chunk stands right behind the prefix it
was encoded behind, else by plain prefill behind what the prefix cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..clock import PhaseClock
from ..prompt.layout import Layout
from ..prompt.segments import Chunk, Segment
from ..sampling import SamplingParams
from ..types import PHASES, Answer, Event, FusionStats
from .base import Method
from .direct import Direct
from .full import Prefix

__all__ = ["Ask", "Composition", "combined", "count_chunks", "exact_method"]

LogitsObserver = Callable[[Any, int], None]
"""Sees ``(vocab_size,)`` logits and the token that was chosen from them."""


class Ask(Protocol):
    """Answers one prompt exactly, streamed; ``observe`` sees the logits that each token was chosen from."""

    def __call__(
        self, segments: Sequence[Segment], params: SamplingParams, observe: LogitsObserver | None = None
    ) -> Iterator[Event]: ...


@dataclass(frozen=True, slots=True)
class Composition:
    """A prompt with chunks, and the means to ask others made of its parts."""

    segments: Sequence[Segment]
    params: SamplingParams
    """Settings of the answer as a whole."""
    ask: Ask
    clock: PhaseClock = field(default_factory=PhaseClock)
    """Started when the request came in."""
    asked: list[FusionStats] = field(default_factory=list)
    """Numbers of every prompt answered so far."""

    @property
    def chunks(self) -> list[Chunk]:
        return [segment for segment in self.segments if isinstance(segment, Chunk)]

    def around(self, middle: Segment) -> list[Segment]:
        """The prompt with ``middle`` in place of all from its first chunk to its last."""
        places = [number for number, segment in enumerate(self.segments) if isinstance(segment, Chunk)]
        return [*self.segments[: places[0]], middle, *self.segments[places[-1] + 1 :]]

    def answer(
        self, segments: Sequence[Segment], params: SamplingParams, observe: LogitsObserver | None = None
    ) -> Answer:
        """The whole answer to a prompt, on the way to the final one."""
        answer = None
        for event in self.ask(segments, params, observe):
            answer = event.answer or answer
        assert answer is not None, "a stream ends with its answer"
        self.asked.append(answer.stats)
        return answer

    def stream(self, segments: Sequence[Segment], method: str) -> Iterator[Event]:
        """The final answer by one more prompt, with the numbers of all."""
        before = self.clock.elapsed()
        for event in self.ask(segments, self.params):
            if event.answer is not None:
                self.asked.append(event.answer.stats)
                event = replace(event, answer=self.closing(event.answer, method, before + event.answer.stats.ttft_s))
            yield event

    def closing(self, answer: Answer, method: str, ttft_s: float) -> Answer:
        """``answer`` as that of the whole prompt, with the numbers of all that were asked."""
        return replace(answer, stats=combined(self.asked, method, ttft_s))

    def plain(self) -> Iterator[Event]:
        """Plain prefill of a prompt in which there is no chunk."""
        for event in self.ask(self.segments, self.params):
            if event.answer is not None:
                stats = event.answer.stats
                method = "prefix" if stats.cached_prefix_tokens else "full"
                stats = replace(stats, method=method, fallback="no chunk found in the prompt")
                event = replace(event, answer=replace(event.answer, stats=stats))
            yield event


def exact_method(layout: Layout) -> Method:
    """How such a prompt is answered exactly."""
    return Direct() if layout.chunks and all(map(layout.is_exact, layout.chunks)) else Prefix()


def count_chunks(stats: FusionStats, layout: Layout) -> FusionStats:
    """Numbers of one such prompt: after plain prefill too, its chunks' tokens count as kept or as computed again."""
    if stats.chunk_tokens or not layout.chunks:
        return stats
    computed = sum(max(0, span.stop - max(span.start, stats.cached_prefix_tokens)) for span in layout.chunks)
    chunk_tokens = sum(len(span.tokens) for span in layout.chunks)
    kept = chunk_tokens - computed
    return replace(
        stats,
        prefix_tokens=stats.prefix_tokens - kept,
        fresh_tokens=stats.fresh_tokens - computed,
        chunk_tokens=chunk_tokens,
        exact_tokens=kept,
        recomputed_tokens=computed,
        charged_ratio=computed / chunk_tokens,
    )


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
