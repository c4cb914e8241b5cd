"""LangChain's own chains, with nothing swapped but the chat model."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_cacheclip import ChatCacheClip
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, Runnable

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.errors import CacheClipError, ConfigurationError

PROMPT = "Where did the keeper live?"
RAG_PROMPT = ChatPromptTemplate([("system", "Use the context.\n\n{context}"), ("human", "{input}")])


class WordRetriever(BaseRetriever):
    """The documents that share most words with the query."""

    documents: list[Document]
    k: int = 2

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        words = set(query.lower().split())
        return sorted(self.documents, key=lambda d: -len(words & set(d.page_content.lower().split())))[: self.k]


class Recorder(BaseCallbackHandler):
    """What callbacks see of the model: its tokens and its final messages."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.messages: list[AIMessage] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.messages.append(response.generations[0][0].message)


@pytest.fixture
def llm(tiny_models: dict[str, str], tmp_path: Path) -> ChatCacheClip:
    return ChatCacheClip(
        model=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], store=str(tmp_path / "store"), max_tokens=12
    )


@pytest.fixture
def documents(chunks: list[str]) -> list[Document]:
    return [Document(chunk, metadata={"page": n}) for n, chunk in enumerate(chunks)]


@pytest.fixture
def chain(llm: ChatCacheClip, documents: list[Document]) -> Runnable[Any, Any]:
    llm.engine.precompute(document.page_content for document in documents)
    return create_retrieval_chain(WordRetriever(documents=documents), create_stuff_documents_chain(llm, RAG_PROMPT))


# -- stock chains ---------------------------------------------------------------------------------------------------


async def test_stock_retrieval_chain_four_ways(chain: Runnable[Any, Any], question: str) -> None:
    recorder = Recorder()
    query, config = {"input": question}, {"callbacks": [recorder]}
    texts = [
        chain.invoke(query, config)["answer"],
        "".join(part.get("answer", "") for part in chain.stream(query, config)),
        (await chain.ainvoke(query, config))["answer"],
        "".join([part.get("answer", "") async for part in chain.astream(query, config)]),
    ]
    assert texts[0].strip()
    assert texts == [texts[0]] * 4
    assert [m.response_metadata["cacheclip"]["hits"] for m in recorder.messages] == [2, 2, 2, 2]
    for message in recorder.messages:
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
    first, *others = [message.usage_metadata for message in recorder.messages]
    assert others == [others[0]] * 3
    # the start of the prompt, computed in the first answer, is kept for the others
    assert first["input_token_details"]["cache_read"] <= others[0]["input_token_details"]["cache_read"]
    assert {**first, "input_token_details": None} == {**others[0], "input_token_details": None}


async def test_prompt_pipe_llm(llm: ChatCacheClip, chunks: list[str]) -> None:
    llm.engine.precompute(chunks[:2])
    chain = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}") | llm
    query = {"context": "\n\n".join(chunks[:2]), "question": PROMPT}
    message = chain.invoke(query)
    assert message.response_metadata["cacheclip"]["hits"] == 2
    assert (chain | StrOutputParser()).invoke(query) == message.content
    other = {"context": "\n\n".join(chunks[1::-1]), "question": "Who kept the light?"}
    expected = [message.content, chain.invoke(other).content, message.content]
    assert [m.content for m in await chain.abatch([query, other, query])] == expected
    assert [m.content for m in chain.batch([query, other, query])] == expected
    streamed = None
    for chunk in chain.stream(query):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.content == message.content
    assert streamed.usage_metadata == message.usage_metadata


def test_documents_as_candidates(llm: ChatCacheClip, documents: list[Document]) -> None:
    prompt = f"{documents[0].page_content}\n\n{documents[1].page_content}\n\n{PROMPT}"
    first = llm.invoke(prompt, documents=[documents[0], documents[1].page_content, " "])
    assert first.response_metadata["cacheclip"]["misses"] == 2
    alone = llm.invoke(f"{documents[2].page_content}\n\n{PROMPT}", documents=documents[2].page_content)
    assert alone.response_metadata["cacheclip"]["misses"] == 1
    again = llm.bind(documents=documents[:2]).invoke(prompt)
    assert again.response_metadata["cacheclip"]["hits"] == 2
    with pytest.raises(ConfigurationError, match="Documents or strings, got int"):
        llm.invoke(prompt, documents=[1])


# -- the four calls -------------------------------------------------------------------------------------------------


async def test_message_and_stream_metadata(llm: ChatCacheClip) -> None:
    message = llm.invoke(PROMPT)
    assert message.response_metadata["model_name"] == llm.model_name
    assert message.response_metadata["finish_reason"] in ("stop", "length")
    stats = message.response_metadata["cacheclip"]
    usage = message.usage_metadata
    assert usage["input_tokens"] == stats["prompt_tokens"]
    assert usage["output_tokens"] == stats["generated_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"]["cache_read"] == stats["reused_tokens"]
    for chunks in (list(llm.stream(PROMPT)), [chunk async for chunk in llm.astream(PROMPT)]):
        assert chunks[0].response_metadata["model_name"] == llm.model_name
        assert sum("model_name" in chunk.response_metadata for chunk in chunks) == 1
        assert [chunk for chunk in chunks if chunk.chunk_position == "last"] == chunks[-1:]
        assert "cacheclip" in chunks[-1].response_metadata
        assert "".join(chunk.content for chunk in chunks) == message.content
        assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1


async def test_callbacks_see_every_token_once(llm: ChatCacheClip) -> None:
    streaming = llm.model_copy(update={"streaming": True})
    recorder = Recorder()
    text = streaming.invoke(PROMPT, {"callbacks": [recorder]}).content
    assert "".join(recorder.tokens) == text
    recorder = Recorder()
    assert "".join([chunk.content async for chunk in llm.astream(PROMPT, {"callbacks": [recorder]})]) == text
    assert "".join(recorder.tokens) == text


def test_run_manager_is_told(llm: ChatCacheClip) -> None:
    seen: list[str] = []

    class Manager:
        def on_llm_new_token(self, token: str, *, chunk: Any) -> None:
            assert chunk.text == token
            seen.append(token)

    chunks = list(llm._stream([HumanMessage(PROMPT)], run_manager=Manager()))
    assert "".join(seen) == "".join(chunk.text for chunk in chunks) != ""


async def test_async_calls_keep_the_model_off_the_loop(llm: ChatCacheClip, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    original = CacheClipEngine._prefill

    def recorded(self: CacheClipEngine, *args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CacheClipEngine, "_prefill", recorded)
    await llm.ainvoke(PROMPT)
    [chunk async for chunk in llm.astream(PROMPT)]
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_tokens_are_counted_with_the_models_own_tokenizer(llm: ChatCacheClip, chunks: list[str]) -> None:
    ids = llm.get_token_ids(chunks[0])
    assert llm.engine.primary.decode_ids(ids) == chunks[0]
    assert llm.get_num_tokens(chunks[0]) == len(ids)


def test_messages_become_roles(llm: ChatCacheClip, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def generate(self: CacheClipEngine, prompt: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        seen.extend(prompt)
        raise LookupError

    monkeypatch.setattr(CacheClipEngine, "generate", generate)
    blocks = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}, "b"]
    turns = [SystemMessage("s"), HumanMessage(blocks), AIMessage("x"), AIMessageChunk(content="y")]
    with pytest.raises(LookupError):
        llm.invoke([*turns, ChatMessage("z", role="user")])
    assert [m["role"] for m in seen] == ["system", "user", "assistant", "assistant", "user"]
    assert [m["content"] for m in seen] == ["s", "ab", "x", "y", "z"]


def test_tools_are_read_and_not_called(llm: ChatCacheClip, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    original = CacheClipEngine.segment

    def segment(self: CacheClipEngine, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(prompt)
        return original(self, prompt, *args, **kwargs)

    monkeypatch.setattr(CacheClipEngine, "segment", segment)
    call = {"name": "find", "args": {"word": "lamp"}, "id": "1"}
    messages = [HumanMessage(PROMPT), AIMessage(content="", tool_calls=[call]), ToolMessage("42", tool_call_id="1")]
    assert llm.invoke(messages).content
    assert [message["role"] for message in seen] == ["user", "assistant", "tool"]
    assert seen[1]["content"] == '<tool_call>\n{"name": "find", "arguments": {"word": "lamp"}}\n</tool_call>'
    with pytest.raises(NotImplementedError):
        llm.bind_tools([])


def test_messages_that_cannot_be_read_are_refused(llm: ChatCacheClip) -> None:
    with pytest.raises(ConfigurationError, match="'function' message"):
        llm.invoke([HumanMessage(PROMPT), FunctionMessage("42", name="f")])
    with pytest.raises(ConfigurationError, match="reads text only"):
        llm.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])])


# -- options --------------------------------------------------------------------------------------------------------


def test_call_options(llm: ChatCacheClip) -> None:
    assert llm.invoke(PROMPT, max_tokens=3).usage_metadata["output_tokens"] <= 3
    assert llm.bind(max_new_tokens=2).invoke(PROMPT).usage_metadata["output_tokens"] <= 2
    assert llm.invoke(PROMPT, method="full").response_metadata["cacheclip"]["method"] == "full"
    assert llm.invoke(PROMPT, recompute_ratio=0.5).response_metadata["cacheclip"]["nominal_ratio"] == 0.5
    hot = [llm.invoke(PROMPT, temperature=5.0, seed=seed).content for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


async def test_stop(llm: ChatCacheClip) -> None:
    text = llm.invoke(PROMPT).content
    stop = text[2:4]
    before = text[: text.index(stop)]
    assert llm.invoke(PROMPT, stop=[stop]).content == before
    assert llm.bind(stop=[stop]).invoke(PROMPT).content == before
    assert llm.model_copy(update={"stop": [stop]}).invoke(PROMPT).content == before
    assert "".join([chunk.content async for chunk in llm.astream(PROMPT, stop=[stop])]) == before
    assert llm.invoke(PROMPT, stop=[stop]).response_metadata["finish_reason"] == "stop"


async def test_unknown_call_option_lists_the_known_ones(llm: ChatCacheClip) -> None:
    with pytest.raises(ConfigurationError, match="unknown call option top_k.*max_tokens"):
        llm.invoke(PROMPT, top_k=5)
    with pytest.raises(ConfigurationError, match="unknown call option top_k"):
        list(llm.stream(PROMPT, top_k=5))
    with pytest.raises(ConfigurationError, match="unknown call option tools"):
        await llm.ainvoke(PROMPT, tools=[])


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute_ratio": 1.5},
        {"method": "magic"},
        {"dtype": "int3"},
        {"modle": "x"},
        {"engine_kwargs": {"windw": 3}},
        {"engine_kwargs": {"store": "elsewhere"}},
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        ChatCacheClip(**fields)


def test_errors_of_the_engine_pass_through(llm: ChatCacheClip) -> None:
    with pytest.raises(CacheClipError, match="fit model"):
        llm.invoke("word " * 4000)


# -- construction ---------------------------------------------------------------------------------------------------


def test_mro_and_identity() -> None:
    assert BaseChatModel in ChatCacheClip.__mro__
    llm = ChatCacheClip(model="m", stop_sequences=["x"])
    assert (llm.model_name, llm.stop) == ("m", ["x"])
    assert ChatCacheClip(model_name="m", stop=["x"]) == llm
    assert llm._llm_type == "cacheclip-chat"
    assert not ChatCacheClip.is_lc_serializable()
    assert llm._get_ls_params()["ls_provider"] == "cacheclip"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_name", "other"),
        ("auxiliary", None),
        ("namespace", "bob"),
        ("method", "full"),
        ("recompute_ratio", 0.5),
        ("temperature", 1.0),
        ("max_tokens", 5),
        ("top_p", 0.5),
        ("stop", ["x"]),
        ("seed", 1),
        ("dtype", "bfloat16"),
        ("engine_kwargs", {"window": 9}),
    ],
)
def test_what_changes_the_output_is_in_the_cache_key(name: str, value: Any) -> None:
    changed = ChatCacheClip(**{name: value})
    assert changed._get_llm_string() != ChatCacheClip()._get_llm_string()


def test_response_cache(llm: ChatCacheClip) -> None:
    cached = llm.model_copy(update={"cache": InMemoryCache()})
    assert cached.invoke(PROMPT).content == cached.invoke(PROMPT).content
    assert cached.invoke(PROMPT, max_tokens=1).usage_metadata["output_tokens"] == 1


def test_construction_is_quick_and_loads_no_torch() -> None:
    code = """
import statistics, sys, time
from langchain_cacheclip import ChatCacheClip
def seconds():
    begin = time.perf_counter()
    ChatCacheClip(store="s", temperature=0.5)
    return time.perf_counter() - begin
assert statistics.median(seconds() for _ in range(9)) < 0.010
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_framework_is_explained() -> None:
    code = """
import sys
sys.modules[sys.argv[2]] = None
try:
    __import__(sys.argv[1])
except ImportError as error:
    sys.exit("pip install 'cacheclip-rag[" not in str(error))
"""
    for module, framework in (
        ("langchain_cacheclip", "langchain_core"),
        ("llama_index.llms.cacheclip", "llama_index.core"),
    ):
        assert subprocess.run([sys.executable, "-c", code, module, framework], check=False).returncode == 0


def test_configurable_fields_and_copies_still_answer(llm: ChatCacheClip) -> None:
    text = llm.invoke(PROMPT).content
    configurable = llm.configurable_fields(
        max_tokens=ConfigurableField(id="max_tokens"), method=ConfigurableField(id="method")
    )
    assert configurable.invoke(PROMPT).content == text
    short = configurable.invoke(PROMPT, {"configurable": {"max_tokens": 1, "method": "full"}})
    assert short.usage_metadata["output_tokens"] == 1
    assert short.response_metadata["cacheclip"]["method"] == "full"
    copied = llm.model_copy(update={"method": "direct"})
    assert copied.engine is llm.engine
    assert copied.invoke(PROMPT).content
