"""Several chunks in one forward pass, each after its own copy of the common context.

A short chunk costs little more than reading the weights once. So many short chunks cost far less in one pass than in a
pass each. No row sees another chunk: blocks cut the keys, as they do where the auxiliary model scores chunks side by
side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch

from ...store import KVShape, LayerKV
from .attention_pattern import AttentionPattern, Block, rows_per_block
from .rotary import unrotate

_ROWS_PER_PASS = 512
"""Tokens of all chunks of a pass. More rows gain nothing: matrix products are efficient from here on."""
_SLOTS_PER_PASS = 8192
"""Tokens of all chunks and of all copies of the context: they take memory."""


def batches_of(lengths: Sequence[int], num_context: int) -> Iterator[slice]:
    """Divide chunks of these lengths, in order, into passes, with ``num_context`` tokens before each chunk. A chunk
    that is too long for company is alone."""
    begin = rows = slots = 0
    for number, length in enumerate(lengths):
        if number > begin and (rows + length > _ROWS_PER_PASS or slots + num_context + length > _SLOTS_PER_PASS):
            yield slice(begin, number)
            begin, rows, slots = number, 0, 0
        rows, slots = rows + length, slots + num_context + length
    if begin < len(lengths):
        yield slice(begin, len(lengths))


def empty_kv(runtime: Any, num_tokens: int) -> torch.Tensor:
    """A tensor for KV of a runtime (a ``ModelRuntime``), in which only padding has numbers: 0."""
    shape = runtime.kv_shape(num_tokens)
    make = torch.zeros if isinstance(shape, KVShape) else torch.empty
    return make(shape, dtype=runtime.dtype, device=runtime.device)


def encode_batch(runtime: Any, chunks: Sequence[Sequence[int]], context: torch.Tensor | None) -> list[torch.Tensor]:
    """Position-free KV of each chunk, as ``encode`` of the runtime (a ``ModelRuntime``) gives it for the chunk alone,
    but for rounding."""
    start = 0 if context is None else context.shape[3]
    lengths = [len(chunk) for chunk in chunks]
    cache = runtime.new_cache(sum(start + length for length in lengths))
    firsts = torch.tensor([0, *(start + length for length in lengths[:-1])]).cumsum(0).tolist()
    if context is not None and start:
        cache.fill(context, slot=0, position=0)
        for layer in cache.layers:
            keys, values = layer.keys[0, :, :start], layer.values[0, :, :start]
            for first in firsts[1:]:
                layer.write(first, keys, values)
    positions = torch.cat([start + torch.arange(length) for length in lengths])
    slots = torch.cat([first + start + torch.arange(n) for first, n in zip(firsts, lengths, strict=True)])
    ids = torch.tensor([token for chunk in chunks for token in chunk])
    pattern = AttentionPattern(_blocks(firsts, lengths, start, runtime.device))
    runtime.run_rows(cache, ids, positions, pattern, slots=slots, head=False)
    kv = empty_kv(runtime, len(ids))
    everywhere = runtime.rotary.tables(torch.arange(start + max(lengths)))
    for target, layer, tables in zip(kv, cache.layers, everywhere, strict=True):
        rows, at = slots.to(layer.device), positions.to(layer.device)
        of_rows = None if tables is None else tables.map(itemgetter(at))
        keys, values, _ = layer.used(LayerKV(*target))
        keys[:] = unrotate(layer.keys[0].index_select(1, rows), of_rows)
        values[:] = layer.values[0].index_select(1, rows)
    return [part.contiguous() for part in kv.split(lengths, dim=3)]


def _blocks(firsts: Sequence[int], lengths: Sequence[int], start: int, device: torch.device) -> list[Block]:
    """Per chunk the blocks of its rows. Their keys begin with the chunk's own copy of the context: ``firsts`` are the
    copies' first slots, ``start`` is their length."""
    blocks, row, size = [], 0, rows_per_block(0, device)
    for first, length in zip(firsts, lengths, strict=True):
        for begin in range(0, length, size):
            end = min(length, begin + size)
            keys = slice(first, first + start + end)
            blocks.append(Block.of(slice(row + begin, row + end), keys, start + torch.arange(begin, end), device))
        row += length
    return blocks
