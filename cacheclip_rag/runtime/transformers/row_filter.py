"""Row filters remove rows from a forward pass between layers, in unmodified models.

A method such as CacheBlend looks at a layer's fresh KV before it decides which tokens the next layers compute. The
model's own loop over layers stays in use: a forward pre-hook on each layer removes rows from the hidden states and from
the layer's other arguments. The hooks act only if the pass's plan has a row filter, or something else to do before each
layer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from .attention import AttentionPlan, Block, causal_plan
from .cache import FusedCache

__all__ = ["RowFilter", "install_row_filter_hooks"]

_OF_ROWS = {"position_embeddings": 1, "position_ids": 1, "cache_position": 0}
"""Arguments of a decoder layer that have one entry per row, and the dimension of the rows."""


class RowFilter(ABC):
    """Decides before each layer which rows stay in the pass. One object serves one pass."""

    charged: int = 0
    """(Layer, chunk token) pairs that got fresh KV so far; the pass's cost in the statistics."""

    def __init__(self, cache: FusedCache, slots: torch.Tensor) -> None:
        """``slots``: ``(num_rows,)`` int64, slots of all rows at the start of the pass, strictly increasing."""
        self.cache = cache
        self.slots = slots
        self.alive = torch.arange(len(slots))
        """Rows that are still in the pass, as increasing indices into ``slots``."""
        self._plan: AttentionPlan | None = None

    @abstractmethod
    def before_layer(self, layer: int) -> torch.Tensor | None:
        """Rows (a subset of ``alive``) that run from ``layer`` on; None keeps all of them.

        The cache already holds fresh KV of the layers below, and still holds stored KV of this layer.
        """

    def enter(self, layer: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Hidden states ``(1, num_alive, hidden_size)`` and arguments of a layer, cut to the rows that stay."""
        kept = self.before_layer(layer)
        if kept is not None and len(kept) < len(self.alive):
            stays = torch.isin(self.alive, kept)
            hidden = hidden[:, stays.to(hidden.device)]
            self.alive = self.alive[stays]
            slots = self.slots[self.alive]
            self.cache.scatter(slots)
            old: AttentionPlan = kwargs["cacheclip_plan"]
            first = old.blocks[0]
            assert isinstance(first, Block), "rows are removed from causal plans only"
            self._plan = causal_plan(slots, first.positions.device, self.cache.geometry)
            self._plan.row_filter, self._plan.layer_starts = self, old.layer_starts
        if self._plan is None:
            return hidden, kwargs
        cut = {name: _rows_of(kwargs[name], self.alive, dim) for name, dim in _OF_ROWS.items() if name in kwargs}
        return hidden, {**kwargs, **cut, "cacheclip_plan": self._plan}


def _rows_of(value: Any, rows: torch.Tensor, dim: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_rows_of(part, rows, dim) for part in value)
    return value.index_select(dim, rows.to(value.device)) if isinstance(value, torch.Tensor) else value


def install_row_filter_hooks(layers: Sequence[torch.nn.Module]) -> None:
    """Let row filters act on these decoder layers."""

    def hook(number: int) -> Any:
        def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            plan: AttentionPlan | None = kwargs.get("cacheclip_plan")
            if plan is not None and plan.layer_starts is not None:
                plan.layer_starts.append(time.perf_counter())
            if plan is not None and plan.before_layer is not None:
                plan.before_layer(number)
            row_filter: RowFilter | None = getattr(plan, "row_filter", None)
            if row_filter is None:
                return None
            hidden, kwargs = row_filter.enter(number, args[0], kwargs)
            return (hidden, *args[1:]), kwargs

        return enter

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(hook(number), with_kwargs=True)
