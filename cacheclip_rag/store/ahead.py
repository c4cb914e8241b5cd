"""Reads the KV of several chunks on a thread of its own, layer by layer, while the request computes.

Media that serve many reads at once (object storage) get as many, by a pool of threads, in the order of layers.

All chunks' first layers come first, then their second ones, and so on, so that a model can run its first layers while
the rest is read. Source of the idea to load a layer's KV while the layer before it is computed: CacheBlend
(arXiv:2405.16444, its pipelined loading). Departure: a backend that gives whole payloads only is read chunk by chunk,
so that nothing but scoring and what else comes before the KV is needed can hide it.
"""

from __future__ import annotations

import contextvars
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

import torch

from .arena import Arena, Resident
from .codecs import HEAD_BYTES, Frame, StoredKV, checked_frame, keeps, new_memory, pins_memory
from .entries import Entry
from .reading_pool import each_in_pool, in_order
from .tenant import FAILURES, Shape, TenantStore

_AHEAD_BYTES = 1 << 26
"""Bytes that reading keeps ahead of layers that are used once. More would take memory and hide nothing."""
_LEAST_AHEAD = 4
"""Layers that it keeps ahead at least."""
_READERS, _GPU_BYTES = min(8, os.cpu_count() or 1), 1 << 24
"""Threads that read for a GPU, and bytes of their reads: each takes the interpreter from the thread that starts the
GPU's work."""
_ALL = sys.maxsize


T = TypeVar("T")


class ReadAgain(Exception):
    """KV that :meth:`ReadAhead.kv` gave turned out to be damaged or was replaced. Ask for all KV again
    (:meth:`ReadAhead.until_whole`)."""


class ReadAhead:
    """Reads the KV of keys in order. Use it in a ``with`` block, at whose end the thread has ended, whatever happens.

    Every layer is compared with its checksum before :meth:`wait` lets anybody use it. Where a part of a payload cannot
    be read as it should be, the payload is read once more as a whole, which decides whether it is damaged. Payloads
    that are in memory need no thread. Memory holds the stored form of all KV until it is closed; of layers that are
    used once, that of a few.
    """

    def __init__(
        self,
        store: TenantStore,
        keys: Sequence[str],
        *,
        codec: str | None = None,
        num_layers: int | None = None,
        once: bool = False,
        when_read: Callable[[], None] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        arena: Arena | None = None,
    ) -> None:
        """
        Args:
            arena: of the GPU that will use the KV. What is there is not read.
            codec: KV of a coarser codec counts as missing; default any codec will do.
            num_layers: read the first layers only, if no others are used; default all.
            once: the caller uses the layers in order, each once, and calls :meth:`done` after each.
            when_read: called when all is read, by the thread that read it. Not called if reading was stopped or failed.
            shapes: that the KV must have, by key; default any shape.
        """
        self._store, self._keys, self._codec, self._when_read = store, tuple(keys), codec, when_read
        # a GPU takes KV faster than one thread copies it and compares it with its checksum
        self._is_pinned = pins_memory()
        self._once = once and not store.promotes and not self._is_pinned  # which take whole payloads
        self._num_layers = _ALL if num_layers is None else num_layers
        self._shapes = shapes or {}
        self._again = lambda: ReadAhead(
            store, keys, codec=codec, num_layers=num_layers, once=once, when_read=when_read, shapes=shapes, arena=arena
        )
        self._arena, self._residents = arena, list[Resident]()
        self._found: dict[str, StoredKV | None] = {}
        self._ready = dict.fromkeys(self._keys, 0)
        """Layers that are there and checked, by key."""
        self._given: set[str] = set()
        self._changed = threading.Condition()
        self._stale: set[str] = set()
        """Keys of which others were given before."""
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._started = False
        self._opened: dict[str, StoredKV] = {}
        """What is read in parts, by key."""
        self._read: dict[tuple[str, int], int] = {}
        """Ends of pieces that were read before others of their key, by key and first layer."""
        self._failed: list[str] = []
        """Keys that are to be read as a whole."""
        self._ahead = self._wanted = self._done = 0
        """Layers that may be read ahead; the last one that was waited for; how many are done with."""
        self._began_at: float | None = None
        self._ended_at: float | None = None
        self._idle_since: float | None = None
        self._idle_s = 0.0

    def start(self) -> None:
        """Begin to read: take what is in memory, and start the thread if anything else is to be read. A second call
        does nothing.

        Raises:
            RuntimeError: the system allows no more threads. :meth:`kv` and :meth:`wait` raise it as well.
        """
        with self._lock:
            if self._started:
                return
            self._started, self._began_at = True, time.perf_counter()
            try:
                if self._arena is not None:
                    self._take(self._arena)
                in_memory = [backend for backend in self._store.chunk_store.tiers.backends if backend.in_memory]
                wanted = [key for key in self._ready if key not in self._found]
                near = [key for key in wanted if any(backend.get_many([key]) for backend in in_memory)]
                for key, stored in zip(near, self._store.get_each(near, shapes=self._shapes), strict=True):
                    self._settle(key, stored)
                if len(near) < len(wanted):
                    # in this context: the thread may wait for the catalog as long as its request
                    run = contextvars.copy_context().run
                    thread = threading.Thread(target=run, args=(self._run,), name="cacheclip-read", daemon=True)
                    thread.start()  # fails where the system allows no more threads
                    self._thread = thread
            except BaseException as error:  # this may be another reading's thread: whoever waits for KV must see it
                self._fail(error)
                raise
        if self._thread is None:
            self._end()

    def kv(self, number: int) -> StoredKV | None:
        """The KV of a key, by its number, or None if there is none. Waits until its size is known, not until its layers
        are there: call :meth:`wait` before each layer is used."""
        self.start()
        key = self._keys[number]
        with self._changed:
            self._changed.wait_for(lambda: key in self._found or self._error is not None)
            if self._error is not None:
                raise self._error
            self._given.add(key)
            stored = self._found[key]
            if stored is not None and self._arena is not None and stored.resident is None:
                resident = self._arena.place(stored.frame)
                self._residents += [resident] if resident is not None else []
                stored = self._found[key] = replace(stored, resident=resident)
        # an engine with this model as auxiliary may have stored it with a coarser codec
        return stored if stored is None or self._codec is None or keeps(stored.codec, self._codec) else None

    def wait(self, layer: int) -> None:
        """Wait until a layer of all keys is there.

        Raises:
            ReadAgain: some KV that :meth:`kv` gave is not what it should be.
        """
        self.start()
        with self._changed:
            self._wanted = max(self._wanted, layer)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: bool(self._stale) or self._error is not None or min(self._ready.values(), default=_ALL) > layer
            )
            if self._error is not None:
                raise self._error
            if self._stale:
                if self._is_pinned:  # the device may still copy from what is dropped now
                    torch.cuda.synchronize(None if self._arena is None else self._arena.device)
                if self._arena is not None:
                    self._arena.delete(self._stale)
                self._stale.clear()
                raise ReadAgain

    def until_whole(self, work: Callable[[ReadAhead], T]) -> T:
        """What ``work`` returns, which asks a reading for KV. While KV that it got turns out to be damaged, which is
        gone then, it is called once more; if layers are used once, with another reading of the same keys."""
        try:
            return work(self)
        except ReadAgain:
            if not self._once:
                return self.until_whole(work)
            self.close()
        with self._again() as another:
            return another.until_whole(work)

    def done(self, layer: int) -> None:
        """This layer is not used any more: its memory is given back if layers are used once."""
        if not self._once:
            return
        with self._changed:
            self._done = layer + 1
            self._changed.notify_all()
            frames = [stored.frame for stored in self._opened.values()]
        for frame in frames:
            memory = frame.data.obj
            if isinstance(memory, mmap.mmap):
                begin, end = frame.bounds[layer : layer + 2]
                begin, end = begin - begin % mmap.PAGESIZE, end - end % mmap.PAGESIZE  # shares a page with the next one
                if begin < end:
                    memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def busy_s(self) -> float:
        """Seconds for which the thread has been reading, without those in which it was far enough ahead."""
        with self._changed:
            now = time.perf_counter()
            idle = self._idle_s + (0.0 if self._idle_since is None else now - self._idle_since)
            return 0.0 if self._began_at is None else (self._ended_at or now) - self._began_at - idle

    def close(self, error: object = None, *_: object) -> None:
        """Stop reading, wait for the read that is under way, and give the memory back."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        with self._lock:
            self._started = True  # never again
            thread = self._thread
        if thread is not None:
            thread.join()
        self._found.clear()
        self._opened.clear()
        if self._arena is not None:
            held, self._residents = self._residents, []
            self._arena.release(held, waits=error is not None)

    def __enter__(self) -> ReadAhead:
        return self

    __exit__ = close

    def _take(self, arena: Arena) -> None:
        """Settle what is in the arena, and still in the store."""
        known, entries = self._store.look_up(self._keys)
        for key in self._ready:
            if known and key not in entries:
                continue
            resident = arena.take(key, self._num_layers)
            if resident is None:
                continue
            self._residents.append(resident)
            frame = resident.frame
            is_entry = not known or entries[key].codec == frame.codec
            if is_entry and frame.shape == tuple(self._shapes.get(key, frame.shape)):
                self._settle(key, StoredKV(frame, resident=resident))
                self._store.record_use(key, is_hit=True)

    @cached_property
    def _layers(self) -> LayerReads:
        return LayerReads(self._store)

    def _fail(self, error: BaseException) -> None:
        """Make whoever waits for KV raise an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read_all([key for key in self._ready if key not in self._found])
            if not self._stop.is_set():
                self._end()
        except BaseException as error:  # the request raises it
            self._fail(error)

    def _read_all(self, keys: list[str]) -> None:
        at_once = max(self._store.chunk_store.tiers.reads_at_once, _READERS if self._is_pinned else 1)
        in_order(self._reads(keys), at_once, lambda: not self._stop.is_set())
        self._read_failed()

    def _reads(self, keys: list[str]) -> Iterator[Callable[[], object]]:
        """Reads in their order, those of first layers first. As many may be under way together as the medium likes."""
        if not self._store.reads_parts:
            for key in keys:
                yield partial(self._read_whole, key)
            return
        pieces = list[tuple[int, int, str, StoredKV, int]]()
        for number, (key, begun) in enumerate(zip(keys, self._layers.begin(keys, self._shapes), strict=True)):
            if self._stop.is_set():
                return
            if begun is None:
                self._read_whole(key)
                continue
            with self._changed:
                self._found[key] = self._opened[key] = begun
                self._changed.notify_all()
            step, last = self._step(begun), self._last(begun)
            pieces += [(first, number, key, begun, min(last, first + step)) for first in range(0, last, step)]
        of_layer = sum(stored.frame.layer_size for stored in self._opened.values())
        self._ahead = max(_LEAST_AHEAD, _AHEAD_BYTES // max(1, of_layer))
        for first, _, key, stored, stop in sorted(pieces, key=lambda piece: piece[:2]):
            self._pace(first)
            yield partial(self._read_piece, key, stored, first, stop)

    def _read_failed(self) -> None:
        """Read what failed in parts as a whole: on this thread, because that may need the pool's."""
        while self._failed and not self._stop.is_set():
            self._read_whole(self._failed.pop(0))

    def _read_whole(self, key: str) -> None:
        self._settle(key, self._store.get(key, shape=self._shapes.get(key)))

    def _read_piece(self, key: str, stored: StoredKV, first: int, stop: int) -> None:
        if key not in self._opened or self._stop.is_set():
            return
        if not self._layers.read(stored, first, stop):
            with self._changed:
                if self._opened.pop(key, None) is not None:
                    self._failed.append(key)
                self._changed.notify_all()
            return
        last = self._last(stored)
        with self._changed:
            if key not in self._opened:
                return
            self._read[key, first] = stop
            while (until := self._read.pop((key, self._ready[key]), None)) is not None:
                self._ready[key] = until if until < last else _ALL
            is_last = self._ready[key] == _ALL
            self._changed.notify_all()
        if is_last:
            self._layers.count(stored, is_whole=last == stored.shape[0])

    def _step(self, stored: StoredKV) -> int:
        """Layers that are read together."""
        least = max(self._store.chunk_store.tiers.least_read, _GPU_BYTES if self._is_pinned else 0)
        return math.ceil(least / stored.frame.layer_size)

    def _pace(self, layer: int) -> None:
        """Wait until a layer is near enough to what is used now. What fails meanwhile is read as a whole."""
        while True:
            self._read_failed()
            with self._changed:
                if not self._once or self._is_near(layer) or self._stop.is_set():
                    return
                self._idle_since = time.perf_counter()
                self._changed.wait_for(lambda: self._is_near(layer) or self._stop.is_set() or bool(self._failed))
                self._idle_s += time.perf_counter() - self._idle_since
                self._idle_since = None

    def _is_near(self, layer: int) -> bool:
        return layer <= max(self._wanted, self._done + self._ahead)

    def _last(self, stored: StoredKV) -> int:
        num_layers = stored.shape[0]
        return num_layers if self._store.promotes else min(num_layers, self._num_layers)

    def _end(self) -> None:
        self._ended_at = time.perf_counter()
        if self._when_read is not None:
            self._when_read()

    def _settle(self, key: str, stored: StoredKV | None) -> None:
        """A whole payload, or none, in place of what may have been given before."""
        with self._changed:
            self._found[key], self._ready[key] = stored, _ALL
            self._opened.pop(key, None)
            self._stale |= self._given & {key}
            self._given.discard(key)
            self._changed.notify_all()


class LayerReads:
    """Reads a tenant's payloads in parts, from the fastest tier outside memory that has them."""

    def __init__(self, tenant: TenantStore) -> None:
        self._tenant, self._tiers = tenant, tenant.chunk_store.tiers

    def begin(self, keys: Sequence[str], shapes: Mapping[str, Shape] | None = None) -> Iterator[StoredKV | None]:
        """The headers of payloads in the last tier, each with memory for its layers, which :meth:`read` reads.
        None where the payload must be read by :meth:`TenantStore.get`, which also says what is wrong with it."""
        shapes = shapes or {}
        known, entries = self._tenant.look_up(keys)
        wanted = [key for key in keys if not known or key in entries]
        if self._tiers.reads_at_once > 1:
            begun = iter(each_in_pool(lambda key: self._header(key, entries.get(key), shapes.get(key)), wanted))
        else:
            begun = (self._header(key, entries.get(key), shapes.get(key)) for key in wanted)
        for key in keys:
            yield next(begun) if not known or key in entries else None

    def _header(self, key: str, entry: Entry | None, shape: Shape | None) -> StoredKV | None:
        try:
            beginning = self._tiers.begin(key, HEAD_BYTES)
            if beginning is None:
                return None
            head, num_bytes, tier = beginning
            frame = checked_frame(Frame.parse(head, key, num_bytes=num_bytes), shape)
            if frame.namespace != self._tenant.namespace or (entry is not None and entry.codec != frame.codec):
                return None
            memory = _returnable_memory(num_bytes)
            memory[: frame.start] = memoryview(head)[: frame.start]
            return StoredKV(replace(frame, data=memory), tier=tier)
        except FAILURES:
            return None

    def read(self, stored: StoredKV, first: int, stop: int) -> bool:
        """Read layers ``first`` to ``stop - 1`` into memory and compare them with their checksums. False if they could
        not be read or are not what the header says."""
        frame = stored.frame
        begin, end = frame.bounds[first], frame.bounds[stop]
        try:
            if self._tiers.read_part(frame.key, begin, frame.data[begin:end], stored.tier) != end - begin:
                return False
            frame.verify(first, end)
        except FAILURES:
            return False
        return True

    def count(self, stored: StoredKV, *, is_whole: bool) -> None:
        """Count a payload of which :meth:`read` read all layers that are used; if they are the whole, faster
        tiers may get a copy."""
        self._tiers.count_hit(stored.tier)
        self._tenant.record_use(stored.frame.key, is_hit=True)
        if is_whole:
            self._tenant.promote(stored.frame.key, stored.frame.data, stored.tier)


def _returnable_memory(num_bytes: int) -> memoryview:
    """Memory of which parts can be given back, where the system has that."""
    if pins_memory() or not hasattr(mmap, "MADV_DONTNEED") or not hasattr(mmap, "MAP_ANONYMOUS"):
        return new_memory(num_bytes)
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
