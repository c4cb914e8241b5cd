"""Checkpoint adapters for models trained to read chunks apart: Block-Attention and TurboRAG.

Source: Block-Attention (arXiv:2409.15355) and TurboRAG (arXiv:2410.07590). Their checkpoints are fine-tuned on a mask
under which a chunk sees itself alone and only what follows the chunks sees everything; caches computed that way are
then no approximation. Nothing is recomputed. The released checkpoints are not among the packaged models: with any other
model this is direct reuse of chunks encoded without a prefix, and says so in a warning. TurboRAG wraps its chunks in
``<|doc_start|>`` and ``<|doc_end|>``: the preset ``turborag``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ...checks import check_choice, check_flag
from ...chunks.context import ChunkContext
from ...errors import ConfigurationError
from ...prompt.layout import Layout, Span
from ...runtime.transformers.attention import Geometry
from ..base import CacheView, Method, recompute_nothing
from . import check_no_context, warn_untuned

__all__ = ["BlockAttention"]


@dataclass(frozen=True, slots=True)
class BlockAttention(Method):
    """Equal to one forward pass under the block mask, whatever the checkpoint; good answers need one trained for it."""

    name: str = field(default="block", kw_only=True)

    reuses_prefixes: ClassVar[bool] = False
    exact_at_one: ClassVar[bool] = False

    chunk_positions: str = "reordered"
    """``reordered``: places in the prompt; ``composite``: every chunk begins at position 0, as it was encoded."""
    before: str = ""
    """Special tokens that open every chunk."""
    after: str = ""
    """Special tokens that close it."""
    tuned: bool = False
    """Set for a checkpoint trained this way; otherwise a warning says that it is not known to be."""

    def __post_init__(self) -> None:
        super(BlockAttention, self).__post_init__()
        check_choice("chunk_positions", self.chunk_positions, ("reordered", "composite"))
        for name in ("before", "after"):
            if not isinstance(getattr(self, name), str):
                raise ConfigurationError(f"{name} must be a string, got {getattr(self, name)!r}.")
        check_flag("tuned", self.tuned)
        check_no_context(self.name, self.chunk_context)

    @property
    def context(self) -> ChunkContext:
        return ChunkContext(isolated=True, before=self.before, after=self.after)

    def positions(self, layout: Layout, reused: Sequence[Span]) -> Geometry | None:
        if not self.tuned:
            warn_untuned(self.name, "to read chunks apart")
        if self.chunk_positions == "reordered":
            return None
        positions = torch.arange(layout.num_tokens)
        for span in reused:
            positions[span.start : span.stop] = torch.arange(len(span.tokens))
        return Geometry(positions)

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return recompute_nothing(view)
