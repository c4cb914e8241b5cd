"""Carries out a plan on a runtime that computes tokens only in the order of the prompt, and whose KV is opaque.

No token depends on a later one, so that one scattering pass and many short ones in order compute the same. A short one
costs nearly as much as one of 64 tokens, so that a runtime may let short neighbours share one, in which they see each
other's stored KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from ..base.clock import PhaseClock
from ..plan.plan import KVSources, Plan
from ..prompt.known_kv import choose_rows
from ..runtime.base import KVMatch, KVSource, State
from ..runtime.slices import Slices
from ..store import KV, ReadAhead, bytes_of
from .answer import Fused
from .fuse import begin, fused_of
from .wire import runs_of

Runs = Sequence[tuple[int, int]]
"""Neighbouring positions, each from a first one up to one that is not in it; ascending."""


@dataclass(frozen=True, slots=True)
class PlacedKV:
    """Neighbouring tokens of stored KV, and where they stand in a prompt."""

    data: torch.Tensor
    """``(num_bytes,)`` uint8: the whole KV."""
    num_tokens: int
    """Tokens of the whole KV."""
    first: int
    """The first of them that is used."""
    count: int
    at: int
    """Its position in the prompt."""


class OrderedRuntime(Protocol):
    """What :func:`fuse_in_order` asks of a runtime beside :class:`~cacheclip_rag.runtime.Runtime`. Stored KV that is
    put together (``held``) is the runtime's own; with :attr:`computed_edges`, its ``computed(rows)`` gives the rows
    that are computed if those must be."""

    computed_edges: tuple[int, int]

    def place(self, match: KVMatch, used: Runs, pieces: Iterable[PlacedKV]) -> tuple[Any, list[PlacedKV]]:
        """KV at its positions in a prompt, and the pieces that could not be read. ``used``: positions that take the KV
        of ``match``."""

    def late_correction(self, held: Any, spans: Runs, runs: Runs, weight: float) -> Callable[[Any], None]:
        """What corrects KV of chunks that is not recomputed; called by :meth:`compute_in_order`.

        Args:
            spans: positions of chunks.
            runs: positions that are recomputed, the prompt's last ones included.
            weight: share of the mean change that is added, 0 to 1.
        """

    def compute_in_order(
        self,
        ids: Sequence[int],
        held: Any,
        runs: Iterable[tuple[int, int]],
        capacity: int,
        *,
        before_last: Callable[[Any], None] | None = None,
    ) -> tuple[State, torch.Tensor]:
        """Compute some tokens of a prompt, in its order: what stands between them comes from ``held``. Returns the
        state, and the logits of the prompt's last token, ``(vocab_size,)``.

        Args:
            runs: positions that are computed, the prompt's last one among them.
            before_last: called before the last of them.
        """


def fuse_in_order(
    runtime: OrderedRuntime,
    plan: Plan,
    kv_sources: KVSources,
    *,
    capacity: int,
    clock: PhaseClock,
    slices: Slices | None = None,
) -> Fused | None:
    """See :meth:`cacheclip_rag.runtime.base.Runtime.fuse`."""
    with begin(plan, kv_sources, clock=clock, slices=slices) as begun:
        plan, reading = begun.plan, begun.reading
        with clock.phase("read"):
            stored = reading.until_whole(partial(_read, begun.texts))
        clock.reading_s += reading.busy_s()
        with clock.phase("assemble"):
            kept, held = _placed(runtime, plan, kv_sources, begun.match, stored)
        if not kept.reused and not kept.known.is_approximate:
            return None
        layout, known = kept.layout, kept.known
        masks = {span: mask for span, mask in begun.masks.items() if span in kept.reused}
        rows = choose_rows(known, masks.items())
        if runtime.computed_edges[0]:
            rows = held.computed(rows)
        runs = runs_of(rows.tolist())
        with clock.phase("recompute"):
            # continued KV was corrected when it was assembled
            spans = [(span.start, span.stop) for span in masks if not known.is_held(span)]
            weight = plan.method.mean_change
            correct = runtime.late_correction(held, spans, runs, weight) if weight else None
            state, logits = runtime.compute_in_order(layout.token_ids, held, runs, capacity, before_last=correct)
        return fused_of(state, logits, kept, rows, begun.rated.items())


def _read(texts: Sequence[str], reading: ReadAhead) -> dict[str, KV | None]:
    """Stored KV by text; None where it is missing or damaged."""
    stored: dict[str, KV | None] = {text: reading.kv(number) for number, text in enumerate(texts)}
    reading.wait(0)
    return stored


def _placed(
    runtime: OrderedRuntime,
    plan: Plan,
    kv_sources: KVSources,
    match: KVMatch,
    stored: Mapping[str, KV | None],
) -> tuple[Plan, Any]:
    """The stored KV at its positions in the prompt, and the plan without what could not be read."""
    layout, known = plan.layout, plan.known
    pieces, gone = list[PlacedKV](), list[tuple[int, int]]()
    if known.count(KVSource.PREFIX):
        kv = kv_sources.prefix_caches.prefix.kv
        pieces.append(PlacedKV(bytes_of(kv), kv.shape[3], 0, layout.num_prefix, 0))
    for span in plan.reused:
        if known.is_held(span):
            continue
        whole, count = stored[span.whole], len(span.tokens)
        if whole is None:
            gone.append((span.start, span.stop))
        else:
            pieces.append(PlacedKV(bytes_of(whole), whole.shape[3], span.first, count, span.start))
    is_held = (known.source >= KVSource.CACHED.value) & ~known.border
    held, unread = runtime.place(match, runs_of(is_held.nonzero()[0].tolist()), pieces)
    gone += [(piece.at, piece.at + piece.count) for piece in unread]
    kept = plan.reusing([span for span in plan.reused if span.start not in dict(gone)])
    return replace(kept, known=known.without(gone)), held
