"""A wrapper around a store of documents by key, for retrievers that search small documents and return large ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.stores import BaseStore

from .base import LangChainFields, passed_on, unchanging


class CacheClipDocumentStore(BaseStore[str, Document]):
    """Wraps the ``docstore`` of a ``ParentDocumentRetriever`` or ``MultiVectorRetriever``. Documents that are set are
    precomputed for a model; deleted documents are released, unless another document has the same text.

    The parents are what the model reads, so they are precomputed. The children are only searched: leave their vector
    store unwrapped, and nothing is computed for them.

    Args:
        docstore: the wrapped store, with documents by key.
        llm: the :class:`ChatCacheClip` or :class:`CacheClipLLM` that will read the documents.

    A document that cannot be precomputed, because it is longer than the model's context or holds half a character, is
    set with a warning that has its id.

    >>> docstore = CacheClipDocumentStore(InMemoryStore(), llm)
    >>> ParentDocumentRetriever(vectorstore=vectors, docstore=docstore, child_splitter=child_splitter)
    """

    def __init__(self, docstore: BaseStore[str, Document], llm: LangChainFields) -> None:
        self.docstore, self.llm = docstore, llm

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the wrapped store, but for methods that change documents."""
        if name.startswith("__") or "docstore" not in self.__dict__:
            raise AttributeError(name)
        return unchanging(self.docstore, name)

    def mset(self, key_value_pairs: Sequence[tuple[str, Document]]) -> None:
        documents = _keyed(key_value_pairs)
        self.llm._precompute(documents)
        self.docstore.mset(key_value_pairs)
        self.llm._settle(documents)

    async def amset(self, key_value_pairs: Sequence[tuple[str, Document]]) -> None:
        documents = _keyed(key_value_pairs)
        await self.llm._aprecompute(documents)
        await self.docstore.amset(key_value_pairs)
        await asyncio.to_thread(self.llm._settle, documents)

    def mdelete(self, keys: Sequence[str]) -> None:
        self.docstore.mdelete(keys)
        self.llm.engine.release(sources=keys)

    async def amdelete(self, keys: Sequence[str]) -> None:
        await self.docstore.amdelete(keys)
        await asyncio.to_thread(lambda: self.llm.engine.release(sources=keys))

    mget, amget = passed_on("docstore", "mget")
    yield_keys, ayield_keys = passed_on("docstore", "yield_keys")


def _keyed(pairs: Sequence[tuple[str, Document]]) -> list[Document]:
    return [document.model_copy(update={"id": key}) for key, document in pairs]
