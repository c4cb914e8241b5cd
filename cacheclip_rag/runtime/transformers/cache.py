"""The KV of a whole prompt, as a transformers ``Cache``, and the positions of its tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ...store import KV, Gather, LayerKV, join, layer_of, upload
from ..base import KVPart, KVSource
from .rotary import ModelRotary, Tables, changed, rotate, unrotate

_TOGETHER = 1 << 27
"""Bytes of layers that are gathered and rotated together."""


def cache_argument(model: Any, cache: Cache) -> dict[str, Cache]:
    """The keyword argument that gives ``cache`` to a transformers model; version 5.24 renamed it."""
    return {_cache_name(type(model).forward): cache}


@functools.cache  # to read a signature takes as long as a small operation, and every decoded token asks
def _cache_name(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


class FusedLayer(DynamicLayer):  # type: ignore[misc]
    """KV of one layer in a preallocated buffer. A prefill scatters rows into the buffer; decoding appends rows.

    Growing the buffer by concatenation would copy the whole prompt's KV at every generated token.
    """

    is_croppable = False

    def __init__(
        self,
        widths: tuple[int, int, int],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: Sequence[torch.Tensor] | None = None,
        is_zero: bool = False,
    ):
        """``widths``: number of heads, widths of keys and values. ``memory``: of keys and of values, in place of its
        own. ``is_zero``: its own begins with zeros."""
        super().__init__()
        self.dtype, self.device, self.is_initialized = dtype, device, True
        if memory is None:
            heads, *of_both = widths
            make = torch.zeros if is_zero else torch.empty
            self._keys, self._values = (
                make(1, heads, capacity, width, dtype=dtype, device=device) for width in of_both
            )
        else:
            self._keys, self._values = memory
        self.slots: torch.Tensor | None = None
        """``(num_rows,)`` int64, slots that the next update writes; None: the update appends."""
        self.slots_on_cpu: torch.Tensor | None = None
        """The same numbers on the CPU: reading them from ``slots`` would synchronise the accelerator."""
        self.last_slot = 0
        """The last of ``slots``."""
        self.before_scatter: Callable[[FusedLayer, torch.Tensor, torch.Tensor], None] | None = None
        """Called with fresh keys and values before they are written to ``slots``. It may change KV of other slots."""
        self.whole: torch.Tensor | None = None
        """``(num_layers, 2, num_kv_heads, capacity, head_dim)`` of which its buffer is a part; None: of none."""
        self._resize(0)

    def _resize(self, length: int) -> None:
        self.length = length
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of one token."""
        return sum(numbers.shape[1] * numbers.shape[3] for numbers in (self._keys, self._values)) * self.dtype.itemsize

    def used(self, kv: LayerKV) -> LayerKV:
        """Stored KV of this layer without padding."""
        heads, keys, values = self._keys.shape[1], self._keys.shape[3], self._values.shape[3]
        return LayerKV(kv.keys[:heads, :, :keys], kv.values[:heads, :, :values], kv.scale)

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Write KV ``(num_kv_heads, num_tokens, head_dim)`` from slot ``start`` on. Values are multiplied by ``scale``,
        ``(num_kv_heads, num_tokens, 1)``: 8-bit integers need no memory for their floats but the cache."""
        stop = start + keys.shape[-2]
        self._keys[0, :, start:stop] = keys
        target = self._values[0, :, start:stop]
        target.copy_(values)
        if scale is not None:
            target.mul_(scale)
        self._resize(max(self.length, stop))

    def write_at(self, start: int, keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor) -> None:
        """Write the row ``source``, ``(num_slots,)`` int64, of ``keys`` and ``values``, ``(num_kv_heads, num_tokens,
        head_dim)`` of the layer's dtype, to each slot from ``start`` on."""
        stop = start + len(source)
        torch.index_select(keys, 1, source, out=self._keys[0, :, start:stop])  # six times as fast as index_copy_
        torch.index_select(values, 1, source, out=self._values[0, :, start:stop])
        self._resize(max(self.length, stop))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Called by the model's attention with KV after RoPE, ``(1, num_kv_heads, num_rows, head_dim)``."""
        stop = self.length + key_states.shape[-2] if self.slots is None else max(self.length, self.last_slot + 1)
        if stop > self._keys.shape[2]:
            self._grow(stop)
        if self.slots is None:
            self._keys[:, :, self.length : stop] = key_states
            self._values[:, :, self.length : stop] = value_states
        else:
            if self.before_scatter is not None:
                self.before_scatter(self, key_states, value_states)
            self._keys.index_copy_(2, self.slots, key_states)
            self._values.index_copy_(2, self.slots, value_states)
        self._resize(stop)
        return self.keys, self.values

    def in_order_of_class(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the model's attention gives and takes them."""
        return self.keys, self.values

    def cut(self, length: int) -> None:
        self._resize(min(length, self.length))

    def _grow(self, length: int) -> None:
        capacity, self.whole = self._keys.shape[2], None
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = old.new_empty(1, old.shape[1], max(length, capacity + capacity // 4), old.shape[3])
            new[:, :, :capacity] = old
            setattr(self, name, new)

    def get_seq_length(self) -> int:
        """In a pass that scatters its rows, the slot of the first: Llama 4 scales queries by the number of their row
        from there on, which is their position at most."""
        return self.length if self.slots_on_cpu is None else int(self.slots_on_cpu[0])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length if self.slots is not None else self.length + query_length), 0


class LatentLayer(FusedLayer):
    """A layer of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): one rotary key a token, which turns, as
    its keys, and the latent, of which each pass makes keys and values of all heads, as its values. Transformers gives
    the latent first."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(value_states, key_states, *args, **kwargs)[::-1]

    def in_order_of_class(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values, self.keys


class FusedCache(Cache):  # type: ignore[misc]
    """The KV of a whole prompt, with one :class:`FusedLayer` per layer."""

    rotary: ModelRotary
    """Tables of the model whose cache it is."""
    positions: torch.Tensor | None = None
    """``(num_slots,)`` int64 on the CPU: position of each slot, where several texts lie side by side; None: slot =
    position."""
    token_bytes: int = 0
    """Bytes of the KV of one token."""
    memory: torch.Tensor | None = None
    """``(num_layers, 2, num_kv_heads, capacity, head_dim)``: of all layers, if prompts are gathered."""
    runs: Sequence[tuple[int, int]] = ()
    """Slots ``[start, stop)`` that have KV of earlier prompts: pieces on both sides are not written as one."""
    tables: Sequence[Tables | None] = ()
    """Per layer the rotary tables of the prompt's slots, while a fused prefill goes on: stored keys, the correction and
    the pass take their rows from them. Empty: each makes its own."""

    def cut(self, length: int) -> None:
        for layer in self.layers:
            layer.cut(length)

    def extend_to(self, length: int) -> None:
        """Give all layers at least this length. Their KV is written later."""
        for layer in self.layers:
            layer._resize(max(layer.length, length))

    def groups(self) -> list[tuple[int, ...]]:
        """Numbers of the arrays with equal shapes, dtypes and devices: 2i of layer i's keys, 2i + 1 of its values."""
        groups: dict[object, list[int]] = {}
        for number, array in enumerate(self.arrays):
            if array.shape[3]:
                groups.setdefault((array.device, array.dtype, array.shape[1], array.shape[3]), []).append(number)
        return [tuple(group) for group in groups.values()]

    @property
    def arrays(self) -> list[torch.Tensor]:
        """Keys and values of each layer, ``(1, num_kv_heads, num_slots, width)``."""
        return [array for layer in self.layers for array in (layer.keys, layer.values)]

    @torch.inference_mode()
    def blocks(self, start: int, stop: int, size: int) -> Iterator[dict[tuple[int, ...], torch.Tensor]]:
        """Copies of the KV of tokens ``start`` to ``stop - 1`` in blocks of ``size`` tokens; the last may be shorter.
        Of each block one tensor per group of arrays with equal shapes, ``(num_arrays, num_kv_heads, size, width)``:
        faster than two per layer, because the number of copies takes the time."""
        whole = self.layers[0].whole
        if whole is not None and all(layer.whole is whole for layer in self.layers):
            group = tuple(range(2 * len(self.layers)))
            step = size * max(1, _TOGETHER // (self.token_bytes * size))
            for first in range(start, stop, step):
                part = whole[:, :, :, first : min(first + step, stop)].contiguous()
                sizes = [min(size, part.shape[3] - begin) for begin in range(0, part.shape[3], size)]
                copies = [part.new_empty(*part.shape[:3], count, part.shape[4]) for count in sizes]
                torch.split_with_sizes_copy(part, sizes, 3, out=copies)  # one kernel
                yield from ({group: copy.flatten(0, 1)} for copy in copies)
            return
        arrays, pieces = self.arrays, {}
        for group in self.groups():
            pieces[group] = [arrays[number][0, :, start:stop].split(size, dim=1) for number in group]
        for number in range(-(-(stop - start) // size)):
            yield {group: torch.stack([piece[number] for piece in of_group]) for group, of_group in pieces.items()}

    @torch.inference_mode()
    def write_blocks(self, part: KVPart) -> None:
        run, old, new = part.run, list[Tables | None](), list[Tables | None]()
        if run.source == KVSource.MOVED and run.source_start != run.start:
            positions = torch.arange(run.start, run.stop)
            old += self.rotary.tables(positions - run.start + run.source_start)
            new += self.rotary.tables(positions)
        tokens = slice(part.skip, part.skip + run.stop - run.start)
        self.extend_to(run.stop)
        self.runs = (*self.runs, (run.start, run.stop))
        arrays = self.arrays
        for group in part.blocks[0]:
            pieces = zip(*(block[group].unbind() for block in part.blocks), strict=True)
            # joined one by one, so that memory holds no second copy of the prompt
            for number, of_blocks in zip(group, pieces, strict=True):
                rows = (torch.cat(of_blocks, dim=1) if len(of_blocks) > 1 else of_blocks[0])[:, tokens]
                if old and number % 2 == 0:
                    rows = rotate(unrotate(rows, old[number // 2]), new[number // 2], rows.dtype)
                arrays[number][0, :, run.start : run.stop] = rows  # (num_kv_heads, num_tokens, width)

    def tables_of(self, slots: torch.Tensor) -> list[Tables | None]:
        """Per layer the rotary tables of slots at their positions: rows of :attr:`tables`, if there are some."""
        if not self.tables:
            return self.rotary.tables(slots if self.positions is None else self.positions[slots])
        rows = {device: upload(slots, device) for device in {layer.device for layer in self.layers}}
        return changed(self.tables, lambda table: table.index_select(0, rows[table.device]))

    def fill(self, kv: KV, *, slot: int, position: int) -> None:
        """Write stored ``kv`` from ``slot`` on, with keys rotated to positions from ``position`` on."""
        if not kv.shape[3]:
            return  # an empty shared prefix: some rotary modules fail without a largest position
        tables = self.rotary.tables(torch.arange(position, position + kv.shape[3]))
        for number, (layer, of_layer) in enumerate(zip(self.layers, tables, strict=True)):
            keys, values, scale = layer.used(layer_of(kv, number, layer.device))
            layer.write(slot, rotate(keys, of_layer), values, scale)

    def fill_all(self, pieces: Iterable[tuple[int, KV]]) -> None:
        """Write many pieces of stored KV, each from its slot on, in order of slots and without overlap. The same as
        :meth:`fill` for each of them, but the number of tensor operations does not depend on the number of pieces.
        Slots between the pieces get KV of other tokens, but :attr:`runs` among them: compute or fill them afterwards.
        """
        write = self.filling(pieces)
        for number in range(len(self.layers)):
            write(number)

    def filling(
        self,
        pieces: Iterable[tuple[int, KV]],
        wait: Callable[[int], None] | None = None,
        num_layers: int | None = None,
    ) -> Callable[[int], None]:
        """Writes many pieces of stored KV layer by layer: as :meth:`fill_all`, but a layer's KV is needed only when the
        function that is returned is called with the layer's number. That may be within a pass. ``wait`` is called with
        the last layer whose KV is needed then, ``num_layers`` of which may be asked for (default all)."""
        groups, gatherings = [], list[Callable[[int], None]]()
        for joined in join(pieces, self.runs):
            if joined.gather is not None:
                gatherings.append(self._gathering(joined.gather, wait, num_layers or len(self.layers)))
                continue
            slots = joined.places
            first, length = int(slots[0]), int(slots[-1]) + 1
            tables = self.tables_of(slots)
            source = torch.zeros(length - first, dtype=torch.int64)
            source[slots - first] = torch.arange(len(slots))
            self.extend_to(length)
            sources = {device: upload(source, device) for device in {layer.device for layer in self.layers}}
            groups.append((joined, first, tables, sources))

        def write(number: int) -> None:
            layer = self.layers[number]
            for gather in gatherings:
                gather(number)
            if groups and wait is not None:
                wait(number)
            for joined, first, tables, sources in groups:
                keys, values, scale = layer.used(joined.layer(number, layer.device))
                keys = rotate(keys, tables[number], layer.dtype)
                values = (values if scale is None else values * scale).to(layer.dtype)
                layer.write_at(first, keys, values, sources[layer.device])

        return write

    def _gathering(self, gather: Gather, wait: Callable[[int], None] | None, num_layers: int) -> Callable[[int], None]:
        """Writes the KV of a layer and of those after it that turn alike, as many as :data:`_TOGETHER` allows."""
        assert self.memory is not None, "pieces are gathered into the memory of all layers"
        tables, memory, done = self.tables_of(torch.arange(gather.first, gather.stop)), self.memory, 0
        self.extend_to(gather.stop)

        def write(number: int) -> None:
            nonlocal done
            if number < done:
                return
            alike = takewhile(lambda n: tables[n] is tables[number], range(number, num_layers))
            done = [*alike][: max(1, _TOGETHER // gather.layer_bytes)][-1] + 1
            if wait is not None:
                wait(done - 1)
            kv, target = gather.layers(number, done), memory[number:done, :, :, gather.first : gather.stop]
            target[:, 0].copy_(rotate(kv[:, 0], tables[number], target.dtype))
            target[:, 1].copy_(kv[:, 1])

        return write

    def repeating(self, kv: torch.Tensor, slots: torch.Tensor, *, position: int) -> Callable[[int], None]:
        """Writes stored KV several times, layer by layer: as :meth:`fill` for each row of ``slots``, ``(num_copies,
        num_tokens)``, when the function that is returned is called with the layer's number."""
        if not slots.numel():
            return lambda number: None
        tables = self.rotary.tables(torch.arange(position, position + kv.shape[3]))
        places = {device: upload(slots.flatten(), device) for device in {layer.device for layer in self.layers}}

        def write(number: int) -> None:
            layer = self.layers[number]
            keys, values, _ = layer.used(layer_of(kv, number, layer.device))
            for target, each in ((layer.keys, rotate(keys, tables[number])), (layer.values, values)):
                copies = each.to(layer.dtype).repeat(1, len(slots), 1)
                # (num_kv_heads, num_copies * num_tokens, head_dim)
                target[0].index_copy_(1, places[layer.device], copies)

        return write

    def scatter(self, slots: torch.Tensor | None) -> None:
        """Write the next pass's rows to these slots (strictly increasing); None: append them."""
        if slots is None:
            for layer in self.layers:
                layer.slots = layer.slots_on_cpu = None
            return
        on_cpu = slots.cpu()
        last = int(on_cpu[-1])
        copies = {device: upload(slots, device) for device in {layer.device for layer in self.layers}}
        for layer in self.layers:
            layer.slots, layer.slots_on_cpu, layer.last_slot = copies[layer.device], on_cpu, last


class StepLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of several caches, for a pass that appends one row to each."""

    is_croppable = False

    def __init__(self, layers: Sequence[FusedLayer]):
        super().__init__()
        self.layers, self.is_initialized = layers, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append row ``i`` of ``(1, num_kv_heads, num_rows, head_dim)`` to layer ``i``. Gives the rows back: the
        attention reads the keys and values of each layer from the layer itself."""
        for row, layer in enumerate(self.layers):
            layer.update(key_states[:, :, row : row + 1], value_states[:, :, row : row + 1])
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0
