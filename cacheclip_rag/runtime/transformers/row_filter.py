"""Row filters remove rows from a forward pass between layers, in unmodified models.

A method such as CacheBlend looks at a layer's fresh KV before it decides which tokens the next layers compute. Hooks on
the layers (:mod:`.layer_hooks`) ask the pass's row filter, if it has one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from .attention_pattern import AttentionPattern, Block, causal_pattern, rows_of
from .cache import FusedCache


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
        self._pattern: AttentionPattern | None = None

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
            hidden = hidden.index_select(1, stays.nonzero().flatten().to(hidden.device))
            self.alive = self.alive[stays]
            slots = self.slots[self.alive]
            self.cache.scatter(slots)
            old: AttentionPattern = kwargs["cacheclip_pattern"]
            first = old.blocks[0]
            assert isinstance(first, Block), "rows are removed from causal patterns only"
            self._pattern = causal_pattern(slots, first.positions.device, self.cache.geometry)
            self._pattern.last_rows = old.last_rows
        if self._pattern is None:
            return hidden, kwargs
        return hidden, {**rows_of(kwargs, self.alive), "cacheclip_pattern": self._pattern}
