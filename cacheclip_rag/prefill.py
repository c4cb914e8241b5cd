"""The way of one prompt to its first logits, with the KV of its chunks taken from the store.

Read top to bottom, :meth:`Prefill.run` is the heart of the library::

    stored chunks -> score with the auxiliary -> read and assemble the primary's KV -> choose tokens -> recompute

What a method needs on the way it declares (:class:`~cacheclip_rag.methods.base.Method`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .chunks import ChunkCaches
from .fusion.layout import Layout, Span, question_slots
from .fusion.recompute import assemble, choose_rows, recompute
from .methods.base import Method, SelectionRequest
from .models.attention import Geometry
from .models.cache import FusedCache
from .models.plain import PlainState
from .prompt import Fresh
from .selection.auxiliary import score_chunks
from .selection.mapping import map_scores
from .stats import FusionStats, PhaseClock

__all__ = ["Prefill", "Prefilled"]

logger = logging.getLogger(__name__)

_MAX_QUESTION_TOKENS = 96
"""Question tokens that score the chunks, the last ones if there are more: each costs one row per chunk."""
_LEAST_QUESTION_TOKENS = 16
"""Fewer say too little: a chunk that leaves the auxiliary model's context less room is not scored."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt in the cache, ready to decode."""

    layout: Layout
    cache: FusedCache | PlainState
    logits: torch.Tensor
    """Of the prompt's last token, ``(vocab_size,)``."""
    stats: FusionStats
    missing: tuple[str, ...]
    """Chunks that were not stored (or damaged) and were computed as fresh text."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt, one method, and the chunk caches of the models it needs."""

    layout: Layout
    method: Method
    primary: ChunkCaches
    auxiliary: ChunkCaches | None
    """None if the method needs no auxiliary model."""
    capacity: int
    """Tokens to make room for, those of the answer included."""
    clock: PhaseClock
    """Started when the request came in."""
    question: str | None = None
    """Text that scores the chunks; default the text after the last chunk."""
    before_reuse: Callable[[], None] = lambda: None
    """Called once it is clear that something will be reused; may raise to forbid it."""
    ignored: frozenset[int] = frozenset()
    """Starts of chunks that were found damaged, and are ordinary text now."""

    def run(self) -> Prefilled:
        """Everything up to the first token's logits."""
        layout, method, clock = self.layout, self.method, self.clock
        with clock.phase("lookup"):
            obstacle = self._obstacle()
            found = [] if obstacle else [span for span in layout.chunks if self._is_stored(span)]
            if found and (geometry := method.place(layout, found)) is not None:
                obstacle = self._obstacle_of(geometry)
        if not found or obstacle:
            return self._run_plain(obstacle)
        self.before_reuse()
        with clock.phase("select"):
            scorable = [span for span in found if not layout.is_exact(span)]
            scores = dict(zip(scorable, method.score(self._selection_request(found, scorable)), strict=True))
        with clock.phase("assemble"):
            cache = self.primary.kv_runtime.new_cache(self.capacity)
            cache.geometry = geometry
            reused = self._assemble(cache, found)
        if not reused:
            return self._run_plain()
        if len(reused) < len(found) and geometry is not None:
            # a damaged chunk is ordinary text, which such methods place elsewhere: begin again without it
            return replace(self, ignored=frozenset(span.start for span in found if span not in reused)).run()
        scorable = [span for span in scorable if span in reused]
        return self._fuse(cache, reused, scorable, [scores[span] for span in scorable])

    def _fuse(
        self, cache: FusedCache, reused: Sequence[Span], scorable: Sequence[Span], scores: Sequence[torch.Tensor]
    ) -> Prefilled:
        """From the assembled cache to the logits: choose, then recompute."""
        layout, method, clock, runtime = self.layout, self.method, self.clock, self.primary.kv_runtime
        computed = torch.zeros(layout.num_tokens, dtype=torch.bool)
        charged = 0

        def recompute_now(masks: list[torch.Tensor]) -> None:
            nonlocal charged
            rows = choose_rows(layout, reused, zip(scorable, masks, strict=True))
            recompute(runtime, cache, layout, rows)
            computed[rows] = True
            charged += runtime.num_layers * sum(int(mask.sum()) for mask in masks)

        with clock.phase("select"):
            request = replace(self._selection_request(reused, scorable), cache=cache, recompute=recompute_now)
            masks = method.select(request, scores)
            rows = choose_rows(layout, reused, zip(scorable, masks, strict=True))
            walk = method.walk(request, rows)
        with clock.phase("recompute"):
            method.prepare(request, masks)
            logits = recompute(runtime, cache, layout, rows, walk)
        if walk is not None:
            rows, charged = rows[walk.alive], walk.charged
        else:
            charged += runtime.num_layers * sum(int(mask.sum()) for mask in masks)
        computed[rows] = True
        recomputed = sum(int(computed[span.start : span.stop].sum()) for span in reused)
        stats = self._stats(reused, recomputed, charged / runtime.num_layers)
        return Prefilled(layout, cache, logits, stats, self._missing(reused))

    def _obstacle(self) -> str | None:
        """Why nothing could be reused exactly, whatever is stored; None if it could."""
        for caches in (self.primary, self.auxiliary):
            if caches is not None and caches.runtime.unsupported:
                return caches.runtime.unsupported
        runtime, num_tokens = self.primary.runtime, self.layout.num_tokens
        if num_tokens > runtime.reuse_tokens:
            return (
                f"the prompt has {num_tokens} tokens, and the rotary frequencies of model {runtime.name!r} change "
                f"above {runtime.reuse_tokens}: reuse would not be exact"
            )
        return None

    def _obstacle_of(self, geometry: Geometry) -> str | None:
        """Why the method's own positions do not fit; None if they do."""
        runtime = self.primary.runtime
        last = int(geometry.positions.max())
        if last < min(runtime.reuse_tokens, runtime.context_tokens - 1):
            return None
        return (
            f"method {self.method.name!r} puts the prompt's {self.layout.num_tokens} tokens at positions up to {last}, "
            f"and model {runtime.name!r} has {runtime.context_tokens}"
        )

    def _run_plain(self, obstacle: str | None = None) -> Prefilled:
        """Ordinary prefill of the same token ids: asked for, or the only correct way."""
        layout, method, runtime = self.layout, self.method, self.primary.runtime
        with self.clock.phase("recompute"):
            cache, logits = runtime.prefill(layout.ids, self.capacity)
        stats = replace(
            self._stats([], recomputed=0),
            method="full",
            charged_ratio=1.0,
            prefix_tokens=0,
            fresh_tokens=layout.num_tokens,
            misses=len(layout.chunks) if method.reuses_chunks else 0,
        )
        if not method.reuses_chunks:
            return Prefilled(layout, cache, logits, stats, ())
        fallback = obstacle or "no stored chunk found in the prompt"
        if layout.chunks and not obstacle:
            fallback = f"none of the prompt's {len(layout.chunks)} chunks is in the store"
        logger.info("answered by plain prefill: %s", fallback)
        return Prefilled(layout, cache, logits, replace(stats, fallback=fallback), self._missing([]))

    def _is_stored(self, span: Span) -> bool:
        """Whether the KV of a chunk is there for every model the method needs."""
        if not self.method.reuses_chunks or span.start in self.ignored:
            return False
        text = span.segment.text
        return text in self.primary and (self.auxiliary is None or text in self.auxiliary)

    def _selection_request(self, reused: Sequence[Span], scorable: Sequence[Span]) -> SelectionRequest:
        return SelectionRequest(
            layout=self.layout,
            runtime=self.primary.kv_runtime,
            spans=scorable,
            num_chunk_tokens=sum(len(span.tokens) for span in reused),
            question=question_slots(self.layout, self.question),
            fresh=choose_rows(self.layout, reused, []),
            auxiliary_scores=lambda: self._auxiliary_scores(scorable),
        )

    def _auxiliary_scores(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Scores of the auxiliary model for each span, in the primary's tokens."""
        caches = self.auxiliary
        assert caches is not None, "a method that asks for the auxiliary's scores declares needs_auxiliary"
        runtime = caches.kv_runtime
        question_ids = runtime.tokenize(self.question or _question_in(self.layout)).ids[-_MAX_QUESTION_TOKENS:]
        least = min(len(question_ids), _LEAST_QUESTION_TOKENS)
        room = {s: runtime.reuse_tokens - len(caches.prefix_ids) - len(caches.tokenize(s.segment.text)) for s in spans}
        scorable = [span for span in spans if room[span] >= least]
        if len(scorable) < len(spans):
            logger.warning(
                "%d of %d chunks leave the auxiliary model %r no room for the question: none of their tokens is chosen",
                len(spans) - len(scorable),
                len(spans),
                runtime.name,
            )
        if not scorable or not question_ids:
            return [torch.zeros(len(span.tokens)) for span in spans]
        question_ids = question_ids[-min(room[span] for span in scorable) :]
        texts = [span.segment.text for span in scorable]
        lengths = [len(caches.tokenize(text)) for text in texts]

        def chunks() -> Iterator[torch.Tensor]:
            for text in texts:
                with self.clock.phase_within("read", "select"):
                    kv = caches.read(text)
                # Damaged or evicted since the look-up: the auxiliary is small, compute it here.
                yield runtime.encode(caches.tokenize(text).ids, caches.prefix) if kv is None else kv

        raw = score_chunks(runtime, caches.prefix, chunks(), question_ids, lengths)
        scores = {
            span: map_scores(score, caches.tokenize(text).offsets, span.tokens.offsets)
            for score, text, span in zip(raw, texts, scorable, strict=True)
        }
        return [scores[span] if span in scores else torch.zeros(len(span.tokens)) for span in spans]

    def _assemble(self, cache: FusedCache, found: Sequence[Span]) -> list[Span]:
        """Put prefix and chunk KV into ``cache``; returns the spans that were there (a damaged one is a miss)."""
        reused = []

        def pieces() -> Iterator[tuple[int, torch.Tensor]]:
            if self.layout.num_prefix:
                yield 0, self.primary.prefix
            for span in found:
                with self.clock.phase_within("read", "assemble"):
                    kv = self.primary.read(span.segment.text)
                if kv is not None:
                    reused.append(span)
                    yield span.start, kv

        assemble(self.primary.kv_runtime, cache, pieces())
        return reused

    def _stats(self, reused: Sequence[Span], recomputed: int, charged: float = 0.0) -> FusionStats:
        """``charged``: chunk tokens given fresh KV, a token that only some layers computed counted by their share."""
        layout = self.layout
        chunk_tokens = sum(len(span.tokens) for span in reused)
        if self.method.needs_reference:
            charged += chunk_tokens
        return FusionStats(
            method=self.method.name,
            fallback=None,
            prompt_tokens=layout.num_tokens,
            prefix_tokens=layout.num_prefix,
            fresh_tokens=layout.num_tokens - layout.num_prefix - chunk_tokens,
            chunk_tokens=chunk_tokens,
            recomputed_tokens=recomputed,
            nominal_ratio=self.method.nominal_ratio,
            hits=len(reused),
            exact_tokens=sum(len(span.tokens) for span in reused if layout.is_exact(span)),
            misses=len(layout.chunks) - len(reused),
            phases_s=self.clock.seconds,
            ttft_s=self.clock.elapsed(),
            charged_ratio=charged / chunk_tokens if chunk_tokens else 0.0,
        )

    def _missing(self, reused: Sequence[Span]) -> tuple[str, ...]:
        return tuple(span.segment.text for span in self.layout.chunks if span not in reused)


def _question_in(layout: Layout) -> str:
    """The user's words that score the chunks: what follows the last chunk, else what precedes the first."""
    chunks = layout.chunks
    own = [s for s in layout.spans if isinstance(s.segment, Fresh) and not s.segment.control]
    after = "".join(s.segment.text for s in own if s.start >= chunks[-1].stop).strip()
    return after or "".join(s.segment.text for s in own if s.stop <= chunks[0].start).strip()
