"""Makes the KV of a prompt's first tokens in vLLM's paged cache, on one worker.

The paged cache is only written by the attention backend's own writer, ``impl.do_kv_cache_update``, which knows its
layout, its dtype and its scales; and it is never read here. vLLM's objects come in as arguments.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from cacheclip_rag.planning import FusionPlan, PlanningRuntime, StoredInterval, check_fits
from cacheclip_rag.store import KV

from .captures import open_context
from .layers_ahead import LayersAhead, copy_stream
from .parameters import Settings
from .passes import Pass, passes
from .scheduling import Load

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
    read_s: float = 0.0
    """In which it waited for stored KV."""


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
    came: float = field(default_factory=lambda: time.perf_counter())
    read_s: float = 0.0


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
        :class:`~cacheclip_vllm.parameters.Ready`."""
        self._layers = dict(sorted(layers.items()))
        if sorted(self._layers) != list(range(runtime.num_layers)):
            raise ValueError(f"vLLM has attention layers {sorted(self._layers)}, the model {runtime.num_layers} layers")
        self._settings, self._runtime, self._row_runner, self._group = settings, runtime, row_runner, group
        self._block_size, self._max_runs, self._max_rows = block_size, max_runs, max_rows
        self._heads = local_heads(runtime.num_kv_heads, group.rank_in_group, group.world_size)
        self._rows: RowRunner | None = None
        self._queue: deque[_UnderWay] = deque()
        self._copied: deque[tuple[Any, Mapping[str, KV]]] = deque()
        """Pinned KV of loads that have ended, each with an event: the device has copied all of it."""
        self._threads = ThreadPoolExecutor(_READERS, "cacheclip-load")
        self.kept: dict[str, KV] = {}
        """Blocks of earlier prompts, of this worker's heads (:mod:`.kept`)."""

    def load(self, load: Load) -> None:
        """Take a load on, and begin to read its KV once those before it leave memory for it."""
        self._queue.append(_UnderWay(load))
        self._read_ahead()

    @torch.inference_mode()
    def work(self, room: int, *, waits: bool) -> Iterator[tuple[Load, Loaded | Exception]]:
        """Make KV, in the order in which loads came, that of several in one pass; yields loads that are complete, or
        failed: some KV cannot be read, on this worker or on another one, or computed. What a failed one has written is
        overwritten by vLLM's own prefill.

        Args:
            room: rows that this step may compute; a pass that needs more runs alone.
            waits: whether to wait for KV that is not read, because there is nothing else to do.
        """
        while self._copied and self._copied[0][0].query():
            self._copied.popleft()
        left = room
        while self._queue:
            together = list[_UnderWay]()
            for each in [*self._queue]:
                try:
                    if each.passes is None:
                        if not self._is_read(each, waits and not together):
                            break
                        each.read_s = time.perf_counter() - each.came if each.entries else 0.0
                        each.passes = self._passes(each)
                except Exception as error:
                    yield self._ended(each, error)
                    continue
                cost = self._cost(each.passes[0])
                if (left < room and cost > left) or not self._fits([*together, each]):
                    break
                left -= cost
                together.append(each)
            if not together:
                return
            failure: Exception | None = None
            try:
                self._carry_out(together)
            except Exception as error:
                failure = error
            for each in together:
                if failure is not None or not each.passes:
                    yield self._ended(each, failure or Loaded(each.rows, each.seconds, each.read_s))

    def _ended(self, each: _UnderWay, found: Loaded | Exception) -> tuple[Load, Loaded | Exception]:
        self._queue.remove(each)
        self._keep_while_copied(each)
        self._read_ahead()
        return each.load, found

    def _keep_while_copied(self, each: _UnderWay) -> None:
        if each.passes is not None and self._side is not None:
            current = torch.get_device_module(self._device).current_stream()
            self._copied.append((current.record_event(), each.kv))

    def _fits(self, together: Sequence[_UnderWay]) -> bool:
        """Whether the next passes of loads can be one pass: one alone can always."""
        runs = [run for each in together for run in (each.passes or [])[0].runs]
        rows = sum(stop - start for start, stop in runs)
        return len(together) == 1 or (len(runs) <= self._max_runs and rows <= self._max_rows)

    def forget(self, request_ids: Collection[str]) -> set[str]:
        """Drop the loads of requests that are finished; returns whose loads were not complete."""
        dropped = [each for each in self._queue if each.load.request_id in request_ids]
        self._queue = deque(each for each in self._queue if each not in dropped)
        for each in dropped:
            self._keep_while_copied(each)
        return {each.load.request_id for each in dropped}

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
        return self._runtime.kv_token_bytes * sum(piece.num_tokens for piece in plan.used_pieces)

    def _passes(self, each: _UnderWay) -> deque[Pass]:
        load = each.load
        if load.plan is None:
            return deque([Pass(load.start, load.stop, (), ())])
        return deque(passes(load.plan, load.start, max_runs=self._max_runs, max_rows=self._max_rows))

    @cached_property
    def _device(self) -> torch.device:
        """Where vLLM's caches are."""
        found: torch.device = self._layers[0].kv_cache.device
        return found

    @cached_property
    def _side(self) -> Any | None:
        return copy_stream(self._device)

    @staticmethod
    def _cost(each: Pass) -> int:
        """Rows whose computation takes as long as the pass."""
        return sum(stop - start for start, stop in each.runs) + (each.stop - each.start) // _STORED_A_ROW

    def _carry_out(self, together: Sequence[_UnderWay]) -> None:
        """Carry out the next pass of each of these loads."""
        began = time.perf_counter()
        writers, requests = list[_PassWriter](), list[tuple[Any, ...]]()
        with ExitStack() as stack:
            for each in together:
                assert each.passes, "a load without passes is complete"
                load, one = each.load, each.passes.popleft()
                if load.plan is None:
                    self._write_context(load)
                    continue
                writer = _PassWriter(self, load, load.plan, one, each.kv)
                stack.callback(writer.layers.close)
                each.rows += len(writer.rows)
                if one.runs:
                    writers.append(writer)
                    requests.append((torch.tensor(load.plan.token_ids, dtype=torch.int64), one.runs, load.block_ids))
                    continue
                for number, layer in self._layers.items():
                    writer.write(number, layer, layer.impl.do_kv_cache_update)
            if requests:
                self._run(writers, requests)
        for each in together:
            each.seconds += (time.perf_counter() - began) / len(together)

    # -- the KV before chunks ---------------------------------------------------------------------------------------

    def _write_context(self, load: Load) -> None:
        folder, name = self._settings.exchange, load.context
        assert folder is not None and name is not None, "the scheduler checked the request"
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

    def _run(self, writers: Sequence[_PassWriter], requests: Sequence[tuple[Any, ...]]) -> None:
        """One forward pass over the rows of these requests."""
        if self._rows is None:
            self._rows = self._row_runner()
        writing = _Writing(writers)
        with self._wrapped(writing):
            self._rows.run(requests)
        writing.check(self._layers)

    def _read(self, plan: FusionPlan) -> dict[str, Future[KV]]:
        keys, moved = dict.fromkeys(piece.key for piece in plan.used_pieces), plan.moved_keys
        entries = {key: _done(self.kept.get(key)) for key in keys if key in moved}
        if len(entries) < len(keys):
            reader = self._settings.open_reader(plan.namespace, plan.codec, self._heads)  # a tenant of the connector's
            read = (key for key in keys if key not in moved)
            entries |= {key: self._threads.submit(reader.get, key, codec=plan.codec) for key in read}
        return entries

    def _is_read(self, each: _UnderWay, waits: bool) -> bool:
        """Whether all tensor-parallel workers have read a load's KV: a worker that stays out of a forward pass leaves
        the others waiting in it for ever. Raises what went wrong, on all of them."""
        entries, group, failed = each.entries or {}, self._group, None
        if waits:
            wait(entries.values())
        has_begun = each.load.plan is None or each.entries is not None
        is_late = not has_begun or not all(future.done() for future in entries.values())
        if each.load.plan is not None and not is_late:
            try:
                each.kv = {key: future.result() for key, future in entries.items()}
                check_fits(each.load.plan, each.kv, self._runtime, self._heads)
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
    def _wrapped(self, writing: _Writing) -> Iterator[None]:
        """Within the block, the writer of every layer also writes stored KV, before the layer's rows attend."""
        for number, layer in self._layers.items():
            layer.impl.do_kv_cache_update = writing.wrapping(number, layer.impl.do_kv_cache_update)
        try:
            yield
        finally:
            for layer in self._layers.values():
                del layer.impl.do_kv_cache_update  # the class's own is back


class _PassWriter:
    """Writes what a pass of one load does not compute, layer by layer."""

    def __init__(self, loader: Loader, load: Load, plan: FusionPlan, each: Pass, kv: Mapping[str, KV]) -> None:
        self._plan, device = plan, loader._device
        self._stored = StoredInterval.of(plan, kv, each.begin, each.end, loader._runtime, device)
        self.layers = LayersAhead(self._stored, loader._heads, len(loader._layers), loader._side)
        self.rows = torch.cat(
            [torch.zeros(0, dtype=torch.int64), *(torch.arange(start, stop) for start, stop in each.runs)]
        )
        self._split = self._stored.split(each.chunks, self.rows)
        is_new = self.rows >= each.start
        self._new = None if bool(is_new.all()) else is_new.nonzero().flatten().to(device)
        """Rows before are in vLLM's prefix cache, where other requests may read them: they are not written again."""
        places = self._stored.places
        is_written = (places >= each.start) & (places < each.stop) & ~torch.isin(places, self.rows)
        self._written = None if bool(is_written.all()) else is_written.nonzero().flatten().to(device)
        """Of the stored positions, those whose stored KV is written; None: all."""
        self._slots = slots_of(load.block_ids, loader._block_size, places[is_written]).to(device)

    def write(
        self,
        number: int,
        layer: Any,
        write: Callable[..., None],
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
        slots: torch.Tensor | None = None,
    ) -> None:
        """Write a layer. ``fresh``: keys and values of the pass's rows, each ``(num_rows, num_kv_heads, head_dim)``,
        which belong to ``slots``."""
        if len(self._slots):
            stored = self.layers.take(number)
            if fresh is not None and self._split is not None:
                self._stored.correct(number, stored, fresh, self._split, self._plan.correction)
            write(layer, *_chosen(stored, self._written), layer.kv_cache, self._slots)
        if fresh is not None and slots is not None and (self._new is None or len(self._new)):
            *new, slots = _chosen((*fresh, slots), self._new)
            write(layer, *new, layer.kv_cache, slots)


class _Writing:
    """What replaces the layers' writer during a forward pass over the rows of several loads."""

    def __init__(self, writers: Sequence[_PassWriter]) -> None:
        self._writers = writers
        self._counts = [len(each.rows) for each in writers]
        self._layers: set[int] = set()
        """Layers whose writer the pass has called."""

    def wrapping(self, number: int, write: Callable[..., None]) -> Callable[..., None]:
        """The writer of a layer that also writes stored KV, before the layer's rows attend."""

        def update(layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: Any, slot_mapping: Any) -> None:
            self._layers.add(number)
            rows = sum(self._counts)  # what follows is padding
            parts = (each[:rows].split(self._counts) for each in (key, value, slot_mapping))
            for writer, keys, values, slots in zip(self._writers, *parts, strict=True):
                writer.write(number, layer, write, (keys, values), slots)

        return update

    def check(self, layers: Iterable[int]) -> None:
        """Raise RuntimeError unless the pass has called the writer of every layer: without it no stored KV is there."""
        missed = sorted(set(layers) - self._layers)
        if missed:
            raise RuntimeError(
                f"the attention backend wrote the KV of layers {missed} by other means than do_kv_cache_update, so "
                "that no stored KV could be written. Choose another one with --attention-backend."
            )


def slots_of(block_ids: Sequence[int], block_size: int, positions: torch.Tensor) -> torch.Tensor:
    """Slots of a request's positions in the paged cache, ``(num_positions,)`` int64 on the CPU."""
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


def _done(kv: KV | None) -> Future[KV]:
    """A block of an earlier prompt, as if it had been read."""
    future = Future[KV]()
    if kv is None:
        future.set_exception(RuntimeError("KV of an earlier prompt is gone"))
    else:
        future.set_result(kv)
    return future


def _chosen(parts: Iterable[torch.Tensor], rows: torch.Tensor | None) -> Iterable[torch.Tensor]:
    return parts if rows is None else [part.index_select(0, rows) for part in parts]


def local_heads(num_heads: int, rank: int, size: int) -> slice:
    """KV heads of one of ``size`` workers: a share of them, or a copy of one if there are more workers than heads."""
    if num_heads >= size:
        count = num_heads // size
        return slice(rank * count, (rank + 1) * count)
    head = rank // (size // num_heads)
    return slice(head, head + 1)
