"""Post-correction: tokens that are not recomputed follow the mean change of those that are.

Source: AgentKVShift (arXiv:2607.21604): what context changes in a chunk's KV is, per layer, one shared offset and
noise. Departures: the probes are the tokens that a selector chose, not some chosen for it, or else tokens spread
evenly; the weight is one number, not one a token. Where rows leave a pass between its layers, the probes of a layer are
those that still run in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..models.cache import FusedCache, FusedLayer
from ..models.rotary import Tables, rotate, unrotate
from ..models.runtime import ModelRuntime
from .layout import Span

__all__ = ["ResidualCorrection"]

_REACH = 64.0
"""Tokens of distance at which a probe counts 1/e as much as one beside the token."""


class ResidualCorrection:
    """Acts within the next scattering pass, layer by layer: before a layer's rows attend, its stale KV is moved."""

    def __init__(self, runtime: ModelRuntime, cache: FusedCache, weight: float) -> None:
        """``weight``: share of the mean change that is added, 0 to 1."""
        self._runtime, self._cache, self._weight = runtime, cache, weight

    def install(self, spans: Sequence[Span], computed: torch.Tensor, probes: torch.Tensor | None = None) -> None:
        """For chunks at ``spans``, of which some tokens are about to be recomputed.

        Args:
            computed: ``(num_tokens,)`` bool of the whole prompt: tokens recomputed before, which stay as they are.
            probes: ``(num_tokens,)`` bool: tokens whose change is a fair sample of that of those left alone. A token
                then follows the near ones more than the far ones, and all of them only as far as their mean is not
                chance. Default all that are recomputed, their plain mean.
        """
        parts = []
        for span in spans:
            start = self._cache.position_of(span.start)
            tables = self._runtime.rotary_tables(start, start + len(span.tokens))
            asked = None if probes is None else probes[span.start : span.stop]
            parts.append((span, ~computed[span.start : span.stop], asked, tables))
        for number, layer in enumerate(self._cache.layers):
            layer.before_scatter = self._corrector(number, parts)

    def _corrector(
        self, number: int, parts: Sequence[tuple[Span, torch.Tensor, torch.Tensor | None, list[Tables | None]]]
    ) -> Callable[[FusedLayer, torch.Tensor, torch.Tensor], None]:
        def correct(layer: FusedLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
            layer.before_scatter = None  # for this pass alone
            assert layer.slots is not None
            for span, uncomputed, asked, tables in parts:
                slots = torch.arange(span.start, span.stop, device=layer.device)
                chosen = torch.isin(slots, layer.slots)
                stale = ~chosen & uncomputed.to(layer.device)
                if asked is not None:
                    chosen &= asked.to(layer.device)
                if not bool(chosen.any()) or not bool(stale.any()):
                    continue
                rows = torch.searchsorted(layer.slots, slots[chosen])
                of_layer = tables[number]
                probes = None if of_layer is None else (of_layer[0][chosen], of_layer[1][chosen])
                others = None if of_layer is None else (of_layer[0][stale], of_layer[1][stale])
                change = keys[0, :, rows].float() - layer.keys[0, :, slots[chosen]].float()
                weights = self._weight * _weights(chosen, stale, even=asked is None)
                sampled = asked is not None
                offset = _offset(unrotate(change, probes), weights, sampled)
                layer.keys[0, :, slots[stale]] += rotate(offset, others).to(keys.dtype)
                change = values[0, :, rows].float() - layer.values[0, :, slots[chosen]].float()
                layer.values[0, :, slots[stale]] += _offset(change, weights, sampled).to(values.dtype)

        return correct


def _weights(probes: torch.Tensor, stale: torch.Tensor, even: bool) -> torch.Tensor:
    """``(num_stale, num_probes)`` float32, rows summing to 1: all alike, or falling with the distance in tokens."""
    at, of = stale.nonzero().flatten(), probes.nonzero().flatten()
    distance = (at[:, None] - of[None]).abs().float()
    return (torch.zeros_like(distance) if even else -distance / _REACH).softmax(-1)


def _offset(change: torch.Tensor, weights: torch.Tensor, sampled: bool) -> torch.Tensor:
    """``(num_kv_heads, num_stale, head_dim)`` from the change of the probes, ``(num_kv_heads, num_probes, head_dim)``.

    ``sampled``: times the share of the mean's square that is not expected from chance (James and Stein, positive part).
    """
    offset = torch.einsum("sp,hpd->hsd", weights, change)
    if not sampled:
        return offset
    if change.shape[1] == 1:
        return torch.zeros_like(offset)
    by_chance = change.var(1).sum() / change.shape[1]
    return offset * (1 - by_chance / change.mean(1).square().sum()).clamp(0.0, 1.0).nan_to_num()
