"""What a measurement looks at in an engine: its models and their chunk caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..answering.turns import turns_of
from ..chunks.caches import ChunkCaches
from ..engine import CacheClipEngine
from ..runtime.transformers.model import ModelRuntime
from ..selection.heads import HeadSet


def prefix_caches(engine: CacheClipEngine) -> ChunkCaches:
    """Chunk caches of the primary whose chunk context is the shared prefix. Loads the model."""
    return engine.parts.models.caches_after_prefix


def auxiliary_caches(engine: CacheClipEngine) -> ChunkCaches:
    """Chunk caches of the auxiliary model, which must be set. Loads it."""
    caches = engine.parts.models.auxiliary_caches
    assert caches is not None, "training needs an engine with an auxiliary model"
    return caches


def use_heads(engine: CacheClipEngine, heads: HeadSet | None) -> None:
    """Score tokens with these heads from now on; None: with all heads alike."""
    engine.parts.use_heads(heads)


@contextmanager
def stock_attention(runtime: ModelRuntime, implementation: str = "eager") -> Iterator[Any]:
    """The model of transformers with one of its own attention functions, while it has the turn of a prompt."""
    model = runtime.model
    with turns_of(runtime).prompt():
        ours = model.config._attn_implementation
        model.set_attn_implementation(implementation)
        try:
            yield model
        finally:
            model.set_attn_implementation(ours)
