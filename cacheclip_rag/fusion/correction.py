"""Post-correction: tokens that are not recomputed follow the mean change of those that are.

Source: AgentKVShift (arXiv:2607.21604): what context changes in a chunk's KV is, per layer, one shared offset and
noise. Departures: the probes are the tokens that a selector chose, not some chosen for it, or else tokens spread
evenly; the weight is one number, not one a token. Where rows leave a pass between its layers, the probes of a layer are
those that still run in it.
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
            parts.append(_Part(span, ~computed[span.start : span.stop], asked, tables))
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
                of_probes, of_stale = places.tables(part.tables[number])
                change = keys[0, :, places.rows].float() - layer.keys[0, :, places.probes].float()
                offset = self._weight * _offset(unrotate(change, of_probes), places.weights)
                layer.keys[0, :, places.stale] += rotate(offset.expand(-1, len(places.stale), -1), of_stale).to(
                    keys.dtype
                )
                change = values[0, :, places.rows].float() - layer.values[0, :, places.probes].float()
                layer.values[0, :, places.stale] += (self._weight * _offset(change, places.weights)).to(values.dtype)

        return correct


@dataclass(frozen=True, slots=True)
class _Places:
    """Which tokens of a chunk follow which, in all layers that compute the same rows."""

    start: int
    """Slot of the chunk's first token."""
    rows: torch.Tensor
    """``(num_probes,)`` rows of the pass."""
    probes: torch.Tensor
    """``(num_probes,)`` slots of these rows."""
    stale: torch.Tensor
    """``(num_stale,)`` slots of the tokens that follow them."""
    weights: torch.Tensor | None
    """``(num_stale, num_probes)`` float32, rows summing to 1; None for the plain mean."""

    def tables(self, tables: Tables | None) -> tuple[Tables | None, Tables | None]:
        """Of a chunk's rotary tables, those of the probes and those of the stale tokens."""
        if tables is None:
            return None, None
        cos, sin = tables
        at, of = self.probes - self.start, self.stale - self.start
        return (cos[at], sin[at]), (cos[of], sin[of])


class _Part:
    """One chunk in a pass."""

    def __init__(
        self, span: Span, uncomputed: torch.Tensor, asked: torch.Tensor | None, tables: list[Tables | None]
    ) -> None:
        self.tables = tables
        self._span, self._uncomputed, self._asked = span, uncomputed, asked
        self._known: tuple[torch.Tensor | None, _Places | None] = (None, None)

    def places(self, slots: torch.Tensor) -> _Places | None:
        """For a layer that computes ``slots``; None if nothing of the chunk can be corrected. Found anew only where
        rows have left the pass, or the layer is on another device: else the very tensor of the layer below is asked."""
        if self._known[0] is not slots:
            self._known = (slots, self._find(slots))
        return self._known[1]

    def _find(self, slots: torch.Tensor) -> _Places | None:
        own = torch.arange(self._span.start, self._span.stop, device=slots.device)
        chosen = torch.isin(own, slots)
        stale = own[~chosen & self._uncomputed.to(slots.device)]
        probes = own[chosen if self._asked is None else chosen & self._asked.to(slots.device)]
        if not len(probes) or not len(stale):
            return None
        weights = None if self._asked is None else _weights(probes, stale)
        return _Places(self._span.start, torch.searchsorted(slots, probes), probes, stale, weights)


def _weights(probes: torch.Tensor, stale: torch.Tensor) -> torch.Tensor:
    """``(num_stale, num_probes)`` float32, rows summing to 1, falling with the distance in tokens."""
    distance = (stale[:, None] - probes[None]).abs().float()
    return (-distance / _REACH).softmax(-1)


def _offset(change: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """From the change of the probes, ``(num_kv_heads, num_probes, head_dim)``: its plain mean,
    ``(num_kv_heads, 1, head_dim)``, or with weights ``(num_kv_heads, num_stale, head_dim)``, times the share of the
    mean's square that is not expected from chance (James and Stein, positive part).
    """
    mean = change.mean(1, keepdim=True)
    if weights is None:
        return mean
    if change.shape[1] == 1:
        return torch.zeros_like(mean)
    by_chance = change.var(1).sum() / change.shape[1]
    share = (1 - by_chance / mean.square().sum()).clamp(0.0, 1.0).nan_to_num()
    return torch.matmul(weights, change) * share
