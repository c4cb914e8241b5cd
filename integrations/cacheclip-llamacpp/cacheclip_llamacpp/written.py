"""Keys and values inside the bytes that llama.cpp writes of a sequence.

llama.cpp calls these bytes opaque. They are read here as the versions that were tried write them, with every field
checked: where anything is otherwise, nothing is read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_HEAD = 8
"""Bytes before each run: a mark, and flags."""
_FLOAT16 = 1
_Array = np.ndarray[tuple[int, int], np.dtype[np.float16]]


class UnknownLayoutError(ValueError):
    """llama.cpp has written something else than expected."""


@dataclass(frozen=True, slots=True)
class _NeighbouringTokens:
    """Neighbouring tokens."""

    layers: list[tuple[_Array, _Array]]
    """Keys and values of each layer, ``(num_tokens, num_heads * head_dim)``, in the order of the cells."""
    orders: list[np.ndarray[tuple[int], np.dtype[np.intp]]]
    """Per layer, the numbers of the rows by position."""


class WrittenKV:
    """What :meth:`.context.Context.dump` wrote of neighbouring tokens. Layers are numbered as they stand there."""

    def __init__(self, data: bytes, start: int, stop: int) -> None:
        """``start``, ``stop``: the positions that it holds.

        Raises:
            UnknownLayoutError: it is written otherwise than by the versions that were tried.
        """
        self.data = bytearray(data)
        self._at = 0
        self._runs, expected = list[_NeighbouringTokens](), start
        while self._at < len(data):
            run, first, last = self._run()
            if first != expected:
                raise UnknownLayoutError(f"expected position {expected}, got {first}")
            self._runs.append(run)
            expected = last + 1
        if expected != stop:
            raise UnknownLayoutError(f"expected {stop - start} tokens, got {expected - start}")
        self.num_layers = len(self._runs[0].layers)

    def take(self, layers: Sequence[int], is_value: bool) -> torch.Tensor:
        """A copy of the keys or values of layers with rows of one size, ``(len(layers), num_tokens, size)`` float16, by
        position."""
        parts = [[run.layers[n][is_value][run.orders[n]] for run in self._runs] for n in layers]
        return torch.from_numpy(np.stack([np.concatenate(each) for each in parts]))

    def put(self, layers: Sequence[int], is_value: bool, rows: torch.Tensor) -> None:
        """Write back what :meth:`take` gave."""
        for number, of_layer in zip(layers, rows.numpy(), strict=True):
            begin = 0
            for run in self._runs:
                order = run.orders[number]
                run.layers[number][is_value][order] = of_layer[begin : begin + len(order)]
                begin += len(order)

    def size(self, layer: int) -> tuple[int, int]:
        """Numbers in a row of keys, and of values."""
        keys, values = self._runs[0].layers[layer]
        return keys.shape[1], values.shape[1]

    # -- reading ----------------------------------------------------------------------------------------------------

    def _run(self) -> tuple[_NeighbouringTokens, int, int]:
        """The next run, its first and its last position. A model with a sliding window has two groups of layers."""
        head = bytes(self.data[:_HEAD])
        self._at += _HEAD
        run, ends = _NeighbouringTokens([], []), set[tuple[int, int]]()
        while self._at < len(self.data) and self.data[self._at : self._at + _HEAD] != head:
            num_streams, count = self._fields("II")
            if num_streams != 1 or not 0 < count <= len(self.data) // 12:
                raise UnknownLayoutError(f"{num_streams} streams of {count} cells")
            cells = np.frombuffer(self.data, "<i4", 3 * count, self._skip(12 * count)).reshape(count, 3)
            order = np.argsort(cells[:, 0])
            positions = cells[order, 0]
            if (cells[:, 1] != 1).any() or (np.diff(positions) != 1).any():
                raise UnknownLayoutError("its cells are not neighbouring tokens of one sequence")
            is_transposed, num_layers = self._fields("II")
            if is_transposed or not 0 < num_layers < 1 << 16:
                raise UnknownLayoutError(f"{num_layers} layers, transposed: {is_transposed}")
            keys, values = ([self._rows(count) for _ in range(num_layers)] for _ in range(2))
            run.layers.extend(zip(keys, values, strict=True))
            run.orders.extend([order] * num_layers)
            ends.add((int(positions[0]), int(positions[-1])))
        if len(ends) != 1:
            raise UnknownLayoutError("its groups of layers hold different tokens")
        return run, *ends.pop()

    def _rows(self, count: int) -> _Array:
        kind, num_bytes = self._fields("iQ")
        if kind != _FLOAT16 or num_bytes % 2 or num_bytes * count > len(self.data):
            raise UnknownLayoutError(f"rows of {num_bytes} bytes of type {kind}")
        size = num_bytes // 2
        return np.frombuffer(self.data, "<f2", count * size, self._skip(count * num_bytes)).reshape(count, size)

    def _fields(self, kinds: str) -> tuple[int, ...]:
        form = f"<{kinds}"
        return struct.unpack_from(form, self.data, self._skip(struct.calcsize(form)))

    def _skip(self, count: int) -> int:
        """Go on by so many bytes, and return where they begin."""
        begin, self._at = self._at, self._at + count
        if self._at > len(self.data):
            raise UnknownLayoutError(f"it ends after {len(self.data)} bytes")
        return begin
