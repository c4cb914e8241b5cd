"""What LlamaIndex's instrumentation is told of each answer."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.events import BaseEvent

__all__ = ["CacheClipFusionEvent"]


class CacheClipFusionEvent(BaseEvent):
    """An answer's chunk caches: emitted once an answer is complete, within the span of the call that asked."""

    model_name: str
    """The primary model."""
    method: str
    """What produced the answer: ``prefix`` or ``full`` where nothing could be reused."""
    node_ids: list[str] = Field(default_factory=list)
    """Nodes whose text, whole, is in this prompt: those that a :class:`CacheClipSynthesizer`, ``llm.with_nodes`` or the
    call named. Of several prompts for one answer each names its own."""
    hits: int
    """Chunks whose KV was in the store."""
    misses: int
    """Chunks that were known to be in the prompt, and were not."""
    prompt_tokens: int
    """Tokens of the whole prompt."""
    reused_tokens: int
    """Tokens whose KV came from the store or the prefix cache and was kept as it is."""
    recomputed_tokens: int
    """Chunk tokens computed anew."""
    nominal_ratio: float
    """Share of the chunk tokens that was asked for."""
    effective_ratio: float
    """Share of the chunk tokens that was recomputed; where no chunk was reused, of the prompt."""
    charged_ratio: float
    """Share of (layer, chunk token) pairs that was given fresh KV."""
    ttft_s: float
    """Seconds to the first new token."""
    phases_s: dict[str, float]
    """Seconds of each phase before it."""
    stats: dict[str, Any]
    """All of FusionStats."""

    @classmethod
    def class_name(cls) -> str:
        return "CacheClipFusionEvent"
