"""A document store that releases the chunk caches of what is deleted from it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.storage.docstore.keyval_docstore import KVDocumentStore

from cacheclip_rag.errors import ConfigurationError

if TYPE_CHECKING:
    from typing import Self

    from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

__all__ = ["CacheClipDocumentStore"]


class CacheClipDocumentStore(KVDocumentStore):
    """Another document store's documents, in the same place; what is deleted here is released from the chunk-cache
    store, unless another node holds the same text.

    It is the document store of an index (``index.refresh_ref_docs``, ``delete_ref_doc(…, delete_from_docstore=True)``,
    ``delete_nodes``) or of an ``IngestionPipeline`` (``upserts``: the caches of a document's older version go before
    the new one is computed). What it releases is what :class:`CacheClipTransform` precomputed, here or in another
    process with the same store. Updates happen through deletion; a node that is overwritten under its id keeps the
    caches of its older text until it is deleted.
    """

    def __init__(self, docstore: KVDocumentStore, llm: CacheClipLLM | CacheClipTransform) -> None:
        """
        Args:
            docstore: where documents are kept: ``SimpleDocumentStore()``, or LlamaIndex's for Redis, MongoDB, ...
            llm: whose engine has the chunk caches; a transform will do.

        Raises:
            ConfigurationError: a document store that is not made of keys and values.
        """
        if not isinstance(docstore, KVDocumentStore):
            raise ConfigurationError(
                f"CacheClipDocumentStore goes over a KVDocumentStore (SimpleDocumentStore, RedisDocumentStore, ...), "
                f"got {type(docstore).__name__}. For others call llm.engine.release_sources(ids) after deleting."
            )
        self._docstore, self._llm = docstore, llm
        for name in (
            "_kvstore",
            "_namespace",
            "_node_collection",
            "_ref_doc_collection",
            "_metadata_collection",
            "_batch_size",
        ):
            setattr(self, name, getattr(docstore, name))

    @classmethod
    def of(cls, llm: CacheClipLLM | CacheClipTransform) -> Self:
        """Over documents in memory."""
        return cls(SimpleDocumentStore(), llm)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the other document store has (``persist``)."""
        if name.startswith("__") or "_docstore" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._docstore, name)

    def persist(self, *arguments: Any, **options: Any) -> None:
        self._docstore.persist(*arguments, **options)

    def delete_document(self, doc_id: str, raise_error: bool = True) -> None:
        """Delete a node or document, and release what was precomputed of it."""
        super().delete_document(doc_id, raise_error=raise_error)
        self._llm.engine.release_sources([doc_id])

    async def adelete_document(self, doc_id: str, raise_error: bool = True) -> None:
        await super().adelete_document(doc_id, raise_error=raise_error)
        await asyncio.to_thread(lambda: self._llm.engine.release_sources([doc_id]))

    def delete_ref_doc(self, ref_doc_id: str, raise_error: bool = True) -> None:
        """Delete all nodes of a document, and release what was precomputed of them."""
        super().delete_ref_doc(ref_doc_id, raise_error=raise_error)
        self._llm.engine.release_sources([ref_doc_id])

    async def adelete_ref_doc(self, ref_doc_id: str, raise_error: bool = True) -> None:
        await super().adelete_ref_doc(ref_doc_id, raise_error=raise_error)
        await asyncio.to_thread(lambda: self._llm.engine.release_sources([ref_doc_id]))
