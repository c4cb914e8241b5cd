"""APE, adaptive parallel encoding: all chunks share the same positions, and every row weighs them against other keys.

Source: APE (arXiv:2502.05431), section 4 and the released code. Chunks ("contexts") are encoded after the shared
prefix, all at the same positions. Attention merges them with the other keys by log-sum-exp, with a temperature inside
the chunks and a scale on their mass, in prefill and at every decode step. Nothing is recomputed. Departures: text
between the chunks is read after them, like the question; chunks that are not stored are ordinary text. CacheClip's
authors and APE's demo use temperature 0.9 and scale 0.9; APE's ChatRAG-Bench script uses 0.9 and 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..base.checks import check_number
from ..prompt.layout import Layout, Span
from ..runtime.transformers.cache import Geometry
from .direct import Direct


@dataclass(frozen=True, slots=True)
class Ape(Direct):
    """Never exact with several chunks. The order of the chunks has no effect."""

    name: str = field(default="ape", kw_only=True)

    temperature: float = 0.9
    """Divides the attention logits within the chunks; values below 1 sharpen the attention."""
    scale: float = 0.9
    """The chunks' mass is ``Z ** (scale * temperature)``; values below 1 lower it."""

    def __post_init__(self) -> None:
        super(Ape, self).__post_init__()
        for name in ("temperature", "scale"):
            check_number(name, getattr(self, name), "above 0 and at most 10", above=0.0, most=10.0)

    def positions(self, layout: Layout, reused: Sequence[Span]) -> Geometry:
        contexts = torch.zeros(layout.num_tokens, dtype=torch.bool)
        for span in reused:
            contexts[span.start : span.stop] = True
        start = reused[0].start
        positions = torch.arange(layout.num_tokens)
        for span in reused:
            positions[span.start : span.stop] = torch.arange(start, start + len(span.tokens))
        after = (~contexts).nonzero().flatten()
        after = after[after >= start]
        first = start + max(len(span.tokens) for span in reused)
        positions[after] = torch.arange(first, first + len(after))
        return Geometry(positions, contexts, self.temperature, self.scale)
