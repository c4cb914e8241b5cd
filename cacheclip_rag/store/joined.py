"""KV of many chunks side by side, so that a layer is rotated and written once for all of them.

A prompt of 36 chunks would otherwise cost 36 times as many small operations per layer. Each of them starts and stops
all threads, which is slow where other programs use the same cores.

A layer is put side by side with numpy, whose copies start no threads, when it is asked for. So memory holds one layer
side by side, and the other layers need not be there yet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch

from .arena import Gather, Resident
from .codecs import CODECS, KV, ArrayPart, LayerKV, StoredKV, widths_of

_ALL_HEADS = slice(None)
COPIES_BESIDE = ("cuda",)
"""Kinds of devices that copy from page-locked memory while they compute."""


class Joined:
    """Pieces of one kind, side by side."""

    def __init__(self, placed: Sequence[tuple[int, KV]]) -> None:
        """``placed``: each piece with where its first token belongs, as in :func:`join`; at least one."""
        self.starts = [start for start, _ in placed]
        self.pieces = [kv for _, kv in placed]
        self.lengths = [kv.shape[3] for kv in self.pieces]
        runs = [np.arange(start, start + n) for start, n in zip(self.starts, self.lengths, strict=True)]
        self.places = torch.from_numpy(np.concatenate(runs))
        """``(num_tokens,)`` int64: where each token belongs."""
        self._tokens = [kv.tokens for kv in self.pieces if isinstance(kv, StoredKV)]
        alike = [
            (start, kv, kv.resident)
            for start, kv in placed
            if isinstance(kv, StoredKV) and isinstance(kv.resident, Resident)
        ]
        self.gather = Gather(alike) if alike else None
        """The pieces as they stand in the memory of a GPU; None if they do not. It takes the place of :meth:`layer`."""
        self._arrays = [kv.arrays() for kv in self.pieces if isinstance(kv, StoredKV) and kv.resident is None]
        """Of each stored piece its layers' arrays, of all tokens."""

    @cached_property
    def _piece_of_token(self) -> torch.Tensor:
        """``(num_tokens,)`` int64."""
        return torch.from_numpy(np.repeat(np.arange(len(self.pieces)), self.lengths))

    def in_blocks(self, num_tokens: int) -> list[Joined]:
        """The same pieces, so many tokens together or one piece more."""
        placed = zip(accumulate(self.lengths), self.starts, self.pieces, strict=True)
        groups = groupby(placed, key=lambda piece: (piece[0] - 1) // num_tokens)
        return [Joined([(start, kv) for _, start, kv in group]) for _, group in groups]

    def layer(self, number: int, device: torch.device | str, heads: slice = _ALL_HEADS) -> LayerKV:
        """KV of one layer, ``(num_kv_heads, num_tokens, head_dim)``, of all heads or some."""
        first = self.pieces[0]
        if not isinstance(first, StoredKV):
            layers = [kv[number] for kv in self.pieces if isinstance(kv, torch.Tensor)]
            joined = torch.cat(layers, dim=2) if len(layers) > 1 else layers[0]
            return LayerKV(*joined[:, heads].to(device))
        codec, shape = CODECS[first.codec], first.frame.layers[number]
        # of each of the codec's arrays: what it is in a piece of several tokens, and that of each piece
        of_pieces = zip(*(layers[number] for layers in self._arrays), strict=True)
        arrays = zip(codec.parts(shape._replace(num_tokens=2)), of_pieces, strict=True)
        device = torch.device(device)
        move = self._moved if device.type in COPIES_BESIDE else self._side_by_side
        return codec.combine(
            [move(part, [array[..., heads, :, :] for array in pieces], device) for part, pieces in arrays]
        )

    def _side_by_side(
        self, part: ArrayPart, pieces: Sequence[np.ndarray[Any, Any]], device: torch.device
    ) -> torch.Tensor:
        if part.shape[-2] > 1:  # else it holds for all tokens of a chunk
            pieces = [array[..., tokens, :] for array, tokens in zip(pieces, self._tokens, strict=True)]
        side_by_side = np.concatenate(pieces, -2) if len(pieces) > 1 else pieces[0]
        array = torch.from_numpy(side_by_side).view(part.dtype).to(device)
        if part.shape[-2] == 1 and len(pieces) > 1:
            array = array.index_select(-2, self._piece_of_token.to(device))
        return array

    def _moved(self, part: ArrayPart, pieces: Sequence[np.ndarray[Any, Any]], device: torch.device) -> torch.Tensor:
        """Each piece is moved from page-locked memory while the caller goes on: keep the pieces until the device has
        used them. Whole pieces, because some of their tokens do not lie side by side; these are cut on the device."""
        at = [array.ctypes.data for array in pieces]
        once = {
            begin: torch.from_numpy(array).view(part.dtype).to(device, non_blocking=True)
            for begin, array in dict(zip(at, pieces, strict=True)).items()
        }  # parts of one text move once
        moved = [once[begin] for begin in at]
        if part.shape[-2] == 1:
            return torch.cat(
                [each.expand(*part.shape[:-3], -1, n, -1) for each, n in zip(moved, self.lengths, strict=True)], -2
            )
        return torch.cat([each[..., tokens, :] for each, tokens in zip(moved, self._tokens, strict=True)], -2)


def join(pieces: Iterable[tuple[int, KV]], runs: Iterable[tuple[int, int]] = ()) -> list[Joined]:
    """Put KV, each with where its first token belongs, in order and without overlap, side by side: neighbouring pieces
    of one kind each, with none of ``runs``, ``[start, stop)``, between them. No layer is read before it is asked for.
    """
    end, placed, cuts = 0, list[tuple[int, KV]](), list[int]()
    for start, kv in pieces:
        assert start >= end, f"the pieces must come in order, got one at {start} after the end of another at {end}"
        if any(first < start and stop > end for first, stop in runs):
            cuts.append(start)
        end = start + kv.shape[3]
        if kv.shape[3]:
            placed.append((start, kv))
    # equal for KV that differs in numbers of tokens only
    groups = (
        [*group]
        for _, group in groupby(
            placed,
            key=lambda piece: (
                bisect_right(cuts, piece[0]),
                (piece[1].codec, widths_of(piece[1].frame.shape), piece[1].resident is None)
                if isinstance(piece[1], StoredKV)
                else (piece[1].dtype, piece[1].device, piece[1].shape[:3], piece[1].shape[4]),
            ),
        )
    )
    return [Joined(group) for group in groups]
