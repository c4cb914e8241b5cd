"""Makes the KV of a prompt's first tokens in vLLM's paged cache, on one worker.

The paged cache is only written by the attention backend's own writer, ``impl.do_kv_cache_update``, which knows its
layout, its dtype and its scales; and it is never read here. vLLM's objects come in as arguments.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..fusion.wire import FusionPlan
from ..methods.correction import Chunks, offsets
from ..runtime.transformers.planning import PlanningRuntime
from ..runtime.transformers.rotary import Tables, changed
from ..store import KV, StoreReader
from .captures import open_context
from .parameters import Settings
from .passes import Pass, passes
from .scheduling import Load
from .stored import StoredInterval, check_shape, slots_of, used_pieces

if TYPE_CHECKING:
    from .rows import RowRunner


_AHEAD_BYTES = 1 << 30
"""Bytes of KV that are read ahead of the load that is carried out."""
_STORED_A_ROW = 8
"""Tokens whose stored KV is written as fast as one row is computed: of an 8B model over PCIe, about so many."""
_READERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load took."""

    rows: int
    """Computed ones."""
    seconds: float
    """In which it held up its worker."""


@dataclass(eq=False, slots=True)
class _UnderWay:
    """A load that is not complete."""

    load: Load
    entries: dict[str, Future[KV]] | None = None
    """Its KV by key, once it is being read."""
    kv: dict[str, KV] = field(default_factory=dict)
    passes: deque[Pass] | None = None
    """Those to be carried out; None: none was begun."""
    rows: int = 0
    seconds: float = 0.0


class Loader:
    """Carries out loads in one worker process."""

    def __init__(
        self,
        layers: Mapping[int, Any],
        settings: Settings,
        runtime: PlanningRuntime,
        row_runner: Callable[[], RowRunner],
        group: Any,
        *,
        block_size: int,
        max_runs: int,
        max_rows: int,
    ) -> None:
        """``layers``: vLLM's attention layers by number; ``row_runner`` makes what runs rows, once a plan computes
        some; ``group``: vLLM's tensor-parallel group. The others are those of
        :class:`~cacheclip_rag.vllm.parameters.Ready`."""
        self._layers = dict(layers)
        if sorted(self._layers) != list(range(runtime.num_layers)):
            raise ValueError(f"vLLM has attention layers {sorted(self._layers)}, the model {runtime.num_layers} layers")
        self._settings, self._runtime, self._row_runner, self._group = settings, runtime, row_runner, group
        self._block_size, self._max_runs, self._max_rows = block_size, max_runs, max_rows
        self._heads = local_heads(runtime.num_kv_heads, group.rank_in_group, group.world_size)
        self._rows: RowRunner | None = None
        self._queue: deque[_UnderWay] = deque()
        self._threads = ThreadPoolExecutor(_READERS, "cacheclip-load")

    def load(self, load: Load) -> None:
        """Take a load on, and begin to read its KV once those before it leave memory for it."""
        self._queue.append(_UnderWay(load))
        self._read_ahead()

    @torch.inference_mode()
    def work(self, room: int, *, waits: bool) -> Iterator[tuple[Load, Loaded | Exception]]:
        """Make KV, in the order in which loads came; yields loads that are complete, or failed: some KV cannot be read,
        on this worker or on another one, or computed. What a failed one has written is overwritten by vLLM's own
        prefill.

        Args:
            room: rows that this step may compute; a pass that needs more runs alone.
            waits: whether to wait for KV that is not read, because there is nothing else to do.
        """
        left = room
        while self._queue:
            first = self._queue[0]
            found: Loaded | Exception
            try:
                if first.passes is None:
                    if not self._is_read(first, waits):
                        return
                    first.passes = self._passes(first)
                began = time.perf_counter()
                while first.passes:
                    cost = self._cost(first.passes[0])
                    if left < room and cost > left:
                        return
                    left -= cost
                    first.rows += self._carry_out(first, first.passes.popleft())
                    first.seconds += time.perf_counter() - began
                    began = time.perf_counter()
                found = Loaded(first.rows, first.seconds)
            except Exception as error:
                found = error
            self._queue.popleft()
            self._read_ahead()
            yield first.load, found

    def forget(self, request_ids: Collection[str]) -> set[str]:
        """Drop the loads of requests that are finished; returns whose loads were not complete."""
        dropped = {each.load.request_id for each in self._queue} & {*request_ids}
        self._queue = deque(each for each in self._queue if each.load.request_id not in dropped)
        return dropped

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read_ahead(self) -> None:
        """Begin to read what fits into memory, and the first load in any case."""
        left = _AHEAD_BYTES
        for number, each in enumerate(self._queue):
            if each.load.plan is None:
                continue
            left -= self._num_bytes(each.load.plan)
            if number and left < 0:
                return
            if each.entries is None:
                each.entries = self._read(each.load.plan)

    def _num_bytes(self, plan: FusionPlan) -> int:
        runtime = self._runtime
        of_token = 2 * runtime.num_layers * runtime.num_kv_heads * runtime.head_dim * runtime.dtype.itemsize
        return of_token * sum(piece.num_tokens for piece in used_pieces(plan))

    def _passes(self, each: _UnderWay) -> deque[Pass]:
        load = each.load
        if load.plan is None:
            return deque([Pass(load.start, load.stop, (), ())])
        return deque(passes(load.plan, load.start, max_runs=self._max_runs, max_rows=self._max_rows))

    @staticmethod
    def _cost(each: Pass) -> int:
        """Rows whose computation takes as long as the pass."""
        return sum(stop - start for start, stop in each.runs) + (each.stop - each.start) // _STORED_A_ROW

    def _carry_out(self, each: _UnderWay, one: Pass) -> int:
        """Carry out a pass; returns the number of computed rows."""
        load = each.load
        if load.plan is not None:
            return self._run(load, load.plan, one, each.kv)
        assert self._settings.exchange is not None and load.context is not None, "the scheduler checked the request"
        self._write_context(load, self._settings.exchange, load.context)
        return 0

    # -- the KV before chunks ---------------------------------------------------------------------------------------

    def _write_context(self, load: Load, folder: Path, name: str) -> None:
        slots = slots_of(load.block_ids, self._block_size, torch.arange(load.start, load.stop))
        with open_context(folder, name) as context:
            for number, layer in self._layers.items():
                keys, values = context.layer(number, load.start, load.stop, self._heads)
                self._write(layer, keys, values, slots)

    def _write(self, layer: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write KV of this worker's heads, each ``(num_tokens, num_kv_heads, head_dim)``."""
        cache = layer.kv_cache
        device, dtype = cache.device, self._runtime.dtype
        keys, values = (each.to(device=device, dtype=dtype).contiguous() for each in (keys, values))
        layer.impl.do_kv_cache_update(layer, keys, values, cache, slots.to(device))

    # -- plans ------------------------------------------------------------------------------------------------------

    def _run(self, load: Load, plan: FusionPlan, one: Pass, kv: Mapping[str, KV]) -> int:
        writer = _PassWriter(self, load, plan, one, StoredInterval.of(plan, kv, one.begin, one.end, self._runtime))
        if not one.runs:
            for number, layer in self._layers.items():
                writer.write_stored(number, layer)
            return 0
        if self._rows is None:
            self._rows = self._row_runner()
        with self._wrapped(writer):
            self._rows.run(torch.tensor(plan.token_ids, dtype=torch.int64), one.runs, load.block_ids)
        writer.check(self._layers)
        return sum(stop - start for start, stop in one.runs)

    def _read(self, plan: FusionPlan) -> dict[str, Future[KV]]:
        assert self._settings.store is not None, "the scheduler checked the request"
        reader = StoreReader(self._settings.store, plan.namespace)  # one of the connector's
        keys = dict.fromkeys(piece.key for piece in used_pieces(plan))
        return {key: self._threads.submit(reader.get, key, codec=plan.codec) for key in keys}

    def _is_read(self, each: _UnderWay, waits: bool) -> bool:
        """Whether all tensor-parallel workers have read a load's KV: a worker that stays out of a forward pass leaves
        the others waiting in it for ever. Raises what went wrong, on all of them."""
        entries, group, failed = each.entries or {}, self._group, None
        if waits:
            wait(entries.values())
        is_late = not all(future.done() for future in entries.values())
        if each.load.plan is not None and not is_late:
            try:
                each.kv = {key: future.result() for key, future in entries.items()}
                check_shape(each.load.plan, each.kv, self._runtime)
            except Exception as error:
                failed = error
        if group.world_size > 1:
            count = torch.tensor([is_late, failed is not None], dtype=torch.int32)
            torch.distributed.all_reduce(count, group=group.cpu_group)
            is_late = bool(count[0])
            if failed is None and int(count[1]):
                failed = RuntimeError("another tensor-parallel worker could not read the chunks")
        if not is_late and failed is not None:
            raise failed
        return not is_late

    @contextmanager
    def _wrapped(self, writer: _PassWriter) -> Iterator[None]:
        """Within the block, the writer of every layer also writes stored KV, before the layer's rows attend."""
        for number, layer in self._layers.items():
            layer.impl.do_kv_cache_update = writer.wrapping(number, layer.impl.do_kv_cache_update)
        try:
            yield
        finally:
            for layer in self._layers.values():
                del layer.impl.do_kv_cache_update  # the class's own is back


class _PassWriter:
    """Writes what a pass does not compute, layer by layer."""

    def __init__(self, loader: Loader, load: Load, plan: FusionPlan, each: Pass, stored: StoredInterval) -> None:
        self._loader, self._plan, self._stored = loader, plan, stored
        self._rows = torch.cat(
            [torch.zeros(0, dtype=torch.int64), *(torch.arange(start, stop) for start, stop in each.runs)]
        )
        self._is_new = self._rows >= each.start
        """Rows before are in vLLM's prefix cache, where other requests may read them: they are not written again."""
        places = stored.places[(stored.places >= each.start) & (stored.places < each.stop)]
        self._places = places[~torch.isin(places, self._rows)]
        """Positions whose stored KV is written."""
        self._slots = slots_of(load.block_ids, loader._block_size, self._places)
        self._chunks = Chunks(each.chunks) if each.chunks else None
        self._tables: list[Tables | None] = []
        """Rotary tables of the chunks, once they are needed."""
        self._written: set[int] = set()
        """Layers whose writer the pass has called."""

    def check(self, layers: Iterable[int]) -> None:
        """Raise RuntimeError unless the pass has called the writer of every layer: without it no stored KV is there."""
        missed = sorted(set(layers) - self._written)
        if missed:
            raise RuntimeError(
                f"the attention backend wrote the KV of layers {missed} by other means than do_kv_cache_update, so "
                "that no stored KV could be written. Choose another one with --attention-backend."
            )

    def write_stored(self, number: int, layer: Any) -> None:
        """Write stored KV of a layer as it is, which computes no row."""
        self._write(number, layer, layer.impl.do_kv_cache_update, None)

    def wrapping(self, number: int, write: Callable[..., None]) -> Callable[..., None]:
        """What replaces a layer's ``do_kv_cache_update`` during the pass."""

        def update(layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: Any, slot_mapping: Any) -> None:
            self._written.add(number)
            self._write(number, layer, write, (key, value))
            if self._is_new.all():
                write(layer, key, value, kv_cache, slot_mapping)
            elif self._is_new.any():
                new = self._is_new.nonzero().flatten().to(key.device)
                parts = (part.index_select(0, new) for part in (key, value))
                write(layer, *parts, kv_cache, slot_mapping.index_select(0, new))

        return update

    def _write(
        self, number: int, layer: Any, write: Callable[..., None], fresh: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        """``fresh``: keys and values of the pass's rows, each ``(num_rows, num_kv_heads, head_dim)``."""
        if not len(self._places):
            return
        cache, stored, loader = layer.kv_cache, self._stored, self._loader
        kv = stored.layer(number, cache.device, loader._heads)
        split = None if self._chunks is None else self._chunks.split(self._rows, cache.device)
        if fresh is not None and split is not None:
            own = slice(split.start - stored.start, split.stop - stored.start)
            old = kv[0][own].transpose(0, 1), kv[1][own].transpose(0, 1)
            new = fresh[0].transpose(0, 1), fresh[1].transpose(0, 1)
            self._tables = self._tables or changed(stored.tables, lambda table: table[own].to(cache.device))
            added = offsets(new, old, split, self._plan.correction, self._tables[number])
            for target, offset in zip(old, added, strict=True):
                target += offset.to(target.dtype)
        if len(self._places) < len(kv[0]):
            at = (self._places - stored.start).to(cache.device)
            kv = kv[0].index_select(0, at), kv[1].index_select(0, at)
        write(layer, *kv, cache, self._slots.to(cache.device))


def local_heads(num_heads: int, rank: int, size: int) -> slice:
    """KV heads of one of ``size`` workers: a share of them, or a copy of one if there are more workers than heads."""
    if num_heads >= size:
        count = num_heads // size
        return slice(rank * count, (rank + 1) * count)
    head = rank // (size // num_heads)
    return slice(head, head + 1)
