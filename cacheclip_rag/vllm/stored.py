"""Stored KV of an interval of a prompt, at true positions, layer by layer; and its slots in the paged cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..fusion.wire import FusionPlan, StoredPiece
from ..runtime.transformers.model import ModelRuntime
from ..runtime.transformers.rotary import Tables, changed, rotate
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
    _of_places: Sequence[Tables | None]
    """And of ``places``."""
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
        of_places = changed(tables, lambda table: table[places - start])
        return cls(start, stop, places, tables, of_places, joined, runtime.dtype)

    def layer(self, number: int, device: torch.device, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys after RoPE and values of one layer in the compute dtype, each ``(stop - start, num_heads, head_dim)``,
        of these KV heads."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        first, tables = 0, self._of_places[number]
        for joined in self._joined:
            keys, values, scale = joined.layer(number, device, heads)
            own = slice(first, first := first + keys.shape[1])
            of_own = None if tables is None else (tables[0][own].to(device), tables[1][own].to(device))
            found.append((rotate(keys, of_own), values if scale is None else values * scale))
        at = None if len(self.places) == self.stop - self.start else (self.places - self.start).to(device)
        keys, values = (self._scattered(parts, at) for parts in zip(*found, strict=True))
        return keys, values

    def _scattered(self, parts: tuple[torch.Tensor, ...], at: torch.Tensor | None) -> torch.Tensor:
        """Tokens side by side, each part ``(num_heads, num_tokens, head_dim)``, at their places (None: at all)."""
        heads, _, width = parts[0].shape
        placed = parts[0].new_empty(len(self.places), heads, width, dtype=self._dtype)
        for part, target in zip(parts, placed.split([part.shape[1] for part in parts]), strict=True):
            target.copy_(part.transpose(0, 1))
        if at is None:
            return placed
        return placed.new_zeros(self.stop - self.start, heads, width).index_copy_(0, at, placed)


def slots_of(block_ids: Sequence[int], block_size: int, positions: torch.Tensor) -> torch.Tensor:
    """Slots of a request's positions in the paged cache, ``(num_positions,)`` int64 on the CPU."""
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


def used_pieces(plan: FusionPlan) -> list[StoredPiece]:
    """The pieces of which something is written, or is compared with what is computed."""
    return [
        piece
        for piece in plan.pieces
        if plan.correction or not any(start <= piece.start and piece.stop <= stop for start, stop in plan.computed)
    ]


def check_shape(plan: FusionPlan, entries: Mapping[str, KV], runtime: ModelRuntime) -> None:
    """Raise ValueError unless all pieces that are used are in entries of this model's shape."""
    shape = (runtime.num_layers, 2, runtime.num_kv_heads, runtime.head_dim)
    for piece in used_pieces(plan):
        found = entries[piece.key].shape
        if (*found[:3], found[4]) != shape or piece.first + piece.num_tokens > found[3]:
            raise ValueError(f"entry {piece.key[:12]}… has shape {tuple(found)}, which does not fit the plan")


def _within(plan: FusionPlan, start: int, stop: int) -> list[StoredPiece]:
    return [piece for piece in used_pieces(plan) if piece.start < stop and piece.stop > start]


def _part(piece: StoredPiece, entries: Mapping[str, KV], start: int, stop: int) -> KV:
    first = piece.first + max(0, start - piece.start)
    return part_of(entries[piece.key], first, piece.first + min(stop, piece.stop) - piece.start)
