"""CacheClip in LlamaIndex: a document store that releases the chunk caches of deleted documents.

>>> storage = StorageContext.from_defaults(docstore=CacheClipDocumentStore.of(llm))
"""

from __future__ import annotations

from .base import CacheClipDocumentStore

__all__ = ["CacheClipDocumentStore"]
