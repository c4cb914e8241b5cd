"""The event of each answer for LlamaIndex's instrumentation."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.events import BaseEvent


class CacheClipFusionEvent(BaseEvent):
    """Statistics of an answer, emitted when the answer is complete, within the span of its call."""

    model_name: str
    """The primary model."""
    method: str
    """Method that produced the answer; ``prefix`` or ``full`` if no chunk was reused."""
    node_ids: list[str] = Field(default_factory=list)
    """Ids of nodes whose whole text is in this prompt, among the nodes given by a :class:`CacheClipSynthesizer`,
    ``llm.with_nodes`` or the call. If one answer needs several prompts, each event has its own nodes."""
    hits: int
    """Chunks whose KV was in the store, whole or in part. Pieces of one chunk count once."""
    misses: int
    """Chunks known to be in the prompt whose KV was not in the store."""
    prompt_tokens: int
    """Tokens of the whole prompt."""
    reused_tokens: int
    """Tokens whose KV came from the store or the prefix cache and was not recomputed."""
    recomputed_tokens: int
    """Chunk tokens that were recomputed."""
    nominal_ratio: float
    """The requested recompute ratio."""
    effective_ratio: float
    """Recomputed share of the chunk tokens. If no chunk was reused, the computed share of the prompt."""
    charged_ratio: float
    """Share of (layer, chunk token) pairs that got fresh KV."""
    ttft_s: float
    """Seconds to the first new token."""
    phases_s: dict[str, float]
    """Seconds per phase of the time to the first token."""
    stats: dict[str, Any]
    """All fields of FusionStats."""

    @classmethod
    def class_name(cls) -> str:
        return "CacheClipFusionEvent"
