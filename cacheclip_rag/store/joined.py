"""KV of many chunks side by side, so that a layer is rotated and written once for all of them.

A prompt of 36 chunks would otherwise cost 36 times as many small operations per layer. Each of them starts and stops
all threads, which is slow where other programs use the same cores.

A layer is put side by side with numpy, whose copies start no threads, when it is asked for. So memory holds one layer
side by side, and the other layers need not be there yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch

from .codecs import CODECS, KV, ArrayPart, LayerKV, StoredKV

_ALL_HEADS = slice(None)


@dataclass(frozen=True, slots=True)
class Joined:
    """Pieces of one kind, side by side."""

    starts: tuple[int, ...]
    """Of each piece, where its first token belongs, as in :func:`join`."""
    pieces: tuple[KV, ...]
    _arrays: list[list[np.ndarray[Any, Any]]] = field(init=False, repr=False)
    """Of each stored piece, its codec's arrays, cut to its tokens."""

    def __post_init__(self) -> None:
        stored = [kv for kv in self.pieces if isinstance(kv, StoredKV)]
        object.__setattr__(self, "_arrays", [kv.arrays() for kv in stored])

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(kv.shape[3] for kv in self.pieces)

    @property
    def places(self) -> torch.Tensor:
        """``(num_tokens,)`` int64: where each token belongs."""
        runs = [np.arange(start, start + n) for start, n in zip(self.starts, self.lengths, strict=True)]
        return torch.from_numpy(np.concatenate(runs))

    def layer(self, number: int, device: torch.device | str, heads: slice = _ALL_HEADS) -> LayerKV:
        """KV of one layer, ``(num_kv_heads, num_tokens, head_dim)``, of all heads or some."""
        first = self.pieces[0]
        if not isinstance(first, StoredKV):
            layers = [kv[number] for kv in self.pieces if isinstance(kv, torch.Tensor)]
            joined = torch.cat(layers, dim=2) if len(layers) > 1 else layers[0]
            return LayerKV(*joined[:, heads].to(device))
        codec = CODECS[first.codec]
        *before, _, width = first.frame.shape[1:]
        parts = codec.parts((*before, 2, width))
        if _on_gpu(torch.device(device)):
            return codec.combine(self._moved(number, torch.device(device), heads, parts))
        arrays = []
        for index, part in enumerate(parts):
            own = (*(slice(None),) * (part.axis - 1), heads)
            found = [of_piece[index][number][own] for of_piece in self._arrays]
            if part.shape[part.axis] == 1:  # holds for all tokens of a chunk
                found = [np.concatenate(found, part.axis).repeat(self.lengths, part.axis)]
            side_by_side = np.concatenate(found, part.axis) if len(found) > 1 else found[0]
            arrays.append(torch.from_numpy(side_by_side).view(part.dtype).to(device))
        return codec.combine(arrays)

    def _moved(self, number: int, device: torch.device, heads: slice, parts: Sequence[ArrayPart]) -> list[torch.Tensor]:
        """The arrays of a layer. The pieces are moved as they are stored, and put side by side on the device. From
        page-locked memory they move while the caller goes on: keep the pieces until the device has used them."""
        found: list[list[torch.Tensor]] = [[] for _ in parts]
        for kv in self.pieces:
            assert isinstance(kv, StoredKV)
            moved = kv.frame.layer_bytes(number).to(device, non_blocking=True)
            for part, array, arrays in zip(
                parts, CODECS[kv.codec].arrays(moved, kv.frame.shape[1:]), found, strict=True
            ):
                own = array[(*(slice(None),) * (part.axis - 1), heads)]
                if part.shape[part.axis] == 1:  # holds for all tokens of a chunk
                    arrays.append(own.expand(*own.shape[: part.axis], kv.shape[3], *own.shape[part.axis + 1 :]))
                else:
                    arrays.append(own[(*(slice(None),) * part.axis, kv.tokens)])
        return [torch.cat(arrays, part.axis) for part, arrays in zip(parts, found, strict=True)]


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def join(pieces: Iterable[tuple[int, KV]]) -> list[Joined]:
    """Put KV, each with where its first token belongs, in order and without overlap, side by side: neighbouring pieces
    of one kind each. No layer is read before it is asked for."""
    end, found = 0, list[tuple[int, KV]]()
    for start, kv in pieces:
        assert start >= end, f"the pieces must come in order, got one at {start} after the end of another at {end}"
        end = start + kv.shape[3]
        if kv.shape[3]:
            found.append((start, kv))
    # equal for KV that differs in numbers of tokens only
    groups = (
        [*group]
        for _, group in groupby(
            found,
            key=lambda piece: (
                (piece[1].codec, piece[1].frame.shape[:3], piece[1].frame.shape[4])
                if isinstance(piece[1], StoredKV)
                else (piece[1].dtype, piece[1].device, piece[1].shape[:3], piece[1].shape[4])
            ),
        )
    )
    return [Joined(tuple(start for start, _ in group), tuple(kv for _, kv in group)) for group in groups]
