"""Carries out a plan that reuses chunks on a transformers model. Read :func:`begin`, then ``_FusedPass.run``::

    match the prefix cache -> score with the auxiliary -> choose -> assemble the primary's KV -> recompute

Each layer of a model runs as soon as the layer's KV of all chunks is there, while the next layers are read on another
thread (:class:`~cacheclip_rag.store.ReadAhead`): first the auxiliary's, then the primary's.

Source of selective recompute: CacheBlend (arXiv:2405.16444, section 4). Departure: the published implementations align
the causal mask to the bottom-right corner, so that a recomputed token sees later tokens. Here a row at position p sees
keys at positions up to p and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ..base.clock import PhaseClock
from ..methods.recompute import install_correction
from ..plan.plan import KVSources, Plan
from ..prompt.known_kv import KnownKV, choose_rows, known_kv
from ..prompt.layout import Span, question_text
from ..runtime.base import KVMatch, KVPart, KVSource, State, wait_for
from ..runtime.slices import Slices
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.model import ModelRuntime
from ..selection.views import PromptView
from ..store import KV, ReadAhead, part_of
from .answer import Fused
from .wire import FusionPlan, StoredPiece, runs_of


@dataclass(frozen=True, slots=True)
class Begun:
    """A plan whose tokens are chosen and whose stored KV is being read."""

    plan: Plan
    match: KVMatch
    """KV of earlier prompts."""
    texts: Sequence[str]
    """What ``reading`` reads, by number."""
    reading: ReadAhead
    masks: Mapping[Span, torch.Tensor]
    """Per span that is not exact, a ``(num_tokens,)`` bool mask of the tokens to recompute."""
    rated: Mapping[Span, torch.Tensor]
    """Per span ``(num_tokens,)`` scores, if the method rated tokens."""


@contextmanager
def begin(
    plan: Plan, kv_sources: KVSources, *, clock: PhaseClock, slices: Slices | None, once: bool = False
) -> Iterator[Begun]:
    """Match KV of earlier prompts, read stored KV on another thread (``once``: :meth:`ChunkCaches.read_ahead`) and
    choose the tokens to recompute."""
    with clock.phase("lookup"):
        match = kv_sources.match(plan.method, plan.layout, continued=plan.continues, moves=plan.moves)
    with match:
        plan = replace(plan, known=known_kv(plan.layout, plan.reused, match.runs))
        texts = list(dict.fromkeys(span.whole for span in plan.reused if not plan.known.is_held(span)))
        with kv_sources.primary.read_ahead(texts, once=once) as reading:
            if not plan.method.needs_auxiliary:  # whose KV is needed first
                with clock.phase("read"):
                    reading.start()
            masks, rated = choose_ahead(plan, kv_sources, clock=clock, when_read=reading.start)
            if slices is not None and plan.method.needs_auxiliary:
                slices.pause(0, plan.known.computed_tokens(plan.method.nominal_ratio))
            yield Begun(plan, match, texts, reading, masks, rated)


def fuse(
    runtime: ModelRuntime,
    plan: Plan,
    kv_sources: KVSources,
    *,
    capacity: int,
    clock: PhaseClock,
    slices: Slices | None = None,
) -> Fused | None:
    """See :meth:`cacheclip_rag.runtime.base.Runtime.fuse`."""
    with begin(plan, kv_sources, clock=clock, slices=slices, once=True) as begun:
        pass_ = _FusedPass(begun, begun.plan, kv_sources, clock, runtime, capacity, slices)
        return begun.reading.until_whole(pass_.run)


@dataclass(frozen=True, slots=True)
class _FusedPass:
    """One plan on its way through the model."""

    begun: Begun
    plan: Plan
    kv_sources: KVSources
    clock: PhaseClock
    runtime: ModelRuntime
    capacity: int
    slices: Slices | None

    def run(self, reading: ReadAhead) -> Fused | None:
        """Write prefix and chunk KV into a cache and recompute on it. A chunk that cannot be read becomes ordinary
        text. Raises ReadAgain if some KV turned out to be damaged."""
        plan, match, clock = self.begun.plan, self.begun.match, self.clock
        with clock.phase("assemble"):
            cache = self.runtime.new_cache(self.capacity)
            if plan.known.held.any():
                match.write_to(cache)  # tokens that are not held are overwritten
            reused, pieces = self._pieces(reading)
            if not reused and not plan.known.is_approximate:
                return None
            kept = plan if len(reused) == len(plan.reused) else plan.reusing(reused)
            cache.tables = cache.tables_of(torch.arange(plan.layout.num_tokens))

            fill = cache.filling(pieces, clock.phase("read", within="assemble")(reading.wait))

        began: list[float] = []

        def before_layer(layer: int) -> None:
            began.append(reading.busy_s())
            with clock.phase("assemble", within="recompute"):
                fill(layer)
                reading.done(layer)

        def written() -> None:
            nonlocal fill
            busy_s = reading.busy_s()
            clock.reading_s += busy_s
            if began:
                clock.left_to_read_s = busy_s - began[0]
            del fill
            pieces.clear()
            match.release()
            with clock.phase("read"):
                reading.close()

        return self._recompute(kept, cache, before_layer, written)

    def _recompute(
        self, plan: Plan, cache: FusedCache, before_layer: Callable[[int], None], written: Callable[[], None]
    ) -> Fused:
        """Recompute the chosen tokens. ``before_layer`` writes the stored KV of a layer. ``written`` gives back what it
        was written from: called once the cache has all of it, before others go first."""
        clock, runtime, layout, weight = self.clock, self.runtime, plan.layout, plan.method.mean_change
        masks = {span: mask for span, mask in self.begun.masks.items() if plan.known.chunk[span.start]}
        rows = choose_rows(plan.known, masks.items())
        logits, done = None, 0
        for stop in [len(rows)] if self.slices is None else self._stops(self.slices, plan, rows):
            if done:
                assert self.slices is not None, "without them, there is one pass"
                self.slices.pause(done, len(rows))
            with clock.phase("recompute"):
                if weight:  # continued KV was corrected when it was assembled
                    corrected = [span for span in masks if not plan.known.is_held(span)]
                    install_correction(runtime, cache, corrected, weight)
                part, is_last = rows[done:stop], stop == len(rows)
                logits = runtime.run_slots(
                    cache, layout.ids[part], part, before_layer=None if done else before_layer, head=is_last
                )
                wait_for(runtime.device if logits is None else logits.device)
            if not done:
                written()
            done = stop
        assert logits is not None, "the last pass computes the prompt's last token"
        cache.tables, cache.memory = (), None  # decoding goes on beyond the prompt
        return fused_of(cache, logits, plan, rows, self.begun.rated.items())

    def _stops(self, slices: Slices, plan: Plan, rows: torch.Tensor) -> list[int]:
        """Where the passes over ``rows`` end. Together they compute what one does, because a row at position p sees
        keys at positions up to p only. But all rows of a corrected chunk are in one pass: in every layer their mean
        change moves the chunk's other tokens before any row attends."""
        stops = np.array(slices.stops(len(rows)))
        if plan.method.mean_change:
            for span in plan.reused:
                first, last = np.searchsorted(rows.numpy(), (span.start, span.stop))
                inside = (stops > first) & (stops < last)
                stops[inside] = np.where(stops[inside] - first < last - stops[inside], first, last)
        return sorted({*stops.tolist()} - {0})

    def _pieces(self, reading: ReadAhead) -> tuple[list[Span], list[tuple[int, KV]]]:
        """The spans that could be read (a damaged one could not), and KV to write by its first slot."""
        plan, numbers = self.begun.plan, {text: number for number, text in enumerate(self.begun.texts)}
        layout, known = plan.layout, plan.known
        reused, pieces = list[Span](), list[tuple[int, KV]]()
        if known.count(KVSource.PREFIX):
            pieces.append((0, part_of(self.kv_sources.prefix_caches.prefix.piece, 0, layout.num_prefix)))
        for span in plan.reused:
            if known.is_held(span):
                reused.append(span)
                continue
            with self.clock.phase("read", within="assemble"):
                whole = reading.kv(numbers[span.whole])
            if whole is not None:
                reused.append(span)
                pieces.append((span.start, part_of(whole, span.first, span.first + len(span.tokens))))
        return reused, pieces


def view_of(
    plan: Plan,
    kv_sources: KVSources,
    clock: PhaseClock,
    spans: Sequence[Span],
    when_read: Callable[[], None] | None = None,
) -> PromptView:
    """What a plan's method chooses tokens of spans by. ``when_read``: called when the auxiliary's KV is read."""
    layout, known, auxiliary = plan.layout, plan.known, kv_sources.auxiliary
    stale = torch.from_numpy(known.stale)
    ask_auxiliary = None
    if auxiliary is not None:
        asked = plan.question or question_text(layout)
        ask_auxiliary = partial(auxiliary.score, spans, asked, clock=clock, when_read=when_read)
    return PromptView(
        layout=layout,
        known=known,
        spans=spans,
        num_chunk_tokens=known.rated_tokens,
        candidates=[stale[span.start : span.stop] for span in spans] if known.is_approximate else None,
        auxiliary_scores=ask_auxiliary,
    )


def fused_of(
    state: State, logits: torch.Tensor, plan: Plan, rows: torch.Tensor, rated: Iterable[tuple[Span, torch.Tensor]]
) -> Fused:
    """A prompt's KV after ``rows`` were computed. ``rated``: chunks with ``(num_tokens,)`` scores of their tokens."""
    computed, stale = rows.numpy(), plan.known.stale.copy()
    stale[computed] = False
    chosen: list[int] = computed[plan.known.chunk[computed]].tolist()
    scores = {span.start: scores for span, scores in rated}
    return Fused(state, logits, plan, chosen, int(computed[0]), stale, scores)


# -- for another process, or an engine that shows no KV ----------------------------------------------------------------


def plan_ahead(
    runtime: ModelRuntime, plan: Plan, kv_sources: KVSources, *, clock: PhaseClock, moved: Sequence[KVPart] = ()
) -> FusionPlan:
    """What :func:`fuse` would do with a plan that reuses chunks, for another process. Needs no weights of the primary.
    ``moved``: exact KV of earlier prompts that process keeps, in blocks that are ``(key, num_tokens)``, and that the
    plan moves."""
    method, layout, known = plan.method, plan.layout, plan.known
    assert plan.bypass is None and not known.stale[known.held].any(), "of earlier prompts, only exact KV can be moved"
    chosen, _ = choose_ahead(plan, kv_sources, clock=clock)
    rows = choose_rows(known, chosen.items())
    pieces = [
        StoredPiece(span.start, key, span.first, len(span.tokens))
        for span, key in zip(plan.reused, plan.keys, strict=True)
        if not known.is_held(span)
    ]
    of_prompts = [piece for part in moved for piece in _moved_pieces(known, part)]
    pieces = sorted([*pieces, *of_prompts], key=lambda piece: piece.start)
    # the stored shared prefix is not read: its KV, which other kernels may have computed, would keep the other process
    # from sharing its own with everyone
    computed = [*range(layout.num_prefix), *rows.tolist()]
    end = pieces[-1].stop
    return FusionPlan(
        token_ids=layout.token_ids,
        pieces=tuple(pieces),
        computed=runs_of([row for row in computed if row < end]),
        chunks=tuple((span.start, span.stop) for span in chosen) if method.mean_change else (),
        correction=method.mean_change,
        model=runtime.fingerprint,
        rope_pin=runtime.rope_pin,
        namespace=kv_sources.primary.store.namespace,
        codec=kv_sources.primary.codec,
        moved=runs_of([at for piece in of_prompts for at in range(piece.start, piece.stop)]),
    )


def _moved_pieces(known: KnownKV, part: KVPart) -> Iterator[StoredPiece]:
    at = part.run.start - part.skip
    for key, num_tokens in part.blocks:
        first, stop = max(at, part.run.start), min(at + num_tokens, part.run.stop)
        for begin, end in runs_of((known.source[first:stop] == KVSource.MOVED).nonzero()[0].tolist()):
            yield StoredPiece(first + begin, key, first + begin - at, end - begin)
        at += num_tokens


def choose_ahead(
    plan: Plan,
    kv_sources: KVSources,
    *,
    clock: PhaseClock,
    when_read: Callable[[], None] | None = None,
) -> tuple[dict[Span, torch.Tensor], dict[Span, torch.Tensor]]:
    """Per span that is not exact, a ``(num_tokens,)`` bool mask of the tokens to recompute; and ``(num_tokens,)``
    scores, if the method rated tokens. ``when_read``: called when the auxiliary's KV is read."""
    with clock.phase("select"):
        spans = [span for span in plan.reused if plan.known.is_scorable(span)]
        view = view_of(plan, kv_sources, clock, spans, when_read)
        scores = plan.method.score(view)
        masks = plan.method.select(view, scores)
    return dict(zip(spans, masks, strict=True)), dict(zip(spans, scores, strict=False))
