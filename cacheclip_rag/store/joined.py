"""KV of many chunks side by side, so that a layer is rotated and written once for all of them.

A prompt of 36 chunks would otherwise cost 36 times as many small operations per layer. Each of them starts and stops
all threads, which is slow where other programs use the same cores.

Chunks are copied side by side with numpy, whose copies start no threads, up to :data:`JOINED_BYTES` at a time. So the
number of tensor operations depends on the bytes of the prompt's KV, not on the number of its chunks, and memory holds
at most that many bytes beside the prompt's own KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .codecs import CODECS, KV, LayerKV, StoredKV, part_of

__all__ = ["JOINED_BYTES", "Joined", "join"]

JOINED_BYTES = 1 << 26
"""Most bytes of KV that are held side by side."""
_NUMPY = {1: np.dtype(np.int8), 2: np.dtype(np.int16), 4: np.dtype(np.int32)}
"""Numbers by their size; numpy has no bfloat16."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Tokens of several chunks side by side. Valid until the next one is asked for."""

    starts: tuple[int, ...]
    """Of each piece, where its first token belongs, as in :func:`join`."""
    lengths: tuple[int, ...]
    """Tokens of each piece."""
    _layers: _Buffer | _Tensors

    def layer(self, number: int, device: torch.device | str) -> LayerKV:
        """KV of one layer, ``(num_kv_heads, num_tokens, head_dim)``."""
        return self._layers.layer(number, device)

    @property
    def places(self) -> torch.Tensor:
        """``(num_tokens,)`` int64: where each token belongs."""
        runs = [np.arange(start, start + n) for start, n in zip(self.starts, self.lengths, strict=True)]
        return torch.from_numpy(np.concatenate(runs))


def join(pieces: Iterable[tuple[int, KV]]) -> Iterator[Joined]:
    """Put KV side by side, as much at a time as fits in :data:`JOINED_BYTES`.

    Args:
        pieces: where the first token belongs, and KV; in order, without overlap. KV from the store may be valid until
            the next piece only.

    Yields:
        Neighbouring pieces of one kind. A piece may be divided.
    """
    end = 0
    buffer: _Buffer | _Tensors | None = None
    starts: list[int] = []
    lengths: list[int] = []
    for start, kv in pieces:
        done, size = 0, kv.shape[3]
        assert start >= end, f"the pieces must come in order, got one at {start} after the end of another at {end}"
        end = start + size
        while done < size:
            if buffer is None or not buffer.takes(kv) or not buffer.room:
                if buffer is not None and starts:
                    yield Joined(tuple(starts), tuple(lengths), buffer)
                    starts, lengths = [], []
                if buffer is None or not buffer.takes(kv):
                    buffer = None  # frees its memory first
                    buffer = _Buffer(kv) if isinstance(kv, StoredKV) else _Tensors(kv)
                buffer.clear()
            count = min(size - done, buffer.room)
            buffer.add(kv if count == size else part_of(kv, done, done + count))  # type: ignore[arg-type]
            starts.append(start + done)
            lengths.append(count)
            done += count
    if buffer is not None and starts:
        yield Joined(tuple(starts), tuple(lengths), buffer)


class _Buffer:
    """Memory for stored KV of one codec."""

    def __init__(self, like: StoredKV) -> None:
        frame = like.frame
        self._codec = CODECS[frame.codec]
        num_layers, *layer = frame.shape
        self._kind = _kind_of(like)
        one = self._codec.num_bytes((*layer[:-2], 1, layer[-1])) * num_layers
        self._capacity = max(1, JOINED_BYTES // one)
        self._parts = self._codec.parts((*layer[:-2], self._capacity, layer[-1]))
        # memory that is never written is never taken from the system
        self._arrays = [np.empty((num_layers, *part.shape), _NUMPY[part.dtype.itemsize]) for part in self._parts]
        two = self._codec.parts((*layer[:-2], 2, layer[-1]))
        self._constant = [number for number, part in enumerate(two) if part.shape[part.axis] == 1]
        """Numbers of the arrays that hold for all tokens of a chunk."""
        self.clear()

    def takes(self, kv: KV) -> bool:
        return isinstance(kv, StoredKV) and _kind_of(kv) == self._kind

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self._capacity - self._used

    def clear(self) -> None:
        self._used = 0
        self._counts: list[int] = []
        self._of_chunks: dict[int, list[Any]] = {number: [] for number in self._constant}

    def add(self, kv: StoredKV) -> None:
        stop = self._used + kv.shape[3]
        for number, (part, array) in enumerate(zip(self._parts, kv.arrays(), strict=True)):
            axis = part.axis + 1  # layers come first
            if number in self._of_chunks:
                self._of_chunks[number].append(array.copy())
                continue
            target = self._arrays[number]
            before = (slice(None),) * axis
            target[(*before, slice(self._used, stop))] = array[(*before, kv.tokens)]
        self._counts.append(stop - self._used)
        self._used = stop

    def layer(self, number: int, device: torch.device | str) -> LayerKV:
        arrays = []
        for index, part in enumerate(self._parts):
            if index in self._of_chunks:
                found = np.concatenate([array[number] for array in self._of_chunks[index]], part.axis)
                found = found.repeat(self._counts, part.axis)
            else:
                found = self._arrays[index][number][(*(slice(None),) * part.axis, slice(self._used))]
            arrays.append(torch.from_numpy(found).view(part.dtype).to(device))
        return self._codec.combine(arrays)


class _Tensors:
    """Computed KV, joined when it is asked for."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like.dtype, like.device, like.shape[:3], like.shape[4]
        self._capacity = max(1, JOINED_BYTES // (like[:, :, :, :1].numel() * like.itemsize))
        self.clear()

    def takes(self, kv: KV) -> bool:
        return isinstance(kv, torch.Tensor) and (kv.dtype, kv.device, kv.shape[:3], kv.shape[4]) == self._like

    @property
    def room(self) -> int:
        return self._capacity - sum(kv.shape[3] for kv in self._kv)

    def clear(self) -> None:
        self._kv: list[torch.Tensor] = []
        self._joined: torch.Tensor | None = None

    def add(self, kv: torch.Tensor) -> None:
        self._kv.append(kv)

    def layer(self, number: int, device: torch.device | str) -> LayerKV:
        if self._joined is None:
            self._joined = torch.cat(self._kv, dim=3) if len(self._kv) > 1 else self._kv[0]
        return LayerKV(*self._joined[number].to(device))


def _kind_of(kv: StoredKV) -> tuple[str, Sequence[int], int]:
    return kv.codec, kv.frame.shape[:3], kv.frame.shape[4]
