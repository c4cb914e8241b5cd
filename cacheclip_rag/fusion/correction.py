"""Correction of tokens that are not recomputed: each gets a share of the mean change of the recomputed tokens.

Source: AgentKVShift (arXiv:2607.21604): in each layer, context changes a chunk's KV by one shared offset plus noise.
Departures: here the scorer's tokens estimate the offset, there tokens are chosen for this purpose; here one weight
serves all tokens, there each token has its own. If a row filter removes rows between layers, the rows that still run in
a layer estimate the offset of that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..prompt.layout import Span
from ..runtime.transformers.cache import FusedCache, FusedLayer
from ..runtime.transformers.rotary import Tables, rotate, unrotate

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["ResidualCorrection"]


class ResidualCorrection:
    """Corrects stale KV during the next scattering pass, in each layer before its rows attend."""

    def __init__(self, runtime: ModelRuntime, cache: FusedCache, weight: float) -> None:
        """``weight``: share of the mean change that is added, 0 to 1."""
        self._runtime, self._cache, self._weight = runtime, cache, weight

    def install(self, spans: Sequence[Span]) -> None:
        """Correct the chunks at ``spans`` during the next pass, which recomputes some of their tokens."""
        if not spans:
            return
        chunks = _Chunks(spans)
        slots = torch.arange(chunks.start, chunks.stop)
        geometry = self._cache.geometry
        tables = self._runtime.rotary_tables_at(slots if geometry is None else geometry.positions_of(slots))
        for layer, of_layer in zip(self._cache.layers, tables, strict=True):
            layer.before_scatter = self._corrector(chunks, of_layer)

    def _corrector(
        self, chunks: _Chunks, tables: Tables | None
    ) -> Callable[[FusedLayer, torch.Tensor, torch.Tensor], None]:
        def correct(layer: FusedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
            layer.before_scatter = None  # for this pass only
            split = chunks.split(layer)
            if split is None:
                return
            of_chosen = None if tables is None else split.tables(tables)
            own = slice(chunks.start, chunks.stop)
            for fresh, stored, is_key in ((keys[0], layer.keys[0], True), (values[0], layer.values[0], False)):
                change = fresh.index_select(1, split.rows).float() - stored.index_select(1, split.chosen).float()
                if is_key:
                    change = unrotate(change, of_chosen)
                # one row per chunk, and one of zeros for slots that are not corrected
                offsets = (self._weight * split.means) @ change
                added = offsets.index_select(1, split.chunk_of_slot)
                if is_key:
                    added = rotate(added, tables)
                stored[:, own] += added.to(stored.dtype)

        return correct


class _Split:
    """Recomputed and stale tokens of all chunks, valid for all layers that compute the same rows."""

    def __init__(self, rows: torch.Tensor, chosen: torch.Tensor, means: torch.Tensor, chunk_of_slot: torch.Tensor):
        self.rows = rows
        """``(num_chosen,)`` rows of the pass."""
        self.chosen = chosen
        """``(num_chosen,)`` slots of these rows."""
        self.means = means
        """``(num_chunks + 1, num_chosen)`` float32: takes the mean of each chunk's rows; the last row is 0."""
        self.chunk_of_slot = chunk_of_slot
        """``(num_slots,)`` from the first chunk's start to the last one's end: number of the chunk whose mean a slot
        gets; the last row of ``means`` for slots that are not stale."""
        self._start = 0
        self._tables: dict[int, Tables] = {}

    @classmethod
    def of(
        cls, numbers: torch.Tensor, start: int, num_chunks: int, slots: torch.Tensor, device: torch.device
    ) -> _Split | None:
        """None if no chunk has both chosen and stale tokens. Computed on the CPU, so that no number is read from the
        accelerator.

        Args:
            numbers: ``(num_slots,)`` number of each slot's chunk from slot ``start`` on, ``num_chunks`` between chunks.
            slots: ``(num_rows,)`` slots that the pass computes, on the CPU.
            device: where the result is used.
        """
        is_inside = (slots >= start) & (slots < start + len(numbers))
        rows = is_inside.nonzero().flatten()
        at = slots[rows] - start
        of_rows = numbers[at]
        counts = torch.bincount(of_rows, minlength=num_chunks + 1)
        sizes = torch.bincount(numbers, minlength=num_chunks + 1)
        is_split = (counts > 0) & (counts < sizes)
        is_split[num_chunks] = False
        kept = is_split[of_rows].nonzero().flatten()
        if not len(kept):
            return None
        chunk_of_slot = numbers.masked_fill(~is_split[numbers], num_chunks)
        chunk_of_slot[at] = num_chunks
        means = torch.zeros(num_chunks + 1, len(kept))
        of_kept = of_rows[kept]
        means[of_kept, torch.arange(len(kept))] = 1.0 / counts[of_kept].float()
        parts = rows[kept], at[kept] + start, means, chunk_of_slot
        found = cls(*(part.to(device) for part in parts))
        found._start = start
        return found

    def tables(self, tables: Tables) -> Tables:
        """The rows of the chunks' rotary tables for the chosen tokens. Layers of one kind share them."""
        key = id(tables[0])
        if key not in self._tables:
            cos, sin = (table.index_select(0, self.chosen - self._start) for table in tables)
            self._tables[key] = cos, sin
        return self._tables[key]


class _Chunks:
    """The chunks of a pass."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.start, self.stop = spans[0].start, max(span.stop for span in spans)
        numbers = np.full(self.stop - self.start, len(spans), np.int64)
        for number, span in enumerate(spans):
            numbers[span.start - self.start : span.stop - self.start] = number
        self._numbers, self._count = torch.from_numpy(numbers), len(spans)
        self._known: tuple[torch.Tensor | None, _Split | None] = (None, None)

    def split(self, layer: FusedLayer) -> _Split | None:
        """The split for the rows that a layer computes. Layers that share one tensor of slots share the split; it is
        made again after rows left the pass or the device changed."""
        assert layer.slots is not None and layer.slots_on_cpu is not None
        if self._known[0] is not layer.slots:
            found = _Split.of(self._numbers, self.start, self._count, layer.slots_on_cpu, layer.device)
            self._known = layer.slots, found
        return self._known[1]
