"""CacheClip in LlamaIndex: a document store that releases the chunk caches of deleted documents.

>>> storage = StorageContext.from_defaults(docstore=CacheClipDocumentStore.of(llm))
"""

from __future__ import annotations

from llama_index.llms.cacheclip import CacheClipLLM as _CacheClipLLM  # noqa: F401  (says what to install)

from .base import CacheClipDocumentStore

__all__ = ["CacheClipDocumentStore"]
