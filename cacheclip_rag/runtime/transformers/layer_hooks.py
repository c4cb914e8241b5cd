"""Hooks on the decoder layers of unmodified models: the model's own loop over layers stays in use.

They act only if a pass has a pattern. Before each layer they let stored KV of this layer be written,
hand on rotary tables that are there already, and ask the row filter, if the pattern has them. Before the last layer
they save work: all rows get KV there, but only few need the layer's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from .attention_pattern import AttentionPattern, Block, PassEnded, rows_of
from .row_filter import RowFilter


def install_layer_hooks(layers: Sequence[torch.nn.Module]) -> None:
    """Let the patterns of passes act on these decoder layers."""

    def hook(number: int) -> Any:
        def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            pattern: AttentionPattern | None = kwargs.get("cacheclip_pattern")
            if pattern is None:
                return None
            if pattern.before_layer is not None:
                pattern.before_layer(number)
            if pattern.position_embeddings is not None:
                kwargs = {**kwargs, "position_embeddings": pattern.position_embeddings[number], "position_ids": None}
            hidden, row_filter = args[0], pattern.row_filter
            if isinstance(row_filter, RowFilter):
                hidden, kwargs = row_filter.enter(number, hidden, kwargs)
            if number == len(layers) - 1:
                hidden, kwargs = _enter_last(module, hidden, kwargs)
            return (hidden, *args[1:]), kwargs

        return enter

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(hook(number), with_kwargs=True)


def _enter_last(
    layer: torch.nn.Module, hidden: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Write the last layer's KV of all rows in a run that ends at its attention, then leave only the rows whose output
    is needed."""
    pattern: AttentionPattern = kwargs["cacheclip_pattern"]
    needed, num_rows = pattern.last_rows, hidden.shape[1]
    last = pattern.blocks[-1] if pattern.blocks else None
    if not needed or needed >= num_rows or not isinstance(last, Block):
        return hidden, kwargs
    with suppress(PassEnded):
        layer.forward(hidden, **{**kwargs, "cacheclip_pattern": replace(pattern, last_rows=0)})
    cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))  # see cache_argument
    slots = cache.layers[-1].slots_on_cpu[-needed:]
    cache.scatter(slots)
    rows = torch.arange(num_rows - needed, num_rows)
    positions = slots - last.keys.start
    block = Block.of(slice(0, needed), last.keys, positions, hidden.device, last.geometry)
    return hidden[:, -needed:], {**rows_of(kwargs, rows), "cacheclip_pattern": AttentionPattern([block])}
