"""Post-correction: tokens that are not recomputed follow the mean change of those that are.

Source: AgentKVShift (arXiv:2607.21604): what context changes in a chunk's KV is, per layer, one shared offset and
noise. Departures: the offset is estimated from the tokens that a scorer chose, not from tokens chosen for it; the
weight is one number, not one per token. Where rows leave a pass between its layers, the offset of a layer is that of
the rows that still run in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..prompt.layout import Span
from ..runtime.transformers.cache import FusedCache, FusedLayer
from ..runtime.transformers.rotary import Tables, rotate, unrotate

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["ResidualCorrection"]


class ResidualCorrection:
    """Acts within the next scattering pass, layer by layer: before a layer's rows attend, its stale KV is moved."""

    def __init__(self, runtime: ModelRuntime, cache: FusedCache, weight: float) -> None:
        """``weight``: share of the mean change that is added, 0 to 1."""
        self._runtime, self._cache, self._weight = runtime, cache, weight

    def install(self, spans: Sequence[Span]) -> None:
        """For chunks at ``spans``, of which some tokens are about to be recomputed."""
        parts = []
        for span in spans:
            start = self._cache.position_of(span.start)
            parts.append(_Part(span, self._runtime.rotary_tables(start, start + len(span.tokens))))
        for number, layer in enumerate(self._cache.layers):
            layer.before_scatter = self._corrector(number, parts)

    def _corrector(
        self, number: int, parts: Sequence[_Part]
    ) -> Callable[[FusedLayer, torch.Tensor, torch.Tensor], None]:
        def correct(layer: FusedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
            layer.before_scatter = None  # for this pass alone
            assert layer.slots is not None
            for part in parts:
                places = part.places(layer.slots)
                if places is None:
                    continue
                of_chosen, of_stale = places.tables(part.tables[number])
                change = keys[0, :, places.rows].float() - layer.keys[0, :, places.chosen].float()
                offset = self._weight * unrotate(change, of_chosen).mean(1, keepdim=True)
                layer.keys[0, :, places.stale] += rotate(offset.expand(-1, len(places.stale), -1), of_stale).to(
                    keys.dtype
                )
                change = values[0, :, places.rows].float() - layer.values[0, :, places.chosen].float()
                layer.values[0, :, places.stale] += (self._weight * change.mean(1, keepdim=True)).to(values.dtype)

        return correct


@dataclass(frozen=True, slots=True)
class _Places:
    """Which tokens of a chunk follow which, in all layers that compute the same rows."""

    start: int
    """Slot of the chunk's first token."""
    rows: torch.Tensor
    """``(num_chosen,)`` rows of the pass."""
    chosen: torch.Tensor
    """``(num_chosen,)`` slots of these rows."""
    stale: torch.Tensor
    """``(num_stale,)`` slots of the tokens that follow them."""

    def tables(self, tables: Tables | None) -> tuple[Tables | None, Tables | None]:
        """Of a chunk's rotary tables, those of the chosen and those of the stale tokens."""
        if tables is None:
            return None, None
        cos, sin = tables
        at, of = self.chosen - self.start, self.stale - self.start
        return (cos[at], sin[at]), (cos[of], sin[of])


class _Part:
    """One chunk in a pass."""

    def __init__(self, span: Span, tables: list[Tables | None]) -> None:
        self.tables = tables
        self._span = span
        self._known: tuple[torch.Tensor | None, _Places | None] = (None, None)

    def places(self, slots: torch.Tensor) -> _Places | None:
        """For a layer that computes ``slots``; None if nothing of the chunk can be corrected. Found anew only where
        rows have left the pass, or the layer is on another device: else the very tensor of the layer below is asked."""
        if self._known[0] is not slots:
            self._known = (slots, self._find(slots))
        return self._known[1]

    def _find(self, slots: torch.Tensor) -> _Places | None:
        own = torch.arange(self._span.start, self._span.stop, device=slots.device)
        is_chosen = torch.isin(own, slots)
        chosen, stale = own[is_chosen], own[~is_chosen]
        if not len(chosen) or not len(stale):
            return None
        return _Places(self._span.start, torch.searchsorted(slots, chosen), chosen, stale)
