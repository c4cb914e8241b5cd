"""Adapters with ``base_url`` before a server that remembers what it is asked and says what it is told."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import MISSING, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from cacheclip_serve.replies import server_sent
from langchain_cacheclip import CacheClipLLM as TextModel
from langchain_cacheclip import ChatCacheClip
from langchain_core.messages import AIMessage, HumanMessage, trim_messages
from llama_index.core.llms import ChatMessage
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.cacheclip import CacheClipLLM

from cacheclip_rag import CallOptions, FusionStats, SamplingParams
from cacheclip_rag.adapters import remote
from cacheclip_rag.adapters.remote import RemoteEngine
from cacheclip_rag.base.errors import ConfigurationError, ServerError

STATS = {each.name: "full" if each.type == "str" else 3 for each in fields(FusionStats) if each.default is MISSING}
STATS |= {"phases_s": {}, "fallback": None}
SCHEMA = {"type": "object", "properties": {"year": {"type": "integer"}}}
SENT: dict[str, tuple[Any, str, Any]] = {
    # field: a value that is not the default, and what arrives
    "max_tokens": (7, "max_tokens", 7),
    "temperature": (0.25, "temperature", 0.25),
    "top_p": (0.75, "top_p", 0.75),
    "top_k": (5, "top_k", 5),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "frequency_penalty": (0.5, "frequency_penalty", 0.5),
    "presence_penalty": (-0.5, "presence_penalty", -0.5),
    "stop": (["x", "y"], "stop", ["x", "y"]),
    "seed": (11, "seed", 11),
    "json_schema": (
        SCHEMA,
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
    ),
    "chat_template_kwargs": ({"enable_thinking": False}, "chat_template_kwargs", {"enable_thinking": False}),
}
KINDS: list[Any] = [ChatCacheClip, TextModel, CacheClipLLM]
WAYS = ("whole", "streamed", "async", "async streamed")


class Server(ThreadingHTTPServer):
    """Streams the chunks of :attr:`says` in pieces of :attr:`size` bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.size = 1000
        own = {"uses_tools": False, "can_constrain": False}
        self.cards = json.dumps({"data": [{"id": "m", "max_model_len": 4096, "cacheclip": own}]}).encode()
        self.say("Twelve metres.")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def say(self, text: str, *, reason: str = "stop", reasoning: str = "") -> None:
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        thought = [{"reasoning_content": piece} for piece in (reasoning[:3], reasoning[3:]) if piece]
        deltas = [*thought, *({"content": piece} for piece in (text[:4], text[4:]))]
        chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        chunks.append(
            {**head, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}, "cacheclip": STATS}
        )
        self.says = b"".join(map(server_sent, chunks)) + b"data: [DONE]\n\n"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(self.server.cards)))
        self.end_headers()
        self.wfile.write(self.server.cards)

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for at in range(0, len(self.server.says), self.server.size):
            self.wfile.write(self.server.says[at : at + self.server.size])
            self.wfile.flush()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join(10)


def ask(llm: Any, way: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """Text and metadata of an answer."""
    if isinstance(llm, CacheClipLLM):
        messages = [ChatMessage(role="user", content="How tall?")]
        if way == "whole":
            found = llm.chat(messages, **options)
        elif way == "streamed":
            found = list(llm.stream_chat(messages, **options))[-1]
        elif way == "async":
            found = asyncio.run(llm.achat(messages, **options))
        else:

            async def last_of() -> Any:
                return [each async for each in await llm.astream_chat(messages, **options)][-1]

            found = asyncio.run(last_of())
        return found.message.content or "", dict(found.additional_kwargs)
    if way == "whole":
        said = llm.generate([prompt(llm)], **options).generations[0]
    elif way == "async":
        said = asyncio.run(llm.agenerate([prompt(llm)], **options)).generations[0]
    elif way == "streamed":
        said = [summed(list(llm._stream(prompt(llm), **options)))]
    else:

        async def pieces() -> list[Any]:
            return [each async for each in llm._astream(prompt(llm), **options)]

        said = [summed(asyncio.run(pieces()))]
    (generation,) = said
    message = getattr(generation, "message", None)
    return generation.text, dict(message.response_metadata if message is not None else generation.generation_info)


def prompt(llm: Any) -> Any:
    return [HumanMessage("How tall?")] if isinstance(llm, ChatCacheClip) else "How tall?"


def summed(chunks: list[Any]) -> Any:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def test_every_field_has_a_row() -> None:
    assert {*SENT} == {*(each.name for each in fields(SamplingParams)), "chat_template_kwargs"}
    assert all(value != getattr(SamplingParams(), name, None) for name, (value, *_) in SENT.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["field", "call"])
def test_every_field_arrives(server: Server, kind: Any, way: str, place: str) -> None:
    given = {name: value for name, (value, *_) in SENT.items()}
    ask(kind(base_url=server.url, **(given if place == "field" else {})), way, **(given if place == "call" else {}))
    ask(kind(base_url=server.url), way)
    body, plain = server.bodies
    assert {sent: body[sent] for _, sent, _ in SENT.values()} == {sent: value for _, sent, value in SENT.values()}
    assert not [sent for _, sent, value in SENT.values() if plain.get(sent) == value], "without it, something else"
    assert plain["max_tokens"] == SamplingParams().max_tokens


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
OPTIONS: dict[str, tuple[Any, str, Any]] = {
    # option of a call, what arrives in the body or in its field `cacheclip`
    "method": ("epic", "method", "epic"),
    "recompute_ratio": (0.25, "ratio", 0.25),
    "max_ttft_s": (0.75, "max_ttft_s", 0.75),
    "question": ("How old?", "question", "How old?"),
    "documents": (["A text."], "documents", ["A text."]),
    "finish": ("verify", "finish", "verify"),
    "tools": ([TOOL], "tools", [TOOL]),
    "chat_template_kwargs": ({"a": 1}, "chat_template_kwargs", {"a": 1}),
}


def test_every_option_has_a_row() -> None:
    """What is recorded of an answer stays in the process that computes it."""
    assert {*OPTIONS} == {each.name for each in fields(CallOptions)} - {"params", "logprobs", "trace"}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_arrives(server: Server, name: str) -> None:
    value, sent, expected = OPTIONS[name]
    engine = RemoteEngine(server.url, tenant="a", model="m", system_prompt="Be brief.")
    list(engine.stream("How tall?", **{name: value}))
    body = server.bodies[-1]
    own = body.pop("cacheclip")
    assert own.pop("tenant") == "a" and body["model"] == "m"
    assert [(each["role"], each["content"]) for each in body["messages"]] == [
        ("system", "Be brief."),
        ("user", "How tall?"),
    ]
    others = {each for _, each, _ in OPTIONS.values()} - {sent}
    assert {**body, **own}[sent] == expected and not others.intersection({**body, **own})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_metadata_by_value(server: Server, kind: Any, way: str, reason: str) -> None:
    server.say("Twelve metres.", reason=reason)
    text, metadata = ask(kind(base_url=server.url), way)
    assert (text, metadata["finish_reason"]) == ("Twelve metres.", reason)
    assert metadata["cacheclip"] | STATS == metadata["cacheclip"]
    assert metadata["gen_ai.usage.output_tokens"] == 5
    assert metadata["gen_ai.usage.input_tokens"] == STATS["prompt_tokens"]


ENDS = ("\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\x1d", "\x1e", "\r", "\n", "\r\n")
"""All that Python takes for the end of a line."""


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_characters_that_end_lines(server: Server, size: int, ends: bytes) -> None:
    said = "".join(f"one{end}two" for end in ENDS)
    server.say(said, reasoning=said)
    server.says, server.size = server.says.replace(b"\n\n", ends * 2), size
    answer = [*RemoteEngine(server.url).stream("Hello", SamplingParams(max_tokens=8))][-1].answer
    assert answer is not None and (answer.text, answer.reasoning) == (said, said)


def fails_with_ours(call: Any, kind: type[Exception]) -> None:
    """With no ValueError or TypeError: LlamaIndex's Refine would go on without the context."""
    with pytest.raises(kind) as caught:
        call()
    assert not isinstance(caught.value, (ValueError, TypeError))


def refine(llm: CacheClipLLM) -> Any:
    nodes = [NodeWithScore(node=TextNode(text="The harbour has 17 berths."), score=1.0)]
    return get_response_synthesizer(llm=llm, response_mode="compact").synthesize("How many?", nodes)


CARDS = [
    *(b"<html>login</html>", b"\xff\xfe", b"", b"[]", b"5", b"{}", b'{"data": 5}', b'{"data": [null]}'),
    *(b'{"data": [{"a": 1}]}', b'{"data": [{"id": "m"}]}', b'{"data": [{"id": "m", "cacheclip": {}}]}'),
    b'{"data": [{"id": "m", "max_model_len": null, "cacheclip": {"uses_tools": 1, "can_constrain": 1}}]}',
    b"[" * 100_000,
]
CHUNKS = [
    *("<html>", "[]", '{"choices": 5}', '{"choices": [null]}', '{"choices": [{"delta": "x"}]}', '{"error": "boom"}'),
    *('{"choices": [{"delta": {"content": 5}}]}', '{"choices": [{"delta": {"tool_calls": [null]}}]}'),
    '{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": {"a": 1}}}]}}]}',
    *('{"choices": [], "usage": "x", "cacheclip": 5}', '{"choices": [], "cacheclip": {"method": 1}}', '{"model": {}}'),
    *(json.dumps({"usage": {"completion_tokens": n}, "cacheclip": STATS}) for n in ("x", float("inf"))),
]
SETTINGS: list[dict[str, Any]] = [
    *({"api_key": key} for key in ("schlüssel", "ключ", "a\nb", "key\n", "\ud800")),
    *({"timeout": seconds} for seconds in (-5, 0, float("nan"), float("inf"), 1e300)),
    *({"base_url": url} for url in ("http://[::1", "http://")),
]
UNREACHABLE = ("http://xn--/v1", f"http://{'a' * 300}/v1", "http://a b")


class TestErrors:
    """Whatever a server sends and whatever the settings are, an error is one of ours."""

    @pytest.mark.parametrize("cards", CARDS, ids=lambda sent: str(sent[:60]))
    def test_what_the_server_says_of_itself(self, server: Server, cards: bytes) -> None:
        server.cards = cards
        llm = CacheClipLLM(base_url=server.url)
        fails_with_ours(lambda: llm.metadata, ServerError)
        fails_with_ours(lambda: refine(llm), ServerError)
        assert "max_input_tokens" not in (ChatCacheClip(base_url=server.url).profile or {})  # known by a first answer

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_what_it_streams(self, server: Server, chunk: str) -> None:
        server.says = f"data: {chunk}\n\n".encode()
        fails_with_ours(lambda: [*RemoteEngine(server.url).stream("Hello")], ServerError)
        fails_with_ours(lambda: refine(CacheClipLLM(base_url=server.url)), ServerError)

    @pytest.mark.parametrize("given", [*SETTINGS, *UNREACHABLE], ids=lambda given: ascii(given)[:40])
    def test_settings(self, server: Server, given: dict[str, Any] | str) -> None:
        kind = ServerError if isinstance(given, str) else ConfigurationError
        settings = {"base_url": given} if isinstance(given, str) else {"base_url": server.url, **given}
        fails_with_ours(lambda: refine(CacheClipLLM(**settings)), kind)
        fails_with_ours(lambda: ChatCacheClip(**settings).invoke("How many?"), kind)

    @pytest.mark.parametrize("given", ["a\ud800b", {"x": {1}}, {"x": b"y"}, {"x": float("nan")}], ids=ascii)
    def test_what_is_no_json(self, server: Server, given: Any) -> None:
        options = {} if isinstance(given, str) else {"chat_template_kwargs": given}
        prompt = given if isinstance(given, str) else "Hello"
        fails_with_ours(lambda: [*RemoteEngine(server.url).stream(prompt, **options)], ConfigurationError)


class TestReasoning:
    @pytest.mark.parametrize("way", ["invoke", "stream"])
    def test_langchain(self, server: Server, way: str) -> None:
        server.say("Twelve metres.", reasoning="Hm, so.")
        llm = ChatCacheClip(base_url=server.url)
        said: Any = llm.invoke("How tall?") if way == "invoke" else summed(list(llm.stream("How tall?")))
        assert (said.content, said.additional_kwargs["reasoning_content"]) == ("Twelve metres.", "Hm, so.")
        assert [block["type"] for block in said.content_blocks] == ["reasoning", "text"]
        llm.invoke([HumanMessage("How tall?"), said, HumanMessage("And the boom?")])
        assert server.bodies[-1]["messages"][1] == {
            "role": "assistant",
            "content": "Twelve metres.",
            "reasoning_content": "Hm, so.",
        }

    @pytest.mark.parametrize("way", ["chat", "stream_chat"])
    def test_llama_index(self, server: Server, way: str) -> None:
        server.say("Twelve metres.", reasoning="Hm, so.")
        llm, asked = CacheClipLLM(base_url=server.url), ChatMessage(role="user", content="How tall?")
        responses = [llm.chat([asked])] if way == "chat" else list(llm.stream_chat([asked]))
        message = responses[-1].message
        assert message.content == "Twelve metres."
        assert [type(block).__name__ for block in message.blocks] == ["ThinkingBlock", "TextBlock"]
        assert message.blocks[0].content == "Hm, so."
        if way == "stream_chat":
            assert "".join(r.additional_kwargs.get("thinking_delta", "") for r in responses) == "Hm, so."
        llm.chat([asked, message, asked])
        assert server.bodies[-1]["messages"][1]["reasoning_content"] == "Hm, so."
        assert llm.complete("How tall?").additional_kwargs["reasoning_content"] == "Hm, so."


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_opens_its_own_connections() -> None:
    own = remote._client()
    assert remote._client() is own
    process = os.fork()
    if not process:
        os._exit(remote._client() is own)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_messages_are_trimmed_by_an_estimate() -> None:
    llm = ChatCacheClip(base_url="http://127.0.0.1:9/v1")
    messages = [HumanMessage("a " * 50), AIMessage("b"), HumanMessage("c")]
    kept = trim_messages(messages, max_tokens=40, token_counter=llm, strategy="last")
    assert [message.content for message in kept] == ["b", "c"]
    assert [llm.get_num_tokens(text) for text in ("", "a", "abcd", "漢字")] == [0, 1, 2, 2]
