"""CacheClip in LangChain: :class:`ChatCacheClip`, a chat model that reuses the precomputed KV of retrieved documents.

>>> llm = ChatCacheClip(store="my-store")
>>> chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, prompt))
"""

from __future__ import annotations

from .callbacks import CacheClipStatsHandler, collect_cacheclip_stats, with_cacheclip_stats
from .chat_models import ChatCacheClip
from .docstores import CacheClipDocumentStore
from .documents import CacheClipDocumentTransformer, create_cacheclip_documents_chain
from .llms import CacheClipLLM
from .vectorstores import CacheClipVectorStore

__all__ = [
    "CacheClipDocumentStore",
    "CacheClipDocumentTransformer",
    "CacheClipLLM",
    "CacheClipStatsHandler",
    "CacheClipVectorStore",
    "ChatCacheClip",
    "collect_cacheclip_stats",
    "create_cacheclip_documents_chain",
    "with_cacheclip_stats",
]
