"""From documents to a faster first token: ingest a folder, then ask through LlamaIndex and through LangChain.

Both chains are the frameworks' own; only the language model is CacheClip's. Each answer is printed with the answer of
plain prefill to the same prompt: if both are wrong, the small model is the cause, not the reuse. Run it with
``make demo``.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheclip_ingest import Embedder, Library, LibrarySettings, ingest
from langchain_cacheclip import ChatCacheClip
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.schema import TextNode
from llama_index.llms.cacheclip import CacheClipLLM
from rich.console import Console
from rich.table import Table

from cacheclip_rag import CacheClipEngine, SamplingParams, get_engine

HERE = Path(__file__).resolve().parent
MODELS = {
    "primary": os.environ.get("PRIMARY", "packaged:qwen2.5-coder-0.5b"),
    "auxiliary": "packaged:smollm2-135m",
}
"""Weights from the package index, so that the demo needs no model hub."""
STORE = str(HERE.parent / ".demo" / Path(MODELS["primary"]).name.replace(":", "-"))
"""A store of texts is for one primary."""
SETTINGS = LibrarySettings(**MODELS, embedding="packaged:all-MiniLM-L6-v2")
TOP_K = 6
MAX_TOKENS = 80
QUESTIONS = (
    "What must you do with files that you modified under the Apache License?",
    "What is a Larger Work under the Mozilla Public License?",
    "What is an Invariant Section in the GNU Free Documentation License?",
)
INSTRUCTION = "Answer in one or two sentences, using only the text above."

Messages = list[dict[str, str]]
Outcome = tuple[Messages, dict[str, Any], list[str]]
"""The prompt that reached the model, its statistics, and the sources."""

library = Library(STORE)
embedder = Embedder(SETTINGS.embedding)


def main() -> None:
    print("Ingesting examples/corpus: chunk caches for both models, only what changed ...", flush=True)
    engine = get_engine(SETTINGS.engine_config(STORE, device="cpu"))
    report = ingest([HERE / "corpus"], library=library, engine=engine, embedder=embedder, settings=SETTINGS)
    print(f"{report.documents} documents, {len(library.passages())} chunks, {report.computed} computed now.\n")
    outcomes = []
    for name, ask in (("LlamaIndex", ask_llama_index), ("LangChain", ask_langchain)):
        for question in QUESTIONS:
            print(f"[{name}] {question}\n  ours  ", end="", flush=True)
            outcomes.append(show(ask(question)))
            show_full(engine, outcomes[-1])
    print_table(engine, outcomes)


def show(pieces: Iterator[str | Outcome]) -> Outcome:
    """Print an answer while it streams, then its time to the first token and its sources."""
    for piece in pieces:
        if isinstance(piece, str):
            print(piece, end="", flush=True)
            continue
        _, stats, sources = piece
        print(f"\n        first token after {stats['ttft_s']:.2f} s, {stats['hits']} chunks from the store")
        print(f"        sources: {', '.join(sources)}", flush=True)
        return piece
    raise AssertionError("an answer ends with its outcome")


def show_full(engine: CacheClipEngine, outcome: Outcome) -> None:
    """Answer the same prompt by plain prefill of all tokens."""
    print("  full  ", end="", flush=True)
    for event in engine.stream(outcome[0], SamplingParams(max_tokens=MAX_TOKENS), method="full"):
        print(event.text, end="", flush=True)
        if event.answer:
            print(f"\n        first token after {event.answer.stats.ttft_s:.2f} s\n", flush=True)


# -- LlamaIndex: a stock query engine --------------------------------------------------------------------------


class LibraryEmbedding(BaseEmbedding):
    """The library's sentence-transformers model for LlamaIndex."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return [float(x) for x in embedder.embed([text])[0]]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return [[float(x) for x in row] for row in embedder.embed(texts)]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class LastChat(BaseEventHandler):
    """Keeps the last chat of the language model. LlamaIndex's instrumentation carries our statistics."""

    messages: Messages = []
    stats: dict[str, Any] = {}

    @classmethod
    def class_name(cls) -> str:
        return "LastChat"

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.messages = [{"role": m.role.value, "content": m.content or ""} for m in event.messages]
            self.stats = event.response.additional_kwargs.get("cacheclip", {})


last_chat = LastChat()
get_dispatcher().add_event_handler(last_chat)
query_engines: list[Any] = []


def ask_llama_index(question: str) -> Iterator[str | Outcome]:
    if not query_engines:
        nodes = [
            TextNode(text=text, metadata={"source": label(path, n)}, excluded_llm_metadata_keys=["source"])
            for path, n, text in library.passages()
        ]
        index = VectorStoreIndex(nodes, embed_model=LibraryEmbedding())
        llm = CacheClipLLM(**MODELS, store=STORE, max_tokens=MAX_TOKENS)
        query_engines.append(index.as_query_engine(llm=llm, similarity_top_k=TOP_K, streaming=True))
    response = query_engines[0].query(question)
    yield from response.response_gen
    yield last_chat.messages, last_chat.stats, [n.metadata["source"] for n in response.source_nodes]


# -- LangChain: a stock retrieval chain ------------------------------------------------------------------------


class LibraryRetriever(BaseRetriever):
    """The library's search for LangChain."""

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        found = library.search(embedder.embed([query]), TOP_K)
        return [Document(p.text, metadata={"source": label(p.path, p.ordinal)}) for p in found]


class LastMessage(BaseCallbackHandler):
    """Keeps the last chat of the language model. LangChain's callbacks carry our statistics."""

    def __init__(self) -> None:
        self.messages: Messages = []
        self.stats: dict[str, Any] = {}

    def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
        roles = {"human": "user", "ai": "assistant", "system": "system"}
        self.messages = [{"role": roles[m.type], "content": str(m.content)} for m in messages[0]]

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.stats = response.generations[0][0].message.response_metadata["cacheclip"]


def ask_langchain(question: str) -> Iterator[str | Outcome]:
    llm = ChatCacheClip(**MODELS, store=STORE, max_tokens=MAX_TOKENS)
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n" + INSTRUCTION + "\nQuestion: {input}")])
    recorder = LastMessage()
    chain = create_retrieval_chain(LibraryRetriever(), create_stuff_documents_chain(llm, prompt))
    sources: list[str] = []
    for part in chain.stream({"input": question}, config={"callbacks": [recorder]}):
        sources.extend(document.metadata["source"] for document in part.get("context", []))
        yield part.get("answer", "")
    yield recorder.messages, recorder.stats, sources


def label(path: str, ordinal: int) -> str:
    return f"{Path(path).name} #{ordinal}"


# -- the table -------------------------------------------------------------------------------------------------


def print_table(engine: CacheClipEngine, outcomes: list[Outcome]) -> None:
    """Measure every other prompt from above with each method, and print medians. Prompts differ in length, so each is
    compared with its own ordinary prefill; a prompt that was disturbed shows in the least and greatest ratio."""
    outcomes = outcomes[::2]
    print(f"Measuring {len(outcomes)} of these prompts with each method, ordinary prefill among them ...", flush=True)
    one_token = SamplingParams(max_tokens=1)
    without_auxiliary = "epic" if engine.config.primary.endswith(".gguf") else "anchored"
    rows: dict[str, list[dict[str, Any]]] = {"full": [], "direct": [], without_auxiliary: [], "cacheclip": []}
    for number, (messages, _, _) in enumerate(outcomes, 1):
        print(f"  prompt {number} of {len(outcomes)}", flush=True)
        for method, stats in rows.items():
            engine.prefixes.clear()  # otherwise the next method would find this method's KV
            stats.append(engine.generate(messages, one_token, method=method).stats.to_dict())
    table = Table(title=f"{engine.config.primary} + {engine.config.auxiliary}, {len(outcomes)} prompts, medians")
    counts = ("effective ratio", "tokens reused", "tokens recomputed")
    for column in ("method", "TTFT", "against full", "min-max", *counts):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, stats in rows.items():
        sooner = [full["ttft_s"] / own["ttft_s"] for full, own in zip(rows["full"], stats, strict=True)]
        ratio, reused, recomputed = (
            median(stats, k) for k in ("effective_ratio", "reused_tokens", "recomputed_tokens")
        )
        spread = f"{statistics.median(sooner):.2f}x", f"{min(sooner):.2f}-{max(sooner):.2f}x"
        seconds = f"{median(stats, 'ttft_s'):.2f} s"
        table.add_row(method, seconds, *spread, f"{ratio:.3f}", f"{reused:.0f}", f"{recomputed:.0f}")
    Console(width=100).print(table)


def median(stats: list[dict[str, Any]], key: str) -> float:
    return statistics.median(float(s[key]) for s in stats)


if __name__ == "__main__":
    main()
