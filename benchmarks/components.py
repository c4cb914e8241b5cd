"""Stock components of LlamaIndex and LangChain: how much of the documents' text in their prompts is reused, and how
much sooner their first tokens come than with full prefill.

    python benchmarks/components.py --primary packaged:smollm2-135m --auxiliary packaged:smollm2-135m --json table.json

The documents are those of the examples, split and precomputed once. Every component then asks one question, with the
default method and with ``full``. Where a component needs an answer of a certain form (a selection, sub-questions, a
call of a tool), the model's answer is replaced by one that is written here, after the model was run. ``of documents``:
characters of the prompts that come from the documents. ``reused``: the share of them whose KV was reused. ``sooner``:
seconds to the first token of all of a component's prompts, ``full`` over the default method. ``later prompts``, of
components with several (turns of a chat, steps of an agent): seconds to the first tokens of all but the first, over
those of the method ``prefix`` (exact prefix caching); and the same with ``finish="idle"`` and a pause before each. The
server is ``cacheclip serve`` in a process of its own.

Agents need a model whose chat template uses tools, and ``LLMListwiseRerank`` the extra ``structured``; without, they
are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import httpx
from common import CORPUS, FILES, LangChainMiniLM, LlamaIndexMiniLM
from langchain.agents import create_agent
from langchain_cacheclip import CacheClipDocumentStore, ChatCacheClip
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever, MultiQueryRetriever, ParentDocumentRetriever
from langchain_classic.retrievers.document_compressors import (
    CrossEncoderReranker,
    LLMChainExtractor,
    LLMListwiseRerank,
)
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_classic.storage import InMemoryStore
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core import Document as LlamaDocument, StorageContext, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import LLMRerank, MetadataReplacementPostProcessor
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

from cacheclip_rag import CacheClipEngine, FusionStats, Plan, ToolCall
from cacheclip_rag.adapters import can_constrain
from cacheclip_rag.guards import ObservedAnswer, Observer
from cacheclip_rag.models import knows_tools
from cacheclip_rag.store import Catalog, TextIndex

QUESTION = "What must be done with modified files?"
EARLIER = "What does the licence say about patents?"
FOUND = "They must carry prominent notices."
TURNS = (EARLIER, QUESTION, "And what does it say about trademarks?")


Said = str | ToolCall
"""What a component is told that the model answered."""


@dataclass
class Watch(Observer):
    """What an engine was asked since the last :meth:`clear`."""

    plans: list[Plan] = field(default_factory=list)
    stats: list[FusionStats] = field(default_factory=list)
    says: list[Said] = field(default_factory=list)
    """Answers to the next prompts, instead of the model's."""
    pauses: bool = False
    """Whether the reader of an answer takes a while."""
    pause_s: float = 0.0
    """Seconds in which a server, of which nobody sees when it is done, completes a prompt's exact KV."""

    def on_plan(self, plan: Plan, sources: Any) -> None:
        self.plans.append(plan)

    def on_answer(self, answered: ObservedAnswer) -> None:
        self.stats.append(answered.answer.stats)

    def clear(self) -> None:
        self.plans.clear()
        self.stats.clear()
        self.says.clear()


def watch(engine: CacheClipEngine) -> Watch:
    seen = Watch()
    engine.observers.append(seen)
    generate, stream = engine.generate, engine.stream

    def instead(answer: Any) -> Any:
        said = seen.says.pop(0)
        text, calls = (said, ()) if isinstance(said, str) else ("", (said,))
        return replace(answer, text=text, tool_calls=calls)

    def pause() -> None:
        if seen.pauses:
            engine.wait_for_observers(600.0)

    def said(*args: Any, **options: Any) -> Any:
        answer = generate(*args, **options)
        pause()
        return instead(answer) if seen.says else answer

    def streamed(*args: Any, **options: Any) -> Iterator[Any]:
        if not seen.says:
            yield from stream(*args, **options)
            pause()
            return
        *_, last = stream(*args, **options)
        pause()
        answer = instead(last.answer)
        yield replace(last, text=answer.text, tool_calls=answer.tool_calls, answer=answer)

    engine.generate, engine.stream = said, streamed  # type: ignore[method-assign]
    return seen


@dataclass
class Case:
    """One component. ``run`` asks it once; ``says`` are the answers that it needs in a certain form, in order."""

    framework: str
    name: str
    run: Callable[[], object]
    says: tuple[Said, ...] = ()


def llama_index_cases(llm: CacheClipLLM, texts: list[str]) -> Iterator[Case]:
    documents = [LlamaDocument(text=text, metadata={"file_name": f"{number}.txt"}) for number, text in enumerate(texts)]
    embedding, transform = LlamaIndexMiniLM(), CacheClipTransform.from_llm(llm)
    nodes = transform(SentenceSplitter(chunk_size=256, chunk_overlap=0)(documents))
    index = VectorStoreIndex(nodes, embed_model=embedding)

    def query(**options: Any) -> Callable[[], object]:
        return lambda: index.as_query_engine(llm=llm, similarity_top_k=4, **options).query(QUESTION)

    for mode in ("compact", "refine", "tree_summarize", "accumulate"):
        yield Case("LlamaIndex", f"response mode `{mode}`", query(response_mode=mode))
    citing = CitationQueryEngine.from_args(index, llm=llm, similarity_top_k=4, citation_chunk_size=128)
    yield Case("LlamaIndex", "`CitationQueryEngine`", lambda: citing.query(QUESTION))
    for mode in ("context", "condense_plus_context"):

        def chat(mode: str = mode) -> None:
            engine = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=4)  # type: ignore[arg-type]
            for question in TURNS:
                engine.chat(question)

        yield Case("LlamaIndex", f"chat mode `{mode}`, three turns", chat)
    tool = QueryEngineTool(
        index.as_query_engine(llm=llm, similarity_top_k=4), ToolMetadata(name="licences", description="Licences.")
    )
    asked = {"items": [{"sub_question": text, "tool_name": "licences"} for text in (QUESTION, EARLIER)]}
    parts = SubQuestionQueryEngine.from_defaults(
        [tool], llm=llm, question_gen=LLMQuestionGenerator.from_defaults(llm=llm), use_async=False, verbose=False
    )
    script = f"```json\n{json.dumps(asked)}\n```"
    yield Case("LlamaIndex", "`SubQuestionQueryEngine`", lambda: parts.query(QUESTION), (script,))
    router = RouterQueryEngine(LLMSingleSelector.from_defaults(llm=llm), [tool, tool], llm=llm)
    choice = '[{"choice": 1, "reason": "it fits"}]'
    yield Case("LlamaIndex", "`RouterQueryEngine`", lambda: router.query(QUESTION), (choice,))
    ranking = "\n".join(f"Doc: {n}, Relevance: {10 - n}" for n in range(1, 5))
    yield Case("LlamaIndex", "`LLMRerank`", query(node_postprocessors=[LLMRerank(llm=llm, top_n=3)]), (ranking,))
    windows = VectorStoreIndex(SentenceWindowNodeParser.from_defaults(window_size=3)(documents), embed_model=embedding)
    replacing = MetadataReplacementPostProcessor(target_metadata_key="window")
    yield Case(
        "LlamaIndex",
        "sentence windows",
        lambda: windows.as_query_engine(llm=llm, similarity_top_k=4, node_postprocessors=[replacing]).query(QUESTION),
    )
    levels = HierarchicalNodeParser.from_defaults(chunk_sizes=[512, 128], chunk_overlap=0)(documents)
    transform(levels)
    docstore = SimpleDocumentStore()
    docstore.add_documents(levels)
    storage = StorageContext.from_defaults(docstore=docstore)
    leaves = VectorStoreIndex(get_leaf_nodes(levels), storage_context=storage, embed_model=embedding)
    merging = AutoMergingRetriever(leaves.as_retriever(similarity_top_k=8), storage, simple_ratio_thresh=0.3)
    merged = RetrieverQueryEngine.from_args(merging, llm=llm)
    yield Case("LlamaIndex", "`AutoMergingRetriever`", lambda: merged.query(QUESTION))
    if knows_tools(llm.primary):
        retriever = index.as_retriever(similarity_top_k=4)

        def licences(query: str) -> str:
            """Search the licences."""
            return "\n\n".join(found.get_content() for found in retriever.retrieve(query))

        async def agent() -> None:
            # the model's answers are written here, so that it need not be able to follow a schema
            calling = llm.model_copy(update={"is_function_calling_model": True})
            await FunctionAgent(tools=[licences], llm=calling).run(QUESTION)

        call = ToolCall("licences", {"query": QUESTION})
        yield Case("LlamaIndex", "`FunctionAgent`", lambda: asyncio.run(agent()), (call, FOUND))


class MiniLMCrossEncoder(BaseCrossEncoder):
    """Similarity of embeddings, where others would load a model."""

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        embedding = LangChainMiniLM()
        asked, found = (embedding.embed_documents(list(texts)) for texts in zip(*text_pairs, strict=True))
        return [sum(a * b for a, b in zip(*pair, strict=True)) for pair in zip(asked, found, strict=True)]


def langchain_cases(chat: ChatCacheClip, texts: list[str]) -> Iterator[Case]:
    whole = [Document(text, metadata={"source": str(number)}) for number, text in enumerate(texts)]
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0)
    pieces = splitter.split_documents(whole)
    chat.engine.precompute(piece.page_content for piece in pieces)
    vectors = InMemoryVectorStore.from_documents(pieces, LangChainMiniLM())
    retriever = vectors.as_retriever(search_kwargs={"k": 4})
    prompt = ChatPromptTemplate.from_messages(
        [("human", "Answer from this context.\n\n{context}\n\nQuestion: {input}")]
    )
    stuff = create_stuff_documents_chain(chat, prompt)

    def ask(found: Any) -> Callable[[], object]:
        return lambda: create_retrieval_chain(found, stuff).invoke({"input": QUESTION})

    yield Case("LangChain", "retrieval chain", ask(retriever))
    rephrase = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input} Rephrase.")])
    aware = create_history_aware_retriever(chat, retriever, rephrase)
    history = [HumanMessage(EARLIER), AIMessage("It grants a patent licence.")]
    yield Case(
        "LangChain",
        "history-aware retriever",
        lambda: create_retrieval_chain(aware, stuff).invoke({"input": QUESTION, "chat_history": history}),
        (QUESTION,),
    )

    def talk() -> None:
        found = "\n\n".join(piece.page_content for piece in retriever.invoke(QUESTION))
        messages: list[Any] = []
        for question in TURNS:
            messages.append(HumanMessage(question if messages else f"Answer from this.\n\n{found}\n\n{question}"))
            messages.append(chat.invoke(messages))

    yield Case("LangChain", "messages, three turns", talk)
    many = MultiQueryRetriever.from_llm(retriever, chat)
    yield Case("LangChain", "`MultiQueryRetriever`", ask(many), (f"{QUESTION}\n{EARLIER}",))
    compressing = ContextualCompressionRetriever(
        base_compressor=LLMChainExtractor.from_llm(chat), base_retriever=retriever
    )
    kept = tuple(piece.page_content[100:700] for piece in retriever.invoke(QUESTION))
    yield Case("LangChain", "contextual compression", ask(compressing), kept)
    reranking = ContextualCompressionRetriever(
        base_compressor=CrossEncoderReranker(model=MiniLMCrossEncoder(), top_n=3), base_retriever=retriever
    )
    yield Case("LangChain", "`CrossEncoderReranker`", ask(reranking))
    if can_constrain():
        listing = ContextualCompressionRetriever(
            base_compressor=LLMListwiseRerank.from_llm(chat, top_n=3), base_retriever=retriever
        )
        yield Case("LangChain", "`LLMListwiseRerank`", ask(listing), ('{"ranked_document_ids": [2, 0, 1]}',))
    for name, docstore in (
        ("`ParentDocumentRetriever`", InMemoryStore()),
        ("the same with `CacheClipDocumentStore`", CacheClipDocumentStore(InMemoryStore(), chat)),
    ):
        parents = ParentDocumentRetriever(
            vectorstore=InMemoryVectorStore(LangChainMiniLM()),
            docstore=docstore,
            child_splitter=RecursiveCharacterTextSplitter(chunk_size=300, chunk_overlap=0),
            parent_splitter=RecursiveCharacterTextSplitter(chunk_size=2000, chunk_overlap=0),
        )
        parents.add_documents(whole)
        yield Case("LangChain", name, ask(parents))
    if knows_tools(chat.primary):
        tool = create_retriever_tool(retriever, "licences", "Search the licences.")
        agent = create_agent(chat, [tool])

        def work() -> None:
            messages: list[Any] = []
            for question in TURNS[:2]:
                messages = agent.invoke({"messages": [*messages, ("user", question)]})["messages"]

        calls = [ToolCall("licences", {"query": question}) for question in TURNS[:2]]
        yield Case("LangChain", "`create_agent`, two questions", work, (calls[0], FOUND, calls[1], FOUND))


@contextmanager
def serving(options: dict[str, str], store: str) -> Iterator[str]:
    """The address of a server."""
    command = [sys.executable, "-P", "-c", "import cacheclip_rag.cli as cli; cli.main()", "serve", "--json"]
    options = {**options, "store": store, "port": "0"}
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield str(json.loads(process.stdout.readline())["address"])
        finally:
            process.terminate()


def server_case(address: str, chat: ChatCacheClip, seen: Watch, texts: list[str]) -> Case:
    """A chat over HTTP. The server's prefix cache cannot be emptied, so that each chat begins with other words."""
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0)
    pieces = [piece for text in texts for piece in splitter.split_text(text)][:4]
    numbers = count()

    def talk() -> None:
        messages = [{"role": "system", "content": f"{next(numbers)} is the number of this chat."}]
        for question in TURNS:
            first = len(messages) == 1
            content = "\n\n".join(["Answer from this.", *pieces, question]) if first else question
            messages.append({"role": "user", "content": content})
            ours = {"method": chat.method, "finish": chat.finish, "documents": pieces}
            body = {"messages": messages, "temperature": 0, "max_tokens": 24, "cacheclip": ours}
            said = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
            seen.plans.append(chat.engine.plan(messages))
            seen.stats.append(SimpleNamespace(**said["cacheclip"]))
            messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"] or ""})
            if seen.pauses:
                time.sleep(seen.pause_s)

    chat.engine.precompute(pieces)
    return Case("server", "chat over HTTP, three turns", talk)


def characters(plan: Plan, corpus: TextIndex) -> tuple[int, int]:
    """Characters of a prompt that come from the documents, and those of them whose KV is reused."""
    text, reused, reused_spans = "", set[int](), set(plan.reused)
    for span in plan.layout.spans:
        if span in reused_spans:
            reused.update(range(len(text), len(text) + len(span.segment.text)))
        text += span.segment.text
    matches = corpus.find(text)
    return (
        sum(match.stop - match.start for match in matches),
        sum(len(reused.intersection(range(match.start, match.stop))) for match in matches),
    )


def measure(case: Case, llms: list[tuple[Any, Watch]], corpus: TextIndex) -> dict[str, Any]:
    """One component with each method in turn."""
    found: dict[str, Any] = {"framework": case.framework, "component": case.name}
    seconds, later = dict[str, float](), dict[str, float]()
    for way, method in (("ours", "cacheclip"), ("full", "full"), ("prefix", "prefix"), ("idle", "cacheclip")):
        if way == "idle" and found["prompts"] == 1:
            continue
        for llm, seen in llms:
            seen.clear()
            seen.says.extend(case.says)
            llm.engine.prefixes.clear()
            llm.method, llm.finish, seen.pauses = method, "idle" if way == "idle" else "none", way == "idle"
        case.run()
        assert not any(seen.says for _, seen in llms), f"{case.name} did not ask for all answers that it needs"
        plans = [plan for _, seen in llms for plan in seen.plans]
        stats = [one for _, seen in llms for one in seen.stats]
        seconds[way] = sum(one.ttft_s for one in stats)
        later[way] = sum(one.ttft_s for one in stats[1:])
        for _, seen in llms:
            seen.pause_s = max(seen.pause_s, *(2 * one.ttft_s for one in stats))
        if way == "ours":
            pairs = [characters(plan, corpus) for plan in plans]
            of_documents, reused = (sum(column) for column in zip(*pairs, strict=True))
            found |= {
                "prompts": len(plans),
                "prompt_tokens": sum(one.prompt_tokens for one in stats),
                "hits": sum(one.hits for one in stats),
                "of_documents": of_documents,
                "reused": reused / of_documents if of_documents else None,
            }
    found["sooner"] = seconds["full"] / seconds["ours"]
    several = found["prompts"] > 1
    found["later_over_prefix"] = later["ours"] / later["prefix"] if several else None
    found["later_over_prefix_after_pauses"] = later["idle"] / later["prefix"] if several else None
    return found


def show(row: dict[str, Any]) -> None:
    share = "-" if row["reused"] is None else f"{row['reused']:.0%}"
    ratios = (row["later_over_prefix"], row["later_over_prefix_after_pauses"])
    later = " | ".join("-" if ratio is None else f"{ratio:.1f}x prefix" for ratio in ratios)
    print(
        f"| {row['framework']} | {row['component']} | {row['prompts']} | {row['prompt_tokens']:,} "
        f"| {row['hits']} | {share} | {row['sooner']:.1f}x | {later} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="", metavar="TEXT", help="only those whose framework and name contain this")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    texts = [(CORPUS / name).read_text(encoding="utf-8") for name in FILES]
    corpus = TextIndex(Catalog().database, "documents")
    corpus.add(texts)
    options = {"primary": arguments.primary, "auxiliary": arguments.auxiliary, "dtype": arguments.dtype}
    rows = []
    print(
        "| | component | prompts | tokens | hits | reused | sooner | later prompts | after pauses |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for make, cases in ((CacheClipLLM, llama_index_cases), (ChatCacheClip, langchain_cases)):
            llm: Any = make(**options, store=f"{folder}/{make.__name__}", max_tokens=24)
            seen = watch(llm.engine)
            for case in cases(llm, texts):
                if arguments.only.lower() in f"{case.framework} {case.name}".lower():
                    rows.append(measure(case, [(llm, seen)], corpus))
                    show(rows[-1])
            if make is ChatCacheClip and arguments.only.lower() in "server chat over http, three turns":
                with serving(options, f"{folder}/{make.__name__}") as address:
                    rows.append(measure(server_case(address, llm, seen, texts), [(llm, seen)], corpus))
                    show(rows[-1])
    if not rows:
        parser.error(f"no component's framework and name contain {arguments.only!r}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
