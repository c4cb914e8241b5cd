"""Post-correction: tokens that are not recomputed follow the mean change of those that are.

Source: AgentKVShift (arXiv:2607.21604): what context changes in a chunk's KV is, per layer, one shared offset and
noise. Departures: the tokens that a selector chose are the probes, not some chosen for it; the weight is one number,
not one a token. Where rows leave a pass between its layers, the probes of a layer are those that still run in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..models.cache import FusedCache, FusedLayer
from ..models.rotary import Tables, rotate, unrotate
from ..models.runtime import ModelRuntime
from .layout import Span

__all__ = ["ResidualCorrection"]


class ResidualCorrection:
    """Acts within the next scattering pass, layer by layer: before a layer's rows attend, its stale KV is moved."""

    def __init__(self, runtime: ModelRuntime, cache: FusedCache, weight: float) -> None:
        """``weight``: share of the mean change that is added, 0 to 1."""
        self._runtime, self._cache, self._weight = runtime, cache, weight

    def install(self, spans: Sequence[Span], computed: torch.Tensor) -> None:
        """For chunks at ``spans``, of which some tokens are about to be recomputed; those in ``computed``,
        ``(num_tokens,)`` of the whole prompt, were before, and stay as they are."""
        parts = []
        for span in spans:
            start = self._cache.position_of(span.start)
            tables = self._runtime.rotary_tables(start, start + len(span.tokens))
            parts.append((span, ~computed[span.start : span.stop], tables))
        for number, layer in enumerate(self._cache.layers):
            layer.before_scatter = self._corrector(number, parts)

    def _corrector(
        self, number: int, parts: Sequence[tuple[Span, torch.Tensor, list[Tables | None]]]
    ) -> Callable[[FusedLayer, torch.Tensor, torch.Tensor], None]:
        def correct(layer: FusedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
            layer.before_scatter = None  # for this pass alone
            assert layer.slots is not None
            for span, uncomputed, tables in parts:
                slots = torch.arange(span.start, span.stop, device=layer.device)
                chosen = torch.isin(slots, layer.slots)
                stale = ~chosen & uncomputed.to(layer.device)
                if not bool(chosen.any()) or not bool(stale.any()):
                    continue
                rows = torch.searchsorted(layer.slots, slots[chosen])
                of_layer = tables[number]
                probes = None if of_layer is None else (of_layer[0][chosen], of_layer[1][chosen])
                others = None if of_layer is None else (of_layer[0][stale], of_layer[1][stale])
                change = keys[0, :, rows].float() - layer.keys[0, :, slots[chosen]].float()
                offset = unrotate(change, probes).mean(1, keepdim=True)
                offset = offset.expand(-1, int(stale.sum()), -1)
                layer.keys[0, :, slots[stale]] += (self._weight * rotate(offset, others)).to(keys.dtype)
                change = values[0, :, rows].float() - layer.values[0, :, slots[chosen]].float()
                layer.values[0, :, slots[stale]] += (self._weight * change.mean(1, keepdim=True)).to(values.dtype)

        return correct
