"""Tools for methods that answer one prompt with several prompts, and the sum of their statistics.

Each of these prompts is answered exactly. Stored KV is used if the chunk stands right after the prefix it was encoded
with; otherwise the prompt is prefilled after the prefix that the prefix cache holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..clock import PhaseClock
from ..prompt.layout import Layout
from ..prompt.occurrences import occurrences
from ..prompt.segments import Chunk, Segment
from ..runtime.sampler import LogitsObserver
from ..sampling import SamplingParams
from ..types import PHASES, Answer, Event, FusionStats
from .base import Method
from .direct import Direct
from .full import Prefix

__all__ = ["Ask", "Composition", "combined", "count_chunks", "exact_method"]


class Ask(Protocol):
    """Streams the exact answer to one prompt; ``observe`` gets the logits of each token."""

    def __call__(
        self, segments: Sequence[Segment], params: SamplingParams, observe: LogitsObserver | None = None
    ) -> Iterator[Event]: ...


@dataclass(frozen=True, slots=True)
class Composition:
    """A prompt with chunks, and functions that answer prompts made of its parts."""

    segments: Sequence[Segment]
    params: SamplingParams
    """Sampling settings of the final answer."""
    ask: Ask
    clock: PhaseClock = field(default_factory=PhaseClock)
    """Started when the request came in."""
    asked: list[FusionStats] = field(default_factory=list)
    """Statistics of every prompt answered so far."""
    not_found: int = 0
    """Given documents of which no part stands in the prompt."""

    @property
    def chunks(self) -> list[list[Segment]]:
        """The segments of each chunk. Pieces of a chunk that continue one another (quoted line by line, for instance)
        are one chunk, with the text between them."""
        found: list[list[Segment]] = []
        between: list[Segment] = []
        for segment in self.segments:
            if not isinstance(segment, Chunk):
                between.append(segment)
                continue
            if found and _goes_on(found[-1][-1], between, segment):
                found[-1] += [*between, segment]
            else:
                found.append([segment])
            between = []
        return found

    def around(self, middle: Iterable[Segment]) -> list[Segment]:
        """The prompt with ``middle`` in place of everything from the first chunk to the last chunk."""
        places = [number for number, segment in enumerate(self.segments) if isinstance(segment, Chunk)]
        return [*self.segments[: places[0]], *middle, *self.segments[places[-1] + 1 :]]

    def answer(
        self, segments: Sequence[Segment], params: SamplingParams, observe: LogitsObserver | None = None
    ) -> Answer:
        """The answer to an intermediate prompt."""
        answer = None
        for event in self.ask(segments, params, observe):
            answer = event.answer or answer
        assert answer is not None, "a stream ends with its answer"
        self.asked.append(answer.stats)
        return answer

    def stream(self, segments: Sequence[Segment], method: str) -> Iterator[Event]:
        """Stream the final answer from one more prompt, with the statistics of all prompts."""
        before = self.clock.elapsed()
        for event in self.ask(segments, self.params):
            if event.answer is not None:
                self.asked.append(event.answer.stats)
                event = replace(event, answer=self.closing(event.answer, method, before + event.answer.stats.ttft_s))
            yield event

    def closing(self, answer: Answer, method: str, ttft_s: float) -> Answer:
        """``answer`` with the statistics of all prompts."""
        stats = replace(combined(self.asked, method, ttft_s), not_found=self.not_found)
        return replace(answer, stats=stats)

    def plain(self) -> Iterator[Event]:
        """Plain prefill of a prompt without chunks."""
        for event in self.ask(self.segments, self.params):
            if event.answer is not None:
                stats = event.answer.stats
                method = "prefix" if stats.cached_prefix_tokens else "full"
                stats = replace(stats, method=method, fallback="no chunk found in the prompt", not_found=self.not_found)
                event = replace(event, answer=replace(event.answer, stats=stats))
            yield event


_NEAR = 64
"""Most characters between two pieces of a chunk beyond those that the chunk itself has there: quotation marks and line
ends, not another text."""


def _goes_on(before: Segment, between: Sequence[Segment], segment: Chunk) -> bool:
    """Whether a piece of a chunk continues the piece ``before``.

    Wider than :attr:`~cacheclip_rag.prompt.layout.Span.continues`: where a sentence of the chunk was left out or
    written anew, the pieces are one text to answer from, though their KV is not one run.
    """
    if not isinstance(before, Chunk) or before.whole != segment.whole or any(each.control for each in between):
        return False
    skipped = segment.at - before.at - len(before.text)
    return skipped >= 0 and sum(len(each.text) for each in between) <= skipped + _NEAR


def exact_method(layout: Layout) -> Method:
    """The method that answers an intermediate prompt exactly."""
    return Direct() if layout.chunks and all(map(layout.is_exact, layout.chunks)) else Prefix()


def count_chunks(stats: FusionStats, layout: Layout) -> FusionStats:
    """Statistics of an intermediate prompt. After plain prefill, too, chunk tokens count as reused or recomputed."""
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
        misses=stats.misses or (len(occurrences(layout.chunks)) if computed else 0),
        missed_tokens=stats.missed_tokens or computed,
        charged_ratio=computed / chunk_tokens,
    )


_SUMS = (
    *("prompt_tokens", "prefix_tokens", "fresh_tokens", "chunk_tokens", "exact_tokens", "recomputed_tokens"),
    *("hits", "misses", "missed_tokens", "cached_prefix_tokens", "queued_s", "generated_tokens", "decode_s"),
    *("unusable", "partial_hits"),
)


def combined(parts: Sequence[FusionStats], method: str, ttft_s: float) -> FusionStats:
    """Sums of the statistics of several prompts. ``ttft_s`` is the time to the final answer's first token; phases do
    not add up to it, because it includes the decoding of intermediate answers."""
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    phases = {phase: sum(part.phases_s[phase] for part in parts) for phase in PHASES}
    charged = sum(part.charged_ratio * part.chunk_tokens for part in parts)
    shares = sum(part.partial_share * part.partial_hits for part in parts if part.partial_share is not None)
    return replace(
        parts[0],
        method=method,
        fallback=None,
        nominal_ratio=0.0,
        phases_s=phases,
        ttft_s=ttft_s,
        charged_ratio=charged / sums["chunk_tokens"] if sums["chunk_tokens"] else 0.0,
        partial_share=shares / sums["partial_hits"] if sums["partial_hits"] else None,
        confidence=None,
        **sums,
    )
