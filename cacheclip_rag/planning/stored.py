"""What a process with the weights makes of a plan and of entries of the store: KV at true positions, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from ..fusion.wire import FusionPlan, Interval, StoredPiece
from ..methods.recompute import Chunks, Split, offsets
from ..runtime.transformers.model import ModelRuntime
from ..runtime.transformers.rotary import Tables, changed, rotate
from ..store import KV, Joined, join, part_of

_BLOCK_TOKENS = 256
"""Tokens that are put side by side in host memory, so that intermediate results stay in the processor's caches: one
chunk most often, which is not copied then."""


@dataclass(frozen=True, slots=True)
class StoredInterval:
    """Stored KV within positions ``[start, stop)`` of a plan's prompt."""

    places: torch.Tensor
    """``(num_stored,)`` int64 on the CPU, positions with stored KV."""
    _tables: Sequence[Tables | None]
    """Per layer, rotary tables of ``places`` on the device, each ``(num_stored, width)``."""
    _joined: tuple[Joined, ...]
    _dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls,
        plan: FusionPlan,
        entries: Mapping[str, KV],
        start: int,
        stop: int,
        runtime: ModelRuntime,
        device: torch.device,
    ) -> StoredInterval:
        """``entries``: KV by key. ``runtime`` gives the rotary tables; it needs no weights."""
        within = [piece for piece in plan.used_pieces if piece.start < stop and piece.stop > start]
        parts = [(max(piece.start, start), _part(piece, entries, start, stop)) for piece in within]
        joined = join(parts)
        places = torch.cat([torch.zeros(0, dtype=torch.int64), *(each.places for each in joined)])
        tables = changed(runtime.rotary.tables(places), lambda table: table.to(device)) if parts else []
        if device.type == "cpu":
            joined = [block for each in joined for block in each.in_blocks(_BLOCK_TOKENS)]
        return cls(places, tables, tuple(joined), runtime.dtype, device)

    def numbers_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Which of :attr:`places` each position is, on the CPU; -1: it has no stored KV."""
        if not len(self.places):
            return torch.full_like(positions, -1)
        numbers = torch.searchsorted(self.places, positions).clamp_(max=len(self.places) - 1)
        return torch.where(self.places[numbers] == positions, numbers, -1)

    def split(self, chunks: Sequence[Interval], rows: torch.Tensor) -> Split | None:
        """What the correction of whole ``chunks`` needs in a pass that computes ``rows``, with numbers of
        :attr:`places` as slots; None: nothing is corrected."""
        if not chunks:
            return None
        starts = self.numbers_of(torch.tensor([start for start, _ in chunks])).tolist()
        slots = [(first, first + stop - start) for first, (start, stop) in zip(starts, chunks, strict=True)]
        return Chunks(slots).split(self.numbers_of(rows), self.device)

    def correct(
        self,
        number: int,
        stored: tuple[torch.Tensor, torch.Tensor],
        fresh: tuple[torch.Tensor, torch.Tensor],
        split: Split,
        weight: float,
    ) -> None:
        """Correct a :meth:`layer` in place, by the keys and values of the pass's rows, each ``(num_rows, num_heads,
        head_dim)``."""
        own, tables = slice(split.start, split.stop), self._tables[number]
        old = stored[0][own].transpose(0, 1), stored[1][own].transpose(0, 1)
        new = fresh[0].transpose(0, 1), fresh[1].transpose(0, 1)
        added = offsets(new, old, split, weight, None if tables is None else tables.map(itemgetter(own)))
        for target, offset in zip(old, added, strict=True):
            target += offset.to(target.dtype)

    def layer(self, number: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys after RoPE and values of one layer in the compute dtype, each ``(num_stored, num_heads, head_dim)``, of
        these KV heads; on the device, in memory of their own."""
        layer, first, tables = list[torch.Tensor](), 0, self._tables[number]
        for joined in self._joined:
            is_cut = joined.pieces[0].shape[2] == heads.stop - heads.start  # read so, or the only worker
            keys, values, scale = joined.layer(number, self.device, slice(None) if is_cut else heads)
            own = slice(first, first := first + keys.shape[1])
            keys = rotate(keys, None if tables is None else tables.map(itemgetter(own)))
            both = (keys, values if scale is None else values * scale)
            if not layer:
                shape = (len(self.places), len(keys), keys.shape[2])
                layer = [torch.empty(shape, dtype=self._dtype, device=self.device) for _ in both]
            for target, numbers in zip(layer, both, strict=True):
                target[own] = numbers.transpose(0, 1)
        return layer[0], layer[1]


def check_fits(plan: FusionPlan, entries: Mapping[str, KV], runtime: ModelRuntime, heads: slice | None = None) -> None:
    """Raise ValueError unless a plan is for this model's weights, and all pieces that are used are in entries of its
    shape, of all KV heads or of ``heads``."""
    if plan.model != runtime.fingerprint:
        raise ValueError("the plan is for other weights than this process loaded")
    expected = (runtime.num_layers, 2, runtime.head_dim)
    counts = (runtime.num_kv_heads, runtime.num_kv_heads if heads is None else heads.stop - heads.start)
    for piece in plan.used_pieces:
        shape = entries[piece.key].shape
        if (*shape[:2], shape[4]) != expected or shape[2] not in counts or piece.first + piece.num_tokens > shape[3]:
            raise ValueError(f"entry {piece.key[:12]}… has shape {tuple(shape)}, which does not fit the plan")


def _part(piece: StoredPiece, entries: Mapping[str, KV], start: int, stop: int) -> KV:
    first = piece.first + max(0, start - piece.start)
    return part_of(entries[piece.key], first, piece.first + min(stop, piece.stop) - piece.start)
