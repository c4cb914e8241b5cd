"""Block-Attention (arXiv:2409.15355), for checkpoints that are trained to read chunks apart.

Such a model is fine-tuned with a mask under which a chunk sees only itself, and text after the chunks sees everything.
Chunk caches computed this way are exact under that mask, so nothing is recomputed. Other models answer worse with it
than with ``direct``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..base.errors import ConfigurationError
from ..chunks.context import ChunkContext
from .direct import Direct


@dataclass(frozen=True, slots=True)
class BlockAttention(Direct):
    """Equals one forward pass under the block mask. Good answers need a checkpoint trained for it."""

    name: str = field(default="block", kw_only=True)

    reuses_prefixes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super(BlockAttention, self).__post_init__()
        if self.chunk_context is not None:
            raise ConfigurationError(
                f"method {self.name!r} encodes chunks without anything before them, got chunk_context="
                f"{self.chunk_context!r}. Leave it out."
            )

    @property
    def context(self) -> ChunkContext:
        return ChunkContext(isolated=True)
