"""Where the nodes are known: the synthesizer, the events, and deletions that release chunk caches."""

from __future__ import annotations

import sys
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from adapter_cases import Questions
from cacheclip_testing import SENTENCES, fake_of
from llama_index.core import PromptTemplate, Settings, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse, Response, StreamingResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.response_synthesizers import BaseSynthesizer, get_response_synthesizer
from llama_index.core.schema import Document, MetadataMode, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform
from llama_index.response_synthesizers.cacheclip import CacheClipSynthesizer
from llama_index.response_synthesizers.cacheclip.packing import WholeChunks
from llama_index.storage.docstore.cacheclip import CacheClipDocumentStore
from llama_index_cases import Events, WordEmbedding, scripted

from cacheclip_rag import ConfigurationError

MODES = ("compact", "refine", "tree_summarize", "simple_summarize", "accumulate", "compact_accumulate")


@pytest.fixture
def nodes(chunks: list[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=chunk, id_=f"node-{n}"), score=1.0) for n, chunk in enumerate(chunks[:3])]


@pytest.mark.parametrize("bad", ["word " * 5000, "Half \ud835 a character, as PDF readers give it."])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_bad_node_is_skipped_with_its_id(
    llm: CacheClipLLM, chunks: list[str], bad: str, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [chunks[0], bad, chunks[1]]
    transform = CacheClipTransform.from_llm(llm)
    given = [TextNode(text=text, id_=f"node-{n}") for n, text in enumerate(texts)]
    assert (await transform.acall(given) if asynchronous else transform(given)) == given, "the index has all of them"
    assert [llm.engine.is_stored(text) for text in (chunks[0], chunks[1])] == [True, True]
    said = [record.getMessage() for record in caplog.records if "not precomputed" in record.getMessage()]
    assert len(said) == 1 and "node-1" in said[0]


class TestSynthesizer:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("mode", MODES)
    def test_nodes_are_stored_and_hit_in_every_mode(
        self, llm: CacheClipLLM, nodes: list[NodeWithScore], question: str, seen: Events, mode: str
    ) -> None:
        """Nobody precomputed them."""
        synthesizer = CacheClipSynthesizer(llm=llm, response_mode=mode)
        first = synthesizer.synthesize(question, nodes)
        assert isinstance(first, Response) and first.source_nodes == nodes and str(first)
        assert seen.fusions[0].misses > 0 and seen.fusions[0].hits == 0
        seen.fusions.clear()
        second = synthesizer.synthesize(question, nodes)
        assert str(second)
        prompts = 3 if mode in ("refine", "accumulate") else 1
        assert sum(event.hits for event in seen.fusions) == 3 and len(seen.fusions) == prompts
        assert all(event.misses == 0 and event.reused_tokens > 0 for event in seen.fusions)
        ids = ["node-0", "node-1", "node-2"]
        assert [event.node_ids for event in seen.fusions] == ([[each] for each in ids] if prompts == 3 else [ids])
        assert seen.names.index("SynthesizeStartEvent") < seen.names.index("CacheClipFusionEvent")

    @pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "simple_summarize"])
    def test_the_answer_is_the_stock_one(
        self, llm: CacheClipLLM, nodes: list[NodeWithScore], question: str, mode: str
    ) -> None:
        """By a method that no question turns: ours hands the user's words on, the stock one does not know them."""
        llm = llm.model_copy(update={"method": "direct"})
        llm.engine.precompute(each.node.get_content(MetadataMode.LLM) for each in nodes)
        stock = get_response_synthesizer(llm=llm, response_mode=mode)
        ours = CacheClipSynthesizer(llm=llm, response_mode=mode)
        assert str(ours.synthesize(question, nodes)) == str(stock.synthesize(question, nodes))

    @pytest.mark.some(3)
    @pytest.mark.parametrize("mode", MODES)
    def test_the_users_words_choose_what_is_recomputed(
        self, llm: CacheClipLLM, nodes: list[NodeWithScore], question: str, mode: str
    ) -> None:
        seen = Questions()
        llm.engine.observers.append(seen)
        CacheClipSynthesizer(llm=llm, response_mode=mode).synthesize(question, nodes)
        assert set(seen.asked) == {question}
        llm.complete("Who lit the lamp?", question="the lamp")
        llm.complete("Who lit the lamp?")
        assert seen.asked[-2:] == ["the lamp", None]

    async def test_a_summary_of_whole_chunks_four_ways(
        self, llm: CacheClipLLM, nodes: list[NodeWithScore], question: str
    ) -> None:
        """This mode is answered by ours alone, and streamed by it."""
        llm.engine.precompute(each.node.get_content(MetadataMode.LLM) for each in nodes)
        whole, streamed = (CacheClipSynthesizer(llm=llm, response_mode="simple_summarize", streaming=s) for s in (0, 1))
        texts = [str(whole.synthesize(question, nodes)), str(await whole.asynthesize(question, nodes))]
        answer = streamed.synthesize(question, nodes)
        assert isinstance(answer, StreamingResponse)
        texts.append("".join(answer.response_gen))
        answer = await streamed.asynthesize(question, nodes)
        assert isinstance(answer, AsyncStreamingResponse)
        texts.append("".join([token async for token in answer.async_response_gen()]))
        assert texts[0] != "Empty Response" and texts == [texts[0]] * 4

    def test_prompts_hold_whole_chunks(
        self, llm: CacheClipLLM, nodes: list[NodeWithScore], question: str, seen: Events
    ) -> None:
        """Where the context ends, the next chunk goes into another prompt; a stock synthesizer would cut it."""
        texts = [each.node.get_content() for each in nodes]
        tokens = max(len(llm.engine.primary.tokenize(text).ids) for text in texts)
        template = PromptTemplate("{context_str} {query_str}")
        refine = PromptTemplate("{existing_answer} {context_msg} {query_str}")
        narrow = llm.model_copy(update={"context_window": 1024 + tokens + 98})
        synthesizer = CacheClipSynthesizer(llm=narrow, text_qa_template=template, refine_template=refine)
        asked = template.partial_format(query_str=question)
        packs = synthesizer._prompt_helper.repack(asked, texts, padding=1024, llm=narrow)
        assert len(packs) > 1 and [text for pack in packs for text in pack.split("\n\n")] == texts
        synthesizer.synthesize(question, nodes)
        seen.fusions.clear()
        synthesizer.synthesize(question, nodes)
        assert sum(event.hits for event in seen.fusions) == 3 and sum(event.misses for event in seen.fusions) == 0

    @pytest.mark.parametrize("put", ["repack", "truncate"])
    def test_the_glue_between_chunks_counts(self, tiny_models: dict[str, str], put: str) -> None:
        """Three chunks need as many tokens of context as one text that holds them and the glue: with a tokenizer that
        makes tokens of the glue alone."""
        llm = CacheClipLLM(primary=tiny_models["llama"], auxiliary=None, max_tokens=8)
        template, texts = PromptTemplate("{context_str}"), [SENTENCES[0], SENTENCES[3], SENTENCES[6]]
        whole = "\n\n".join(texts)

        def first(texts: list[str], context_window: int) -> str:
            narrow = llm.model_copy(update={"context_window": context_window})
            packs = getattr(CacheClipSynthesizer(llm=narrow)._prompt_helper, put)(template, texts, llm=narrow)
            return str(packs[0] if put == "repack" else "\n\n".join(packs))

        sizes = range(100, 400)
        needed = sizes[bisect_left(sizes, True, key=lambda size: first([whole], size) == whole)]
        assert first(texts, needed) == whole
        assert first(texts, needed - 1) == "\n\n".join(texts[:2])

    def test_a_chunk_larger_than_the_context_is_split(self, llm: CacheClipLLM, question: str) -> None:
        narrow = llm.model_copy(update={"context_window": 160})
        synthesizer = CacheClipSynthesizer(llm=narrow)
        template = PromptTemplate("{context_str} {query_str}").partial_format(query_str=question)
        text = "one two three four five six seven eight nine ten. " * 40
        packs = synthesizer._prompt_helper.repack(template, ["short", text, "short too"], llm=narrow)
        assert packs[0] == "short" and packs[-1] == "short too" and len(packs) > 4
        (kept,) = synthesizer._prompt_helper.truncate(template, [text, "short"], llm=narrow)
        assert text.startswith(kept.strip()) and 0 < len(kept) < len(text)

    def test_what_does_not_fit_a_summary_is_left_out_whole(
        self, llm: CacheClipLLM, question: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        narrow = llm.model_copy(update={"context_window": 220})
        template = PromptTemplate("{context_str} {query_str}").partial_format(query_str=question)
        texts = [f"Text {n} has a few words, and that is that." for n in range(40)]
        kept = CacheClipSynthesizer(llm=narrow)._prompt_helper.truncate(template, texts, llm=narrow)
        assert 0 < len(kept) < 40 and kept == texts[: len(kept)]
        assert f"{40 - len(kept)} of 40 chunks do not fit" in caplog.text

    def test_modes_without_an_answer(self, llm: CacheClipLLM, nodes: list[NodeWithScore], question: str) -> None:
        empty = CacheClipSynthesizer(llm=llm, response_mode="no_text").synthesize(question, nodes)
        assert isinstance(empty, Response) and empty.response == "" and empty.source_nodes == nodes
        context = str(CacheClipSynthesizer(llm=llm, response_mode="context_only").synthesize(question, nodes))
        assert all(each.node.get_content() in context for each in nodes)
        assert str(CacheClipSynthesizer(llm=llm, response_mode="generation").synthesize(question, nodes))

    def test_structured(self, llm: CacheClipLLM, nodes: list[NodeWithScore], question: str, seen: Events) -> None:
        """The nodes are known on both ways."""

        class Fact(BaseModel):
            name: str

        asked = scripted(llm, '{"name": "Brindle"}')
        answers = [CacheClipSynthesizer(llm=llm.as_structured_llm(Fact)).synthesize(question, nodes)]
        assert nodes[0].node.get_content() in asked[0]
        llm.engine.release([each.node.get_content() for each in nodes])
        seen.fusions.clear()
        for _ in range(2):
            scripted(llm, '{"name": "Brindle"}')
            answers.append(CacheClipSynthesizer(llm=llm, output_cls=Fact).synthesize(question, nodes))
        assert all(isinstance(answer, PydanticResponse) for answer in answers)
        assert [answer.response for answer in answers] == [Fact(name="Brindle")] * 3
        ids = ["node-0", "node-1", "node-2"]
        assert [(event.hits, event.misses, event.node_ids) for event in seen.fusions] == [(0, 3, ids), (3, 0, ids)]

    def test_versions_without_a_helper_for_messages(
        self, llm: CacheClipLLM, nodes: list[NodeWithScore], question: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before 0.14.23 LlamaIndex's factory took none, and before 0.14.22 synthesizers had none."""

        def older(**options: Any) -> BaseSynthesizer:
            assert "chat_prompt_helper" not in options
            return get_response_synthesizer(**options)

        monkeypatch.setattr("llama_index.response_synthesizers.cacheclip.base.get_response_synthesizer", older)
        synthesizer = CacheClipSynthesizer(llm=llm)
        monkeypatch.delattr(synthesizer, "_chat_prompt_helper", raising=False)
        assert str(synthesizer.synthesize(question, nodes))

    def test_settings_and_wrong_models(self, llm: CacheClipLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Settings, "_llm", llm)
        assert CacheClipSynthesizer()._llm is llm
        with pytest.raises(ConfigurationError, match="needs a CacheClipLLM, got MockLLM"):
            CacheClipSynthesizer(llm=MockLLM())
        with pytest.raises(ValueError, match="'nonsense' is not a valid ResponseMode"):
            CacheClipSynthesizer(llm=llm, response_mode="nonsense")
        assert BaseSynthesizer.__name__ in [cls.__name__ for cls in CacheClipSynthesizer.__mro__]

    def test_what_an_answer_stored_is_released_with_its_node(
        self, llm: CacheClipLLM, chunks: list[str], question: str
    ) -> None:
        """By node or by document, unless another node holds the text."""
        store = CacheClipDocumentStore.of(llm)
        nodes = IngestionPipeline(transformations=[SentenceSplitter()]).run(
            documents=[Document(text=text, id_=f"doc-{n}") for n, text in enumerate([*chunks[:3], chunks[2]])]
        )
        store.add_documents(nodes)
        texts = [chunk.strip() for chunk in chunks[:3]]
        CacheClipSynthesizer(llm=llm).synthesize(question, [NodeWithScore(node=node) for node in nodes])
        assert stored(llm, texts) == [True, True, True]
        store.delete_document(nodes[0].node_id)
        assert stored(llm, texts) == [False, True, True]
        store.delete_ref_doc("doc-1")
        assert stored(llm, texts) == [False, False, True]
        store.delete_ref_doc("doc-2")
        assert stored(llm, texts) == [False, False, True], "doc-3 holds it too"
        store.delete_ref_doc("doc-3")
        assert stored(llm, texts) == [False, False, False]

    @pytest.mark.long
    def test_counting_while_others_count(self, llm: CacheClipLLM) -> None:
        """What is remembered is thrown away by whoever finds it full, while others count."""
        helper, before = WholeChunks.of(llm), sys.getswitchinterval()

        def count(worker: int) -> None:
            helper.count([f"Text {number} of {worker}." for number in range(1500)])

        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(count, range(4)))
        finally:
            sys.setswitchinterval(before)
        template = PromptTemplate("{context_str}")
        assert helper.repack(template, ["One.", "Two."], llm=llm) == ["One.\n\nTwo."]


class TestEvents:
    def test_each_prompt_names_its_own_nodes(
        self, llm: CacheClipLLM, chunks: list[str], question: str, seen: Events
    ) -> None:
        twins = [TextNode(text=chunks[n], id_=name) for n, name in ((0, "a"), (0, "b"), (1, "c"))]
        nodes = [NodeWithScore(node=node) for node in twins]
        synthesizer = CacheClipSynthesizer(llm=llm, response_mode="accumulate")
        synthesizer.synthesize(question, nodes)
        assert [event.node_ids for event in seen.fusions] == [["a", "b"], ["a", "b"], ["c"]]
        seen.fusions.clear()
        synthesizer.get_response(question, chunks[:1])
        assert [event.node_ids for event in seen.fusions] == [[]], "no node is known"

    def test_plain_calls_emit_them_too(self, llm: CacheClipLLM, chunks: list[str], seen: Events) -> None:
        llm.engine.precompute(chunks[:2])
        text = "\n\n".join([*chunks[:2], "What was built?"])
        llm.complete(text)
        list(llm.stream_complete(text))
        assert [(event.hits, event.node_ids) for event in seen.fusions] == [(2, []), (2, [])]
        (event, _) = seen.fusions
        assert event.method == "epic-corrected" and event.nominal_ratio == 0.2 and event.ttft_s > 0
        assert event.model_dump()["class_name"] == "CacheClipFusionEvent" and set(event.phases_s)

    def test_nodes_of_a_call_and_of_the_model(self, llm: CacheClipLLM, chunks: list[str], seen: Events) -> None:
        knowing = llm.with_nodes({chunks[0]: [("a", "doc")], chunks[2]: [("elsewhere", "")]})
        text = f"{chunks[0]}\n\n{chunks[1]}\n\nWhat was built?"
        knowing.complete(text, documents={chunks[0]: [("b", "")], chunks[1]: [("c", "doc")]})
        assert [event.node_ids for event in seen.fusions] == [["a", "b", "c"]]
        llm.engine.release(sources=["doc"])
        assert stored(llm, chunks[:3]) == [True, False, False], "b holds the first, too"


def stored(llm: CacheClipLLM, texts: list[str]) -> list[bool]:
    return [llm.engine.is_stored(text) for text in texts]


def held(llm: CacheClipLLM, texts: list[str]) -> tuple[CacheClipDocumentStore, list[TextNode]]:
    """A document store of precomputed nodes."""
    docstore = CacheClipDocumentStore.of(llm)
    nodes = [TextNode(text=text) for text in texts]
    CacheClipTransform.from_llm(llm)(nodes)
    docstore.add_documents(nodes)
    return docstore, nodes


class TestDeletion:
    async def test_asynchronously(self, llm: CacheClipLLM, chunks: list[str]) -> None:
        store = CacheClipDocumentStore.of(llm)
        document = Document(text=chunks[0], id_="doc")
        nodes = await IngestionPipeline(
            transformations=[SentenceSplitter(), CacheClipTransform.from_llm(llm)], disable_cache=True
        ).arun(documents=[document, Document(text=chunks[1], id_="other")])
        await store.async_add_documents(nodes)
        await store.adelete_ref_doc("doc")
        assert stored(llm, chunks[:2]) == [False, True]
        await store.adelete_document(nodes[1].node_id)
        assert stored(llm, chunks[:2]) == [False, False]

    @pytest.mark.parametrize("how", ["pipeline", "async pipeline", "index"])
    async def test_a_document_that_changed_in_one_place(self, llm: CacheClipLLM, how: str) -> None:
        """Within an update only what is new is computed, and only what is gone released."""
        docstore = CacheClipDocumentStore.of(llm)
        splitter, embedding = SentenceSplitter(chunk_size=24, chunk_overlap=0), WordEmbedding()
        transform = CacheClipTransform.from_llm(llm)
        strategy: Any = {"docstore": docstore, "docstore_strategy": DocstoreStrategy.UPSERTS_AND_DELETE}
        parts = [splitter, embedding, transform]
        pipeline = IngestionPipeline(transformations=parts, vector_store=SimpleVectorStore(), **strategy)
        storage = StorageContext.from_defaults(docstore=docstore)
        options: Any = {"transformations": [splitter, transform], "store_nodes_override": True}
        index = VectorStoreIndex([], storage_context=storage, embed_model=embedding, **options)

        async def ingest(documents: list[Document]) -> None:
            if how == "pipeline":
                pipeline.run(documents=documents)
            elif how == "async pipeline":
                await pipeline.arun(documents=documents)
            else:
                index.refresh_ref_docs(documents)

        computed = fake_of(llm.engine).encoded
        llm.engine.precompute(["What chunks are computed behind is computed with the first of them."])
        computed.clear()
        lines = SENTENCES[:6]
        old = Document(text="\n\n\n".join(lines), id_="a")
        await ingest([old, Document(text=SENTENCES[6], id_="b")])
        before = [node.text for node in splitter([old])]
        assert len(before) == 6 and len(computed) == 7 and all(stored(llm, before))
        computed.clear()
        lines[2] = "A keeper and three assistants lived on the rock for six weeks at a time."
        new = Document(text="\n\n\n".join(lines), id_="a")
        after = [node.text for node in splitter([new])]
        with docstore.updating():
            await ingest([new, Document(text=SENTENCES[7], id_="b")])
            assert all(stored(llm, [*before, *after, SENTENCES[6]])), "what is gone goes at the end"
        assert len(computed) == 2
        assert stored(llm, before) == [text in after for text in before] and all(stored(llm, after))
        assert stored(llm, SENTENCES[6:8]) == [False, True]
        docstore.delete_ref_doc("a", raise_error=False)
        assert stored(llm, after) == [False] * len(after), "nothing of the update stays behind"

    def test_an_update_that_fails_releases_too(self, llm: CacheClipLLM, chunks: list[str]) -> None:
        docstore, nodes = held(llm, chunks[:3])

        def fails() -> None:
            with docstore.updating():
                docstore.delete_document(nodes[0].node_id)
                with docstore.updating():
                    docstore.delete_document(nodes[1].node_id)
                assert stored(llm, chunks[:3]) == [True, True, True], "an update within another ends with it"
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fails()
        assert stored(llm, chunks[:3]) == [False, False, True]

    def test_what_a_killed_update_left_goes_with_the_next_deletion(self, llm: CacheClipLLM, chunks: list[str]) -> None:
        docstore, nodes = held(llm, chunks[:3])
        left = docstore.updating()
        left.__enter__()
        docstore.delete_document(nodes[0].node_id)
        llm.engine.close()
        again = CacheClipDocumentStore(docstore._docstore, llm)  # as the next process makes it
        assert stored(llm, chunks[:3]) == [True, True, True]
        again.delete_document(nodes[1].node_id)
        assert stored(llm, chunks[:3]) == [False, False, True]

    def test_the_other_store_keeps_the_documents(self, llm: CacheClipLLM, chunks: list[str], tmp_path: Path) -> None:
        inner = SimpleDocumentStore()
        ours = CacheClipDocumentStore(inner, llm)
        ours.add_documents([TextNode(text=chunks[0], id_="node")])
        assert inner.get_document("node").get_content() == chunks[0]
        ours.persist(str(tmp_path / "docstore.json"))
        again = CacheClipDocumentStore(SimpleDocumentStore.from_persist_path(str(tmp_path / "docstore.json")), llm)
        assert again.get_document("node").get_content() == chunks[0]
        with pytest.raises(ValueError, match="doc_id missing not found"):
            ours.delete_document("missing")
        ours.delete_document("missing", raise_error=False)

    @pytest.mark.parametrize("by_settings", [False, True])
    def test_an_index_that_is_loaded_again_still_releases(
        self, llm: CacheClipLLM, chunks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_settings: bool
    ) -> None:
        monkeypatch.setattr(Settings, "_llm", llm if by_settings else MockLLM())
        monkeypatch.setattr(Settings, "_embed_model", WordEmbedding())
        storage = StorageContext.from_defaults(docstore=CacheClipDocumentStore.of(llm))
        documents = [Document(text=text, id_=f"doc-{n}") for n, text in enumerate(chunks[:2])]
        transformations = [SentenceSplitter(), CacheClipTransform.from_llm(llm)]
        VectorStoreIndex.from_documents(
            documents, storage_context=storage, store_nodes_override=True, transformations=transformations
        )
        storage.persist(str(tmp_path))
        docstore = CacheClipDocumentStore.from_persist_dir(str(tmp_path), None if by_settings else llm)
        again = StorageContext.from_defaults(persist_dir=str(tmp_path), docstore=docstore)
        index = load_index_from_storage(again, transformations=transformations, store_nodes_override=True)
        assert index.docstore is docstore and [*map(llm.engine.is_stored, chunks[:2])] == [True, True]
        index.delete_ref_doc("doc-0", delete_from_docstore=True)
        assert [*map(llm.engine.is_stored, chunks[:2])] == [False, True]
        monkeypatch.setattr(Settings, "_llm", MockLLM())
        with pytest.raises(ConfigurationError, match="got MockLLM from Settings"):
            CacheClipDocumentStore.from_persist_path(str(tmp_path / "docstore.json"))

    def test_wrong_stores_are_refused(self, llm: CacheClipLLM) -> None:
        with pytest.raises(ConfigurationError, match="wraps a KVDocumentStore .* got dict"):
            CacheClipDocumentStore({}, llm)  # type: ignore[arg-type]
