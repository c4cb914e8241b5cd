"""Makes the KV of a prompt's first tokens in vLLM's paged cache, on one worker.

The paged cache is only written by the attention backend's own writer, ``impl.do_kv_cache_update``, which knows its
layout, its dtype and its scales; and it is never read here. vLLM's objects come in as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from .stored import StoredInterval, check_shape, slots_of

if TYPE_CHECKING:
    from .rows import RowRunner


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

    @torch.inference_mode()
    def load(self, load: Load) -> int:
        """Make the KV of a load; returns the number of computed rows. Raises OSError, ValueError, RuntimeError: some KV
        cannot be read, on this worker or on another one. Nothing was computed then, and what was written is overwritten
        by vLLM's own prefill."""
        if load.plan is not None:
            return self._carry_out(load, load.plan)
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

    def _carry_out(self, load: Load, plan: FusionPlan) -> int:
        entries = self._together(lambda: self._read(plan))
        ids = torch.tensor(plan.token_ids, dtype=torch.int64)
        computed = 0
        for each in passes(plan, load.start, max_runs=self._max_runs, max_rows=self._max_rows):
            stored = StoredInterval.of(plan, entries, each.begin, each.end, self._runtime)
            writer = _PassWriter(self, load, plan, each, stored)
            if not each.runs:
                for number, layer in self._layers.items():
                    writer.write_stored(number, layer)
                continue
            if self._rows is None:
                self._rows = self._row_runner()
            with self._wrapped(writer):
                self._rows.run(ids, each.runs, load.block_ids)
            writer.check(self._layers)
            computed += sum(stop - start for start, stop in each.runs)
        return computed

    def _read(self, plan: FusionPlan) -> dict[str, KV]:
        assert self._settings.store is not None, "the scheduler checked the request"
        reader = StoreReader(self._settings.store, plan.namespace)  # one of the connector's
        entries: dict[str, KV] = {}
        for piece in plan.pieces:
            if piece.key not in entries:
                entries[piece.key] = reader.get(piece.key, codec=plan.codec)
        check_shape(plan, entries, self._runtime)
        return entries

    def _together(self, read: Callable[[], dict[str, KV]]) -> dict[str, KV]:
        """Read on all tensor-parallel workers, or fail on all of them: a worker that stays out of a forward pass leaves
        the others waiting in it for ever."""
        group = self._group
        found, failed = None, None
        try:
            found = read()
        except Exception as error:
            failed = error
        if group.world_size > 1:
            count = torch.tensor([failed is not None], dtype=torch.int32)
            torch.distributed.all_reduce(count, group=group.cpu_group)
            if failed is None and int(count):
                failed = RuntimeError("another tensor-parallel worker could not read the chunks")
        if failed is not None:
            raise failed
        assert found is not None
        return found

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
        kv = list(stored.layer(number, cache.device, loader._heads))
        split = None if self._chunks is None else self._chunks.split(self._rows, cache.device)
        if fresh is not None and split is not None:
            own = slice(split.start - stored.start, split.stop - stored.start)
            old = kv[0][:, own], kv[1][:, own]
            new = fresh[0].transpose(0, 1), fresh[1].transpose(0, 1)
            self._tables = self._tables or changed(stored.tables, lambda table: table[own].to(cache.device))
            added = offsets(new, old, split, self._plan.correction, self._tables[number])
            for target, offset in zip(old, added, strict=True):
                target += offset.to(target.dtype)
        at = (self._places - stored.start).to(cache.device)
        keys, values = (each.index_select(1, at).transpose(0, 1).contiguous() for each in kv)
        write(layer, keys, values, cache, self._slots.to(cache.device))


def local_heads(num_heads: int, rank: int, size: int) -> slice:
    """KV heads of one of ``size`` workers: a share of them, or a copy of one if there are more workers than heads."""
    if num_heads >= size:
        count = num_heads // size
        return slice(rank * count, (rank + 1) * count)
    head = rank // (size // num_heads)
    return slice(head, head + 1)
