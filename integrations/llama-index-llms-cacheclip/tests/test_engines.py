"""LlamaIndex around the LLM: chat engines, composed query engines, workflows, agents, and what retrievers and
postprocessors do to the text that a model reads."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from cacheclip_testing import fake_of
from llama_index.core import Document, PromptTemplate, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter, SentenceWindowNodeParser
from llama_index.core.node_parser.text.utils import split_by_sentence_tokenizer
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform
from llama_index.llms.cacheclip.statistics import collector
from llama_index.response_synthesizers.cacheclip import CacheClipSynthesizer
from llama_index_cases import Events, WordEmbedding


@pytest.fixture
def index(llm: CacheClipLLM, chunks: list[str]) -> VectorStoreIndex:
    nodes = [TextNode(text=chunk, metadata={"page": n}) for n, chunk in enumerate(chunks[:4])]
    CacheClipTransform.from_llm(llm)(nodes)
    return VectorStoreIndex(nodes, embed_model=WordEmbedding())


class TestEngines:
    @pytest.mark.parametrize("stock", [True, False])
    async def test_the_statistics_are_in_the_metadata(
        self, index: VectorStoreIndex, llm: CacheClipLLM, question: str, seen: Events, stock: bool
    ) -> None:
        def engine(mode: str = "compact", streaming: bool = False) -> Any:
            make: Any = get_response_synthesizer if stock else CacheClipSynthesizer
            synthesizer = make(llm=llm, response_mode=mode, streaming=streaming)
            options: Any = {"response_synthesizer": synthesizer, "streaming": streaming}
            return index.as_query_engine(llm=llm, similarity_top_k=3, **options)

        response = engine().query(question)
        (stats,) = response.metadata["cacheclip"]
        assert stats == seen.fusions[-1].stats and stats["hits"] == 3
        assert set(response.metadata) == {"cacheclip", *(node.node_id for node in response.source_nodes)}
        streamed = engine(streaming=True).query(question)
        assert "".join(streamed.response_gen) and [s["hits"] for s in streamed.metadata["cacheclip"]] == [3]
        async_streamed = await engine(streaming=True).aquery(question)
        assert [token async for token in async_streamed.async_response_gen()]
        assert [s["hits"] for s in async_streamed.metadata["cacheclip"]] == [3]
        assert [s["hits"] for s in (await engine("refine").aquery(question)).metadata["cacheclip"]] == [1, 1, 1]
        if not stock:  # LlamaIndex would ask Settings.llm
            assert "cacheclip" not in engine("no_text").query(question).metadata
        json.dumps(response.metadata["cacheclip"])

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("mode", "hits"),
        [
            ("simple", [[0]] * 4),
            ("context", [[2]] * 4),
            *((mode, [[2], *[[0, 2]] * 3]) for mode in ("condense_plus_context", "condense_question")),
        ],
    )
    async def test_chat_engines_have_them_too(
        self, index: VectorStoreIndex, llm: CacheClipLLM, question: str, mode: str, hits: list[list[int]]
    ) -> None:
        """Of all prompts of a turn: the one that condenses the question, and that of the answer."""
        engine = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=2)
        answers = [engine.chat(question), await engine.achat(question)]
        answers += [streamed := engine.stream_chat(question)]
        assert "".join(streamed.response_gen)
        answers += [streamed := await engine.astream_chat(question)]
        assert [token async for token in streamed.async_response_gen()]
        assert [[stats["hits"] for stats in response.metadata["cacheclip"]] for response in answers] == hits
        assert collector() is None
        other = index.as_chat_engine(chat_mode=mode, llm=MockLLM(), similarity_top_k=2)
        assert "cacheclip" not in (other.chat(question).metadata or {})

    def test_a_failed_answer_leaves_no_statistics(
        self, index: VectorStoreIndex, llm: CacheClipLLM, question: str
    ) -> None:
        failing = index.as_query_engine(llm=llm, text_qa_template=PromptTemplate(" word" * 10**6 + "{query_str}"))
        with pytest.raises(ValueError, match="."):
            failing.query(question)
        assert collector() is None
        assert "cacheclip" not in index.as_query_engine(llm=MockLLM(), similarity_top_k=2).query(question).metadata


class TestWhatTheModelReads:
    """Chunks are known by the text that a model reads, whatever node it comes from."""

    def test_metadata_belongs_to_the_text(self, llm: CacheClipLLM, chunks: list[str]) -> None:
        node = TextNode(text=chunks[0], metadata={"title": "Log"}, excluded_llm_metadata_keys=[])
        CacheClipTransform.from_llm(llm)([node])
        assert llm.engine.is_stored(node.get_content(MetadataMode.LLM)) and not llm.engine.is_stored(chunks[0])
        hidden = TextNode(text=chunks[1], metadata={"title": "Log"}, excluded_llm_metadata_keys=["title"])
        CacheClipTransform.from_llm(llm)([hidden])
        assert llm.engine.is_stored(chunks[1])

    def test_sentence_windows_are_parts_of_the_documents_chunks(
        self, tiny_models: dict[str, str], chunks: list[str], question: str, seen: Events
    ) -> None:
        """The way of the tutorial, on a model with tokens: the sentences are indexed, the document is precomputed."""
        llm = CacheClipLLM(primary=tiny_models["llama"], auxiliary=None, method="epic-corrected", max_tokens=2)
        documents = [Document(text=" ".join(chunks[:3]), metadata={"file": "island.txt"})]
        split = split_by_sentence_tokenizer()
        parser = SentenceWindowNodeParser.from_defaults(
            window_size=2, sentence_splitter=lambda text: [sentence.strip() for sentence in split(text)]
        )
        windows = parser.get_nodes_from_documents(documents)
        engine = RetrieverQueryEngine.from_args(
            VectorStoreIndex(windows, embed_model=WordEmbedding()).as_retriever(similarity_top_k=2),
            llm=llm,
            node_postprocessors=[MetadataReplacementPostProcessor(target_metadata_key="window")],
        )
        response = engine.query(question)
        assert seen.fusions[-1].hits == 0
        CacheClipTransform.from_llm(llm)(SentenceSplitter(chunk_size=512, chunk_overlap=0)(documents))
        llm.engine.prefixes.clear()
        engine.query(question)
        stats = seen.fusions[-1].stats
        assert stats["hits"] == stats["partial_hits"] == 2
        read = [each.node.get_content(metadata_mode=MetadataMode.NONE) for each in response.source_nodes]
        tokens = sum(len(llm.engine.primary.tokenize(window)) for window in read)
        assert stats["chunk_tokens"] >= 0.9 * tokens


async def test_the_event_loop_goes_on(
    index: VectorStoreIndex, llm: CacheClipLLM, chunks: list[str], question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model works in another thread, from the first prompt on; so does what counts its tokens."""
    synthesizer = CacheClipSynthesizer(llm=llm, streaming=True)
    engine = index.as_query_engine(llm=llm, similarity_top_k=3, streaming=True, response_synthesizer=synthesizer)
    runtime, tokenized = fake_of(llm.engine), list[tuple[threading.Thread, str]]()
    tokenize = runtime.tokenize

    def watched(text: str, **options: Any) -> Any:
        tokenized.append((threading.current_thread(), text))
        return tokenize(text, **options)

    monkeypatch.setattr(runtime, "tokenize", watched)
    response = await engine.aquery(question)
    assert [token async for token in response.async_response_gen()]
    main = threading.main_thread()
    assert any(thread is not main and chunk in text for thread, text in tokenized for chunk in chunks)
    here = [text for thread, text in tokenized if thread is main]
    assert max(map(len, here), default=0) < 1000, "templates at most"
    assert not any(chunk in text for text in here for chunk in chunks)
