"""The way of one prompt to its first logits, with the KV of its chunks taken from the store.

Read top to bottom, :meth:`Prefill.run` is the heart of the library::

    stored chunks, longest known start -> score with the auxiliary -> read and assemble the primary's KV
                  -> choose tokens -> recompute

What a method needs on the way it declares (:class:`~cacheclip_rag.methods.base.Method`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..chunks.caches import ChunkCaches
from ..chunks.captured import CapturedChunks, Variant, capture, digest_before
from ..chunks.prefix_cache import Match, PrefixCache
from ..methods.base import CacheView, Method, PromptView
from ..prompt.layout import Layout, Span, question_slots
from ..prompt.segments import Fresh
from ..runtime.transformers.attention import Geometry
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.model import ModelRuntime
from ..runtime.transformers.plain import PlainState
from ..selection.scorers import AuxiliaryAttention
from ..selection.scoring import AuxiliaryScorer
from ..stats import FusionStats, PhaseClock
from .recompute import assemble, choose_rows, recompute

__all__ = ["Keeping", "Prefill", "Prefilled"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where KV may be kept for prompts that begin alike, and how much of it is what plain prefill computes."""

    prefixes: PrefixCache
    max_tokens: int
    """Most tokens of prompt and answer: beyond, the model's rotary frequencies may be others, and nothing is kept."""
    num_plain: int | None = None
    """Leading tokens that are plain, if not all: behind them comes reused KV."""

    def keep(self, ids: Sequence[int], cache: FusedCache) -> None:
        """Put what is plain of a prompt and its answer, ``ids``, into the prefix cache."""
        if len(ids) > self.max_tokens:
            return
        try:
            self.prefixes.insert(ids[: self.num_plain], cache)
        except RuntimeError as error:  # out of memory, say: the answer comes first
            logger.warning("the start of this prompt could not be kept: %s", error)


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
    keeping: Keeping | None = None
    """None if none of it may be kept for other prompts."""

    def keep_prefix(self, cache: FusedCache | PlainState, answer: Sequence[int] = ()) -> None:
        """Put the prompt and what was answered into the prefix cache, as far as ``cache`` has its KV: of the last
        token it has not."""
        if self.keeping is not None and isinstance(cache, FusedCache):
            self.keeping.keep([*self.layout.ids.tolist(), *answer][: cache.get_seq_length()], cache)


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt, one method, and the chunk caches of the models it needs."""

    layout: Layout
    method: Method
    primary: ChunkCaches
    auxiliary: AuxiliaryScorer | None
    """None if the method needs no auxiliary model."""
    chunks: ChunkCaches | CapturedChunks
    """Where chunk caches of the primary come from: as a rule ``primary`` itself."""
    prefixes: PrefixCache
    """Starts of earlier prompts; read here, filled while decoding."""
    capacity: int
    """Tokens to make room for, those of the answer included."""
    clock: PhaseClock
    """Started when the request came in."""
    question: str | None = None
    """Text that scores the chunks; default the text after the last chunk."""
    before_reuse: Callable[[], None] = lambda: None
    """Called once it is clear that something will be reused; may raise to forbid it."""
    captured: Mapping[int, Variant] = field(default_factory=dict)
    """Captured caches by start of chunk."""
    ignored: frozenset[int] = frozenset()
    """Starts of chunks that were found damaged, and are ordinary text now."""

    def run(self) -> Prefilled:
        """Everything up to the first token's logits."""
        layout, method, clock = self.layout, self.method, self.clock
        with clock.phase("lookup"):
            obstacle = self._obstacle()
            captured = {} if obstacle else self._captured()
            if captured is None:
                return self._run_capturing()
            found = [] if obstacle else [span for span in layout.chunks if self._is_stored(span)]
            if found and (geometry := method.positions(layout, found)) is not None:
                obstacle = self._obstacle_of(geometry)
        if not found or obstacle:
            return self._run_plain(obstacle)
        self.before_reuse()
        with self._match(usable=geometry is None) as match:
            behind = replace(self, layout=layout.cached_until(match.num_tokens, found), captured=captured)
            return behind._run_fused(found, geometry, match)

    def _captured(self) -> dict[int, Variant] | None:
        """Captured caches by start of chunk, for methods that use them; None if one is missing."""
        if not isinstance(self.chunks, CapturedChunks):
            return {}
        texts = [span.segment.text for span in self.layout.chunks]
        found = {}
        for number, span in enumerate(self.layout.chunks):
            variant = self.chunks.find(span.segment.text, texts[:number], digest_before(self.layout, span))
            if variant is None:
                return None
            found[span.start] = variant
        return found

    def _run_capturing(self) -> Prefilled:
        """Plain prefill whose chunks are kept for later prompts."""
        assert isinstance(self.chunks, CapturedChunks)
        num_chunks = len(self.layout.chunks)
        with self.clock.phase("recompute"):
            cache, logits, variants = capture(self.primary.kv_runtime, self.layout, self.capacity)
            self.chunks.add(variants)
        stats = replace(self._stats([], recomputed=0), method="full", charged_ratio=1.0, misses=num_chunks)
        fallback = f"not all of the prompt's {num_chunks} chunks were captured before; now they are"
        used = replace(stats, prefix_tokens=0, fresh_tokens=self.layout.num_tokens, fallback=fallback)
        return Prefilled(self.layout, cache, logits, used, ())

    def _run_fused(self, found: Sequence[Span], geometry: Geometry | None, match: Match) -> Prefilled:
        """With stored chunks to reuse, behind what the prefix cache holds."""
        layout, method, clock = self.layout, self.method, self.clock
        with clock.phase("select"):
            scorable = [span for span in found if not layout.is_exact(span)]
            scores = dict(zip(scorable, method.score(PromptView(**self._seen(found, scorable))), strict=True))
        with clock.phase("assemble"):
            cache = self.primary.kv_runtime.new_cache(self.capacity)
            cache.geometry = geometry
            reused = self._assemble(cache, found, match)
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
        charged = 0

        def full_prefill() -> FusedCache:
            nonlocal charged
            charged += runtime.num_layers * sum(len(span.tokens) for span in reused)
            return runtime.prefill(layout.ids, layout.num_tokens)[0]

        with clock.phase("select"):
            view = CacheView(
                **self._seen(reused, scorable),
                runtime=runtime,
                cache=cache,
                captured=self.captured,
                full_prefill=full_prefill,
            )
            masks = method.select(view, scores)
            rows = choose_rows(layout, reused, zip(scorable, masks, strict=True))
            row_filter = method.row_filter(view, rows)
        with clock.phase("recompute"):
            method.prepare(view, masks)
            logits = recompute(runtime, cache, layout, rows, row_filter)
            _wait_for(logits)
        if row_filter is not None:
            rows, charged = rows[row_filter.alive], charged + row_filter.charged
        else:
            charged += runtime.num_layers * sum(int(mask.sum()) for mask in masks)
        recomputed = sum(int(((rows >= span.start) & (rows < span.stop)).sum()) for span in reused)
        stats = self._stats(reused, recomputed, charged / runtime.num_layers)
        keeping = self._keeping(reused, int(rows[0])) if cache.geometry is None else None
        return Prefilled(layout, cache, logits, stats, self._missing(reused), keeping)

    def _keeping(self, reused: Sequence[Span], first_computed: int) -> Keeping | None:
        """What of this prompt may be kept: up to the first reused chunk whose KV is not what plain prefill computes, or
        was but has been through a coarser codec. None if it is nothing that the store does not hold already."""
        layout, is_lossy = self.layout, self.primary.is_lossy
        if not self._uses_prefixes or is_lossy and layout.num_prefix > layout.num_cached:
            return None
        is_plain = layout.is_cached if is_lossy else layout.is_exact
        num_plain = min((span.start for span in reused if not is_plain(span)), default=None)
        if num_plain is not None and num_plain <= first_computed:
            return None
        return Keeping(self.prefixes, self.primary.runtime.reuse_tokens, num_plain)

    def _obstacle(self) -> str | None:
        """Why nothing could be reused exactly, whatever is stored; None if it could."""
        for caches in (self.primary, self.auxiliary.caches if self.auxiliary else None):
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
        method = self.method
        with self._match() as match:
            # the stored shared prefix is not read: through a coarser codec it would not be fit to keep for others
            used = replace(self.layout, num_prefix=0, num_cached=match.num_tokens)
            cache, logits = self._extend(match) if match.num_tokens else self._prefill()
        stats = replace(replace(self, layout=used)._stats([], recomputed=0), misses=0, missed_tokens=0)
        stats = replace(stats, charged_ratio=stats.effective_ratio)
        layout = self.layout
        keeping = Keeping(self.prefixes, self.primary.runtime.reuse_tokens) if self._uses_prefixes else None
        if not method.reuses_chunks:
            return Prefilled(layout, cache, logits, stats, (), keeping)
        stats = replace(stats, method="prefix" if match.num_tokens else "full", misses=len(layout.chunks))
        stats = replace(stats, missed_tokens=self._chunk_tokens)
        fallback = obstacle or "no stored chunk found in the prompt"
        if layout.chunks and not obstacle:
            fallback = f"none of the prompt's {len(layout.chunks)} chunks is in the store"
        logger.info("answered by plain prefill: %s", fallback)
        return Prefilled(layout, cache, logits, replace(stats, fallback=fallback), self._missing([]), keeping)

    def _prefill(self) -> tuple[FusedCache | PlainState, torch.Tensor]:
        with self.clock.phase("recompute"):
            cache, logits = self.primary.runtime.prefill(self.layout.ids, self.capacity)
            _wait_for(logits)
        return cache, logits

    def _extend(self, match: Match) -> tuple[FusedCache, torch.Tensor]:
        """Plain prefill behind a start that is known."""
        runtime, start = self.primary.kv_runtime, match.num_tokens
        with self.clock.phase("assemble"):
            cache = runtime.new_cache(self.capacity)
            match.write_to(cache)
        with self.clock.phase("recompute"):
            logits = runtime.extend(cache, self.layout.ids[start:], start)
            assert logits is not None
            _wait_for(logits)
        return cache, logits

    @property
    def _uses_prefixes(self) -> bool:
        """Whether KV computed here is the same in every prompt that begins alike, and the method wants to share it."""
        runtime = self.primary.runtime
        is_same = isinstance(runtime, ModelRuntime) and self.layout.num_tokens <= runtime.reuse_tokens
        return is_same and self.method.reuses_prefixes

    def _match(self, usable: bool = True) -> Match:
        """The longest start of the prompt that the prefix cache holds, never its last token: the logits are needed."""
        with self.clock.phase("lookup"):
            return self.prefixes.match(self.layout.ids[:-1].tolist() if usable and self._uses_prefixes else [])

    def _is_stored(self, span: Span) -> bool:
        """Whether the KV of a chunk is there for every model the method needs."""
        if not self.method.reuses_chunks or span.start in self.ignored:
            return False
        if isinstance(self.chunks, CapturedChunks):
            return True
        text = span.segment.text
        return text in self.chunks and (self.auxiliary is None or text in self.auxiliary.caches)

    def _seen(self, reused: Sequence[Span], scorable: Sequence[Span]) -> dict[str, Any]:
        """Fields of a :class:`PromptView`."""
        return {
            "layout": self.layout,
            "spans": scorable,
            "num_chunk_tokens": sum(len(span.tokens) for span in reused),
            "question": question_slots(self.layout, self.question),
            "fresh": choose_rows(self.layout, reused, []),
            "auxiliary_scores": lambda scorer: self._auxiliary_scores(scorable, scorer),
        }

    def _auxiliary_scores(self, spans: Sequence[Span], scorer: AuxiliaryAttention) -> list[torch.Tensor]:
        """Scores of the auxiliary model for each span, in the primary's tokens."""
        assert self.auxiliary is not None, "a method that asks for the auxiliary's scores declares needs_auxiliary"
        return self.auxiliary.score(spans, self.question or _question_in(self.layout), scorer, self.clock)

    def _assemble(self, cache: FusedCache, found: Sequence[Span], match: Match) -> list[Span]:
        """Put prefix and chunk KV into ``cache``; returns the spans that were there (a damaged one is a miss)."""
        layout = self.layout
        reused = [span for span in found if layout.is_cached(span)]
        unread = found[len(reused) :]
        if layout.num_cached:
            match.write_to(cache)  # what it holds beyond num_cached is overwritten

        def pieces() -> Iterator[tuple[int, torch.Tensor]]:
            if layout.num_prefix and not layout.num_cached:
                yield 0, self.primary.prefix
            for span in unread:
                with self.clock.phase_within("read", "assemble"):
                    kv = self._read(span)
                if kv is not None:
                    reused.append(span)
                    yield span.start, kv

        assemble(self.primary.kv_runtime, cache, pieces())
        return reused

    def _read(self, span: Span) -> torch.Tensor | None:
        if isinstance(self.chunks, CapturedChunks):
            return self.captured[span.start].kv
        return self.chunks.read(span.segment.text)

    def _stats(self, reused: Sequence[Span], recomputed: int, charged: float = 0.0) -> FusionStats:
        """``charged``: chunk tokens given fresh KV, a token that only some layers computed counted by their share."""
        layout = self.layout
        chunk_tokens = sum(len(span.tokens) for span in reused)
        prefix_tokens = layout.num_exact - sum(len(span.tokens) for span in reused if layout.is_cached(span))
        return FusionStats(
            method=self.method.name,
            fallback=None,
            prompt_tokens=layout.num_tokens,
            prefix_tokens=prefix_tokens,
            fresh_tokens=layout.num_tokens - prefix_tokens - chunk_tokens,
            chunk_tokens=chunk_tokens,
            recomputed_tokens=recomputed,
            nominal_ratio=self.method.nominal_ratio,
            hits=len(reused),
            exact_tokens=sum(len(span.tokens) for span in reused if layout.is_exact(span)),
            misses=len(layout.chunks) - len(reused),
            missed_tokens=self._chunk_tokens - chunk_tokens,
            phases_s=self.clock.seconds,
            ttft_s=self.clock.elapsed(),
            charged_ratio=charged / chunk_tokens if chunk_tokens else 0.0,
            cached_prefix_tokens=layout.num_cached,
        )

    @property
    def _chunk_tokens(self) -> int:
        """Of all chunks in the prompt, found or not."""
        return sum(len(span.tokens) for span in self.layout.chunks)

    def _missing(self, reused: Sequence[Span]) -> tuple[str, ...]:
        return tuple(span.segment.text for span in self.layout.chunks if span not in reused)


def _wait_for(logits: torch.Tensor) -> None:
    """Until an accelerator has computed them: seconds are stated of work done, not of work queued."""
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)


def _question_in(layout: Layout) -> str:
    """The user's words that score the chunks: what follows the last chunk, else what precedes the first."""
    chunks = layout.chunks
    own = [s for s in layout.spans if isinstance(s.segment, Fresh) and not s.segment.control]
    after = "".join(s.segment.text for s in own if s.start >= chunks[-1].stop).strip()
    return after or "".join(s.segment.text for s in own if s.stop <= chunks[0].start).strip()
