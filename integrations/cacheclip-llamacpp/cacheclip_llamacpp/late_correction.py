"""The correction for a runtime that computes a prompt in its order: after its chunks, before its last tokens.

Its recomputed tokens see stored KV as it is, and the prompt's last tokens see it corrected. In transformers, where
recomputed tokens see it corrected too, this order has nearly the same effect
(:func:`cacheclip_rag.plugins.offsets`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cacheclip_rag.methods import Chunks, Split, offsets

from .context import Cells
from .rotary import Rotation
from .written import WrittenKV

Runs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _CorrectedChunk:
    """A chunk with recomputed and stale tokens."""

    start: int
    stop: int
    recomputed: list[tuple[int, int]]
    """Runs of positions that are computed before the prompt's last run."""
    stale: list[tuple[int, int]]
    stored: WrittenKV

    @property
    def split(self) -> Split:
        slots = torch.cat([torch.arange(*run) for run in self.recomputed])
        split = Chunks([(self.start, self.stop)]).split(slots, slots.device)
        assert split is not None, "it has recomputed and stale tokens"
        return split


class LateCorrection:
    """Made before the recompute, while ``held`` still has all stored KV; then called with what is recomputed."""

    def __init__(
        self,
        written: Callable[[Cells, int, int], WrittenKV],
        rotations: Sequence[Rotation],
        held: Cells,
        spans: Runs,
        runs: Runs,
        weight: float,
    ) -> None:
        """``written``: the KV of positions from one to another. Others: see
        :meth:`cacheclip_rag.plugins.OrderedRuntime.late_correction`."""
        self._written, self._held, self._weight = written, held, weight
        self._rotations = rotations if spans else []
        self._chunks = list[_CorrectedChunk]()
        for start, stop in spans if self._rotations else ():
            inside = [(max(a, start), min(b, stop)) for a, b in runs if a < stop and b > start]
            edges = [start, *(edge for run in inside for edge in run), stop]
            stale = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
            recomputed = [run for run in inside if run[1] <= runs[-1][0]]
            if recomputed and stale:
                self._chunks.append(_CorrectedChunk(start, stop, recomputed, stale, written(held, start, stop)))

    def __call__(self, state: Cells) -> None:
        for chunk in self._chunks:
            fresh = [self._written(state, *run) for run in chunk.recomputed]
            split = chunk.split
            for rotation in self._rotations:
                self._correct(chunk, fresh, split, rotation)
            span = chunk.start, chunk.stop
            state.context.replace(state, self._held, chunk.stored.data, span, chunk.stale)

    def _correct(self, chunk: _CorrectedChunk, fresh: Sequence[WrittenKV], split: Split, rotation: Rotation) -> None:
        layers = rotation.layers
        new = [torch.cat([kv.take(layers, is_value) for kv in fresh], dim=1) for is_value in (False, True)]
        old = [chunk.stored.take(layers, is_value) for is_value in (False, True)]
        keys, values = offsets(
            (rotation.heads(new[0]), new[1]),
            (rotation.heads(old[0]), old[1]),
            split,
            self._weight,
            rotation.tables(torch.arange(chunk.start, chunk.stop)),
        )
        for is_value, stored, added in ((False, old[0], rotation.rows(keys)), (True, old[1], values)):
            chunk.stored.put(layers, is_value, (stored.float() + added).half())
