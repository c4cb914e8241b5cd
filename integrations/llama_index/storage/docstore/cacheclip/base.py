"""A document store that releases the chunk caches of what is deleted from it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.storage.docstore.keyval_docstore import KVDocumentStore

from cacheclip_rag.errors import ConfigurationError

if TYPE_CHECKING:
    from typing import Self

    from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

__all__ = ["CacheClipDocumentStore"]

_DELETED = "cacheclip:deleted"
"""Source that holds what was deleted while an update is under way. It lies in the chunk-cache store: what a crash left
there, the next deletion or update releases."""
_lock = threading.Lock()  # of the module: a document store can be copied


class CacheClipDocumentStore(KVDocumentStore):
    """Another document store's documents, in the same place; what is deleted here is released from the chunk-cache
    store, unless another node holds the same text.

    It is the document store of an index (``index.refresh_ref_docs``, ``delete_ref_doc(…, delete_from_docstore=True)``,
    ``delete_nodes``) or of an ``IngestionPipeline`` (``upserts``). What it releases is what :class:`CacheClipTransform`
    precomputed or :class:`CacheClipSynthesizer` stored, here or in another process with the same store. LlamaIndex
    updates a document by deleting it first: within :meth:`updating`, chunks that its new version holds too are not
    computed again. A node that is overwritten under its id keeps the caches of its older text until it is deleted.

    >>> with docstore.updating():
    ...     pipeline.run(documents=documents)  # or index.refresh_ref_docs(documents)
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
                f"got {type(docstore).__name__}. For others call llm.engine.release(sources=ids) after deleting."
            )
        self._docstore, self._llm = docstore, llm
        self._updates = 0
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

    @contextmanager
    def updating(self) -> Iterator[None]:
        """What is deleted in this block is released at its end (an exception is an end, too), as far as nothing stored
        meanwhile holds the same text."""
        with _lock:
            self._updates += 1
        try:
            yield
        finally:
            with _lock:
                self._updates -= 1
                if not self._updates:
                    self._release_deleted()

    def _release(self, name: str) -> None:
        """Release a source or document, now or at the end of an update."""
        engine = self._llm.engine
        with _lock:
            if self._updates:
                for text in engine.library.orphans([name]):
                    engine.library.add_source(text, _DELETED)
                engine.library.remove_sources([name])  # last: a killed run does it again
            else:
                engine.release(sources=[name])
                self._release_deleted()

    def _release_deleted(self) -> None:
        """Release what updates left, unless another source holds it by now."""
        engine = self._llm.engine
        deleted = engine.library.texts(_DELETED)
        engine.release(set(engine.library.orphans([_DELETED])).intersection(deleted))
        engine.library.remove_sources([_DELETED], texts=deleted)  # not what another process deletes just now

    def delete_document(self, doc_id: str, raise_error: bool = True) -> None:
        """Delete a node or document, and release what was precomputed of it."""
        super().delete_document(doc_id, raise_error=raise_error)
        self._release(doc_id)

    async def adelete_document(self, doc_id: str, raise_error: bool = True) -> None:
        await super().adelete_document(doc_id, raise_error=raise_error)
        await asyncio.to_thread(self._release, doc_id)

    def delete_ref_doc(self, ref_doc_id: str, raise_error: bool = True) -> None:
        """Delete all nodes of a document, and release what was precomputed of them."""
        super().delete_ref_doc(ref_doc_id, raise_error=raise_error)
        self._release(ref_doc_id)

    async def adelete_ref_doc(self, ref_doc_id: str, raise_error: bool = True) -> None:
        await super().adelete_ref_doc(ref_doc_id, raise_error=raise_error)
        await asyncio.to_thread(self._release, ref_doc_id)
