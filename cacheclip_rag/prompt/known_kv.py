"""What is known of a prompt's KV before it is computed: the source of every token's, and how near it is to exact.

Plan, prefill, fusion and the ratio's controller ask this one value. It holds no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..runtime.base import KVRun, KVSource
from .layout import Layout, Span

FOLLOW_UP_SHARE = 0.5
"""Share of the recompute ratio that a prompt which continues the KV of an earlier one spends on its own question, among
the tokens that no question has recomputed yet. The least that is shown to answer no worse than a fresh plan: on 100
later questions F1 minus a fresh plan's is -0.11 at 0, -0.00 [-0.05, +0.04] at 0.25, +0.02 [-0.01, +0.06] at 0.5."""

MOST_BORDER = 8
"""First tokens of a run of moved KV that are computed, because they have seen other text most of all."""

LEAST_END = 64
"""Last tokens of a prompt that are never moved: most often the question. In the earlier prompt it has not read what was
edited."""

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False, slots=True)
class KnownKV:
    """The source of each token's KV. Arrays are ``(num_tokens,)``, bool but for :attr:`source`; do not change them."""

    reused: tuple[Span, ...]
    """Chunks whose KV is used, stored or held, in prompt order."""
    source: _Array
    """uint8, values of :class:`~cacheclip_rag.runtime.base.KVSource`."""
    chunk: _Array
    """Tokens of the reused chunks."""
    held: _Array
    """Tokens whose KV earlier prompts left. Of a reused chunk, all are or none."""
    own: _Array
    """Tokens whose stored KV is exact: the shared prefix's, and those of a chunk right behind its own context."""
    exact: _Array
    """Tokens whose KV equals full prefill's."""
    stale: _Array
    """Tokens whose KV is a chunk's as it was stored, and not exact."""
    border: _Array
    """Tokens of reused chunks whose KV is moved, and computed again whatever the recompute ratio."""
    turns: int
    """Answers whose approximate KV the prompt continues; 0: none is held."""
    past: _Array
    """float32, 0 to 1, of the KV that earlier prompts left: as in :class:`~cacheclip_rag.runtime.base.KVRun`; else 1.
    """

    def count(self, *sources: KVSource) -> int:
        """Number of tokens whose KV comes from these sources."""
        return int(np.bincount(self.source, minlength=len(KVSource))[[*sources]].sum())

    def is_exact(self, span: Span) -> bool:
        """Whether the KV of a whole span equals full prefill's."""
        return bool(self.exact[span.start : span.stop].all())

    def is_held(self, span: Span) -> bool:
        """Whether earlier prompts left the KV of a reused chunk. It is not read from the store."""
        return bool(self.held[span.start])

    def is_scorable(self, span: Span) -> bool:
        """Whether tokens of a reused chunk may be chosen to be computed again."""
        part = slice(span.start, span.stop)
        is_moved = bool((self.source[part] == KVSource.MOVED).all())
        return bool(self.stale[part].any()) if is_moved else not self.is_exact(span)

    @property
    def moved_past(self) -> float | None:
        """Mean :attr:`past` of moved KV; None: none is moved."""
        pasts = self.past[self.source == KVSource.MOVED]
        return float(pasts.mean()) if len(pasts) else None

    @property
    def is_approximate(self) -> bool:
        """Whether some KV that earlier prompts left is approximate."""
        return bool((self.source >= KVSource.CONTINUED.value).any())

    @property
    def rated_tokens(self) -> int:
        """Chunk tokens of which the recompute ratio is a share: all, but of those in continued KV none that are exact
        by now, and :data:`FOLLOW_UP_SHARE` of the others. A chunk that is exact as stored counts as in a first
        question. Of moved KV only what is stale counts, wholly: its method and ratio may have been others."""
        if not self.is_approximate:
            return int(self.chunk.sum())
        is_moved = self.source == KVSource.MOVED
        again = self.chunk & self.held & ~is_moved & (self.own | (self.source != KVSource.CACHED))
        # the same prompt again has the same answer
        share = FOLLOW_UP_SHARE if self.held.sum() < len(self.held) - 1 else 0
        wholly = self.chunk & (~self.held | (is_moved & self.stale))
        return int(wholly.sum()) + round(share * int(again.sum()))

    def computed_tokens(self, ratio: float) -> int:
        """Number of tokens that are computed at a recompute ratio: those of no source, and as many of the reused chunks
        as the ratio allows."""
        approximate = int((self.chunk & ~self.exact).sum())
        fixed = self.count(KVSource.COMPUTED) + int(self.border.sum())
        return fixed + min(approximate, round(ratio * self.rated_tokens))

    def without(self, parts: Iterable[tuple[int, int]]) -> KnownKV:
        """The same if tokens ``[start, stop)`` of each part turn out to have no KV. A part is a whole reused chunk, or
        the shared prefix."""
        left, starts = np.ones(len(self.source), np.bool_), set[int]()
        for start, stop in parts:
            left[start:stop] = False
            starts.add(start)
        columns = {name: getattr(self, name) & left for name in ("chunk", "held", "own", "exact", "stale", "border")}
        reused = tuple(span for span in self.reused if span.start not in starts)
        return replace(self, reused=reused, source=np.where(left, self.source, KVSource.COMPUTED), **columns)


def known_kv(layout: Layout, reused: Sequence[Span] = (), runs: Iterable[KVRun] = ()) -> KnownKV:
    """What is known of a prompt's KV.

    Args:
        reused: chunks whose KV is stored, in prompt order.
        runs: what caches have of the prompt, without overlap. Of a reused chunk of which they have a part, nothing is
            taken from them: it is read as a whole. Nor if they have less than the whole shared prefix, or no more.
            Of what is left of moved runs, the first :data:`MOST_BORDER` tokens are computed.
    """
    source: _Array = np.zeros(layout.num_tokens, np.uint8)
    chunk, own, stale, border = np.zeros((4, layout.num_tokens), np.bool_)
    runs, num_prefix, past = [*runs], layout.num_prefix, np.ones(layout.num_tokens, np.float32)
    for run in runs:
        part = slice(run.start, run.stop)
        source[part] = run.source
        stale[part] = False if run.stale is None else run.stale
        past[part] = 1.0 if run.past is None else run.past
    own[:num_prefix] = True
    for span in reused:
        part = slice(span.start, span.stop)
        chunk[part], own[part] = True, span.start == layout.exact_from and not span.first
        if not source[part].all():
            source[part] = KVSource.COMPUTED
    if not source[: num_prefix + 1].all():
        source[:num_prefix] = KVSource.PREFIX
    source[(source == KVSource.MOVED) & stale & ~chunk] = KVSource.COMPUTED  # no chunk's ratio would correct it
    for run in runs:
        if run.source == KVSource.MOVED:
            is_left = source[run.start : run.stop] == KVSource.MOVED
            border[run.start : run.stop] = _first_of_each(is_left, MOST_BORDER)
    source[border & ~chunk] = KVSource.COMPUTED
    turns = max((run.turns for run in runs if (source[run.start : run.stop] == run.source).any()), default=0)
    held = source >= KVSource.CACHED.value
    read = chunk & ~held
    source[read] = np.where(own[read], KVSource.OWN_CONTEXT, KVSource.STORED)
    stale = np.where(held, stale, source == KVSource.STORED)
    exact = (own & (source != KVSource.MOVED)) | (source == KVSource.CACHED)
    past[source < KVSource.CONTINUED.value] = 1.0
    return KnownKV(tuple(reused), source, chunk, held, own, exact, stale, border & chunk, turns, past)


def _first_of_each(marks: _Array, count: int) -> _Array:
    """The first ``count`` marks of each row of neighbouring marks, bool."""
    numbers = np.cumsum(marks)
    before = np.maximum.accumulate(np.where(marks, 0, numbers))
    first: _Array = marks & (numbers - before <= count)
    return first


def choose_rows(known: KnownKV, selected: Iterable[tuple[Span, torch.Tensor]]) -> torch.Tensor:
    """Strictly increasing int64 positions to compute: all tokens whose KV has no source, plus the selected chunk
    tokens, of which each span has a ``(num_tokens,)`` bool mask. The prompt's last token is always computed: its logits
    give the first new token."""
    active = (known.source == KVSource.COMPUTED) | known.border
    chosen = [*selected]
    if chosen:  # all masks at once: a conversion of each would cost an operation
        lengths = [len(span.tokens) for span, _ in chosen]
        masks = np.split(torch.cat([mask for _, mask in chosen]).numpy(), np.cumsum(lengths)[:-1])
        for (span, _), mask in zip(chosen, masks, strict=True):
            active[span.start : span.stop] |= mask
    active[-1] = True
    return torch.from_numpy(active.nonzero()[0])
