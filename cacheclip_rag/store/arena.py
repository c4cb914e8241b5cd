"""Chunk caches in the memory of a GPU, as they are stored: the fastest tier, and what prompts are gathered from.

A payload is copied there once, many layers in one copy. A prompt's KV is gathered from it, for all chunks and many
layers at once. LMCache (csrc/cb_kernels.cu) does the same with kernels of its own.

A payload that is looked up stays until it is released, which must be after the GPU has used it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .codecs import CODECS, FloatCodec, Frame, KVShape, StoredKV, upload

_ALIGNED = 4096
Free = list[tuple[int, int]]
_SHARE = 4
"""Of the memory that is free at first use, the arena takes one part in so many."""


@dataclass(eq=False, slots=True)
class Resident:
    """A payload in the arena, or its first layers."""

    arena: Arena
    frame: Frame
    """The header alone."""
    begin: int
    end: int
    """The arena's bytes that it takes."""
    start: int
    """Where layer 0 begins: a multiple of the bytes of one row of numbers."""
    layers: int = 0
    """Layers that were copied."""
    users: int = 0

    @property
    def dtype(self) -> torch.dtype:
        codec = CODECS[self.frame.codec]
        assert isinstance(codec, FloatCodec)
        return codec.dtype


class Arena:
    """Up to ``max_bytes`` bytes (None: a quarter of what is free at first use); the least recently used leave first.
    Payloads whose layers differ, and integers, do not come in. Safe to share between threads that use one stream."""

    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        self.device = device
        self.num_bytes = free_bytes(device) // _SHARE if max_bytes is None else max_bytes
        self.num_bytes -= self.num_bytes % _ALIGNED
        self.memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.in_memory = True
        self.hits = self.misses = self.loads = self.evictions = 0
        self._residents: OrderedDict[str, Resident] = OrderedDict()
        self._free = [(0, self.num_bytes)]
        self._lock = threading.Lock()

    @property
    def bytes_held(self) -> int:
        with self._lock:
            return self.num_bytes - sum(end - begin for begin, end in self._free)

    def list(self) -> Iterator[str]:
        """Keys, the least recently used first."""
        with self._lock:
            return iter([*self._residents])

    def take(self, key: str, num_layers: int) -> Resident | None:
        """A payload whose first layers are all there, kept until :meth:`release`."""
        with self._lock:
            resident = self._residents.get(key)
            if resident is None or resident.layers < min(num_layers, resident.frame.shape[0]):
                self.misses += 1
                return None
            self._residents.move_to_end(key)
            resident.users += 1
            self.hits += 1
            return resident

    def place(self, frame: Frame) -> Resident | None:
        """A place for a payload, kept until :meth:`release`. None: it may not come in, or there is no room."""
        codec, shape = CODECS[frame.codec], frame.shape
        if not isinstance(codec, FloatCodec) or isinstance(shape, KVShape):
            return None
        with self._lock:
            resident = self._residents.get(frame.key)
            if resident is None or (resident.frame.codec, resident.frame.shape) != (frame.codec, shape):
                self._remove(frame.key)
                row = shape[4] * codec.dtype.itemsize
                begin = self._allocate(size := -(-(frame.num_bytes - frame.start + row) // _ALIGNED) * _ALIGNED)
                if begin is None:
                    return None
                header = replace(frame, data=memoryview(bytearray()))
                resident = Resident(self, header, begin, begin + size, -(-begin // row) * row)
                self._residents[frame.key] = resident
                self.loads += 1
            self._residents.move_to_end(frame.key)
            resident.users += 1
            return resident

    def load(self, resident: Resident, frame: Frame, stop: int) -> None:
        """Copy layers of ``frame`` before ``stop``, as many as are not there yet, at once. They have been checked."""
        with self._lock:
            first = resident.layers
            if first >= stop:
                return
            begin, end = frame.bounds[first], frame.bounds[stop]
            source = torch.frombuffer(frame.data, dtype=torch.uint8, count=end - begin, offset=begin)
            target = resident.start + begin - frame.start
            self.memory[target : target + end - begin].copy_(source, non_blocking=True)
            resident.layers = stop

    def release(self, residents: Iterable[Resident], *, waits: bool = False) -> None:
        """Payloads may leave. ``waits``: first wait until the GPU has used them and what was copied to them."""
        if waits:
            torch.cuda.synchronize(self.device)
        with self._lock:
            for resident in residents:
                resident.users -= 1
                if not resident.users and self._residents.get(resident.frame.key) is not resident:
                    self._give_back(resident)  # it was dropped meanwhile

    def delete(self, keys: Iterable[str]) -> None:
        """Nobody finds these payloads any more."""
        with self._lock:
            for key in keys:
                self._remove(key)

    def _remove(self, key: str) -> None:
        resident = self._residents.pop(key, None)
        if resident is not None and not resident.users:
            self._give_back(resident)

    def _allocate(self, size: int) -> int | None:
        while True:
            for number, (begin, end) in enumerate(self._free):
                if end - begin >= size:
                    self._free[number] = (begin + size, end)
                    return begin
            oldest = next((key for key, each in self._residents.items() if not each.users), None)
            if oldest is None:
                return None
            self._remove(oldest)
            self.evictions += 1

    def _give_back(self, resident: Resident) -> None:
        merged: Free = []
        for begin, end in sorted([*self._free, (resident.begin, resident.end)]):
            if merged and begin == merged[-1][1]:
                merged[-1] = merged[-1][0], end
            elif begin < end:
                merged.append((begin, end))
        self._free = merged


class Gather:
    """Pieces in one arena, of one codec and width, side by side."""

    def __init__(self, placed: Sequence[tuple[int, StoredKV, Resident]]) -> None:
        """``placed``: each piece with the slot of its first token, in order; at least one. Slots between them get KV of
        another token."""
        self._pieces = [(kv.frame, resident) for _, kv, resident in placed]
        resident = placed[0][2]
        self._arena, self._dtype, (_, _, self._heads, _, self._width) = (
            resident.arena,
            resident.dtype,
            resident.frame.shape,
        )
        self.first, self.stop = placed[0][0], placed[-1][0] + placed[-1][1].shape[3]
        row = self._width * self._dtype.itemsize
        rows = np.zeros((2, self.stop - self.first), np.int64)
        rows[0], rows[1] = resident.frame.num_tokens, resident.start // row
        for slot, kv, each in placed:
            own, first = slice(slot - self.first, slot - self.first + kv.shape[3]), kv.tokens.start or 0
            rows[0, own] = kv.frame.num_tokens
            rows[1, own] = each.start // row + first + np.arange(kv.shape[3])
        self._steps, self._firsts = upload(torch.from_numpy(rows), self._arena.device)

    @property
    def layer_bytes(self) -> int:
        return 2 * self._heads * (self.stop - self.first) * self._width * self._dtype.itemsize

    def layers(self, first: int, stop: int) -> torch.Tensor:
        """KV of layers ``first`` to ``stop - 1``, ``(num_layers, 2, num_kv_heads, num_slots, head_dim)`` in the codec's
        dtype. What is not in the arena is copied there."""
        for frame, resident in self._pieces:
            self._arena.load(resident, frame, stop)
        numbers = torch.arange(first * 2 * self._heads, stop * 2 * self._heads, device=self._arena.device)
        rows = torch.addcmul(self._firsts, numbers[:, None], self._steps)
        memory = self._arena.memory.view(self._dtype)
        memory = memory[: len(memory) - len(memory) % self._width].view(-1, self._width)
        return memory.index_select(0, rows.flatten()).view(stop - first, 2, self._heads, -1, self._width)


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]
