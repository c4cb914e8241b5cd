"""JSON that must follow a schema: white space where JSON may hold it, with an end; refusals that say what is wrong."""

import json
from typing import Any

import pytest
import torch
from cacheclip_testing.tiny import make_tokenizer

from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.runtime.transformers.constraint import Grammars

ITEMS = {"type": "array", "items": {"type": "string"}}
LIST = {"type": "object", "properties": {"items": ITEMS}, "required": ["items"]}
TOKENIZER = make_tokenizer(400)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, [2], "tiny")


def test_without_an_end_of_turn_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'tiny' has no token that ends a turn.*eos_token_id"):
        Grammars(TOKENIZER, [], "tiny").constraint(json.dumps(LIST))


def taken(grammars: Grammars, text: str, schema: dict[str, Any] = LIST) -> str:
    """The beginning of a text that the schema allows, token by token."""
    constraint = grammars.constraint(json.dumps(schema))
    found: list[int] = []
    for token in TOKENIZER(text)["input_ids"]:
        if not torch.isfinite(constraint.allowed(torch.zeros(len(TOKENIZER)))[token]):
            break
        constraint.accept(token)
        found.append(token)
    return str(TOKENIZER.decode(found))


KEYS = (
    *("enum", "anyOf", "oneOf", "allOf", "$ref", "format", "pattern", "minLength", "maximum", "items", "properties"),
    *("required", "title", "description", "default", "examples", "additionalProperties", "$defs", "nullable"),
)


@pytest.mark.some(4)
@pytest.mark.parametrize("key", KEYS)
def test_null_in_a_schema_is_as_nothing(grammars: Grammars, key: str) -> None:
    """Typed clients send it for what they leave out."""
    odd = {"type": "string", key: None}
    for schema in (odd, {"allOf": [odd]}, {"anyOf": [odd, {"type": "null"}]}):
        whole = {key: None, "type": "object", "properties": {"a": schema, "b": {"const": None}}, "required": ["a", "b"]}
        assert taken(grammars, '{"a": "x", "b": null}', whole) == '{"a": "x", "b": null}'
        assert taken(grammars, '{"a": "x", "b": 1}', whole) == '{"a": "x", "b":'


@pytest.mark.some(5)
@pytest.mark.parametrize("indent", [None, 0, 1, 2, 4, "\t"])
@pytest.mark.parametrize("separators", [None, (",", ":"), (", ", ":"), (" , ", " : ")])
def test_json_may_be_written_in_any_way(grammars: Grammars, indent: Any, separators: Any) -> None:
    text = json.dumps({"items": ["a", "b c", ""]}, indent=indent, separators=separators)
    assert taken(grammars, text) == text


@pytest.mark.some(4)
@pytest.mark.parametrize("blank", [" ", "\n", " \n", "\n ", "\n\t"])
@pytest.mark.parametrize("place", ['{X"items": []}', '{"items":X[]}', '{"items": [X]}', '{"items": ["a"X, "b"]}'])
def test_a_run_of_white_space_ends(grammars: Grammars, blank: str, place: str) -> None:
    text = place.replace("X", blank * 200)
    read = taken(grammars, text)
    assert len(read) < len(place) + 50
    rest = place.partition("X")[2]
    assert taken(grammars, read + rest) == read + rest or not read.endswith(blank), "and JSON may go on after it"


def test_white_space_in_texts_is_free(grammars: Grammars) -> None:
    text = json.dumps({"items": [" " * 200]})
    assert taken(grammars, text) == text


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


TEXT = {"type": "string"}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (of(a=TEXT, code={**TEXT, "pattern": "^(?!0)[0-9]+$"}), ["properties/code", "(?!0)", "look"]),
    (of(a={"type": "array", "items": of(b={"not": {}})}), ["properties/a/items/properties/b", "not"]),
    (of(a={"$ref": "#/$defs/x"}), ["properties/a", "#/$defs/x", "does not exist"]),
    (
        {"$defs": {"A": of(b={**TEXT, "pattern": "[a-"})}, **of(a={"$ref": "#/$defs/A"})},
        ["$defs/A/properties/b", "unclosed"],
    ),
    ({"anyOf": [TEXT, {"type": "integer", "multipleOf": 0}]}, ["anyOf/1", "multiple"]),
    (of(a={**TEXT, "format": "colour"}), ["properties/a", "colour"]),
    ({"type": "foo"}, ["as a whole", "foo"]),
    ({"type": "array", "uniqueItems": True}, ["as a whole", "uniqueItems"]),
    ({"$ref": "#"}, ["as a whole: no value can follow it", "refers to itself alone"]),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED)
def test_a_refusal_says_which_part_and_why(grammars: Grammars, schema: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be followed") as caught:
        grammars.constraint(json.dumps(schema))
    assert all(word in str(caught.value) for word in words), caught.value
