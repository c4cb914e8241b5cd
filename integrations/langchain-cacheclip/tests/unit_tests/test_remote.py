"""Models with ``base_url``, before a server that remembers what it is asked and says what it is told."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import FakeServer
from langchain_cacheclip import CacheClipLLM, ChatCacheClip
from langchain_core.messages import AIMessage, HumanMessage, trim_messages

from cacheclip_rag import ConfigurationError, ServerError

KINDS: list[Any] = [ChatCacheClip, CacheClipLLM]
WAYS = ("whole", "streamed", "async", "async streamed")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as found:
        yield found


def ask(llm: Any, way: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """Text and metadata of an answer."""
    prompt: Any = [HumanMessage("How tall?")] if isinstance(llm, ChatCacheClip) else "How tall?"

    async def pieces() -> list[Any]:
        return [each async for each in llm._astream(prompt, **options)]

    if way in ("whole", "async"):
        call = llm.generate if way == "whole" else lambda *args, **kwargs: asyncio.run(llm.agenerate(*args, **kwargs))
        ((generation,),) = call([prompt], **options).generations
    else:
        generation = summed(list(llm._stream(prompt, **options)) if way == "streamed" else asyncio.run(pieces()))
    message = getattr(generation, "message", None)
    return generation.text, dict(message.response_metadata if message is not None else generation.generation_info)


def summed(chunks: list[Any]) -> Any:
    return functools.reduce(operator.add, chunks)


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["field", "call"])
def test_settings_arrive(server: FakeServer, kind: Any, way: str, place: str) -> None:
    """``stop`` and the options of a call take a way of their own through LangChain."""
    given: dict[str, Any] = {"max_tokens": 7, "temperature": 0.25, "stop": ["x", "y"], "seed": 11}
    ask(kind(base_url=server.url, **(given if place == "field" else {})), way, **(given if place == "call" else {}))
    assert {name: server.bodies[0][name] for name in given} == given


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_metadata_by_value(server: FakeServer, kind: Any, way: str, reason: str) -> None:
    server.say("Twelve metres.", reason=reason)
    text, metadata = ask(kind(base_url=server.url), way)
    assert (text, metadata["finish_reason"]) == ("Twelve metres.", reason)
    assert metadata["cacheclip"] | server.STATS == metadata["cacheclip"]
    assert metadata["gen_ai.usage.output_tokens"] == 5
    assert metadata["gen_ai.usage.input_tokens"] == server.STATS["prompt_tokens"]


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_reasoning(server: FakeServer, way: str) -> None:
    server.say("Twelve metres.", reasoning="Hm, so.")
    llm = ChatCacheClip(base_url=server.url)
    said: Any = llm.invoke("How tall?") if way == "invoke" else summed(list(llm.stream("How tall?")))
    assert (said.content, said.additional_kwargs["reasoning_content"]) == ("Twelve metres.", "Hm, so.")
    assert [block["type"] for block in said.content_blocks] == ["reasoning", "text"]
    llm.invoke([HumanMessage("How tall?"), said, HumanMessage("And the boom?")])
    told = {"role": "assistant", "content": "Twelve metres.", "reasoning_content": "Hm, so."}
    assert server.bodies[-1]["messages"][1] == told


def test_errors_are_ours(server: FakeServer) -> None:
    with pytest.raises(ConfigurationError):
        ChatCacheClip(base_url=server.url, timeout=-5).invoke("How many?")
    server.says = b"data: <html>\n\n"
    with pytest.raises(ServerError):
        ChatCacheClip(base_url=server.url).invoke("How many?")


def test_the_profile(server: FakeServer) -> None:
    profile = ChatCacheClip(base_url=server.url).profile
    assert profile is not None and profile["max_input_tokens"] == 4096
    assert profile["structured_output"] is profile["tool_calling"] is False
    own: Any = {"max_input_tokens": 7}
    assert ChatCacheClip(base_url=server.url, profile=own).profile["max_input_tokens"] == 7  # type: ignore[index]


def test_the_profile_of_a_server_that_says_nothing(server: FakeServer) -> None:
    server.cards = b"<html>login</html>"
    for url in (server.url, "http://127.0.0.1:1/v1"):
        assert "max_input_tokens" not in (ChatCacheClip(base_url=url).profile or {})


def test_messages_are_trimmed_by_an_estimate() -> None:
    llm = ChatCacheClip(base_url="http://127.0.0.1:9/v1")
    messages = [HumanMessage("a " * 50), AIMessage("b"), HumanMessage("c")]
    kept = trim_messages(messages, max_tokens=40, token_counter=llm, strategy="last")
    assert [message.content for message in kept] == ["b", "c"]
    assert [llm.get_num_tokens(text) for text in ("", "a", "abcd", "漢字")] == [0, 1, 2, 2]
