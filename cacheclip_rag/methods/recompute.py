"""Selective recompute: a scorer, a budget and a correction. Most published methods are instances of :class:`Recompute`.

Source: CacheBlend (arXiv:2405.16444) introduced selective recompute. The chosen tokens are computed exactly at their
true positions. The other tokens keep their stored KV, or are corrected: each gets a share of the mean change of the
recomputed ones.

Source of the correction: AgentKVShift (arXiv:2607.21604): in each layer, context changes a chunk's KV by one shared
offset plus noise. Departures: here the scorer's tokens estimate the offset, there tokens are chosen for this purpose;
here one weight serves all tokens, there each token has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from ..base.checks import check_share
from ..base.errors import ConfigurationError
from ..prompt.layout import Span
from ..runtime.transformers.cache import FusedCache, FusedLayer
from ..runtime.transformers.model import ModelRuntime
from ..runtime.transformers.rotary import Tables, rotate, unrotate
from ..selection.budget import Budget, TokenBudget
from ..selection.scorers import Scorer
from ..selection.views import PromptView, per_span
from ..store import upload
from .base import Method


@dataclass(frozen=True, slots=True)
class Recompute(Method):
    """Recomputes the best-scored tokens, exactly as many as the budget allows.

    Equals full prefill at ratio 1.0 and direct reuse at 0.0.

    >>> Recompute(ChunkStart(), Budget(ratio=0.1), name="starts")
    """

    scorer: Scorer
    """Gives every chunk token a score."""
    budget: TokenBudget = field(default_factory=Budget)
    """How many tokens are recomputed, and how scores become spans."""
    correction: float = 0.0
    """Share of the recomputed tokens' mean change that is added to the other tokens, per chunk and layer (AgentKVShift,
    arXiv:2607.21604). 0: no correction."""

    def __post_init__(self) -> None:
        super(Recompute, self).__post_init__()
        if not isinstance(self.scorer, Scorer):
            raise ConfigurationError(f"scorer must be a Scorer such as ChunkStart(), got {self.scorer!r}.")
        if not isinstance(self.budget, TokenBudget):
            raise ConfigurationError(f"budget must be a TokenBudget such as Budget(), got {self.budget!r}.")
        check_share("correction", self.correction, "the mean change")

    @property
    def needs_auxiliary(self) -> bool:
        return self.scorer.needs_auxiliary

    @property
    def mean_change(self) -> float:
        return self.correction

    @property
    def head_sets(self) -> tuple[str, ...]:
        return self.scorer.head_sets

    @property
    def has_ratio(self) -> bool:
        return isinstance(self.budget, Budget)

    @property
    def nominal_ratio(self) -> float:
        return self.budget.ratio if isinstance(self.budget, Budget) else 0.0

    def at(self, ratio: float) -> Self:
        if not isinstance(self.budget, Budget):
            return super(Recompute, self).at(ratio)
        return replace(self, budget=replace(self.budget, ratio=ratio))

    def score(self, view: PromptView) -> list[torch.Tensor]:
        return self.scorer.score(view) if self.budget.is_open(view) else []

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # the budget may be open only since a chunk could not be read
        return self.budget.select(view, scores or per_span(view.spans, 0.0))


def install_correction(runtime: ModelRuntime, cache: FusedCache, spans: Sequence[Span], weight: float) -> None:
    """Correct the stale KV of the chunks at ``spans`` during the next pass over ``cache``, which recomputes some of
    their tokens: in each layer before its rows attend. ``weight``: share of the mean change that is added, 0 to 1."""
    if not spans:
        return
    chunks, shares = Chunks([(span.start, span.stop) for span in spans]), list[Any]()

    def correct(
        layer: FusedLayer, keys: torch.Tensor, values: torch.Tensor, *, number: int, tables: Tables | None
    ) -> None:
        layer.before_scatter = None  # for this pass only
        assert layer.slots_on_cpu is not None
        split = chunks.split(layer.slots_on_cpu, layer.device)
        if split is None:
            return
        own = slice(split.start, split.stop)
        if layer.whole is not None:  # the same in fewer operations: keys and values in one
            both = layer.whole[number, :, :, own]
            change = torch.cat((keys, values)).index_select(2, split.rows).float() - both.index_select(2, split.chosen)
            if tables is not None:
                change[0] = unrotate(change[0], split.tables(tables))
            if not shares or shares[0] is not split:  # layers with the same rows share them
                shares[:] = split, weight * split.means
            added_to_both = (shares[1] @ change).index_select(2, split.chunk_of_slot)
            if tables is not None:
                added_to_both[0] = rotate(added_to_both[0], tables)
            both.add_(added_to_both.to(both.dtype))
            return
        stored = layer.keys[0, :, own], layer.values[0, :, own]
        added = offsets((keys[0], values[0]), stored, split, weight, tables)
        for target, offset in zip(stored, added, strict=True):
            target += offset.to(target.dtype)

    tables = cache.tables_of(torch.arange(chunks.start, chunks.stop))
    for number, (layer, of_layer) in enumerate(zip(cache.layers, tables, strict=True)):
        layer.before_scatter = partial(correct, number=number, tables=of_layer)


def offsets(
    fresh: tuple[torch.Tensor, torch.Tensor],
    stored: tuple[torch.Tensor, torch.Tensor],
    split: Split,
    weight: float,
    tables: Tables | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the correction adds to one layer's KV.

    Args:
        fresh: keys after RoPE and values of the computed rows, each ``(num_kv_heads, num_rows, head_dim)``.
        stored: keys after RoPE and values as stored, each ``(num_kv_heads, num_slots, head_dim)``, of slots
            ``split.start`` to ``split.stop - 1``.
        weight: share of the mean change that is added, 0 to 1.
        tables: rotary tables of these slots; None for a layer without RoPE.

    Returns:
        Float32 offsets of keys and values of these slots, shapes as ``stored``; 0 where a slot is not corrected.
    """
    of_chosen = None if tables is None else split.tables(tables)
    shares, of_both = weight * split.means, []
    for new, old, is_key in ((fresh[0], stored[0], True), (fresh[1], stored[1], False)):
        change = new.index_select(1, split.rows).float() - old.index_select(1, split.chosen)
        if is_key:
            change = unrotate(change, of_chosen)
        # one row per chunk, and one of zeros for slots that are not corrected
        added = (shares @ change).index_select(1, split.chunk_of_slot)
        of_both.append(rotate(added, tables) if is_key else added)
    return of_both[0], of_both[1]


@dataclass(eq=False, slots=True)
class Split:
    """Recomputed and stale tokens of all chunks, valid for all layers that compute the same rows."""

    start: int
    stop: int
    """Slots from the first chunk's start to the last one's end."""
    rows: torch.Tensor
    """``(num_chosen,)`` rows of the pass."""
    chosen: torch.Tensor
    """``(num_chosen,)`` slots of these rows, counted from ``start``."""
    means: torch.Tensor
    """``(num_chunks + 1, num_chosen)`` float32: takes the mean of each chunk's rows; the last row is 0."""
    chunk_of_slot: torch.Tensor
    """``(num_slots,)``: number of the chunk whose mean a slot gets; the last row of ``means`` for slots that are not
    stale."""
    _tables: dict[int, tuple[torch.Tensor, Tables]] = field(default_factory=dict, init=False)

    def tables(self, tables: Tables) -> Tables:
        """The rows of the chunks' rotary tables for the chosen tokens. Layers of one kind share them."""
        known = self._tables.get(id(tables.cos))
        if known is None:
            of_chosen = tables.map(lambda table: table.index_select(0, self.chosen))
            of_chosen = of_chosen._replace(square=of_chosen.cos.square() + of_chosen.sin.square())
            # a tensor that is kept keeps its id
            known = self._tables[id(tables.cos)] = (tables.cos, of_chosen)
        return known[1]


class Chunks:
    """The chunks of a pass."""

    def __init__(self, chunks: Sequence[tuple[int, int]]) -> None:
        """``chunks``: first slot, and slot after the last one; in order, at least one."""
        self.start, self.stop = chunks[0][0], max(stop for _, stop in chunks)
        numbers = np.full(self.stop - self.start, len(chunks), np.int64)
        for number, (start, stop) in enumerate(chunks):
            numbers[start - self.start : stop - self.start] = number
        self._numbers, self._count = torch.from_numpy(numbers), len(chunks)
        self._last: tuple[torch.Tensor, torch.device, Split | None] | None = None

    def split(self, slots: torch.Tensor, device: torch.device) -> Split | None:
        """The split for a layer that computes ``slots``, ``(num_rows,)`` on the CPU, for use on ``device``; None if no
        chunk has both chosen and stale tokens. Layers that share one tensor of slots share the split; it is made again
        after rows left the pass or the device changed."""
        if self._last is not None and self._last[0] is slots and self._last[1] == device:
            return self._last[2]
        self._last = slots, device, None
        # on the CPU, so that no number is read from the accelerator
        numbers, count = self._numbers, self._count
        is_inside = (slots >= self.start) & (slots < self.stop)
        rows = is_inside.nonzero().flatten()
        at = slots[rows] - self.start
        of_rows = numbers[at]
        counts = torch.bincount(of_rows, minlength=count + 1)
        sizes = torch.bincount(numbers, minlength=count + 1)
        is_split = (counts > 0) & (counts < sizes)
        is_split[count] = False
        kept = is_split[of_rows].nonzero().flatten()
        if not len(kept):
            return None
        chunk_of_slot = numbers.masked_fill(~is_split[numbers], count)
        chunk_of_slot[at] = count
        means = torch.zeros(count + 1, len(kept))
        of_kept = of_rows[kept]
        means[of_kept, torch.arange(len(kept))] = 1.0 / counts[of_kept].float()
        parts = rows[kept], at[kept], means, chunk_of_slot
        self._last = slots, device, Split(self.start, self.stop, *(upload(part, device) for part in parts))
        return self._last[2]
