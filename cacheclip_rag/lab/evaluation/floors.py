"""How many floating-point operations the matrix products of a forward pass take, from the model's own shapes.

A pass over R rows takes ``2 * inputs * outputs * R`` for each linear layer, and ``4 * head_dim * num_heads * pairs`` in
each layer's attention: half of it for queries times keys, half for weights times values. A pair is a row and a key that
it may see. Hidden pairs do not count, though kernels may multiply them. Nor do products outside linear layers and
attention count: rotary tables, low-rank updates, and experts whose weights are no linear layers, which are most of a
mixture of experts. So the counts are lower bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.transformers.attention_plan import Block, SideBySide

__all__ = ["LayerShape", "block_pairs", "causal_pairs", "layer_shapes", "linear_flops", "linear_layers"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one decoder layer."""

    weights: int
    """Inputs times outputs, over all linear layers."""
    num_heads: int
    """Heads of the queries."""
    head_dim: int
    window: int | None
    """Sliding window in tokens; None: all earlier tokens are seen."""
    before_attention: int = 0
    """Of :attr:`weights`, those of the linear layers before the attention: queries, keys and values."""

    def flops(self, rows: int, pairs: int, scored: int = 0) -> int:
        """Operations of a pass over ``rows`` rows that see ``pairs`` keys in all.

        Args:
            scored: further pairs whose attention weights are read: queries times keys only.
        """
        return linear_flops(self.weights, rows) + self.num_heads * self.head_dim * (4 * pairs + 2 * scored)


def layer_shapes(model: Any) -> list[LayerShape]:
    """Shapes of the decoder layers of a transformers model."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shapes = []
    for layer in model.base_model.layers:
        window = getattr(layer.self_attn, "sliding_window", getattr(config, "sliding_window", None))
        weights = sum(each.in_features * each.out_features for each in linear_layers(layer))
        projections = sum(each.in_features * each.out_features for each in linear_layers(layer.self_attn))
        output = config.num_attention_heads * head_dim * config.hidden_size
        shapes.append(LayerShape(weights, config.num_attention_heads, head_dim, window, projections - output))
    return shapes


def linear_layers(module: torch.nn.Module) -> list[torch.nn.Linear]:
    """All linear layers in a module."""
    return [each for each in module.modules() if isinstance(each, torch.nn.Linear)]


def linear_flops(weights: int, rows: int) -> int:
    """Operations of linear layers with so many ``weights`` (inputs times outputs) on ``rows`` rows."""
    return 2 * weights * rows


def causal_pairs(known: int, rows: int, window: int | None) -> int:
    """Pairs of ``rows`` rows after ``known`` tokens: each sees itself and what is before it, within the window."""
    most = known + rows if window is None else window
    return sum(min(seen, most) for seen in range(known + 1, known + rows + 1))


def block_pairs(block: Block | SideBySide, window: int | None) -> int:
    """Pairs of a block's rows. The window counts slots, which differ from positions in few methods."""
    if isinstance(block, SideBySide):
        own = torch.arange(block.width - block.num_rows, block.width)
        seen = own + 1 - block.padding[:, None]
        return int(seen.sum() if window is None else seen.clamp(max=window).sum())
    rows = block.positions.cpu()
    first = torch.zeros_like(rows) if window is None else (rows + 1 - window).clamp(min=0)
    seen = rows + 1 - first
    if block.geometry is not None and block.geometry.contexts is not None:
        contexts = _before(block.geometry.contexts_of(torch.arange(block.keys.stop - block.keys.start)))
        seen += contexts[-1] - contexts[rows + 1]  # every row sees the later contexts too
    return int(seen.sum())


def _before(mask: torch.Tensor) -> torch.Tensor:
    """``(num_slots + 1,)`` int64: how many of the first 0, 1, ... slots are set."""
    return torch.cat((torch.zeros(1, dtype=torch.int64), mask.cumsum(0)))
