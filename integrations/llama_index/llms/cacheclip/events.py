"""What LlamaIndex's instrumentation is told of each answer."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.events import BaseEvent

__all__ = ["CacheClipFusionEvent"]


class CacheClipFusionEvent(BaseEvent):
    """An answer's chunk caches: emitted once an answer is complete, within the span of the call that asked."""

    model_name: str
    method: str
    """What produced the answer: ``prefix`` or ``full`` where nothing could be reused."""
    node_ids: list[str] = Field(default_factory=list)
    """Nodes that the prompt was made of, where a :class:`CacheClipSynthesizer` made it."""
    hits: int
    """Chunks whose KV was in the store."""
    misses: int
    """Chunks that were known to be in the prompt, and were not."""
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    nominal_ratio: float
    effective_ratio: float
    charged_ratio: float
    ttft_s: float
    """Seconds to the first new token."""
    phases_s: dict[str, float]
    stats: dict[str, Any]
    """All of FusionStats."""

    @classmethod
    def class_name(cls) -> str:
        return "CacheClipFusionEvent"
