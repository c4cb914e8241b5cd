"""A model with ``base_url``, before a server that remembers what it is asked and says what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_server import FakeServer
from llama_index.core.llms import ChatMessage
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

from cacheclip_rag import ConfigurationError, ServerError

WAYS = ("whole", "streamed", "async", "async streamed")
ASKED = ChatMessage(role="user", content="How tall?")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as found:
        yield found


def ask(llm: CacheClipLLM, way: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """Text and metadata of an answer."""
    if way == "whole":
        found: Any = llm.chat([ASKED], **options)
    elif way == "streamed":
        found = list(llm.stream_chat([ASKED], **options))[-1]
    elif way == "async":
        found = asyncio.run(llm.achat([ASKED], **options))
    else:

        async def last_of() -> Any:
            return [each async for each in await llm.astream_chat([ASKED], **options)][-1]

        found = asyncio.run(last_of())
    return found.message.content or "", dict(found.additional_kwargs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["field", "call"])
def test_settings_arrive(server: FakeServer, way: str, place: str) -> None:
    given: dict[str, Any] = {"max_tokens": 7, "temperature": 0.25, "stop": ["x", "y"], "seed": 11}
    llm = CacheClipLLM(base_url=server.url, **(given if place == "field" else {}))
    ask(llm, way, **(given if place == "call" else {}))
    assert {name: server.bodies[-1][name] for name in given} == given


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_metadata_by_value(server: FakeServer, way: str, reason: str) -> None:
    server.say("Twelve metres.", reason=reason)
    text, metadata = ask(CacheClipLLM(base_url=server.url), way)
    assert (text, metadata["finish_reason"]) == ("Twelve metres.", reason)
    assert metadata["cacheclip"] | server.STATS == metadata["cacheclip"]
    assert metadata["gen_ai.usage.output_tokens"] == 5
    assert metadata["gen_ai.usage.input_tokens"] == server.STATS["prompt_tokens"]


def fails_with_ours(call: Callable[[], object], kind: type[Exception]) -> None:
    """With no ValueError or TypeError: Refine would go on without the context."""
    with pytest.raises(kind) as caught:
        call()
    assert not isinstance(caught.value, (ValueError, TypeError))


def refine(llm: CacheClipLLM) -> Any:
    nodes = [NodeWithScore(node=TextNode(text="The harbour has 17 berths."), score=1.0)]
    return get_response_synthesizer(llm=llm, response_mode="compact").synthesize("How many?", nodes)


class TestErrors:
    def test_what_the_server_says_of_itself(self, server: FakeServer) -> None:
        llm = CacheClipLLM(base_url=server.url)
        server.cards = b"<html>login</html>"
        fails_with_ours(lambda: llm.metadata, ServerError)
        fails_with_ours(lambda: refine(llm), ServerError)

    def test_what_it_streams(self, server: FakeServer) -> None:
        server.says = b"data: []\n\n"
        fails_with_ours(lambda: refine(CacheClipLLM(base_url=server.url)), ServerError)

    @pytest.mark.parametrize(
        ("settings", "kind"),
        [({"timeout": -5}, ConfigurationError), ({"base_url": "http://a b"}, ServerError)],
        ids=str,
    )
    def test_settings(self, server: FakeServer, settings: dict[str, Any], kind: type[Exception]) -> None:
        fails_with_ours(lambda: refine(CacheClipLLM(**{"base_url": server.url, **settings})), kind)


@pytest.mark.parametrize("way", ["chat", "stream_chat"])
def test_reasoning(server: FakeServer, way: str) -> None:
    server.say("Twelve metres.", reasoning="Hm, so.")
    llm = CacheClipLLM(base_url=server.url)
    responses: list[Any] = [llm.chat([ASKED])] if way == "chat" else list(llm.stream_chat([ASKED]))
    message = responses[-1].message
    assert message.content == "Twelve metres."
    assert [type(block).__name__ for block in message.blocks] == ["ThinkingBlock", "TextBlock"]
    assert message.blocks[0].content == "Hm, so."
    if way == "stream_chat":
        assert "".join(r.additional_kwargs.get("thinking_delta", "") for r in responses) == "Hm, so."
    llm.chat([ASKED, message, ASKED])
    assert server.bodies[-1]["messages"][1]["reasoning_content"] == "Hm, so."
    assert llm.complete("How tall?").additional_kwargs["reasoning_content"] == "Hm, so."


def test_metadata_is_the_servers(server: FakeServer) -> None:
    found = CacheClipLLM(base_url=server.url).metadata
    assert (found.context_window, found.model_name, found.is_function_calling_model) == (4096, "m", False)
    with pytest.raises(ConfigurationError, match="on its machine"):
        CacheClipTransform.from_llm(CacheClipLLM(base_url=server.url))
