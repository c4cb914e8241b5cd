"""CacheClip in LlamaIndex: :class:`CacheClipLLM` answers, :class:`CacheClipTransform` precomputes at ingestion.

>>> Settings.llm = CacheClipLLM(store="my-store")
>>> IngestionPipeline(transformations=[SentenceSplitter(), CacheClipTransform.from_llm(Settings.llm)])
"""

from __future__ import annotations

from cacheclip_rag.base.errors import MissingExtraError

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise MissingExtraError("llama-index-core", "llama-index") from error

from .base import CacheClipLLM
from .events import CacheClipFusionEvent
from .transform import CacheClipTransform

__all__ = ["CacheClipFusionEvent", "CacheClipLLM", "CacheClipTransform"]
