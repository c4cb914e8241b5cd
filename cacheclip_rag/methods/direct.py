"""Direct reuse: chunk caches are concatenated and nothing is recomputed.

Source: the "full KV reuse" baseline of CacheBlend (arXiv:2405.16444) and "direct precomputation" of CacheClip
(arXiv:2510.10129v1, section 2.3). Departure: chunks are encoded after a chunk context, as for every method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..base.errors import ConfigurationError
from ..chunks.context import ChunkContext
from ..selection.views import PromptView, per_span
from .base import Method


@dataclass(frozen=True, slots=True)
class Direct(Method):
    """The fastest method and the lower baseline; exact only for a single chunk right after its own prefix."""

    name: str = field(default="direct", kw_only=True)

    exact_at_one: ClassVar[bool] = False

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return per_span(view.spans, False)


@dataclass(frozen=True, slots=True)
class BlockAttention(Direct):
    """Block-Attention (arXiv:2409.15355), for checkpoints that are trained to read chunks apart.

    Such a model is fine-tuned with a mask under which a chunk sees only itself, and text after the chunks sees
    everything. Chunk caches computed this way equal one forward pass under that mask, so nothing is recomputed. Other
    models answer worse with it than with ``direct``.
    """

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
