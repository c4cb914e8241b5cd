"""The client of a server, and a model with ``base_url``, before a server that says what it is told."""

import json
import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import httpx
import pytest
from fake_server import FakeServer

from cacheclip_rag import CallOptions, ConfigurationError, SamplingParams, ServerError, ToolCall
from cacheclip_rag.adapters import SCHEMA_OF_CALLS, RemoteEngine, remote
from tests.adapters.plain_model import PlainModel

SCHEMA = {"type": "object", "properties": {"year": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
SAME = {"max_tokens": 7, "temperature": 0.25, "top_p": 0.75, "top_k": 5, "seed": 11, "stop": ["x", "y"]}
SAME |= {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": -0.5}
SENT: dict[str, tuple[Any, str, Any]] = {
    # field: a value that is not the default, and what arrives
    **{name: (value, name, value) for name, value in SAME.items()},
    "json_schema": (SCHEMA, "response_format", FORMAT),
    "chat_template_kwargs": ({"enable_thinking": False}, "chat_template_kwargs", {"enable_thinking": False}),
}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as found:
        yield found


def test_every_field_and_option_has_a_row() -> None:
    """What is recorded of an answer stays in the process that computes it."""
    assert {*SENT} == {*(each.name for each in fields(SamplingParams)), "chat_template_kwargs"}
    assert all(value != getattr(SamplingParams(), name, None) for name, (value, *_) in SENT.items())
    assert {*OPTIONS} == {each.name for each in fields(CallOptions)} - {"params", "logprobs", "trace"}


@pytest.mark.parametrize("place", ["field", "call"])
def test_every_field_arrives(server: FakeServer, place: str) -> None:
    given: dict[str, Any] = {name: value for name, (value, *_) in SENT.items()}
    of_fields, of_call = (given, {}) if place == "field" else ({}, given)
    PlainModel(base_url=server.url, **of_fields).ask("How tall?", **of_call)
    PlainModel(base_url=server.url).ask("How tall?")
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
    "moved": ("off", "moved", "off"),
    "tools": ([TOOL], "tools", [TOOL]),
    "chat_template_kwargs": ({"a": 1}, "chat_template_kwargs", {"a": 1}),
}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, SCHEMA_OF_CALLS),
        ({"tools": [TOOL], "json_schema": SCHEMA}, SCHEMA_OF_CALLS),
        ({"json_schema": SCHEMA}, "answer"),
    ],
    ids=str,
)
def test_a_schema_of_calls_is_named(server: FakeServer, options: dict[str, Any], name: str) -> None:
    """So that the server takes what follows it for a call."""
    PlainModel(base_url=server.url).ask("How tall?", **options)
    assert server.bodies[-1]["response_format"]["json_schema"]["name"] == name


def test_earlier_calls_are_in_openais_form(server: FakeServer) -> None:
    """Their arguments are text; results say which call they answer."""
    call = {"id": "abcdefghi", "function": {"name": "f", "arguments": {"q": "fenêtre"}}}
    messages = [
        {"role": "user", "content": "How tall?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_call_id": "abcdefghi"},
    ]
    PlainModel(base_url=server.url).ask(messages)
    _, called, result = server.bodies[-1]["messages"]
    expected = {"name": "f", "arguments": '{"q": "fenêtre"}'}
    assert called["tool_calls"] == [{"id": "abcdefghi", "type": "function", "function": expected}]
    assert result["tool_call_id"] == "abcdefghi"


def test_calls_in_pieces(server: FakeServer) -> None:
    """As vLLM sends them."""
    pieces: list[dict[str, Any]] = [
        {"index": 0, "id": "abcdefghi", "function": {"name": "f", "arguments": '{"q": '}},
        {"index": 0, "function": {"arguments": "1}"}},
        {"index": 1, "id": "ihgfedcba", "function": {"name": "g", "arguments": "{}"}},
    ]
    deltas = [{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in pieces]
    server.says = b"".join(f"data: {json.dumps(delta)}\n\n".encode() for delta in deltas) + server.says
    events = [*RemoteEngine(server.url).stream("Hello")]
    calls = (ToolCall("f", {"q": 1}, "abcdefghi"), ToolCall("g", {}, "ihgfedcba"))
    assert [event.tool_calls for event in events if event.tool_calls] == [calls]
    assert events[-1].answer is not None and events[-1].answer.tool_calls == calls


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_arrives(server: FakeServer, name: str) -> None:
    value, sent, expected = OPTIONS[name]
    engine = RemoteEngine(server.url, tenant="a", model="m", system_prompt="Be brief.")
    list(engine.stream("How tall?", **{name: value}))
    body = server.bodies[-1]
    own = body.pop("cacheclip")
    assert own.pop("tenant") == "a" and body["model"] == "m"
    said = [(each["role"], each["content"]) for each in body["messages"]]
    assert said == [("system", "Be brief."), ("user", "How tall?")]
    others = {each for _, each, _ in OPTIONS.values()} - {sent}
    assert {**body, **own}[sent] == expected and not others.intersection({**body, **own})


ENDS = ("\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\x1d", "\x1e", "\r", "\n", "\r\n")
"""All that Python takes for the end of a line."""


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_characters_that_end_lines(server: FakeServer, size: int, ends: bytes) -> None:
    said = "".join(f"one{end}two" for end in ENDS)
    server.say(said, reasoning=said)
    server.says, server.size = server.says.replace(b"\n\n", ends * 2), size
    answer = [*RemoteEngine(server.url).stream("Hello", SamplingParams(max_tokens=8))][-1].answer
    assert answer is not None and (answer.text, answer.reasoning) == (said, said)


def fails_with_ours(call: Any, kind: type[Exception]) -> None:
    """With no ValueError or TypeError: frameworks take one for an unusable answer."""
    with pytest.raises(kind) as caught:
        call()
    assert not isinstance(caught.value, (ValueError, TypeError))


CARDS = [
    *(b"<html>login</html>", b"\xff\xfe", b"", b"[]", b"5", b"{}", b'{"data": 5}', b'{"data": [null]}'),
    *(b'{"data": [{"a": 1}]}', b'{"data": [{"id": "m"}]}', b'{"data": [{"id": "m", "cacheclip": {}}]}'),
    b'{"data": [{"id": "m", "max_model_len": null, "cacheclip": {"uses_tools": 1, "can_constrain": 1}}]}',
    b"[" * 100_000,
]
PIECES = [
    *("<html>", "[]", '{"choices": 5}', '{"choices": [null]}', '{"choices": [{"delta": "x"}]}', '{"error": "boom"}'),
    *('{"choices": [{"delta": {"content": 5}}]}', '{"choices": [{"delta": {"tool_calls": [null]}}]}'),
    '{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": {"a": 1}}}]}}]}',
    *('{"choices": [], "usage": "x", "cacheclip": 5}', '{"choices": [], "cacheclip": {"method": 1}}', '{"model": {}}'),
    *(json.dumps({"usage": {"completion_tokens": n}, "cacheclip": FakeServer.STATS}) for n in ("x", float("inf"))),
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
    def test_what_the_server_says_of_itself(self, server: FakeServer, cards: bytes) -> None:
        server.cards = cards
        fails_with_ours(lambda: RemoteEngine(server.url).served, ServerError)

    @pytest.mark.parametrize("chunk", PIECES)
    def test_what_it_streams(self, server: FakeServer, chunk: str) -> None:
        server.says = f"data: {chunk}\n\n".encode()
        fails_with_ours(lambda: PlainModel(base_url=server.url).ask("Hello"), ServerError)

    @pytest.mark.parametrize("given", [*SETTINGS, *UNREACHABLE], ids=lambda given: ascii(given)[:40])
    def test_settings(self, server: FakeServer, given: dict[str, Any] | str) -> None:
        kind = ServerError if isinstance(given, str) else ConfigurationError
        settings = {"base_url": given} if isinstance(given, str) else {"base_url": server.url, **given}
        fails_with_ours(lambda: PlainModel(**settings).ask("How many?"), kind)

    @pytest.mark.parametrize("given", ["a\ud800b", {"x": {1}}, {"x": b"y"}, {"x": float("nan")}], ids=ascii)
    def test_what_is_no_json(self, server: FakeServer, given: Any) -> None:
        options = {} if isinstance(given, str) else {"chat_template_kwargs": given}
        prompt = given if isinstance(given, str) else "Hello"
        fails_with_ours(lambda: [*RemoteEngine(server.url).stream(prompt, **options)], ConfigurationError)

    def test_what_it_would_lose(self, server: FakeServer) -> None:
        fails_with_ours(lambda: [*RemoteEngine(server.url).stream("Hello", trace=True)], ConfigurationError)


def test_another_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of OpenAI's API without our statistics."""
    text = 'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "other"}]})
        return httpx.Response(200, text=text)

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        monkeypatch.setattr(remote, "_client", lambda: client)
        with pytest.raises(ServerError, match="another server"):
            PlainModel(base_url="http://other/v1").ask("What?")
        with pytest.raises(ServerError, match="what a cacheclip server does not send"):
            _ = RemoteEngine("http://other/v1").served


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_opens_its_own_connections() -> None:
    own = remote._client()
    assert remote._client() is own
    process = os.fork()
    if not process:
        os._exit(remote._client() is own)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
