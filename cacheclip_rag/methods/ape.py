"""APE, adaptive parallel encoding: all contexts share their positions, and every row weighs them against the rest.

Source: APE (arXiv:2502.05431), section 4 and the released code: contexts are encoded behind the shared prefix, all at
the same positions, and merged with the other keys by log-sum-exp, with a temperature inside the contexts and a scale
on their mass, in prefill and at every decode step. Nothing is recomputed. Departures: text between the contexts is
read behind them, like the question; chunks that were not stored are ordinary text. CacheClip's authors and the demo use
temperature 0.9 and scale 0.9; the runner of ChatRAG-Bench 0.9 and 1.0 (``ape:scale=1.0``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigurationError
from ..prompt.layout import Layout, Span
from ..runtime.transformers.attention import Geometry
from .direct import Direct

__all__ = ["Ape"]


@dataclass(frozen=True, slots=True)
class Ape(Direct):
    """Never exact with several chunks; the order of chunks does not matter to it."""

    name: ClassVar[str] = "ape"

    temperature: float = 0.9
    """Divides the attention logits within the contexts; below 1 sharpens."""
    scale: float = 0.9
    """The contexts' mass is ``Z ** (scale * temperature)``; below 1 lowers it."""

    def __post_init__(self) -> None:
        super(Ape, self).__post_init__()
        for name in ("temperature", "scale"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0.0 < value <= 10.0:
                raise ConfigurationError(f"{name} must be above 0 and at most 10, got {value!r}.")

    def place(self, layout: Layout, reused: Sequence[Span]) -> Geometry:
        contexts = torch.zeros(layout.num_tokens, dtype=torch.bool)
        for span in reused:
            contexts[span.start : span.stop] = True
        start = reused[0].start
        positions = torch.arange(layout.num_tokens)
        for span in reused:
            positions[span.start : span.stop] = torch.arange(start, start + len(span.tokens))
        behind = (~contexts).nonzero().flatten()
        behind = behind[behind >= start]
        first = start + max(len(span.tokens) for span in reused)
        positions[behind] = torch.arange(first, first + len(behind))
        return Geometry(positions, contexts, self.temperature, self.scale)
