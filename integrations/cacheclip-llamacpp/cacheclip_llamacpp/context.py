"""The KV of many prompts in one context of llama.cpp.

A context has cells; a cell holds the KV of a token for every layer, its position, and the sequences that it belongs to.
To give a cell to another sequence, or to another position, changes only what is written about it: the keys are rotated
by llama.cpp itself, for all cells together, when it next computes. Computed tokens must follow the last position of
their sequence.

Where a model has a sliding window, llama.cpp writes over cells that their own sequence no longer sees, unless they
belong to another one, too. Here they may still be copied elsewhere, so every token belongs to two sequences then. For
the same reason, KV is written out in runs that are no longer than the window.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cacheclip_rag import ModelError

from .library import library
from .weights import GgufWeights

logger = logging.getLogger(__name__)

_SEQUENCES = 64
"""Sequences of a context. Each costs a row of logits."""
_SCRATCH = 0
"""The sequence in which KV is read and written."""
_BATCH = 2048
"""Tokens of one call."""
_STEP = 1024
"""A context's cells are a multiple of this."""
KV_TYPE = "f16"
"""Type of keys and values."""

_IDLE_S = 0.5
"""Between two looks whether a context is idle that is to be given back."""


class Cells:
    """A sequence of a context: tokens from position 0 on. Its cells are free again once nobody refers to it."""

    def __init__(self, context: Context, ids: tuple[int, ...], room: int) -> None:
        self.context, self.ids, self.room = context, ids, room
        self.length = 0
        """The position of the next token."""
        self.runs: list[tuple[int, int]] | None = None
        """Positions that are filled, if those between them are not; None: all up to the last one."""
        weakref.finalize(self, context.released.append, ids).atexit = False


class _Opened(NamedTuple):
    """A context of llama.cpp."""

    pointer: Any
    memory: Any
    num_cells: int
    free: Callable[[], object]


_CLOSED = _Opened(None, None, 0, lambda: None)


class Context:
    """One context of a model. It grows when more cells are asked for. Safe to share between threads: one computes at a
    time."""

    def __init__(self, weights: GgufWeights, free_bytes: Callable[[], int | None] = lambda: None) -> None:
        """``free_bytes``: of the device; None if that is not known."""
        self.bytes_per_token = 0
        """Of KV; 0: not known yet."""
        self._free_bytes = free_bytes
        self.released: deque[tuple[int, ...]] = deque()
        """Sequences that nobody refers to any more. Whatever thread drops the last reference, it waits for nobody."""
        self._weights = weights
        self._lock = threading.RLock()
        self._per_token = 2 if weights.window else 1
        self._scratch = (_SCRATCH, _SEQUENCES - 1)[: self._per_token]
        self._free = [tuple(range(n, n + self._per_token)) for n in range(1, _SEQUENCES - 2, self._per_token)]
        self._live: weakref.WeakSet[Cells] = weakref.WeakSet()
        self._opened = _CLOSED
        self._closes_when_idle = threading.Event()
        """Whether :meth:`drop_freed` waits for an idle moment."""
        self._shifted = False
        self._batch = _Batch(self._per_token)
        self.vocab_size = int(library().llama_vocab_n_tokens(weights.vocabulary))

    @property
    def _pointer(self) -> Any:
        return self._opened.pointer

    @property
    def _memory(self) -> Any:
        return self._opened.memory

    # -- cells ----------------------------------------------------------------------------------------------------

    def new(self, room: int) -> Cells:
        """An empty sequence for which ``room`` cells are free.

        Raises:
            ModelError: too many prompts at a time, or no memory.
        """
        with self._lock:
            self._collect()
            if not self._free:
                raise ModelError(
                    f"model {self._weights.name!r} holds the KV of {len(self._live)} prompts, and llama.cpp has room "
                    "for no more. Finish some answers first."
                )
            self._make_room(room)
            cells = Cells(self, self._free.pop(), room)
            self._live.add(cells)
            return cells

    def copy(self, source: Cells, target: Cells, start: int, stop: int) -> None:
        """Let the cells of positions ``[start, stop)`` belong to ``target``, too, whose next position is ``start``."""
        assert start == target.length, f"position {start} cannot follow {target.length} tokens"
        if start < stop:
            with self._lock:
                for own in target.ids:
                    library().llama_memory_seq_cp(self._memory, source.ids[0], own, start, stop)
        target.length = stop

    def cut(self, cells: Cells, start: int) -> None:
        """Drop all positions from ``start`` on."""
        with self._lock:
            for own in cells.ids:
                library().llama_memory_seq_rm(self._memory, own, start, -1)
        cells.length = min(cells.length, start)

    def keep(self, cells: Cells, runs: Sequence[tuple[int, int]]) -> None:
        """Drop all positions that are in no run; they are ascending."""
        edges = [0, *(edge for run in runs for edge in run), cells.length]
        with self._lock:
            for start, stop in zip(edges[::2], edges[1::2], strict=True):
                for own in cells.ids if start < stop else ():
                    library().llama_memory_seq_rm(self._memory, own, start, stop)

    def dump(self, cells: Cells, start: int, stop: int) -> bytes:
        """The KV of positions ``[start, stop)`` as llama.cpp writes it, with its positions."""
        api = library()
        with self._lock:
            self._settle()
            parts = []
            for first, last in self._runs(start, stop):
                api.llama_memory_seq_cp(self._memory, cells.ids[0], _SCRATCH, first, last)
                try:
                    size = api.llama_state_seq_get_size(self._pointer, _SCRATCH)
                    buffer = (ctypes.c_uint8 * size)()  # there may be no memory for it
                    written = api.llama_state_seq_get_data(self._pointer, buffer, size, _SCRATCH)
                finally:
                    api.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
                if written != size:
                    raise ModelError(f"llama.cpp wrote {written} of {size} bytes of the KV of {last - first} tokens.")
                parts.append(bytes(buffer))
            return b"".join(parts)

    def load(self, data: torch.Tensor, num_tokens: int, target: Cells, *, first: int, count: int, at: int) -> bool:
        """Read what :meth:`dump` wrote of ``num_tokens`` tokens, and let those from ``first`` on, ``count`` of them,
        belong to ``target`` from position ``at`` on. The keys are rotated when something is next computed.

        Args:
            data: ``(num_bytes,)`` uint8. Bytes after the KV are ignored.

        Returns:
            False if llama.cpp cannot read it. The target then has nothing at these positions.
        """
        with self._lock:
            is_read = self._load(data, num_tokens, target, first, count, at)
            if is_read and target.runs is not None:
                target.runs.append((at, at + count))
        return is_read

    def _load(self, data: torch.Tensor, num_tokens: int, target: Cells, first: int, count: int, at: int) -> bool:
        """The same for one who has the lock, and who knows which positions are filled."""
        api, taken = library(), 0
        begin = 0
        for low, high in self._runs(0, num_tokens):
            part = data[taken:]
            pointer = ctypes.cast(part.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
            read = api.llama_state_seq_set_data(self._pointer, pointer, part.numel(), _SCRATCH) if len(part) else 0
            if low == 0:
                begin = api.llama_memory_seq_pos_min(self._memory, _SCRATCH)
            own = (
                api.llama_memory_seq_pos_min(self._memory, _SCRATCH) - begin,
                api.llama_memory_seq_pos_max(self._memory, _SCRATCH) - begin + 1,
            )
            if not read or own != (low, high):
                api.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
                for each in target.ids:
                    api.llama_memory_seq_rm(self._memory, each, at, at + count)
                return False
            taken += read
            for start, stop in ((0, first), (first + count, num_tokens)):
                if start < stop:
                    api.llama_memory_seq_rm(self._memory, _SCRATCH, begin + start, begin + stop)
            shift = at - first - begin
            if shift:
                api.llama_memory_seq_add(self._memory, _SCRATCH, -1, -1, shift)
                self._shifted = True
            for each in target.ids:
                api.llama_memory_seq_cp(self._memory, _SCRATCH, each, -1, -1)
            api.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        target.length = max(target.length, at + count)
        return True

    def replace(
        self,
        target: Cells,
        held: Cells,
        data: bytes | bytearray,
        span: tuple[int, int],
        parts: Sequence[tuple[int, int]],
    ) -> None:
        """Let KV as :meth:`dump` writes it take the place of what two sequences have: ``target``, and ``held`` behind
        the end of ``target``.

        Args:
            span: positions that ``data`` holds.
            parts: positions that are replaced, each before or behind the end of ``target``.
        """
        api, (at, end) = library(), span
        with self._lock:
            new = self.new(0)  # it takes the cells of what it replaces
            for start, stop in parts:
                for own in (*target.ids, *held.ids):
                    api.llama_memory_seq_rm(self._memory, own, start, stop)
            tensor = torch.frombuffer(data, dtype=torch.uint8)
            is_read = self.load(tensor, end - at, new, first=0, count=end - at, at=at)
            assert is_read, "llama.cpp reads what it has written"
            for start, stop in parts:
                for own in (target if stop <= target.length else held).ids:
                    api.llama_memory_seq_cp(self._memory, new.ids[0], own, start, stop)
            self.cut(new, 0)

    def alone(self, tokens: Sequence[tuple[int, int]]) -> list[bytes]:
        """What :meth:`dump` writes of tokens, each a position and an id, that see only themselves. All are computed in
        one call, each in a sequence of its own."""
        with self._lock:
            cells = [self.new(1) for _ in tokens]
            for each, (position, _) in zip(cells, tokens, strict=True):
                each.length, each.room = position, position + 1
            try:
                self.decode_many([(each, [token]) for each, (_, token) in zip(cells, tokens, strict=True)], logits_of=0)
                return [self.dump(each, at, at + 1) for each, (at, _) in zip(cells, tokens, strict=True)]
            finally:
                for each in cells:
                    each.room = 1

    def moved(self, data: bytes, at: int) -> bytes:
        """What :meth:`dump` writes of a token, once what it wrote of it elsewhere is moved to position ``at``."""
        with self._lock:
            cells = self.new(1)
            cells.runs = []
            is_read = self.load(torch.frombuffer(bytearray(data), dtype=torch.uint8), 1, cells, first=0, count=1, at=at)
            assert is_read, "llama.cpp reads what it has written"
            return self.dump(cells, at, at + 1)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        step = self._weights.window or max(1, stop - start)
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    # -- computing ------------------------------------------------------------------------------------------------

    def decode(self, cells: Cells, ids: Sequence[int], *, logits_of: int = 1) -> torch.Tensor | None:
        """Compute tokens after the last one.

        Args:
            logits_of: of so many last tokens.

        Returns:
            ``(logits_of, vocab_size)`` logits; None for none.
        """
        found: list[torch.Tensor] = []
        for begin in range(0, len(ids), _BATCH):
            part = ids[begin : begin + _BATCH]
            wanted = max(0, min(len(part), logits_of - (len(ids) - begin - len(part))))
            found += self.decode_many([(cells, part)], logits_of=wanted)
        return torch.cat(found) if found else None

    def decode_many(self, parts: Sequence[tuple[Cells, Sequence[int]]], *, logits_of: int) -> list[torch.Tensor]:
        """Compute tokens after the last one of each sequence, all in one call: the weights are read once. No sequence
        sees what is computed of another.

        Args:
            parts: sequences, each once, and their tokens; no more than a call takes.
            logits_of: of so many last tokens of each.

        Returns:
            Per part ``(logits_of, vocab_size)`` logits; empty for none.

        Raises:
            ModelError: llama.cpp could not do it. Nothing has changed then.
        """
        with self._lock:
            for cells, ids in parts:
                if cells.length + len(ids) > cells.room:  # an answer that is longer than was said
                    self._make_room(grown := cells.length + len(ids) + _STEP // 4 - cells.room)
                    cells.room += grown
            self._use_threads()
            code = library().llama_decode(
                self._pointer, self._batch.of([(cells.ids, cells.length, ids) for cells, ids in parts], logits_of)
            )
            if code:
                for cells, _ in parts:
                    self.cut(cells, cells.length)
                count = sum(len(ids) for _, ids in parts)
                raise ModelError(f"llama.cpp could not compute {count} tokens (its code is {code}).")
            self._shifted = False
            for cells, ids in parts:
                cells.length += len(ids)
            if not logits_of:
                return []
            get, rows, end = library().llama_get_logits_ith, [], 0
            for _, ids in parts:
                end += len(ids)
                numbers = range(end - logits_of, end)
                rows += [np.ctypeslib.as_array(get(self._pointer, n), (self.vocab_size,)) for n in numbers]
            return list(torch.from_numpy(np.stack(rows)).split(logits_of))

    def compute_apart(
        self, target: Cells, held: Cells, ids: Sequence[int], runs: Sequence[tuple[int, int]], *, logits_of: int = 0
    ) -> torch.Tensor | None:
        """Compute some runs of a prompt in one call, and let them and what ``held`` has between them belong to
        ``target``. A run sees the others of its call as ``held`` has them; one that is stored nowhere it does not see.
        ``held`` loses them, so that the tokens of the next call take their cells: the fewer cells, the faster.

        Args:
            ids: of the whole prompt.
            runs: neighbouring positions, ascending; none is empty.
            logits_of: of so many last tokens; only for a single run.
        """
        with self._lock:
            (start, stop), *others = runs
            self.copy(held, target, target.length, start)
            if not others:
                self._drop(held, start, stop)
                return self.decode(target, ids[start:stop], logits_of=logits_of)
            apart = [self.new(0) for _ in others]
            for cells, (first, last) in zip(apart, others, strict=True):
                self.copy(target, cells, 0, start)
                self.copy(held, cells, start, first)
                cells.room = last  # its new cells are counted as the target's
            parts = [(target, ids[start:stop])]
            parts += [(cells, ids[first:last]) for cells, (first, last) in zip(apart, others, strict=True)]
            self.decode_many(parts, logits_of=0)
            for cells, (first, last) in zip(apart, others, strict=True):
                self.copy(held, target, target.length, first)
                self.copy(cells, target, first, last)
                self.cut(cells, 0)
            for first, last in runs:
                self._drop(held, first, last)
        return None

    def _drop(self, cells: Cells, start: int, stop: int) -> None:
        for own in cells.ids:
            library().llama_memory_seq_rm(self._memory, own, start, stop)
        filled = cells.runs if cells.runs is not None else [(0, cells.length)]
        parts = [part for first, last in filled for part in ((first, min(last, start)), (max(first, stop), last))]
        cells.runs = [(first, last) for first, last in parts if first < last]

    def spare(self) -> int:
        """Sequences that are free, without those for the next answers."""
        with self._lock:
            self._collect()
            return max(0, len(self._free) - _SEQUENCES // 4)

    def _use_threads(self) -> None:
        threads = torch.get_num_threads()
        if threads != library().llama_n_threads(self._pointer):
            library().llama_set_n_threads(self._pointer, threads, threads)

    def _settle(self) -> None:
        """Have keys rotated that wait for it: llama.cpp does so when it computes anything."""
        if not self._shifted:
            return
        code = library().llama_decode(self._pointer, self._batch.of([(self._scratch, 0, [0])], 0))
        for own in self._scratch:
            library().llama_memory_seq_rm(self._memory, own, -1, -1)
        if code:
            raise ModelError(f"llama.cpp could not rotate the keys of moved KV (its code is {code}).")
        self._shifted = False

    # -- size -----------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        while self.released:
            ids = self.released.popleft()
            for own in ids if self._pointer is not None else ():
                library().llama_memory_seq_rm(self._memory, own, -1, -1)
            self._free.append(ids)

    def drop_freed(self) -> None:
        """Give the memory back in which the KV of ended answers lies, as cells that are free still hold it: now, or as
        soon as nobody computes and no answer is under way, whose KV must stay where it is between two steps."""
        if not self._closes_when_idle.is_set():
            self._closes_when_idle.set()
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
                if not self._live:
                    self._closes_when_idle.clear()
                    self._close()
                    return
            finally:
                self._lock.release()
        again = threading.Timer(_IDLE_S, self._close_if_idle)
        again.daemon = True
        again.start()

    def _make_room(self, room: int) -> None:
        self._collect()
        needed = sum(cells.room for cells in self._live) + room + 1  # one is computed to have keys rotated
        if needed > self._opened.num_cells:
            self._grow(-(-needed // _STEP) * _STEP)

    def _grow(self, num_cells: int) -> None:
        """Move all to a larger context. This one stays until all is there: if that fails, only who wanted more has the
        error."""
        self._check_room(num_cells)
        if not self._live:  # nobody needs what is in it
            self._close()
        old, new = self._opened, self._open(num_cells)
        try:
            for cells, start, stop in self._filled():
                data = bytearray(self.dump(cells, start, stop))
                self._opened = new
                tensor = torch.frombuffer(data, dtype=torch.uint8)
                is_moved = self._load(tensor, stop - start, cells, 0, stop - start, start)
                if not is_moved:
                    raise ModelError(
                        f"llama.cpp could not move KV of model {self._weights.name!r} to a context of {num_cells} "
                        "tokens: there may be too little memory. Ask fewer questions at a time."
                    )
                self._opened = old
        except BaseException:
            self._opened = old
            new.free()
            raise
        self._opened = new
        old.free()

    def _filled(self) -> list[tuple[Cells, int, int]]:
        """What is in this context: sequences, each with neighbouring positions that are filled."""
        return [
            (cells, start, stop)
            for cells in self._live
            for start, stop in (cells.runs if cells.runs is not None else [(0, cells.length)])
            if start < stop
        ]

    def _check_room(self, num_cells: int) -> None:
        """The system kills a process without a message. While KV is moved, both contexts are there, and what is being
        moved is there twice more."""
        free, beside = self._free_bytes(), " beside the one that is in use" if self._live else ""
        moved = max((stop - start for _, start, stop in self._filled()), default=0)
        more = num_cells + 2 * moved if self._live else num_cells - self._opened.num_cells
        needed = more * self.bytes_per_token
        if free is not None and needed > free:
            raise ModelError(
                f"a context of {num_cells} tokens of model {self._weights.name!r} needs {needed / 2**30:.1f} GiB more"
                f"{beside}, and only {free / 2**30:.1f} GiB are free. Ask shorter questions, or fewer at a time."
            )

    def _open(self, num_cells: int) -> _Opened:
        api = library()
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = num_cells, _BATCH, _SEQUENCES
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.kv_unified = params.swa_full = True
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = api.GGML_TYPE_F16
        pointer = api.llama_init_from_model(self._weights.pointer, params)
        if not pointer:
            raise ModelError(
                f"llama.cpp could not make a context of {num_cells} tokens for model {self._weights.name!r}: there is "
                "too little memory, or the model's attention has no fast form. Use a shorter prompt or a smaller "
                "model, or ask fewer at a time."
            )
        # it refers to the weights, which must not be freed before it
        end = weakref.finalize(self, lambda pointer, weights: api.llama_free(pointer), pointer, self._weights)
        end.atexit = False
        logger.debug("context of %d tokens for %s", num_cells, self._weights.name)
        opened = _Opened(pointer, api.llama_get_memory(pointer), num_cells, end)
        if not api.llama_memory_can_shift(opened.memory):
            end()
            self._weights.refuse("llama.cpp cannot move its KV to other positions")
        return opened

    def _close(self) -> None:
        closed, self._opened, self._shifted = self._opened, _CLOSED, False
        closed.free()


class _Batch:
    """The arrays of one call, made once: to fill them token by token would cost more than a small call."""

    def __init__(self, per_token: int) -> None:
        api = library()
        self._tokens, self._positions = np.zeros(_BATCH, np.int32), np.zeros(_BATCH, np.int32)
        self._counts, self._wanted = np.full(_BATCH, per_token, np.int32), np.zeros(_BATCH, np.int8)
        self._own = np.zeros((_BATCH, per_token), np.int32)
        rows = self._own.ctypes.data + self._own.strides[0] * np.arange(_BATCH, dtype=np.uintp)
        self._rows = rows.astype(np.uintp)
        numbers = ctypes.POINTER(ctypes.c_int32)
        self._struct = api.llama_batch(
            0,
            self._tokens.ctypes.data_as(numbers),
            None,
            self._positions.ctypes.data_as(numbers),
            self._counts.ctypes.data_as(numbers),
            self._rows.ctypes.data_as(ctypes.POINTER(numbers)),
            self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def of(self, parts: Sequence[tuple[tuple[int, ...], int, Sequence[int]]], logits_of: int) -> Any:
        """A batch of tokens, with logits of so many last ones of each part: its sequences, first position and ids."""
        begin = 0
        for sequences, position, ids in parts:
            end = begin + len(ids)
            self._tokens[begin:end] = ids
            self._positions[begin:end] = np.arange(position, position + len(ids))
            self._wanted[begin:end] = np.arange(len(ids)) >= len(ids) - logits_of
            self._own[begin:end] = sequences
            begin = end
        self._struct.n_tokens = begin
        return self._struct
