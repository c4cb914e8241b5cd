"""CacheClip in LlamaIndex: :class:`CacheClipLLM` answers, :class:`CacheClipTransform` precomputes at ingestion.

>>> Settings.llm = CacheClipLLM(store="my-store")
>>> IngestionPipeline(transformations=[SentenceSplitter(), CacheClipTransform.from_llm(Settings.llm)])
"""

from __future__ import annotations

from .base import CacheClipLLM
from .events import CacheClipFusionEvent
from .transform import CacheClipTransform

__all__ = ["CacheClipFusionEvent", "CacheClipLLM", "CacheClipTransform"]
