"""What LangChain's indexing leaves behind: caches for the model's own method, and none for documents that are gone."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing import fake_models, fake_of
from langchain_cacheclip import (
    CacheClipDocumentStore,
    CacheClipDocumentTransformer,
    CacheClipVectorStore,
    ChatCacheClip,
    create_cacheclip_documents_chain,
)
from langchain_cases import RAG_PROMPT
from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter

from cacheclip_rag import ConfigurationError
from cacheclip_rag.methods import preset, vary

TOO_LONG = "word " * 5000


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ChatCacheClip]:
    """On fake models: what the framework does does not depend on attention."""
    models = fake_models()
    return lambda **fields: ChatCacheClip(**models, store=str(tmp_path / "store"), max_tokens=4, **fields)


@pytest.fixture
def llm(make: Callable[..., ChatCacheClip]) -> ChatCacheClip:
    return make()


@pytest.fixture
def store(llm: ChatCacheClip) -> CacheClipVectorStore:
    return over_memory(llm)


@pytest.fixture
def documents(chunks: list[str]) -> list[Document]:
    return [Document(chunk, id=f"doc-{n}", metadata={"source": f"file-{n}"}) for n, chunk in enumerate(chunks)]


def over_memory(llm: ChatCacheClip) -> CacheClipVectorStore:
    return CacheClipVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), llm)


def stored(llm: ChatCacheClip, documents: list[Document]) -> list[bool]:
    return [llm.engine.is_stored(document.page_content) for document in documents]


def hits(llm: ChatCacheClip, documents: list[Document], **options: Any) -> int:
    prompt = "\n\n".join([*(document.page_content for document in documents), "What?"])
    return int(llm.invoke(prompt, **options).response_metadata["cacheclip"]["hits"])


class TestMethods:
    """Chunks are computed as the model's own method reads them."""

    @pytest.mark.some(2)
    @pytest.mark.parametrize("method", ["epic-corrected", vary(preset("epic"), {"chunk_context": "prefix"})], ids=str)
    @pytest.mark.parametrize("way", ["store", "transformer"])
    async def test_all_are_hit(
        self, method: Any, way: str, tiny_models: dict[str, str], tmp_path: Path, documents: list[Document]
    ) -> None:
        models: Any = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
        llm = ChatCacheClip(**models, store=str(tmp_path / "store"), max_tokens=2, method=method)
        if way == "store":
            over_memory(llm).add_documents(documents[:1])
            await over_memory(llm).aadd_documents(documents[1:3])
        else:
            CacheClipDocumentTransformer(llm).transform_documents(documents[:1])
            await CacheClipDocumentTransformer(llm).atransform_documents(documents[1:3])
        assert hits(llm, documents[:3]) == 3

    @pytest.mark.parametrize("method", ["full", "prefix"])
    def test_what_reads_no_stored_chunks_leaves_the_engines_default(
        self, method: str, make: Callable[..., ChatCacheClip], documents: list[Document]
    ) -> None:
        llm = make(method=method)
        over_memory(llm).add_documents(documents[:2])
        assert hits(llm, documents[:2], method="epic-corrected") == 2


class TestParents:
    """Children are searched, parents are read: parents alone are precomputed."""

    @pytest.fixture
    def retriever(self, llm: ChatCacheClip) -> ParentDocumentRetriever:
        return ParentDocumentRetriever(
            vectorstore=InMemoryVectorStore(DeterministicFakeEmbedding(size=8)),
            docstore=CacheClipDocumentStore(InMemoryStore(), llm),
            child_splitter=CharacterTextSplitter(separator=". ", chunk_size=40, chunk_overlap=0),
            search_kwargs={"k": 2},
        )

    @pytest.mark.parametrize("way", ["add_documents", "aadd_documents"])
    async def test_parents_are_precomputed_and_hit(
        self, retriever: ParentDocumentRetriever, llm: ChatCacheClip, documents: list[Document], way: str, question: str
    ) -> None:
        encoded, ids = fake_of(llm.engine).threads["encode"], [f"parent-{n}" for n in range(4)]
        adding = getattr(retriever, way)(documents, ids=ids)
        if way == "aadd_documents":
            await adding
        children = list(retriever.vectorstore.store.values())
        assert len(children) > 4 and not any(llm.engine.is_stored(each["text"]) for each in children)
        assert stored(llm, documents) == [True] * 4 and len(encoded) == 4 + 1, "parents and the shared prefix"
        read = retriever.invoke(question)
        assert read == await retriever.ainvoke(question) and hits(llm, read) == len(read) > 0
        assert sorted(retriever.docstore.yield_keys()) == ids

    async def test_deleted_and_changed_parents_are_released(
        self, llm: ChatCacheClip, documents: list[Document]
    ) -> None:
        store = CacheClipDocumentStore(InMemoryStore(), llm)
        store.mset([("a", documents[0]), ("b", documents[1])])
        store.mset([("a", documents[2])])
        assert stored(llm, documents) == [False, True, True, False]
        await store.amset([("a", documents[3])])
        assert stored(llm, documents) == [False, True, False, True]
        await store.amset([("a", documents[2]), ("c", documents[1])])
        store.mdelete(["b"])
        assert stored(llm, documents) == [False, True, True, False], "c has the same text"
        await store.amdelete(["c", "a"])
        assert stored(llm, documents) == [False] * 4 and store.mget(["a", "b", "c"]) == [None] * 3
        assert [key async for key in store.ayield_keys()] == [] == await store.amget([])
        assert store.store == {}, "other attributes are the wrapped store's"


class Replacing(DeterministicFakeEmbedding):
    """Takes half a character, as embedding models do."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return super().embed_documents([text.encode("utf-8", "replace").decode() for text in texts])


def test_components_that_choose_by_the_class_see_the_wrapped_store(llm: ChatCacheClip) -> None:
    """``SelfQueryRetriever`` among them, which writes filters for each class of stores in its own way."""
    store = over_memory(llm)
    assert store.__class__ is InMemoryVectorStore and isinstance(store, InMemoryVectorStore)
    assert type(store) is CacheClipVectorStore and isinstance(store, CacheClipVectorStore)
    assert type(copy.copy(store)) is CacheClipVectorStore and copy.copy(store).llm is llm
    assert store.as_retriever().vectorstore is store


class Chromatic(InMemoryVectorStore):
    """Has Chroma's other methods that change documents, and some of other stores."""

    def update_document(self, document_id: str, document: Document) -> None:
        self.update_documents([document_id], [document])

    def update_documents(self, ids: list[str], documents: list[Document]) -> None:
        InMemoryVectorStore.add_documents(self, documents, ids=ids)

    def delete_collection(self) -> None:
        self.store.clear()

    reset_collection = truncate = wipe_documents = delete_collection

    def purge(self, *ids: str) -> None:
        InMemoryVectorStore.delete(self, [*ids])

    def delete(self, ids: Any = None, delete_all: bool = False, filter: Any = None) -> None:
        if delete_all:
            self.delete_collection()
        else:
            self.purge(*(ids or ()), *(filter or ()))

    async def adelete(self, ids: Any = None, **kwargs: Any) -> None:
        self.delete(ids, **kwargs)

    def compact(self) -> int:
        return len(self.store)

    async def arewind(self) -> int:
        return len(self.store)

    def upsert(self, *_: Any) -> None:
        raise AssertionError("reached")

    merge_from = add_images = drop_tables = aupsert = upsert

    def peek(self) -> int:
        return len(self.store)


class Silent(Chromatic):
    def get_by_ids(self, ids: Any, /) -> list[Document]:
        raise NotImplementedError


class TestOtherMethods:
    @pytest.fixture
    def store(self, llm: ChatCacheClip, documents: list[Document]) -> CacheClipVectorStore:
        store = CacheClipVectorStore(Chromatic(DeterministicFakeEmbedding(size=8)), llm)
        store.add_documents(documents[:2], ids=["a", "b"])
        return store

    def test_updates(self, store: CacheClipVectorStore, llm: ChatCacheClip, documents: list[Document]) -> None:
        store.update_document("a", documents[2])
        assert stored(llm, documents) == [False, True, True, False]
        store.update_documents(["a", "b"], [documents[3], documents[2]])
        assert stored(llm, documents) == [False, False, True, True]
        assert store.get_by_ids(["a"])[0].page_content == documents[3].page_content
        store.purge("a")
        assert stored(llm, documents[2:]) == [True, False], "deleted in part"

    @pytest.mark.parametrize("name", ["delete_collection", "reset_collection", "truncate", "wipe_documents"])
    def test_emptied(
        self, store: CacheClipVectorStore, llm: ChatCacheClip, documents: list[Document], name: str
    ) -> None:
        other = CacheClipVectorStore(Chromatic(DeterministicFakeEmbedding(size=8)), llm)
        other.add_documents(documents[1:3], ids=["c", "d"])
        getattr(store, name)()
        assert stored(llm, documents) == [False, True, True, False], "another store of the tenant keeps its own"
        assert store.peek() == 0

    @pytest.mark.some(3)
    @pytest.mark.parametrize("way", ["delete", "adelete"])
    @pytest.mark.parametrize(
        ("options", "left"),
        [
            ({"delete_all": True}, ""),
            ({"filter": ["a"]}, "b"),
            ({"ids": ["b"], "filter": ["a"]}, ""),
            ({"ids": ["b"], "filter": None}, "a"),
            ({"ids": []}, "ab"),
            ({}, "ab"),
        ],
        ids=str,
    )
    async def test_deleted_by_other_arguments(
        self, store: Any, llm: ChatCacheClip, documents: list[Document], way: str, options: Any, left: str
    ) -> None:
        await store.adelete(**options) if way == "adelete" else store.delete(**options)
        assert stored(llm, documents[:2]) == ["a" in left, "b" in left] and "".join(store.store.store) == left

    def test_a_name_that_does_not_tell_is_said_once(
        self, store: CacheClipVectorStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert [store.compact(), store.compact(), asyncio.run(store.arewind()), store.peek()] == [2] * 4
        assert len(caplog.records) == 2
        assert "Chromatic.compact" in caplog.text and "engine.release(sources=ids)" in caplog.text

    @pytest.mark.parametrize("way", ["delete_collection", "truncate", "delete"])
    def test_a_store_that_does_not_tell(
        self, llm: ChatCacheClip, documents: list[Document], caplog: pytest.LogCaptureFixture, way: str
    ) -> None:
        store = CacheClipVectorStore(Silent(DeterministicFakeEmbedding(size=8)), llm)
        store.add_documents(documents[:1], ids=["a"])
        getattr(store, way)(**({"delete_all": True} if way == "delete" else {}))
        assert stored(llm, documents[:1]) == [True] and "release(sources=ids)" in caplog.text

    @pytest.mark.parametrize("name", ["upsert", "aupsert", "merge_from", "add_images", "drop_tables"])
    def test_what_is_not_followed_is_refused(self, store: CacheClipVectorStore, name: str) -> None:
        with pytest.raises(ConfigurationError, match=f"{name} of Chromatic changes documents"):
            getattr(store, name)()
        with pytest.raises(AssertionError, match="reached"):
            getattr(store.store, name)()
        assert store.peek() == 2 and not hasattr(store, "update_something"), "others pass"


class TestOrder:
    """Precomputed, added, then older texts released."""

    @pytest.mark.some(3)
    @pytest.mark.parametrize("bad", [TOO_LONG, "Half \ud835 a character, as PDF readers give it."])
    @pytest.mark.parametrize("hook", ["vector store", "document store", "transformer"])
    def test_a_bad_document_is_skipped_with_its_id(
        self, llm: ChatCacheClip, documents: list[Document], bad: str, hook: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        given = [documents[0], Document(bad), *documents[1:3]]
        given = [Document(each.page_content, id=f"node-{n}") for n, each in enumerate(given)]
        if hook == "vector store":
            CacheClipVectorStore(InMemoryVectorStore(Replacing(size=8)), llm).add_documents(given)
        elif hook == "document store":
            store = CacheClipDocumentStore(InMemoryStore(), llm)
            store.mset([(str(each.id), each) for each in given])
            assert [*store.yield_keys()] == [each.id for each in given]
        else:
            CacheClipDocumentTransformer(llm).transform_documents(given)
        assert stored(llm, documents) == [True, True, True, False], "those after it, too"
        said = [record.getMessage() for record in caplog.records if "not precomputed" in record.getMessage()]
        assert len(said) == 1 and "node-1" in said[0]

    async def test_an_older_text_stays_until_the_new_one_is_there(
        self, store: Any, llm: ChatCacheClip, documents: list[Document], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def failing(*arguments: Any, **options: Any) -> list[str]:
            raise ConnectionError("the vector store is down")

        store.add_documents([documents[0]], ids=["a"])
        with monkeypatch.context() as patch:
            for name, added in (("aadd_documents", documents[2]), ("aadd_texts", documents[2].page_content)):
                patch.setattr(store.store, name, failing)
                with pytest.raises(ConnectionError):
                    await getattr(store, name)([added], ids=["a"])
        assert store.get_by_ids(["a"])[0].page_content == documents[0].page_content
        assert stored(llm, documents[:1]) == [True]
        await store.aadd_documents([documents[1]], ids=["a"])
        assert stored(llm, documents[:2]) == [False, True]
        store.delete(["a"])
        assert stored(llm, documents[:2]) == [False, False]

    def test_one_id_and_one_metadata_a_text(self, store: CacheClipVectorStore, documents: list[Document]) -> None:
        with pytest.raises(ConfigurationError, match="got 1 for 2 texts"):
            store.add_documents(documents[:2], ids=["a"])
        with pytest.raises(ConfigurationError, match="expected one metadata per text, got 1 for 2"):
            store.add_texts(["a", "b"], [{}])

    def test_by_the_file_too(self, store: CacheClipVectorStore, llm: ChatCacheClip, documents: list[Document]) -> None:
        store.add_texts([each.page_content for each in documents[:2]], [each.metadata for each in documents[:2]])
        llm.engine.release(sources=["file-1"])
        assert stored(llm, documents[:2]) == [True, False]


class TestStoredByAnswers:
    """What is stored after an answer goes with its document."""

    def carried(self, way: str, llm: ChatCacheClip, documents: list[Document]) -> None:
        text = "\n\n".join([*(document.page_content for document in documents), "What?"])
        kind = "text-plain" if way == "text-plain" else "text"
        blocks = [{"type": kind, "text": each.page_content, "id": each.id} for each in documents]
        asked: dict[str, list[BaseMessage]] = {
            "keyword": [HumanMessage(text, additional_kwargs={"documents": documents})],
            "artifact": [HumanMessage("What?"), ToolMessage(text, tool_call_id="1", artifact=documents)],
            kind: [HumanMessage([*blocks, {"type": "text", "text": "What?"}])],
        }
        if way == "chain":
            create_cacheclip_documents_chain(llm, RAG_PROMPT).invoke({"input": "What?", "context": documents})
        elif way == "option":
            llm.invoke(text, documents=documents)
        else:
            llm.invoke(asked[way])

    @pytest.mark.some(3)
    @pytest.mark.parametrize("way", ["chain", "option", "keyword", "artifact", "text", "text-plain"])
    def test_deleting_releases_it(
        self, way: str, store: CacheClipVectorStore, llm: ChatCacheClip, documents: list[Document]
    ) -> None:
        store.store.add_documents(documents[:2])  # past the wrapper: never precomputed
        assert stored(llm, documents[:2]) == [False, False]
        self.carried(way, llm, store.get_by_ids(["doc-0", "doc-1"]))
        assert stored(llm, documents[:2]) == [True, True]
        store.delete(["doc-0"])
        assert stored(llm, documents[:2]) == [False, True]

    def test_by_the_file_too(self, llm: ChatCacheClip, documents: list[Document]) -> None:
        CacheClipDocumentTransformer(llm).transform_documents(
            [document.model_copy(update={"id": None}) for document in documents[:2]]  # as splitters give them
        )
        llm.engine.release([documents[0].page_content])
        self.carried("option", llm, documents[:2])
        llm.engine.release(sources=["file-0"])
        assert stored(llm, documents[:2]) == [False, True]


def test_plan_of_a_document_too_long(store: CacheClipVectorStore) -> None:
    with pytest.raises(ContextOverflowError, match="Split the document"):
        store.plan([Document(TOO_LONG)])
