"""Carries out a plan that reuses chunks on a transformers model. Read :func:`fuse`, then ``_FusedPass.run``::

    match the prefix cache -> score with the auxiliary -> assemble the primary's KV -> choose -> recompute

Each layer of a model runs as soon as the layer's KV of all chunks is there, while the next layers are read on another
thread (:class:`~cacheclip_rag.store.ReadAhead`): first the auxiliary's, then the primary's. A method that looks at the
assembled cache (:attr:`~cacheclip_rag.methods.base.Method.reads_cache`) waits for all layers before it chooses,
and ``anchored`` scores only then.

Source of selective recompute: CacheBlend (arXiv:2405.16444, section 4). Departure: the published implementations align
the causal mask to the bottom-right corner, so that a recomputed token sees later tokens. Here a row at position p sees
keys at positions up to p and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from ..base.clock import PhaseClock
from ..base.errors import ConfigurationError
from ..plan.plan import KVSources, Plan
from ..prompt.known_kv import KnownKV, choose_rows, known_kv
from ..prompt.layout import Span, question_text
from ..runtime.base import KVMatch, KVPart, KVSource, State, wait_for
from ..runtime.slices import Slices
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.model import ModelRuntime
from ..selection.views import CacheView, PromptView
from ..store import KV, ReadAhead, part_of
from .answer import Fused
from .wire import FusionPlan, StoredPiece, runs_of


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
    with clock.phase("lookup"):
        match = kv_sources.match(plan.method, plan.layout, continued=plan.continues, moves=plan.moves)
    with match:
        known = known_kv(plan.layout, plan.reused, match.runs)
        pass_ = _FusedPass(
            plan=replace(plan, known=known),
            kv_sources=kv_sources,
            clock=clock,
            runtime=runtime,
            capacity=capacity,
            slices=slices,
        )
        return pass_.run(match)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FusedPass:
    """One plan on its way through the model."""

    plan: Plan
    kv_sources: KVSources
    clock: PhaseClock
    runtime: ModelRuntime
    capacity: int
    slices: Slices | None

    def run(self, match: KVMatch) -> Fused | None:
        plan, clock = self.plan, self.clock
        texts = list(dict.fromkeys(span.whole for span in plan.reused if not plan.known.is_held(span)))
        with self.kv_sources.primary.read_ahead(texts, once=True) as reading:
            if not plan.method.needs_auxiliary:  # whose KV is needed first
                with clock.phase("read"):
                    reading.start()
            with clock.phase("select"):
                scorable = [span for span in plan.reused if plan.known.is_scorable(span)]
                view = view_of(plan, self.kv_sources, clock, scorable, reading.start)
                scores = dict(zip(scorable, plan.method.score(view), strict=True))
            if self.slices is not None and plan.method.needs_auxiliary:
                self.slices.pause(0, plan.known.computed_tokens(plan.method.nominal_ratio))
            return reading.until_whole(lambda again: self._assemble_and_recompute(match, again, texts, scores))

    def _assemble_and_recompute(
        self,
        match: KVMatch,
        reading: ReadAhead,
        texts: Sequence[str],
        scores: Mapping[Span, torch.Tensor],
    ) -> Fused | None:
        """Write prefix and chunk KV, which ``reading`` gives of these texts, into a cache and recompute on it. A chunk
        that cannot be read becomes ordinary text. Raises ReadAgain if some KV turned out to be damaged."""
        plan, clock = self.plan, self.clock
        layout = plan.layout
        with clock.phase("assemble"):
            cache = self.runtime.new_cache(self.capacity)
            if plan.known.held.any():
                match.write_to(cache)  # tokens that are not held are overwritten
            reused, pieces = self._pieces(reading, texts)
            if not reused and not plan.known.is_approximate:
                return None
            kept = plan if len(reused) == len(plan.reused) else plan.reusing(reused)
            cache.tables = cache.tables_of(torch.arange(layout.num_tokens))

            fill = cache.filling(pieces, clock.phase("read", within="assemble")(reading.wait))
            if plan.method.reads_cache:
                for layer in range(self.runtime.num_layers):
                    fill(layer)
                    reading.done(layer)

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

        left = {span: of_span for span, of_span in scores.items() if kept.known.chunk[span.start]}
        return self._recompute(kept, cache, left, None if plan.method.reads_cache else before_layer, written)

    def _recompute(
        self,
        plan: Plan,
        cache: FusedCache,
        scores: Mapping[Span, torch.Tensor],
        before_layer: Callable[[int], None] | None,
        written: Callable[[], None],
    ) -> Fused:
        """Choose tokens on the assembled cache and recompute them. ``before_layer`` writes the stored KV of a layer;
        None if the cache has that of all layers. ``written`` gives back what it was written from: called once the cache
        has all of it, before others go first."""
        clock, runtime, layout, method = self.clock, self.runtime, plan.layout, plan.method
        with clock.phase("select"):
            prompt = view_of(plan, self.kv_sources, clock, [*scores])
            view = CacheView(**vars(prompt), runtime=runtime, cache=cache)
            masks = method.select(view, [*scores.values()])
            rows = choose_rows(plan.known, zip(scores, masks, strict=True))
        logits, done = None, 0
        for stop in [len(rows)] if self.slices is None else self._stops(self.slices, plan, rows):
            if done:
                assert self.slices is not None, "without them, there is one pass"
                self.slices.pause(done, len(rows))
            with clock.phase("recompute"):
                method.prepare(view, masks)
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
        return fused_of(cache, logits, plan, rows, zip(scores, view.rated, strict=False))

    def _stops(self, slices: Slices, plan: Plan, rows: torch.Tensor) -> list[int]:
        """Where the passes over ``rows`` end. Together they compute what one does, because a row at position p sees
        keys at positions up to p only. But all rows of a corrected chunk are in one pass: in every layer their mean
        change moves the chunk's other tokens before any row attends."""
        if plan.method.reads_cache or not plan.method.plans_ahead:
            return [len(rows)]
        stops = np.array(slices.stops(len(rows)))
        if plan.method.mean_change:
            for span in plan.reused:
                first, last = np.searchsorted(rows.numpy(), (span.start, span.stop))
                inside = (stops > first) & (stops < last)
                stops[inside] = np.where(stops[inside] - first < last - stops[inside], first, last)
        return sorted({*stops.tolist()} - {0})

    def _pieces(self, reading: ReadAhead, texts: Sequence[str]) -> tuple[list[Span], list[tuple[int, KV]]]:
        """The spans that could be read (a damaged one could not), and KV to write by its first slot."""
        layout, known, numbers = self.plan.layout, self.plan.known, {text: number for number, text in enumerate(texts)}
        reused, pieces = list[Span](), list[tuple[int, KV]]()
        if known.count(KVSource.PREFIX):
            pieces.append((0, part_of(self.kv_sources.prefix_caches.prefix.piece, 0, layout.num_prefix)))
        for span in self.plan.reused:
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
        asked=plan.question,
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
    """What :func:`fuse` would do with a plan that reuses chunks by a method with
    :attr:`~cacheclip_rag.methods.base.Method.plans_ahead`, for another process. Needs no weights of the primary. Raises
    ConfigurationError for another method. ``moved``: exact KV of earlier prompts that process keeps, in blocks that are
    ``(key, num_tokens)``, and that the plan moves."""
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
    """Per span that is not exact, a ``(num_tokens,)`` bool mask of the tokens to recompute, by a method that looks at
    no KV of the primary; and ``(num_tokens,)`` scores, if it rated tokens. ``when_read``: called when the auxiliary's
    KV is read. Raises ConfigurationError for another method."""
    method = plan.method
    if not method.plans_ahead:
        raise ConfigurationError(f"method {method.name!r} chooses tokens by the primary's KV. Prefill with an engine.")
    unread: Any = _Unread(method.name)
    with clock.phase("select"):
        spans = [span for span in plan.reused if plan.known.is_scorable(span)]
        view = view_of(plan, kv_sources, clock, spans, when_read)
        early = method.score(view)
        assembled = CacheView(**vars(view), runtime=unread, cache=unread)
        masks = method.select(assembled, early)
    return dict(zip(spans, masks, strict=True)), dict(zip(spans, assembled.rated, strict=False))


class _Unread:
    """In the place of the primary's model and KV, for a method that says it looks at neither."""

    def __init__(self, method: str) -> None:
        self._method = method

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"method {self._method!r} plans ahead, and asked for the primary's {name}")
