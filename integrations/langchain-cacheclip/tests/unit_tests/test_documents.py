"""Where LangChain's documents are known: the documents chain, the vector store, indexing, carriers in messages, and the
text model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_cases import Questions
from cacheclip_testing import fake_models
from langchain_cacheclip import (
    CacheClipDocumentTransformer,
    CacheClipLLM,
    CacheClipStatsHandler,
    CacheClipVectorStore,
    ChatCacheClip,
    collect_cacheclip_stats,
    create_cacheclip_documents_chain,
    with_cacheclip_stats,
)
from langchain_cases import RAG_PROMPT, Recorder, WordRetriever
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.messages.content import create_plaintext_block, create_text_block
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField, Runnable
from langchain_core.runnables.utils import add
from langchain_core.vectorstores import InMemoryVectorStore

from cacheclip_rag import ConfigurationError


@pytest.fixture
def llm(tmp_path: Path) -> ChatCacheClip:
    """On a fake model: what the framework does does not depend on attention."""
    return ChatCacheClip(**fake_models(), store=str(tmp_path / "store"), max_tokens=8)


@pytest.fixture
def documents(chunks: list[str]) -> list[Document]:
    return [Document(chunk, id=f"doc-{n}", metadata={"source": f"file-{n}"}) for n, chunk in enumerate(chunks)]


def found(recorder: Recorder) -> list[tuple[int, int]]:
    stats = [message.response_metadata["cacheclip"] for message in recorder.messages]
    return [(each["hits"], each["misses"]) for each in stats]


class TestStatisticsOfAChain:
    """A chain that gives a string drops the message; its statistics are collected all the same."""

    async def test_four_ways(self, llm: ChatCacheClip, documents: list[Document], question: str) -> None:
        llm.engine.precompute([document.page_content for document in documents[:2]])
        stock = create_stuff_documents_chain(llm, RAG_PROMPT)
        ours: Runnable[Any, Any] = create_cacheclip_documents_chain(llm, RAG_PROMPT)
        given = {"context": documents[:2], "input": question}
        for chain in (stock, ours):
            with collect_cacheclip_stats() as collected:
                assert isinstance(chain.invoke(given), str)
                assert isinstance(await chain.ainvoke(given), str)
                assert "".join(chain.stream(given))
                assert "".join([part async for part in chain.astream(given)])
                assert len(chain.batch([given, given])) == 2
            assert [stats["hits"] for stats in collected.stats] == [2] * 6
            assert all(stats["reused_tokens"] > 0 for stats in collected.stats)
            chain.invoke(given)
            assert len(collected.stats) == 6, "nothing is collected after the block"
        with get_usage_metadata_callback() as counted:
            stock.invoke(given)
        details = counted.usage_metadata[llm.primary]["input_token_details"]
        assert details["cache_read"] > 0

    def test_as_a_callback_and_of_the_text_model(self, llm: ChatCacheClip, documents: list[Document]) -> None:
        handler = CacheClipStatsHandler()
        text_llm = CacheClipLLM(primary=llm.primary, auxiliary=llm.auxiliary, store=llm.store, max_tokens=2)
        text_llm.engine.precompute([documents[0].page_content])
        for each in (llm, text_llm, GenericFakeChatModel(messages=iter([AIMessage("No.")]))):
            each.invoke(f"{documents[0].page_content}\n\nWhat?", config={"callbacks": [handler]})
        assert [stats["hits"] for stats in handler.stats] == [1, 1]


class TestStatisticsInTheOutput:
    async def test_of_a_retrieval_chain(self, llm: ChatCacheClip, documents: list[Document], question: str) -> None:
        llm.engine.precompute([document.page_content for document in documents])
        for make in (create_stuff_documents_chain, create_cacheclip_documents_chain):
            stock = create_retrieval_chain(WordRetriever(documents=documents, k=2), make(llm, RAG_PROMPT))
            chain, given, recorder = with_cacheclip_stats(stock), {"input": question}, Recorder()
            config: Any = {"callbacks": [recorder], "tags": ["mine"]}
            plain = stock.invoke(given)
            parts = list(chain.stream(given, config))
            async_parts = [part async for part in chain.astream(given, config)]
            found = [chain.invoke(given, config), await chain.ainvoke(given, config), *chain.batch([given, given])]
            found += [add(parts), add(async_parts)]
            assert all({**plain, "cacheclip": each["cacheclip"]} == each for each in found)
            assert [[stats["hits"] for stats in each["cacheclip"]] for each in found] == [[2]] * 6
            assert set(parts[-1]) == {"cacheclip"} and len(parts) > 3, "it streams"
            assert len(recorder.messages) == 4, "the caller's callbacks are called too"

    def test_of_a_chain_that_gives_a_string(self, llm: ChatCacheClip, question: str) -> None:
        chain = with_cacheclip_stats(RAG_PROMPT | llm | StrOutputParser()) | (lambda output: output)
        given = {"input": question, "context": "Nothing."}
        output: Any = chain.invoke(given)
        assert isinstance(output["output"], str) and len(output["cacheclip"]) == 1
        assert output["output"] == add(list(chain.stream(given)))["output"]
        other = with_cacheclip_stats(GenericFakeChatModel(messages=iter([AIMessage("No.")])))
        assert other.invoke("What?")["cacheclip"] == []


class TestChain:
    def test_it_answers_as_the_stock_chain(self, llm: ChatCacheClip, documents: list[Document], question: str) -> None:
        """By a method that no question turns: ours hands the user's words on, the stock one does not know them."""
        llm = llm.model_copy(update={"method": "direct"})
        llm.engine.precompute(document.page_content for document in documents)
        inputs = {"input": question, "context": documents[:2]}
        page: Any = PromptTemplate.from_template("[{source}] {page_content}")
        options: dict[str, Any] = {"document_prompt": page, "document_separator": "\n--\n"}
        ours = create_cacheclip_documents_chain(llm, RAG_PROMPT, **options)
        stock = create_stuff_documents_chain(llm, RAG_PROMPT, **options)
        recorder = Recorder()
        assert ours.invoke(inputs, {"callbacks": [recorder]}) == stock.invoke(inputs)
        assert found(recorder) == [(2, 0)]

    def test_the_users_words_choose_what_is_recomputed(
        self, llm: ChatCacheClip, documents: list[Document], question: str
    ) -> None:
        seen = Questions()
        llm.engine.observers.append(seen)
        inputs = {"input": question, "context": documents[:2]}
        create_cacheclip_documents_chain(llm, RAG_PROMPT).invoke(inputs)
        create_cacheclip_documents_chain(llm, RAG_PROMPT, question_variable_name="other").invoke(inputs)
        llm.invoke("Who lit the lamp?", question="the lamp")
        assert seen.asked == [question, None, "the lamp"]

    def test_a_prompt_without_the_variable(self, llm: ChatCacheClip) -> None:
        with pytest.raises(ConfigurationError, match="needs the variable 'facts' .* got \\['context', 'input'\\]"):
            create_cacheclip_documents_chain(llm, RAG_PROMPT, document_variable_name="facts")

    def test_what_is_ours_alone_is_told(self, llm: ChatCacheClip, documents: list[Document]) -> None:
        """However it is wrapped; a model of another maker refuses words that it does not know."""
        inputs = {"input": "What?", "context": documents[:2]}
        other = Strict()
        fields = llm.configurable_fields(max_tokens=ConfigurableField(id="max_tokens"))
        choice = llm.configurable_alternatives(
            ConfigurableField(id="model"), default_key="ours", other=other, made=lambda: llm.bind(max_tokens=1)
        )
        for asked, config in (
            (llm, {}),
            (llm.with_fallbacks([other]), {}),
            (other.bind(fail=True).with_fallbacks([llm]), {}),
            (llm.with_retry().bind(max_tokens=3), {}),
            (llm.with_config(tags=["a"]) | StrOutputParser(), {}),
            (fields, {"configurable": {"max_tokens": 2}}),
            (choice, {}),
            (choice, {"configurable": {"model": "made"}}),
        ):
            llm.engine.release([document.page_content for document in documents])
            assert create_cacheclip_documents_chain(asked, RAG_PROMPT).invoke(inputs, config)
            assert stored(llm, documents[:3]) == [True, True, False], asked
        strangers = (other, choice, llm.bind(max_tokens=0).with_fallbacks([other]))
        for asked in strangers:
            chain = create_cacheclip_documents_chain(asked, RAG_PROMPT)
            assert chain.invoke(inputs, {"configurable": {"model": "other"}}) == "strict"


class Strict(BaseChatModel):
    """A model of another maker."""

    @property
    def _llm_type(self) -> str:
        return "strict"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, *, fail: bool = False) -> ChatResult:
        if fail:
            raise LookupError
        return ChatResult(generations=[ChatGeneration(message=AIMessage("strict"))])


def stored(llm: ChatCacheClip, documents: list[Document]) -> list[bool]:
    return [llm.engine.is_stored(document.page_content) for document in documents]


class TestVectorStore:
    @pytest.fixture
    def store(self, llm: ChatCacheClip) -> CacheClipVectorStore:
        return CacheClipVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), llm)

    def test_indexing_is_incremental(
        self, store: CacheClipVectorStore, llm: ChatCacheClip, documents: list[Document]
    ) -> None:
        manager = InMemoryRecordManager("test")
        manager.create_schema()
        options: Any = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "blake2b"}
        assert index(documents[:2], manager, store, **options)["num_added"] == 2
        assert stored(llm, documents[:3]) == [True, True, False]
        assert index(documents[:2], manager, store, **options)["num_skipped"] == 2
        changed = Document(documents[2].page_content, metadata=documents[0].metadata)
        result = index([changed, documents[1]], manager, store, **options)
        assert (result["num_added"], result["num_deleted"], result["num_skipped"]) == (1, 1, 1)
        assert stored(llm, documents[:3]) == [False, True, True]
        index([], manager, store, **{**options, "cleanup": "full"})
        assert stored(llm, documents[:3]) == [False, False, False]

    async def test_asynchronously(
        self, store: CacheClipVectorStore, llm: ChatCacheClip, documents: list[Document]
    ) -> None:
        ids = await store.aadd_documents(documents[:2])
        more = await store.aadd_texts([documents[2].page_content])
        assert stored(llm, documents[:3]) == [True, True, True]
        await store.adelete([ids[0], *more])
        assert stored(llm, documents[:3]) == [False, True, False]
        (left,) = await store.asimilarity_search("anything")
        assert left.page_content == documents[1].page_content

    def test_searches_are_the_wrapped_stores(self, store: CacheClipVectorStore, documents: list[Document]) -> None:
        store.add_documents(documents[:3])
        wrapped = store.store
        vector = store.embeddings.embed_query("keeper")
        assert store.similarity_search("keeper", k=2) == wrapped.similarity_search("keeper", k=2)
        assert store.similarity_search_with_score("keeper", k=1) == wrapped.similarity_search_with_score("keeper", k=1)
        assert store.similarity_search_by_vector(vector, k=2) == wrapped.similarity_search_by_vector(vector, k=2)
        ours = store.max_marginal_relevance_search("keeper", k=2, fetch_k=3)
        assert ours == wrapped.max_marginal_relevance_search("keeper", k=2, fetch_k=3)
        assert store.as_retriever(search_kwargs={"k": 1}).invoke("keeper") == wrapped.similarity_search("keeper", k=1)
        assert store.dump  # what it does not know itself

    def test_from_texts(self, llm: ChatCacheClip, documents: list[Document]) -> None:
        texts = [document.page_content for document in documents[:2]]
        store = CacheClipVectorStore.from_texts(texts, DeterministicFakeEmbedding(size=8), llm=llm)
        assert stored(llm, documents[:3]) == [True, True, False] and len(store.similarity_search("x")) == 2
        with pytest.raises(ConfigurationError, match="pass llm="):
            CacheClipVectorStore.from_texts(texts, DeterministicFakeEmbedding(size=8))


async def test_documents_come_back_unchanged(llm: ChatCacheClip, documents: list[Document]) -> None:
    transformer = CacheClipDocumentTransformer(llm)
    some = [documents[0], Document("  ")]
    assert transformer.transform_documents(some) == some
    assert await transformer.atransform_documents(documents[1:2]) == documents[1:2]
    assert stored(llm, documents[:3]) == [True, True, False]
    llm.engine.release(sources=["doc-1"])
    assert stored(llm, documents[:3]) == [True, False, False]


class TestCarriers:
    def ask(self, llm: ChatCacheClip, *messages: Any) -> tuple[int, int]:
        stats = llm.invoke(list(messages)).response_metadata["cacheclip"]
        return stats["hits"], stats["misses"]

    def test_text_blocks_with_an_id(self, llm: ChatCacheClip, chunks: list[str]) -> None:
        blocks = [{"type": "text", "text": chunks[0], "id": "doc-0"}, {"type": "text", "text": "\n\nWhat is it?"}]
        assert self.ask(llm, HumanMessage(content=blocks)) == (0, 1)
        assert self.ask(llm, HumanMessage(content=blocks)) == (1, 0)
        assert not llm.engine.is_stored("What is it?")
        told = AIMessage(content=[{"type": "text", "text": chunks[1], "id": "msg-1"}])
        assert self.ask(llm, HumanMessage("Say."), told, HumanMessage("Again.")) == (0, 0), "an answer is no document"

    def test_questions_are_no_documents(self, llm: ChatCacheClip, chunks: list[str]) -> None:
        question = create_text_block("What is it?")
        assert self.ask(llm, HumanMessage(content=[create_text_block(chunks[0]), question])) == (0, 0)
        blocks = [{**create_text_block(chunks[0]), "id": "doc-0"}, {**question, "id": "q"}]
        assert self.ask(llm, HumanMessage(content=blocks)) == (0, 1)
        assert not llm.engine.is_stored("What is it?")
        earlier = HumanMessage(content=[{**create_text_block(chunks[1]), "id": "doc-1"}])
        assert self.ask(llm, earlier, AIMessage("Well."), HumanMessage(content=blocks)) == (1, 1)
        plain = create_plaintext_block(text=chunks[2])
        assert self.ask(llm, HumanMessage(content=[question, plain])) == (0, 1), "a document by its type"
        assert llm.engine.texts.orphans(["doc-0", "doc-1", plain["id"]]) == chunks[:2]

    @pytest.mark.parametrize("wrap", [list, lambda found: {"documents": found}, lambda found: found[0]])
    def test_artifacts_of_tools(self, llm: ChatCacheClip, documents: list[Document], wrap: Any) -> None:
        document = documents[0]
        messages = [
            HumanMessage("What is it?"),
            AIMessage("", tool_calls=[{"name": "search", "args": {"query": "it"}, "id": "1"}]),
            ToolMessage(f"Found: {document.page_content}", tool_call_id="1", artifact=wrap([document])),
        ]
        assert self.ask(llm, *messages) == (0, 1)
        assert self.ask(llm, *messages) == (1, 0)

    def test_carried_but_not_in_the_prompt(self, llm: ChatCacheClip, documents: list[Document]) -> None:
        message = HumanMessage("What?", additional_kwargs={"documents": documents})
        assert self.ask(llm, message) == (0, 0)


class TestTextModel:
    @pytest.fixture
    def text_llm(self, llm: ChatCacheClip) -> CacheClipLLM:
        return CacheClipLLM(primary=llm.primary, auxiliary=llm.auxiliary, store=llm.store, max_tokens=llm.max_tokens)

    async def test_four_ways_and_batches(self, text_llm: CacheClipLLM, llm: ChatCacheClip, chunks: list[str]) -> None:
        assert text_llm.engine is llm.engine
        text_llm.engine.precompute(chunks[:2])
        prompt, other = f"{chunks[0]}\n\nWhat?", f"{chunks[1]}\n\nWho?"
        text = text_llm.invoke(prompt)
        assert text and text == llm.invoke(prompt).content
        assert [await text_llm.ainvoke(prompt), "".join(text_llm.stream(prompt))] == [text, text]
        assert "".join([part async for part in text_llm.astream(prompt)]) == text
        expected = [text, text_llm.invoke(other)]
        assert text_llm.batch([prompt, other]) == await text_llm.abatch([prompt, other]) == expected
        result = text_llm.generate([prompt, other])
        assert [each[0].generation_info["cacheclip"]["hits"] for each in result.generations] == [1, 1]
        usage = result.llm_output["token_usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
        infos = [each[0].generation_info for each in result.generations]
        reused = [info["gen_ai.usage.cache_read.input_tokens"] for info in infos]
        assert reused == [info["cacheclip"]["reused_tokens"] for info in infos] and all(reused)
        assert usage["prompt_tokens_details"] == {"cached_tokens": sum(reused)}
