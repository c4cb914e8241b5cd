"""What a measurement looks at in an engine: its models, their chunk caches, the identity of a combination."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..answering.turns import turns_of
from ..chunks.caches import ChunkCaches
from ..engine import CacheClipEngine
from ..guards.identity import Identity
from ..methods.base import Method
from ..runtime.transformers.model import ModelRuntime
from ..selection.heads import HeadSet


def identity_of(engine: CacheClipEngine, method: Method) -> Identity:
    """Everything that can change an answer of this engine with this method, but its ratio and gate. Loads the models
    that the method needs."""
    return engine.parts.certificates.identity(method)


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
