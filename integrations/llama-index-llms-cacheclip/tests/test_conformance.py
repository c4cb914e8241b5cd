"""Our parts are what LlamaIndex expects of such: the LLM as a chat model and as a completion model; the transform, the
synthesizer, the document store. LlamaIndex has no suite like ``langchain-tests``; this one asks its own parts the same.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import AsyncGenerator, Callable, Generator

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, MessageRole
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.llms import LLM
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import BaseNode, NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform
from llama_index.response_synthesizers.cacheclip import CacheClipSynthesizer
from llama_index.storage.docstore.cacheclip import CacheClipDocumentStore
from llama_index_cases import Events

PROMPT = "Say something about a lighthouse."
MESSAGES = [
    ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
    ChatMessage(role=MessageRole.USER, content="Where did the keeper live?"),
    ChatMessage(role=MessageRole.ASSISTANT, content="In the tower."),
    ChatMessage(role=MessageRole.USER, content=PROMPT),
]


class LLMConformance:
    """For language models that decode greedily: define the fixture ``llm``."""

    def test_metadata(self, llm: LLM) -> None:
        metadata = llm.metadata
        assert isinstance(metadata, LLMMetadata)
        assert metadata.context_window > metadata.num_output > 0 and metadata.model_name

    async def test_completion_four_ways(self, llm: LLM) -> None:
        whole = llm.complete(PROMPT)
        assert isinstance(whole, CompletionResponse) and whole.text
        streamed = llm.stream_complete(PROMPT)
        assert isinstance(streamed, Generator)
        self.check_stream(list(streamed), whole.text)
        assert (await llm.acomplete(PROMPT)).text == whole.text
        later = await llm.astream_complete(PROMPT)
        assert isinstance(later, AsyncGenerator)
        self.check_stream([part async for part in later], whole.text)

    async def test_chat_four_ways(self, llm: LLM) -> None:
        whole = llm.chat(MESSAGES)
        assert isinstance(whole, ChatResponse) and whole.message.role == MessageRole.ASSISTANT
        text = whole.message.content
        assert text
        streamed = llm.stream_chat(MESSAGES)
        assert isinstance(streamed, Generator)
        parts = list(streamed)
        assert parts[-1].message.content == text and "".join(part.delta or "" for part in parts) == text
        assert all(part.message.role == MessageRole.ASSISTANT for part in parts)
        assert (await llm.achat(MESSAGES)).message.content == text
        later = await llm.astream_chat(MESSAGES)
        assert isinstance(later, AsyncGenerator)
        assert [part async for part in later][-1].message.content == text

    def check_stream(self, parts: list[CompletionResponse], text: str) -> None:
        """Each text is the sum of the deltas so far."""
        so_far = ""
        for part in parts:
            so_far += part.delta or ""
            assert part.text == so_far
        assert so_far == text and len(parts) > 1

    def test_predict_with_templates(self, llm: LLM) -> None:
        assert llm.predict(PromptTemplate("Say {what}."), what="hello")
        assert "".join(llm.stream(PromptTemplate("Say {what}."), what="hello"))
        chat = ChatPromptTemplate([ChatMessage(role=MessageRole.USER, content="Say {what}.")])
        assert llm.predict(chat, what="hello")

    def test_events(self, llm: LLM, seen: Events) -> None:
        llm.chat(MESSAGES)
        list(llm.stream_complete(PROMPT))
        wanted = [name for name in seen.names if name.startswith("LLM")]
        assert wanted[:2] == ["LLMChatStartEvent", "LLMChatEndEvent"]
        assert wanted[2] == "LLMCompletionStartEvent" and wanted[-1] == "LLMCompletionEndEvent"
        assert "LLMCompletionInProgressEvent" in wanted

    def test_it_can_be_written_down_and_made_again(self, llm: LLM) -> None:
        made = type(llm).from_dict(json.loads(json.dumps(llm.to_dict())))
        assert made.complete(PROMPT).text == llm.complete(PROMPT).text
        assert copy.deepcopy(llm).complete(PROMPT).text == llm.complete(PROMPT).text

    async def test_a_stream_may_be_left(self, llm: LLM) -> None:
        next(llm.stream_complete(PROMPT))
        async for _ in await llm.astream_complete(PROMPT):
            break
        assert llm.complete(PROMPT).text, "and it still answers"


@pytest.fixture
def llm(tiny_models: dict[str, str]) -> CacheClipLLM:
    return CacheClipLLM(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], max_tokens=12)


class TestTransform:
    """A step of an ingestion pipeline that changes no node."""

    @pytest.fixture
    def transform(self, llm: CacheClipLLM) -> CacheClipTransform:
        return CacheClipTransform.from_llm(llm)

    @pytest.fixture
    def nodes(self) -> list[BaseNode]:
        return [TextNode(text=f"Lamp number {n} was lit.", metadata={"page": n}) for n in range(3)]

    async def test_nodes_go_through(self, transform: CacheClipTransform, nodes: list[BaseNode]) -> None:
        before = [node.to_dict() for node in nodes]
        for after in (transform(nodes), await transform.acall(nodes)):
            assert [node.to_dict() for node in after] == before
        assert not list(transform([])) and not list(await transform.acall([]))

    def test_unknown_arguments_are_the_pipelines(self, transform: CacheClipTransform, nodes: list[BaseNode]) -> None:
        assert list(transform(nodes, show_progress=True, whatever=1)) == nodes

    async def test_in_a_pipeline(self, transform: CacheClipTransform, nodes: list[BaseNode]) -> None:
        for pipeline in (IngestionPipeline(transformations=[transform]) for _ in range(2)):
            assert [node.id_ for node in pipeline.run(nodes=nodes)] == [node.id_ for node in nodes]
            assert [node.id_ for node in await pipeline.arun(nodes=nodes)] == [node.id_ for node in nodes]

    def test_it_can_be_written_down_and_made_again(self, transform: CacheClipTransform) -> None:
        made = type(transform).from_dict(json.loads(json.dumps(transform.to_dict())))
        copied = pickle.loads(pickle.dumps(transform))
        for other in (made, copied, copy.deepcopy(transform)):
            assert get_transformation_hash([], other) == get_transformation_hash([], transform)
        assert type(transform).class_name() == type(transform).__name__


class TestSynthesizer:
    @pytest.fixture
    def make(self, llm: CacheClipLLM) -> Callable[..., CacheClipSynthesizer]:
        return lambda **options: CacheClipSynthesizer(llm=llm, **options)

    @pytest.fixture
    def nodes(self) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=f"Lamp number {n} was lit."), score=1.0) for n in range(3)]

    async def test_four_ways(self, make: Callable[..., BaseSynthesizer], nodes: list[NodeWithScore]) -> None:
        whole, streaming = make(), make(streaming=True)
        answer = whole.synthesize(PROMPT, nodes)
        assert isinstance(answer, Response) and str(answer)
        assert answer.source_nodes == nodes and {each.node_id for each in nodes} <= set(answer.metadata or {})
        assert str(await whole.asynthesize(PROMPT, nodes)) == str(answer)
        streamed = streaming.synthesize(QueryBundle(PROMPT), nodes)
        assert isinstance(streamed, StreamingResponse) and "".join(streamed.response_gen) == str(answer)
        later = await streaming.asynthesize(QueryBundle(PROMPT), nodes)
        assert isinstance(later, AsyncStreamingResponse)
        assert "".join([part async for part in later.async_response_gen()]) == str(answer)

    async def test_texts_without_nodes(self, make: Callable[..., BaseSynthesizer], nodes: list[NodeWithScore]) -> None:
        texts = [each.node.get_content() for each in nodes]
        answer = make().get_response(PROMPT, texts)
        assert answer and await make().aget_response(PROMPT, texts) == answer

    async def test_additional_sources_and_none(
        self, make: Callable[..., BaseSynthesizer], nodes: list[NodeWithScore]
    ) -> None:
        answer = make().synthesize(PROMPT, nodes[:1], additional_source_nodes=nodes[1:])
        assert answer.source_nodes == nodes
        assert str(make().synthesize(PROMPT, [])) == str(await make().asynthesize(PROMPT, [])) == "Empty Response"

    def test_prompts_can_be_changed(self, make: Callable[..., BaseSynthesizer], nodes: list[NodeWithScore]) -> None:
        synthesizer = make()
        before = str(synthesizer.synthesize(PROMPT, nodes))
        names = synthesizer.get_prompts()
        assert names
        synthesizer.update_prompts({name: PromptTemplate("{context_str} So: {query_str}") for name in names})
        assert {each.get_template() for each in synthesizer.get_prompts().values()} == {"{context_str} So: {query_str}"}
        assert str(synthesizer.synthesize(PROMPT, nodes)) != before


class TestDocumentStore:
    @pytest.fixture
    def docstore(self, llm: CacheClipLLM) -> CacheClipDocumentStore:
        return CacheClipDocumentStore.of(llm)

    @pytest.fixture
    def nodes(self) -> list[TextNode]:
        """Two nodes of one document, one node of another."""
        sources = [{NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc-{n // 2}")} for n in range(3)]
        texts = [(f"Lamp number {n} was lit.", f"node-{n}") for n in range(3)]
        return [TextNode(text=t, id_=i, relationships=s) for (t, i), s in zip(texts, sources, strict=True)]

    def test_what_is_added_is_there(self, docstore: BaseDocumentStore, nodes: list[TextNode]) -> None:
        docstore.add_documents(nodes)
        assert docstore.get_document("node-1") == nodes[1] and docstore.document_exists("node-1")
        assert sorted(docstore.docs) == ["node-0", "node-1", "node-2"]
        assert docstore.get_nodes(["node-2", "node-0"]) == [nodes[2], nodes[0]]
        ids = {name: info.node_ids for name, info in (docstore.get_all_ref_doc_info() or {}).items()}
        assert ids == {"doc-0": ["node-0", "node-1"], "doc-1": ["node-2"]}
        with pytest.raises(ValueError, match="node-9"):
            docstore.get_document("node-9")
        assert docstore.get_document("node-9", raise_error=False) is None

    def test_what_is_deleted_is_gone(self, docstore: BaseDocumentStore, nodes: list[TextNode]) -> None:
        docstore.add_documents(nodes)
        docstore.delete_document("node-0")
        docstore.delete_ref_doc("doc-1")
        assert list(docstore.docs) == ["node-1"] and docstore.get_ref_doc_info("doc-1") is None
        for delete in (docstore.delete_document, docstore.delete_ref_doc):
            with pytest.raises(ValueError, match="nothing"):
                delete("nothing")
            delete("nothing", raise_error=False)

    async def test_asynchronously(self, docstore: BaseDocumentStore, nodes: list[TextNode]) -> None:
        await docstore.async_add_documents(nodes)
        assert await docstore.aget_document("node-1") == nodes[1] and await docstore.adocument_exists("node-1")
        await docstore.adelete_document("node-0")
        await docstore.adelete_ref_doc("doc-1")
        assert list(docstore.docs) == ["node-1"]
        for delete in (docstore.adelete_document, docstore.adelete_ref_doc):
            with pytest.raises(ValueError, match="nothing"):
                await delete("nothing")

    async def test_hashes(self, docstore: BaseDocumentStore) -> None:
        docstore.set_document_hashes({"a": "1", "b": "2"})
        await docstore.aset_document_hash("c", "3")
        assert docstore.get_document_hash("a") == "1" and await docstore.aget_document_hash("z") is None
        assert docstore.get_all_document_hashes() == {"1": "a", "2": "b", "3": "c"}


class TestChatModel(LLMConformance):
    @pytest.fixture
    def llm(self, tiny_models: dict[str, str]) -> CacheClipLLM:
        return CacheClipLLM(primary=tiny_models["smollm3"], auxiliary=tiny_models["auxiliary"], max_tokens=12)


class TestCompletionModel(LLMConformance):
    @pytest.fixture
    def llm(self, tiny_models: dict[str, str]) -> CacheClipLLM:
        return CacheClipLLM(primary=tiny_models["qwen2"], auxiliary=None, max_tokens=12, is_chat_model=False)
