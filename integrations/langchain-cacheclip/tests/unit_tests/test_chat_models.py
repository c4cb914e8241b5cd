"""LangChain's own chains, with nothing swapped but the chat model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_cases import join_workers
from cacheclip_testing import Latch, fake_models, fake_of, messages_of
from langchain_cacheclip import CacheClipLLM, ChatCacheClip, collect_cacheclip_stats, with_cacheclip_stats
from langchain_cases import Recorder
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
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
from langchain_core.runnables import ConfigurableField

from cacheclip_rag import ConfigurationError, PromptTooLongError, __version__
from cacheclip_rag.runtime import Message

PROMPT = "Where did the keeper live?"


@pytest.fixture
def llm(tmp_path: Path) -> ChatCacheClip:
    """On a fake model: what the frameworks do does not depend on attention."""
    return ChatCacheClip(**fake_models(), store=str(tmp_path / "store"), max_tokens=12)


@pytest.fixture
def tiny(tiny_models: dict[str, str], tmp_path: Path) -> ChatCacheClip:
    """On a transformer."""
    models: Any = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    return ChatCacheClip(**models, store=str(tmp_path / "store"), max_tokens=12)


@pytest.fixture
def documents(chunks: list[str]) -> list[Document]:
    return [Document(chunk, metadata={"page": n}) for n, chunk in enumerate(chunks)]


def test_documents_as_candidates(llm: ChatCacheClip, documents: list[Document]) -> None:
    def stats(model: Any, *contents: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = model.invoke("\n\n".join([*contents, PROMPT]), **options).response_metadata["cacheclip"]
        return found

    first, second, third = (document.page_content for document in documents[:3])
    assert stats(llm, first, second, documents=[documents[0], second, " "])["misses"] == 2
    assert stats(llm, third, documents=third)["misses"] == 1
    assert stats(llm.bind(documents=documents[:2]), first, second)["hits"] == 2
    with pytest.raises(ConfigurationError, match="Documents or strings, got int"):
        stats(llm, documents=[1])


async def test_message_and_stream_metadata(llm: ChatCacheClip) -> None:
    message = llm.invoke(PROMPT)
    told, usage = message.response_metadata, message.usage_metadata
    stats = told["cacheclip"]
    assert told["model_name"] == llm.primary and told["finish_reason"] in ("stop", "length")
    assert (usage["input_tokens"], usage["output_tokens"]) == (stats["prompt_tokens"], stats["generated_tokens"])
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"]["cache_read"] == stats["reused_tokens"]
    assert told["gen_ai.usage.cache_read.input_tokens"] == stats["reused_tokens"]
    for chunks in (list(llm.stream(PROMPT)), [chunk async for chunk in llm.astream(PROMPT)]):
        assert chunks[0].response_metadata["model_name"] == llm.primary
        assert sum("model_name" in chunk.response_metadata for chunk in chunks) == 1
        assert [chunk for chunk in chunks if chunk.chunk_position == "last"] == chunks[-1:]
        assert {"cacheclip", "gen_ai.usage.cache_read.input_tokens"} <= {*chunks[-1].response_metadata}
        assert "".join(chunk.content for chunk in chunks) == message.content
        assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1


async def test_callbacks_see_every_token_once(llm: ChatCacheClip) -> None:
    streaming = llm.model_copy(update={"streaming": True})
    first, second = Recorder(), Recorder()
    text = streaming.invoke(PROMPT, {"callbacks": [first]}).content
    assert "".join([chunk.content async for chunk in llm.astream(PROMPT, {"callbacks": [second]})]) == text
    assert "".join(first.tokens) == "".join(second.tokens) == text


async def test_async_calls_keep_the_model_off_the_loop(llm: ChatCacheClip) -> None:
    await llm.ainvoke(PROMPT)
    [chunk async for chunk in llm.astream(PROMPT)]
    threads = fake_of(llm.engine).threads["prefill"]
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_tokens_are_counted_with_the_models_own_tokenizer(tiny: ChatCacheClip, chunks: list[str]) -> None:
    ids = tiny.get_token_ids(chunks[0])
    assert tiny.engine.primary.decode_ids(ids) == chunks[0] and tiny.get_num_tokens(chunks[0]) == len(ids)


Read = Callable[[], list[Message]]


@pytest.fixture
def read(llm: ChatCacheClip) -> Read:
    """The messages of the last prompt, out of the text that reached the model."""
    return lambda: messages_of(fake_of(llm.engine).prompts[-1])


def text(said: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": said}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [SystemMessage("s"), HumanMessage([text("a"), "b"]), AIMessage("x"), AIMessageChunk(content="y")],
            [("system", "s"), ("user", "ab"), ("assistant", "x"), ("assistant", "y")],
        ),
        (
            [HumanMessage([text("Read"), " it:", text("1.", "text-plain"), "with:", text("2.", "text-plain"), "?"])],
            [("user", "Read it:\n\n1.\n\nwith:\n\n2.\n\n?")],
        ),
        (
            [ChatMessage("Short.", role="developer"), ChatMessage("z", role="user"), FunctionMessage("42", name="f g")],
            [("system", "Short."), ("user", "z"), ("tool", "42")],
        ),
    ],
    ids=["roles", "blocks in order", "old kinds"],
)
def test_messages_are_read(llm: ChatCacheClip, read: Read, messages: Any, expected: list[tuple[str, str]]) -> None:
    llm.invoke([*messages, HumanMessage(PROMPT)])
    assert [(message["role"], message["content"]) for message in read()] == [*expected, ("user", PROMPT)]


def test_calls_and_results_of_tools_are_read(llm: ChatCacheClip, read: Read) -> None:
    call = {"name": "find", "args": {"word": "fenêtre"}, "id": "1"}
    messages = [HumanMessage(PROMPT), AIMessage(content="", tool_calls=[call]), ToolMessage("42", tool_call_id="1")]
    assert llm.invoke(messages).content
    assert [message["role"] for message in read()] == ["user", "assistant", "tool"]
    assert '"name": "find", "arguments": {"word": "fenêtre"}' in read()[1]["content"]


def test_what_a_message_says_of_itself_is_passed_over(llm: ChatCacheClip, read: Read) -> None:
    call = {"type": "tool_call", "name": "find", "args": {}, "id": "1"}
    thought = {"type": "reasoning", "reasoning": "Let me see."}
    llm.invoke([HumanMessage(PROMPT), AIMessage(content=[thought, {"type": "text", "text": "Wait."}, call])])
    assert read()[1]["content"].startswith("Wait.") and "see" not in read()[1]["content"]


def test_messages_that_cannot_be_read_are_refused(llm: ChatCacheClip) -> None:
    with pytest.raises(ConfigurationError, match="'chat' message"):
        llm.invoke([HumanMessage(PROMPT), ChatMessage("42", role="robot")])
    with pytest.raises(ConfigurationError, match="'human' without text"):
        llm.invoke([HumanMessage([{"type": "reasoning", "reasoning": "Hm."}])])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "image", "base64": "", "mime_type": "image/png"},
        {"type": "text-plain", "url": "file:///x.txt"},
        {"type": "document", "source": {}},
    ],
)
def test_blocks_that_are_no_text_are_refused_and_passed_over_in_turns_of_another_model(
    llm: ChatCacheClip, read: Read, block: dict[str, Any]
) -> None:
    both: list[Any] = [text(PROMPT), block]
    with pytest.raises(ConfigurationError, match=f"reads text only, got a block of type '{block['type']}'"):
        llm.invoke([HumanMessage(both)])
    with pytest.raises(ConfigurationError, match=f"reads text only, got a block of type '{block['type']}'"):
        llm.invoke([SystemMessage(both), HumanMessage(PROMPT)])
    llm.invoke([HumanMessage(both), AIMessage(both), HumanMessage([block]), HumanMessage(PROMPT)])
    assert [each["content"] for each in read()] == [PROMPT, PROMPT, "", PROMPT]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": [{"type": "reasoning", "reasoning": "Hm."}]}, ""),
        ({"content": "", "additional_kwargs": {"reasoning_content": "Hm."}}, ""),
        ({"content": "No", "invalid_tool_calls": [{"name": "f g", "args": '{"a', "id": "1|2", "error": None}]}, "No"),
    ],
    ids=["reasoning", "reasoning beside", "call that was cut off"],
)
def test_an_earlier_answer_is_read_whatever_it_lacks(
    llm: ChatCacheClip, read: Read, fields: dict[str, Any], content: str
) -> None:
    llm.invoke([HumanMessage(PROMPT), AIMessage(**fields), ToolMessage("No.", tool_call_id="1|2"), HumanMessage("So?")])
    said = read()[1]["content"]
    assert said.startswith(content) and "Hm." not in said
    assert ('"name": "f_g", "arguments": {"arguments": "{\\"a"}' in said) == ("invalid_tool_calls" in fields), said


def test_half_a_character_in_an_earlier_call(llm: ChatCacheClip, read: Read) -> None:
    call = {"name": "f", "args": {"a\ud83d": ["\udd27"]}, "id": "1"}
    cut = {"name": "g", "args": '{"a": "\ud83d', "id": "2", "error": None}
    answer = AIMessage("", tool_calls=[call], invalid_tool_calls=[cut])
    llm.invoke([HumanMessage(PROMPT), answer, ToolMessage("No.", tool_call_id="1"), HumanMessage("So?")])
    said = read()[1]["content"]
    assert '"name": "f", "arguments": {"a\ufffd": ["\ufffd"]}' in said
    assert '"name": "g", "arguments": {"arguments": "{\\"a\\": \\"\ufffd"}' in said


async def test_unknown_call_option_lists_the_known_ones(llm: ChatCacheClip) -> None:
    for ask in (llm.invoke, lambda *args, **options: list(llm.stream(*args, **options))):
        with pytest.raises(ConfigurationError, match="unknown call option num_beams.*max_tokens"):
            ask(PROMPT, num_beams=5)
    with pytest.raises(ConfigurationError, match="unknown call option num_beams"):
        await llm.ainvoke(PROMPT, num_beams=5)
    assert (await llm.ainvoke(PROMPT, parallel_tool_calls=True)).content
    with pytest.raises(ConfigurationError, match="logprobs"):
        llm.invoke(PROMPT, logprobs=3)


@pytest.mark.parametrize("kind", [ChatCacheClip, CacheClipLLM])
async def test_a_prompt_too_long_is_langchains_error_too(
    llm: ChatCacheClip, kind: type[ChatCacheClip | CacheClipLLM]
) -> None:
    model, long = kind(primary=llm.primary, auxiliary=llm.auxiliary, store=llm.store), "word " * 5000
    with pytest.raises(ContextOverflowError, match="fit the model") as error:
        model.invoke(long)
    assert isinstance(error.value, PromptTooLongError)
    with pytest.raises(ContextOverflowError):
        await model.ainvoke(long)
    with pytest.raises(ContextOverflowError):
        list(model.stream(long))
    with pytest.raises(ContextOverflowError):
        [part async for part in model.astream(long)]


@pytest.mark.parametrize("kind", [ChatCacheClip, CacheClipLLM])
async def test_a_cancelled_task_stops_the_model(llm: ChatCacheClip, kind: type[ChatCacheClip | CacheClipLLM]) -> None:
    model = kind(primary=llm.primary, auxiliary=llm.auxiliary, store=llm.store, max_tokens=200)
    runtime = fake_of(model.engine)
    runtime.says = ["word " * 20] * 2
    assert len(list(model.stream(PROMPT))) > 15 and runtime.steps > 15
    runtime.steps, runtime.decoding = 0, Latch()
    before = set(threading.enumerate())
    task = asyncio.create_task(model.ainvoke(PROMPT))
    assert await asyncio.to_thread(runtime.decoding.reached.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    runtime.decoding.open()
    await asyncio.get_running_loop().shutdown_default_executor()  # its idle threads would be waited for
    join_workers(before)
    assert runtime.steps == 1


def test_mro_and_identity() -> None:
    llm = ChatCacheClip(model="m", stop_sequences=["x"])
    assert isinstance(llm, BaseChatModel) and (llm.primary, llm.stop) == ("m", ["x"])
    assert ChatCacheClip(primary="m", stop="x") == ChatCacheClip(model_name="m", stop=["x"]) == llm
    assert llm._llm_type == "cacheclip-chat" and llm._get_ls_params()["ls_provider"] == "cacheclip"
    assert not ChatCacheClip.is_lc_serializable()


def test_profile_and_version(tiny: ChatCacheClip) -> None:
    llm = tiny
    assert llm.profile["max_input_tokens"] == llm.engine.primary.context_tokens == 2048
    assert not llm.profile["image_inputs"] and not llm.profile["tool_calling"] and llm.profile["structured_output"]
    assert ChatCacheClip(primary="packaged:qwen2.5-coder-0.5b").profile["max_input_tokens"] == 32768
    assert not {"max_input_tokens", "tool_calling"} & {*ChatCacheClip(primary="some/model").profile}
    assert ChatCacheClip(profile={"max_input_tokens": 7}).profile == {"max_input_tokens": 7}
    if hasattr(BaseChatModel, "_add_version"):
        assert llm.metadata["lc_versions"]["cacheclip-rag"] == __version__
        assert "langchain-core" in llm.metadata["lc_versions"]


OTHER = {"primary": "other", "auxiliary": None, "namespace": "bob", "method": "full", "recompute_ratio": 0.5}
OTHER |= {"temperature": 1.0, "max_tokens": 5, "stop": ["x"], "seed": 1, "engine_kwargs": {"codec": "bfloat16"}}


@pytest.mark.parametrize("name", OTHER)
def test_what_changes_the_output_is_in_the_cache_key(name: str) -> None:
    assert ChatCacheClip(**{name: OTHER[name]})._get_llm_string() != ChatCacheClip()._get_llm_string()


async def test_answers_from_the_response_cache_are_not_counted(llm: ChatCacheClip) -> None:
    """No model ran for them. A handler counts what it sees computed, whoever else has seen it before."""
    cached = llm.model_copy(update={"cache": InMemoryCache()})
    with collect_cacheclip_stats() as first:
        cached.invoke(PROMPT)
        cached.invoke(PROMPT)
        await cached.ainvoke(PROMPT)
    with collect_cacheclip_stats() as second:
        cached.invoke(PROMPT)
        cached.invoke(PROMPT + "?")
    assert len(first.stats) == 1 and len(second.stats) == 1
    assert with_cacheclip_stats(cached).invoke(PROMPT)["cacheclip"] == []


@pytest.mark.parametrize("given", [{"api_key": "x"}, {"timeout": 3.0}, {"api_key": "x", "timeout": 3.0}])
def test_what_needs_a_server_says_so(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    ChatCacheClip(**given)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and " and ".join(given) in record.message and "no effect" in record.message
    caplog.clear()
    ChatCacheClip(), ChatCacheClip(base_url="http://127.0.0.1:1/v1", **given)
    assert not caplog.records


@pytest.mark.long
def test_construction_loads_no_torch() -> None:
    code = """
import sys
from langchain_cacheclip import ChatCacheClip

ChatCacheClip(store="s", temperature=0.5)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_configurable_fields_and_copies_still_answer(llm: ChatCacheClip) -> None:
    fields: Any = {name: ConfigurableField(id=name) for name in ("max_tokens", "method")}
    configurable = llm.configurable_fields(**fields)
    assert configurable.invoke(PROMPT).content == llm.invoke(PROMPT).content
    short = configurable.invoke(PROMPT, {"configurable": {"max_tokens": 1, "method": "full"}})
    assert short.usage_metadata["output_tokens"] == 1
    assert short.response_metadata["cacheclip"]["method"] == "full"
    copied = llm.model_copy(update={"method": "direct"})
    assert copied.engine is llm.engine and copied.invoke(PROMPT).content
