"""Methods for checkpoints trained to read chunks separately: Block-Attention and TurboRAG.

Source: Block-Attention (arXiv:2409.15355) and TurboRAG (arXiv:2410.07590). Their checkpoints are fine-tuned with a mask
under which a chunk sees only itself, and text after the chunks sees everything. Chunk caches computed this way are
exact under that mask, so nothing is recomputed. The released checkpoints are not packaged models. With other models
this is direct reuse of chunks encoded without a prefix, and a warning says so. TurboRAG wraps its chunks in
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
from ...runtime.transformers.attention_plan import Geometry
from ..base import CacheView, Method, recompute_nothing
from . import check_no_context, warn_untuned

__all__ = ["BlockAttention"]


@dataclass(frozen=True, slots=True)
class BlockAttention(Method):
    """Equals one forward pass under the block mask. Good answers need a checkpoint trained for it."""

    name: str = field(default="block", kw_only=True)

    reuses_prefixes: ClassVar[bool] = False
    exact_at_one: ClassVar[bool] = False

    chunk_positions: str = "reordered"
    """``reordered``: positions in the prompt; ``composite``: every chunk begins at position 0, as it was encoded."""
    before: str = ""
    """Special tokens that open every chunk."""
    after: str = ""
    """Special tokens that close every chunk."""
    tuned: bool = False
    """True: the checkpoint was trained this way, and no warning is logged."""

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
            warn_untuned(self.name, "to read chunks separately")
        if self.chunk_positions == "reordered":
            return None
        positions = torch.arange(layout.num_tokens)
        for span in reused:
            positions[span.start : span.stop] = torch.arange(len(span.tokens))
        return Geometry(positions)

    @property
    def reads_cache(self) -> bool:
        return False

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return recompute_nothing(view)
