"""CacheBlend: tokens whose KV changes most when computed in context are recomputed, whatever is asked.

Source: CacheBlend (arXiv:2405.16444), section 4.3, and the released code: the first layers run in full, the change of
KV at a check layer chooses the tokens, and only these go on. Departures: the mask is exact (theirs lets a token see
its future); the question is always computed and never competes; tokens that are exact already are not run at all.
``schedule="gradual"`` filters layer by layer; the paper names no schedule, ours starts at 1.5 times the ratio and
reaches the ratio after eight layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigurationError
from . import check_ratio
from .base import ChunkWalk, Method, SelectionRequest

__all__ = ["CacheBlend"]

_CHOICES = {"deviation": ("v", "k", "kv"), "schedule": ("single", "gradual")}
_GRADUAL_LAYERS = 8


@dataclass(frozen=True, slots=True)
class CacheBlend(Method):
    """Exact at ``recompute_ratio`` 1.0; at 0.0 only the layers up to the check are fresh."""

    name: ClassVar[str] = "cacheblend"
    walks_layers: ClassVar[bool] = True

    recompute_ratio: float = 0.2
    """Share of chunk tokens that go on behind the check layer."""
    check_layer: int = 1
    """Layer (from 0) whose fresh KV decides; it and those below run in full, which ``charged_ratio`` counts."""
    deviation: str = "v"
    """What is compared: values, keys, or ``kv``, both, each divided by its layer's mean norm."""
    schedule: str = "single"
    """``single``: one choice at the check layer; ``gradual``: again at every layer behind it."""
    equal_charge: bool = False
    """True lowers the ratio so that all that is computed, the layers run in full included, is ``recompute_ratio`` of
    the chunk tokens' layers."""

    def __post_init__(self) -> None:
        check_ratio(self.recompute_ratio)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if not isinstance(self.check_layer, int) or self.check_layer < 0:
            raise ConfigurationError(f"check_layer must be a layer, 0 or more, got {self.check_layer!r}.")

    @property
    def nominal_ratio(self) -> float:
        return self.recompute_ratio

    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.ones(len(span.tokens), dtype=torch.bool) for span in request.spans]

    def walk(self, request: SelectionRequest, rows: torch.Tensor) -> ChunkWalk | None:
        assert request.cache is not None
        return DeviationWalk(self, request, rows) if self.recompute_ratio < 1.0 else None

    def ratio_at(self, layer: int, num_layers: int) -> float:
        """Share of chunk tokens that run in ``layer``, 1.0 up to the check layer."""
        if layer <= self.check_layer:
            return 1.0
        behind = num_layers - 1 - self.check_layer
        mean = self.recompute_ratio
        if self.equal_charge:
            mean = max(0.0, (mean * num_layers - self.check_layer - 1) / behind)
        if self.schedule == "single":
            return mean
        shape = [1 + 0.5 * max(0.0, 1 - n / _GRADUAL_LAYERS) for n in range(behind)]
        return min(1.0, mean * shape[layer - self.check_layer - 1] * behind / sum(shape))


class DeviationWalk(ChunkWalk):
    """All tokens up to the check layer; from there on those whose KV changed most."""

    def __init__(self, method: CacheBlend, request: SelectionRequest, rows: torch.Tensor) -> None:
        assert request.cache is not None
        super().__init__(request.cache, rows)
        self.method, self.request = method, request
        self.of_chunks = torch.zeros(len(rows), dtype=torch.bool)
        """Rows that may leave."""
        for span in request.spans:
            self.of_chunks |= (rows >= span.start) & (rows < span.stop)
        self.of_chunks[-1] = False  # the prompt's last row gives the answer's first logits, chunk or not
        self.charged = 0
        self.deviations: dict[int, torch.Tensor] = {}
        """Per layer looked at, ``(num_alive,)`` float32, in the order of ``alive`` at that layer."""
        self._stale: tuple[torch.Tensor, torch.Tensor] | None = None

    def before_layer(self, layer: int) -> torch.Tensor | None:
        kept = self._filter(layer) if self._stale is not None else None
        alive = self.alive if kept is None else kept
        self.charged += int(self.of_chunks[alive].sum())
        self._stale = self._stored(layer, alive) if self._looks_at(layer) else None
        return kept

    def _looks_at(self, layer: int) -> bool:
        last = self.request.runtime.num_layers - 1
        if layer >= last:
            return False
        return (
            layer >= self.method.check_layer if self.method.schedule == "gradual" else layer == self.method.check_layer
        )

    def _stored(self, layer: int, alive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """KV of the rows as the cache holds it, each ``(num_kv_heads, num_alive, head_dim)``; zeros not yet filled."""
        of_layer = self.cache.layers[layer]
        slots = self.slots[alive].to(of_layer.device)
        known = slots < of_layer.length
        found = []
        for stored in (of_layer.keys[0], of_layer.values[0]):
            rows = stored.new_zeros(stored.shape[0], len(slots), stored.shape[2])
            rows[:, known] = stored[:, slots[known]]
            found.append(rows)
        return found[0], found[1]

    def _filter(self, layer: int) -> torch.Tensor:
        """Rows that run in ``layer``, by the change of KV in the layer below."""
        assert self._stale is not None
        fresh = self._stored(layer - 1, self.alive)
        change = [
            (new.float() - old.float()).square().sum((0, 2)).cpu() for new, old in zip(fresh, self._stale, strict=True)
        ]
        sizes = [new.float().square().sum((0, 2)).mean().cpu() for new in fresh]
        keys, values = change
        score = {"v": values, "k": keys, "kv": (keys / sizes[0]).sqrt() + (values / sizes[1]).sqrt()}
        deviation = score[self.method.deviation]
        self.deviations[layer - 1] = deviation
        share = self.method.ratio_at(layer, self.request.runtime.num_layers)
        budget = round(share * self.request.num_chunk_tokens)
        mine = self.of_chunks[self.alive]
        order = deviation.masked_fill(~mine, -1.0).argsort(descending=True, stable=True)
        keep = ~mine
        keep[order[: min(budget, int(mine.sum()))]] = True
        return self.alive[keep]
