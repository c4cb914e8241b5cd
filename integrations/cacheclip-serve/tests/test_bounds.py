"""What one request may hold, and that a large one which is meant passes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cacheclip_serve import bounds
from cacheclip_serve.bounds import check_counts, check_size, check_values
from cacheclip_serve.errors import RequestError
from cacheclip_serve.reading import read_json
from cacheclip_serve.schema import ChatBody, parse
from serve_cases import Served

from cacheclip_rag.answering.pipeline import Answering

CONTEXT = 32_768
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(content: Any = "What?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def followed(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"a": [found]}
    return found


LARGE: dict[str, tuple[dict[str, Any], str]] = {
    # name: fields beside one message, words of the refusal
    "messages": ({"messages": [user("")] * 5000}, "messages has 5000"),
    "calls": ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 500}] * 9}, "tool_calls has 4500"),
    "parts of a message": ({"messages": [user([{"type": "text", "text": ""}] * 100_000)]}, "values"),
    "documents": ({"cacheclip": {"documents": ["a"] * 5000}}, "documents has 5000"),
    "text of documents": ({"cacheclip": {"documents": ["a" * 10**6] * 3}}, "documents has 3000000 characters"),
    "text": ({"messages": [user("a " * 10**6)]}, "characters"),
    "text of a tool": ({"tools": [tool({"description": "a" * 10**6})]}, "characters"),
    "keys of a tool": ({"tools": [tool({f"a{'b' * 20}{n}": {} for n in range(40_000)})]}, "characters"),
    "question": ({"cacheclip": {"question": "a" * 10**6}}, "characters"),
    "schema": ({"response_format": followed({"a" * 10**6: 1})}, "characters"),
    "tools": ({"tools": [tool({})] * 2000}, "tools has 2000"),
    "stop strings": ({"stop": ["a"] * 100}, "stop has 100"),
    "a stop string": ({"stop": "a" * 5000}, "stop string"),
    "lists": ({"metadata": [[]] * 300_000}, "values"),
    "depth": ({"metadata": nested(400)}, "inside one another"),
    "great depth": ({"metadata": json.loads("[" * 900 + "]" * 900)}, "inside one another"),
    "depth of a tool": ({"tools": [tool(nested(100))]}, "inside one another"),
    "depth of a schema": ({"response_format": followed(nested(200))}, "inside one another"),
    "max_tokens": ({"max_tokens": 10**300}, "64 bits"),
    "temperature": ({"temperature": 10**300}, "64 bits"),
    "seed": ({"seed": -(10**300)}, "64 bits"),
    "number in a tool": ({"tools": [tool({"const": 10**300})]}, "64 bits"),
    "number in a call": ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "index": 10**300}]}]}, "64 bits"),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_much(served: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is read for its turn, streamed and whole."""
    monkeypatch.setattr(Answering, "_segment", None)
    fields, words = LARGE[name]
    for stream in (False, True):
        body = json.dumps({"messages": [user()], "stream": stream, **fields})
        answer = served.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text[:300]


def test_numbers_that_are_none(served: Served) -> None:
    for number in ("1e999", "-1e999", "NaN", "1" * 5000):
        body = f'{{"messages": [{{"role": "user", "content": "a"}}], "temperature": {number}}}'
        answer = served.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text


def test_separators_inside_texts_are_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_VALUES", 20)
    check_size(json.dumps({"a": 'x, [y], {z} "\\' * 100}).encode())
    with pytest.raises(RequestError, match="20 values"):
        check_size(json.dumps(["a"] * 22).encode())
    check_size(json.dumps(["a"] * 18).encode())


def test_depth_is_counted_from_the_body() -> None:
    check_values(json.loads("[" * 100 + "]" * 100))
    with pytest.raises(RequestError, match="100 times"):
        check_values(json.loads("[" * 102 + "]" * 102))


def test_a_real_request_passes() -> None:
    """200 retrieved documents of 100,000 characters, a long history with calls, 128 tools."""
    documents = [f"Document {n}: " + "The keepers wrote down what they saw. " * 13 for n in range(200)]
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    history = [user(), asked, {"role": "tool", "content": "3"}] * 200
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "description": "d"} for n in range(20)}}
    body = {
        "messages": [*history, user("\n\n".join(documents) + "\n\nWhat did they see?")],
        "cacheclip": {"documents": documents},
        "tools": [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(128)],
        "stop": ["\n", "END"],
        "seed": 2**63 - 1,
    }
    assert len("".join(documents)) >= 100_000
    given = read_json(json.dumps(body).encode())
    check_counts(given, CONTEXT)
    assert len(parse(ChatBody, given).messages) == 601


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit(name: str) -> None:
    for given, expected in ((-1, None), (None, None), (7, 7)):
        body = parse(ChatBody, {"messages": [user()], name: given})
        assert body.sampling().get("max_tokens") == expected
    for wrong in (-2, 0, 2**31):
        with pytest.raises(RequestError, match=name):
            parse(ChatBody, {"messages": [user()], name: wrong})


LOOP = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
SCHEMAS: dict[str, Any] = {
    "a reference to itself": {"$ref": "#"},
    "a reference loop": LOOP,
    "a loop that is required": {"type": "object", "properties": {"a": LOOP["$defs"]["a"]}, "required": ["a"], **LOOP},  # type: ignore[index]
    "no such reference": {"$ref": "#/no/such"},
    "no reference": {"$ref": 5},
    "another machine's": {"$ref": "http://localhost/schema"},
    "no type": {"type": 5},
    "no pattern": {"type": "string", "pattern": "("},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_that_cannot_be_followed(served: Served, name: str) -> None:
    for stream in (False, True):
        answer = served.chat(response_format=followed(SCHEMAS[name]), stream=stream, max_tokens=2)
        assert answer.status_code == 400, answer.text
