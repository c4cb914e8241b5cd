"""A document store that releases the chunk caches of deleted documents."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llama_index.core.settings import Settings
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.storage.docstore.keyval_docstore import KVDocumentStore
from llama_index.core.storage.docstore.types import DEFAULT_PERSIST_DIR

from cacheclip_rag import ConfigurationError

if TYPE_CHECKING:
    from typing import Self

    from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

_DELETED = "cacheclip:deleted"
"""Source of texts deleted during an update. It is recorded in the chunk-cache store, so that after a crash the next
deletion or update releases them."""
_lock = threading.Lock()  # one lock per module, because document stores can be copied


class CacheClipDocumentStore(KVDocumentStore):
    """Wraps a document store. Deleted nodes are released from the chunk-cache store, unless another node has the same
    text.

    Use it as the document store of an index (``index.refresh_ref_docs``, ``delete_ref_doc(…,
    delete_from_docstore=True)``, ``delete_nodes``) or of an ``IngestionPipeline`` (``upserts``). It releases texts that
    :class:`CacheClipTransform` precomputed or :class:`CacheClipSynthesizer` stored, here or in another process with the
    same store. LlamaIndex updates a document by deleting it first; within :meth:`updating`, chunks that the new version
    also has are not computed again. If a node is overwritten under its id, the caches of its older text stay until the
    node is deleted.

    >>> with docstore.updating():
    ...     pipeline.run(documents=documents)  # or index.refresh_ref_docs(documents)
    """

    def __init__(self, docstore: KVDocumentStore, llm: CacheClipLLM | CacheClipTransform) -> None:
        """
        Args:
            docstore: the wrapped store: ``SimpleDocumentStore()``, or LlamaIndex's stores for Redis, MongoDB, ...
            llm: an LLM or transform whose engine has the chunk caches.

        Raises:
            ConfigurationError: ``docstore`` is not a KVDocumentStore.
        """
        if not isinstance(docstore, KVDocumentStore):
            raise ConfigurationError(
                f"CacheClipDocumentStore wraps a KVDocumentStore (SimpleDocumentStore, RedisDocumentStore, ...), "
                f"got {type(docstore).__name__}. For other stores call llm.engine.release(sources=ids) after deleting."
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
        """A store with documents in memory."""
        return cls(SimpleDocumentStore(), llm)

    @classmethod
    def from_persist_dir(
        cls,
        persist_dir: str = DEFAULT_PERSIST_DIR,
        llm: CacheClipLLM | CacheClipTransform | None = None,
        **options: Any,
    ) -> Self:
        """A persisted ``SimpleDocumentStore``, wrapped: for an index that is loaded again, which would otherwise get
        one that releases nothing.

        Args:
            llm: default ``Settings.llm``.
            options: ``namespace`` and ``fs``, as of ``SimpleDocumentStore``.

        >>> docstore = CacheClipDocumentStore.from_persist_dir("./storage", llm)
        >>> storage = StorageContext.from_defaults(persist_dir="./storage", docstore=docstore)
        >>> index = load_index_from_storage(storage)
        """
        return cls(SimpleDocumentStore.from_persist_dir(persist_dir, **options), _set_llm() if llm is None else llm)

    @classmethod
    def from_persist_path(
        cls, persist_path: str, llm: CacheClipLLM | CacheClipTransform | None = None, **options: Any
    ) -> Self:
        """Like :meth:`from_persist_dir`, by the path of the file."""
        return cls(SimpleDocumentStore.from_persist_path(persist_path, **options), _set_llm() if llm is None else llm)

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the wrapped store, such as ``persist``."""
        if name.startswith("__") or "_docstore" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._docstore, name)

    def persist(self, *arguments: Any, **options: Any) -> None:
        self._docstore.persist(*arguments, **options)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Texts deleted in this block are released at its end (also after an exception), unless a node stored meanwhile
        has the same text."""
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
                for text in engine.texts.orphans([name]):
                    engine.texts.add_source(text, _DELETED)
                engine.texts.remove_sources([name])  # last, so that a killed run can be repeated
            else:
                engine.release(sources=[name])
                self._release_deleted()

    def _release_deleted(self) -> None:
        """Release texts deleted during updates, unless another source has them now."""
        engine = self._llm.engine
        deleted = engine.texts.texts(_DELETED)
        engine.release(set(engine.texts.orphans([_DELETED])).intersection(deleted))
        engine.texts.remove_sources(
            [_DELETED], texts=deleted
        )  # only these texts: another process may be deleting others

    def delete_document(self, doc_id: str, raise_error: bool = True) -> None:
        """Delete a node or document and release its chunk caches."""
        super().delete_document(doc_id, raise_error=raise_error)
        self._release(doc_id)

    async def adelete_document(self, doc_id: str, raise_error: bool = True) -> None:
        await super().adelete_document(doc_id, raise_error=raise_error)
        await asyncio.to_thread(self._release, doc_id)

    def delete_ref_doc(self, ref_doc_id: str, raise_error: bool = True) -> None:
        """Delete all nodes of a document and release their chunk caches."""
        super().delete_ref_doc(ref_doc_id, raise_error=raise_error)
        self._release(ref_doc_id)

    async def adelete_ref_doc(self, ref_doc_id: str, raise_error: bool = True) -> None:
        await super().adelete_ref_doc(ref_doc_id, raise_error=raise_error)
        await asyncio.to_thread(self._release, ref_doc_id)


def _set_llm() -> CacheClipLLM:
    """``Settings.llm``, if it is one of ours."""
    from llama_index.llms.cacheclip import CacheClipLLM

    if not isinstance(Settings.llm, CacheClipLLM):
        raise ConfigurationError(
            f"CacheClipDocumentStore needs a CacheClipLLM, got {type(Settings.llm).__name__} from Settings. Pass llm."
        )
    return Settings.llm
