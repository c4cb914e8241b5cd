"""Correction of tokens that are not recomputed: each gets a share of the mean change of the recomputed tokens.

Source: AgentKVShift (arXiv:2607.21604): in each layer, context changes a chunk's KV by one shared offset plus noise.
Departures: here the scorer's tokens estimate the offset, there tokens are chosen for this purpose; here one weight
serves all tokens, there each token has its own. If a row filter removes rows between layers, the rows that still run in
a layer estimate the offset of that layer.
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
    """Corrects stale KV during the next scattering pass, in each layer before its rows attend."""

    def __init__(self, runtime: ModelRuntime, cache: FusedCache, weight: float) -> None:
        """``weight``: share of the mean change that is added, 0 to 1."""
        self._runtime, self._cache, self._weight = runtime, cache, weight

    def install(self, spans: Sequence[Span]) -> None:
        """Correct the chunks at ``spans`` during the next pass, which recomputes some of their tokens."""
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
            layer.before_scatter = None  # for this pass only
            assert layer.slots is not None
            for part in parts:
                split = part.split(layer.slots)
                if split is None:
                    continue
                of_chosen, of_stale = split.tables(part.tables[number])
                change = keys[0, :, split.rows].float() - layer.keys[0, :, split.chosen].float()
                offset = self._weight * unrotate(change, of_chosen).mean(1, keepdim=True)
                layer.keys[0, :, split.stale] += rotate(offset.expand(-1, len(split.stale), -1), of_stale).to(
                    keys.dtype
                )
                change = values[0, :, split.rows].float() - layer.values[0, :, split.chosen].float()
                layer.values[0, :, split.stale] += (self._weight * change.mean(1, keepdim=True)).to(values.dtype)

        return correct


@dataclass(frozen=True, slots=True)
class _Split:
    """A chunk's recomputed and stale tokens, valid for all layers that compute the same rows."""

    start: int
    """Slot of the chunk's first token."""
    rows: torch.Tensor
    """``(num_chosen,)`` rows of the pass."""
    chosen: torch.Tensor
    """``(num_chosen,)`` slots of these rows."""
    stale: torch.Tensor
    """``(num_stale,)`` slots of the tokens that are corrected."""

    def tables(self, tables: Tables | None) -> tuple[Tables | None, Tables | None]:
        """The rows of a chunk's rotary tables for the chosen tokens, and for the stale tokens."""
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
        self._known: tuple[torch.Tensor | None, _Split | None] = (None, None)

    def split(self, slots: torch.Tensor) -> _Split | None:
        """The split for a layer that computes ``slots``; None if the chunk has no chosen or no stale token. Layers that
        share one ``slots`` tensor share the split; it is made again after rows left the pass or the device changed."""
        if self._known[0] is not slots:
            self._known = (slots, self._find(slots))
        return self._known[1]

    def _find(self, slots: torch.Tensor) -> _Split | None:
        own = torch.arange(self._span.start, self._span.stop, device=slots.device)
        is_chosen = torch.isin(own, slots)
        chosen, stale = own[is_chosen], own[~is_chosen]
        if not len(chosen) or not len(stale):
            return None
        return _Split(self._span.start, torch.searchsorted(slots, chosen), chosen, stale)
