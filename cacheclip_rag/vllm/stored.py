"""Stored KV of an interval of a prompt, at true positions, layer by layer; and its slots in the paged cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..fusion.wire import FusionPlan, StoredPiece
from ..runtime.transformers.model import ModelRuntime
from ..runtime.transformers.rotary import Tables, rotate
from ..store import KV, Joined, join, part_of


@dataclass(frozen=True, slots=True)
class StoredInterval:
    """Positions ``[start, stop)`` of a plan's prompt. Positions between the pieces have zeros."""

    start: int
    stop: int
    places: torch.Tensor
    """``(num_stored,)`` int64, positions with stored KV."""
    tables: Sequence[Tables | None]
    """Per layer, rotary tables of all positions of the interval."""
    _joined: tuple[Joined, ...]
    _dtype: torch.dtype

    @classmethod
    def of(
        cls, plan: FusionPlan, entries: Mapping[str, KV], start: int, stop: int, runtime: ModelRuntime
    ) -> StoredInterval:
        """``entries``: KV by key. ``runtime`` gives the rotary tables; it needs no weights."""
        parts = [(max(piece.start, start), _part(piece, entries, start, stop)) for piece in _within(plan, start, stop)]
        joined = tuple(join(parts))
        places = torch.cat([torch.zeros(0, dtype=torch.int64), *(each.places for each in joined)])
        tables = runtime.rotary_tables(torch.arange(start, stop))
        return cls(start, stop, places, tables, joined, runtime.dtype)

    def layer(self, number: int, device: torch.device, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys after RoPE and values of one layer in the compute dtype, each ``(num_heads, stop - start, head_dim)``,
        of these KV heads."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for joined in self._joined:
            keys, values, scale = joined.layer(number, device)
            keys, values = keys[heads], values[heads]
            values = values if scale is None else values * scale[heads]
            found.append((keys.to(torch.float32), values))
        at = (self.places - self.start).to(device)
        whole = []
        for parts in zip(*found, strict=True):
            side_by_side = torch.cat([part.to(parts[0].dtype) for part in parts], dim=1)
            target = side_by_side.new_zeros(side_by_side.shape[0], self.stop - self.start, side_by_side.shape[2])
            whole.append(target.index_copy_(1, at, side_by_side))
        keys, values = whole
        tables = self.tables[number]
        tables = None if tables is None else (tables[0].to(device), tables[1].to(device))
        return rotate(keys, tables).to(self._dtype), values.to(self._dtype)


def slots_of(block_ids: Sequence[int], block_size: int, positions: torch.Tensor) -> torch.Tensor:
    """Slots of a request's positions in the paged cache, ``(num_positions,)`` int64 on the CPU."""
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


def check_shape(plan: FusionPlan, entries: Mapping[str, KV], runtime: ModelRuntime) -> None:
    """Raise ValueError unless all pieces are in entries of this model's shape."""
    shape = (runtime.num_layers, 2, runtime.num_kv_heads, runtime.head_dim)
    for piece in plan.pieces:
        found = entries[piece.key].shape
        if (*found[:3], found[4]) != shape or piece.first + piece.num_tokens > found[3]:
            raise ValueError(f"entry {piece.key[:12]}… has shape {tuple(found)}, which does not fit the plan")


def _within(plan: FusionPlan, start: int, stop: int) -> list[StoredPiece]:
    return [piece for piece in plan.pieces if piece.start < stop and piece.stop > start]


def _part(piece: StoredPiece, entries: Mapping[str, KV], start: int, stop: int) -> KV:
    first = piece.first + max(0, start - piece.start)
    return part_of(entries[piece.key], first, piece.first + min(stop, piece.stop) - piece.start)
