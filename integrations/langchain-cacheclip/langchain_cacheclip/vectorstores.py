"""A wrapper around any vector store that precomputes added documents and releases deleted documents."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheclip_rag import ConfigurationError

from .base import langchain_errors, passed_on, unchanging

if TYPE_CHECKING:
    from typing import Self

    from cacheclip_rag.adapters import PrecomputeCost

    from .base import LangChainFields

logger = logging.getLogger(__name__)

_UPDATES = ("update_document", "update_documents")
_EMPTYING = ("delete_collection", "reset_collection")
_DELETING = re.compile("(empty|erase|evict|expire|prune|purge|truncate|vacuum|wipe)(_|$)")
"""Beginnings of names of methods after which the wrapped store tells what is left."""
_AT_ONCE = 500
"""Documents that a store is asked for in one call."""


class _HeldDocuments:
    """What the wrapped store holds, and the release of what it does not hold any more."""

    def __init__(self, store: VectorStore, llm: LangChainFields) -> None:
        self._store, self._llm = store, llm

    def ids(self, known: list[str] | None = None) -> list[str]:
        """Ids of the documents in the wrapped store, of ``known`` or of all that have chunk caches."""
        known, held = self._llm.engine.texts.sources() if known is None else known, list[str]()
        try:
            for start in range(0, len(known), _AT_ONCE):
                found = self._store.get_by_ids(known[start : start + _AT_ONCE])
                held += [document.id for document in found if document.id]
        except NotImplementedError:
            logger.warning(
                "%s does not tell which documents it holds, so that their chunk caches stay. Release them: "
                "llm.engine.release(sources=ids).",
                type(self._store).__name__,
            )
        return held

    def release(self, ids: list[str] | None, held: list[str]) -> None:
        """Release these, and those of ``held`` that the wrapped store does not hold any more."""
        gone = [*(ids or ()), *{*held}.difference(self.ids(held))]
        if gone:
            self._llm.engine.release(sources=gone)


class CacheClipVectorStore(VectorStore):
    """Wraps a vector store. Added documents are precomputed for a model. Deleted documents are released, unless another
    document has the same text. The wrapped store does the searches.

    With ``langchain_core.indexing.index`` and a record manager, ingestion is incremental: only new and changed
    documents are processed. Documents are precomputed, then added; then older texts under their ids are released. So a
    killed run can be repeated: precomputed documents are found by their content. A document that cannot be precomputed,
    because it is longer than the model's context or holds half a character, is added with a warning that has its id.

    Args:
        store: any vector store.
        llm: the :class:`ChatCacheClip` or :class:`CacheClipLLM` that will read the documents; its ``method`` decides
            the chunk context.

    >>> store = CacheClipVectorStore(InMemoryVectorStore(embeddings), llm)
    >>> index(documents, record_manager, store, cleanup="incremental", source_id_key="source", key_encoder="blake2b")
    """

    def __init__(self, store: VectorStore, llm: LangChainFields) -> None:
        self.store, self.llm, self._held = store, llm, _HeldDocuments(store, llm)

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the wrapped store, such as ``save_local``, but for methods that change documents. Those
        of Chroma and others that are followed: ``update_document``, ``update_documents``, ``delete_collection``,
        ``reset_collection``, and those such as ``truncate`` and ``purge``."""
        if name.startswith("__") or "store" not in self.__dict__:
            raise AttributeError(name)
        if name in _UPDATES:
            return partial(self._update, getattr(self.store, name))
        if name in _EMPTYING:
            return partial(self._empty, getattr(self.store, name))
        if _DELETING.match(name) and inspect.ismethod(found := getattr(self.store, name)):
            return partial(self._empty, found, ask=True)
        return unchanging(self.store, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type[VectorStore]:  # type: ignore[override]
        """The wrapped store's, because components choose by it: ``SelfQueryRetriever`` how filters are written. By
        ``type()``, this is a ``CacheClipVectorStore``."""
        return type(self) if "store" not in self.__dict__ else self.store.__class__

    @property
    def embeddings(self) -> Embeddings | None:
        return self.store.embeddings

    # -- changes ------------------------------------------------------------------------------------------------

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        texts = list(texts)
        documents = _documents(texts, metadatas, ids)
        self.llm._precompute(documents)
        return self._settled(self.store.add_texts(texts, metadatas, ids=ids, **kwargs), documents)

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        texts = list(texts)
        documents = _documents(texts, metadatas, ids)
        await self.llm._aprecompute(documents)
        added = await self.store.aadd_texts(texts, metadatas, ids=ids, **kwargs)
        return await asyncio.to_thread(self._settled, added, documents)

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        self.llm._precompute(_with_ids(documents, kwargs.get("ids")))
        return self._settled(self.store.add_documents(documents, **kwargs), documents)

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        await self.llm._aprecompute(_with_ids(documents, kwargs.get("ids")))
        added = await self.store.aadd_documents(documents, **kwargs)
        return await asyncio.to_thread(self._settled, added, documents)

    def plan(self, documents: Iterable[Document]) -> PrecomputeCost:
        """Estimate the cost of adding documents: ``chunks`` (documents that are not blank), ``computed`` (documents
        that are not stored), ``tokens``, ``bytes`` of their KV, and ``seconds``. Embeddings are not included. A few
        documents are computed for timing; nothing is stored or added.

        Raises:
            PromptTooLongError: a document is longer than the model's context.
        """
        from cacheclip_rag.adapters import precompute_cost  # it loads torch

        texts = (document.page_content for document in documents if document.page_content.strip())
        with langchain_errors():
            return precompute_cost(self.llm.engine, texts, method=self.llm.method)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents and release their chunk caches. Without ``ids``, or with other arguments, the wrapped store
        decides what to delete: it is asked what it holds before and afterwards."""
        held = self._held.ids() if _is_open(ids, kwargs) else []
        done = self.store.delete(ids, **kwargs)
        self._held.release(ids, held)
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        held = await asyncio.to_thread(self._held.ids) if _is_open(ids, kwargs) else []
        done = await self.store.adelete(ids, **kwargs)
        await asyncio.to_thread(self._held.release, ids, held)
        return done

    def _update(
        self, update: Callable[..., Any], ids: str | list[str], documents: Document | list[Document], **kwargs: Any
    ) -> Any:
        named = _with_ids(*((documents, ids) if isinstance(documents, list) else ([documents], [ids])))
        self.llm._precompute(named)
        done = update(ids, documents, **kwargs)
        self.llm._settle(named)
        return done

    def _empty(self, empty: Callable[..., Any], *args: Any, ask: bool = False, **kwargs: Any) -> Any:
        """``ask``: ask the store what is left, else nothing is."""
        held = self._held.ids()
        done = empty(*args, **kwargs)
        self._held.release(*((None, held) if ask else (held, [])))
        return done

    def _settled(self, ids: list[str], documents: Sequence[Document]) -> list[str]:
        """Release older texts under the same ids, which the store no longer holds."""
        self.llm._settle(_with_ids(documents, ids))
        return ids

    # -- searches -----------------------------------------------------------------------------------------------

    get_by_ids, aget_by_ids = passed_on("store", "get_by_ids")
    similarity_search, asimilarity_search = passed_on("store", "similarity_search")
    similarity_search_with_score, asimilarity_search_with_score = passed_on("store", "similarity_search_with_score")
    similarity_search_by_vector, asimilarity_search_by_vector = passed_on("store", "similarity_search_by_vector")
    max_marginal_relevance_search, amax_marginal_relevance_search = passed_on("store", "max_marginal_relevance_search")
    max_marginal_relevance_search_by_vector, amax_marginal_relevance_search_by_vector = passed_on(
        "store", "max_marginal_relevance_search_by_vector"
    )
    _select_relevance_score_fn = passed_on("store", "_select_relevance_score_fn")[0]
    _similarity_search_with_relevance_scores, _asimilarity_search_with_relevance_scores = passed_on(
        "store", "_similarity_search_with_relevance_scores"
    )

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        llm: LangChainFields | None = None,
        store: VectorStore | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a store and add texts.

        Args:
            llm: the model that will read the texts; required.
            store: the store to wrap; default ``InMemoryVectorStore(embedding)``.
        """
        if llm is None:
            raise ConfigurationError("CacheClipVectorStore needs a model: pass llm=ChatCacheClip(...).")
        made = cls(store if store is not None else InMemoryVectorStore(embedding), llm)
        made.add_texts(texts, metadatas, ids=ids, **kwargs)
        return made


def _is_open(ids: list[str] | None, kwargs: Mapping[str, Any]) -> bool:
    """Whether a deletion may take other documents than ``ids``."""
    return ids is None or any(kwargs.values())


def _documents(texts: list[str], metadatas: list[dict[str, Any]] | None, ids: list[str] | None) -> list[Document]:
    if metadatas is not None and len(metadatas) != len(texts):
        raise ConfigurationError(f"expected one metadata per text, got {len(metadatas)} for {len(texts)} texts.")
    found = [
        Document(text, metadata=each or {}) for text, each in zip(texts, metadatas or [{}] * len(texts), strict=True)
    ]
    return _with_ids(found, ids)


def _with_ids(documents: Sequence[Document], ids: Sequence[str | None] | None) -> list[Document]:
    if not ids:
        return list(documents)
    if len(ids) != len(documents):
        raise ConfigurationError(f"expected one id per text, got {len(ids)} for {len(documents)} texts.")
    return [document.model_copy(update={"id": each}) for document, each in zip(documents, ids, strict=True)]
