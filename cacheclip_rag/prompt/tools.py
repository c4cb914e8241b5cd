"""Tools: their definitions and calls in a prompt, and the calls in an answer.

Definitions and calls have the format of OpenAI's API, which chat templates read too::

    {"type": "function", "function": {"name": "search", "description": "…", "parameters": {JSON schema}}}
    {"role": "assistant", "content": "", "tool_calls": [{"id": "…", "function": {"name": "search", "arguments": {…}}}]}
    {"role": "tool", "tool_call_id": "…", "content": "what the tool returned"}

Chat templates write definitions and calls into control text. So :class:`Marks` marks every string in them that a user,
a document or a tool server may have written, and what is marked never yields control tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigurationError
from ..types import Event, Message

__all__ = [
    "CallReader",
    "Marks",
    "ToolCall",
    "call_schema",
    "calls_as_text",
    "check_calls",
    "check_name",
    "check_tools",
    "parameters_of",
    "read_calls",
    "tool_names",
    "unmarked",
    "with_short_ids",
]

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
"""What the name of a tool and the id of a call may be: templates write them as control text."""
_UNMARKED = frozenset({"name", "type", "format", "required", "$ref"})
"""Keys of a definition whose strings templates compare, so that they must not be marked."""


_SHORT = re.compile(r"[A-Za-z0-9]{9}")
"""An id of a call that every template accepts: Mistral's want nine letters and digits."""


def _new_id() -> str:
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model asks for."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=_new_id)
    """Nine random letters and digits. The tool message with the result names it."""

    def to_dict(self) -> dict[str, Any]:
        """The call as an entry of a message's ``tool_calls``, with its arguments as JSON text."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


# -- in a prompt ------------------------------------------------------------------------------------------------------


def check_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The definitions as a list. A definition may lack the outer ``{"type": "function", "function": …}``.

    Raises:
        ConfigurationError: a definition lacks a name, or has a name that is more than a word.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise ConfigurationError(f"tools must be a list of definitions, got {type(tools).__name__}.")
    checked: list[dict[str, Any]] = []
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise ConfigurationError(f"a tool must be a dict in OpenAI's function format, got {type(tool).__name__}.")
        whole = dict(tool) if isinstance(tool.get("function"), Mapping) else {"function": dict(tool)}
        checked.append({"type": "function", **whole})
        check_name("a tool's name", whole["function"].get("name"))
    return checked


def tool_names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of checked definitions."""
    return [str(tool["function"]["name"]) for tool in tools]


def check_name(what: str, name: Any) -> None:
    """Raise ConfigurationError unless ``name`` is one word."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name[:80]) if isinstance(name, str) else type(name).__name__
        raise ConfigurationError(f"{what} must be a word of letters, digits and _ . : / -, got {shown}.")


def check_calls(calls: Any) -> list[dict[str, Any]]:
    """A message's ``tool_calls`` with arguments as dicts, because templates write them as JSON themselves.

    Raises:
        ConfigurationError: a call is malformed.
    """
    if not isinstance(calls, list | tuple):
        raise ConfigurationError(f"tool_calls must be a list, got {type(calls).__name__}.")
    return [_checked_call(call) for call in calls]


def _checked_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ConfigurationError(
            'each tool call must be a dict {"function": {"name": …, "arguments": {…}}}, got '
            f"{sorted(map(str, call)) if isinstance(call, Mapping) else type(call).__name__}."
        )
    check_name("the name of a called tool", function.get("name"))
    arguments = _as_object(function.get("arguments") or {})
    if arguments is None:
        raise ConfigurationError(f"the arguments in a call of {function['name']!r} must be a JSON object.")
    checked = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id"):
        check_name("the id of a tool call", call["id"])
        checked["id"] = call["id"]
    return checked


def _as_object(value: Any) -> dict[str, Any] | None:
    """A JSON object, or the one that a string holds; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError):
            return None
    return dict(value) if isinstance(value, Mapping) else None


def calls_as_text(message: Message) -> Message:
    """The message with its calls written into its content, for templates that do not know calls."""
    if "tool_calls" not in message:
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    written = [json.dumps({"name": c["name"], "arguments": c["arguments"]}, ensure_ascii=False) for c in calls]
    parts = [message["content"], *(f"<tool_call>\n{text}\n</tool_call>" for text in written)]
    return {"role": message["role"], "content": "\n\n".join(filter(None, parts))}


def with_short_ids(messages: Iterable[Message]) -> list[Message]:
    """Checked messages in which every call has an id of nine letters and digits, and its result names it.

    Ids of other lengths are replaced by a digest, so that the same history is always the same prompt. Calls without an
    id are answered in their order.
    """
    short: list[Message] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            named = [{**call, "id": _short_id(call.get("id") or f"{number}.{place}")} for place, call in calls]
            waiting = [call["id"] for call in named]
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            answered = _short_id(given) if given else waiting[0] if waiting else _short_id(str(number))
            waiting = [each for each in waiting if each != answered]
            message = {**message, "tool_call_id": answered}
        short.append(message)
    return short


def _short_id(given: str) -> str:
    return given if _SHORT.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]


class Marks:
    """Marks strings, and finds them in what a template made of them.

    The marks are random, so that no text can contain them.
    """

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(12)
        self._marked = re.compile(f"{self.nonce}a(.*?){self.nonce}z", re.DOTALL)

    def mark(self, value: Any) -> Any:
        """A JSON value with all its strings and keys marked."""
        match value:
            case str():
                return f"{self.nonce}a{value}{self.nonce}z"
            case Mapping():
                return {self.mark(str(key)): self.mark(each) for key, each in value.items()}
            case list() | tuple():
                return [self.mark(each) for each in value]
            case None | bool() | int() | float():
                return value
        raise ConfigurationError(f"definitions and arguments of tools must be JSON, got {type(value).__name__}.")

    def definition(self, value: Any, *, plain: bool = False) -> Any:
        """A definition with its descriptions, defaults and choices marked. ``plain``: leave strings as they are."""
        match value:
            case Mapping():
                return {str(key): self.definition(each, plain=key in _UNMARKED) for key, each in value.items()}
            case list() | tuple():
                return [self.definition(each, plain=plain) for each in value]
        return value if plain and isinstance(value, str) else self.mark(value)

    def calls(self, message: Message) -> Message:
        """The message with the arguments of its calls marked."""
        if "tool_calls" not in message:
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": self.mark(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    def renamed(self, message: Message) -> Message:
        """The message with calls of a tool that has the marks' name, to see whether a template writes calls."""
        if "tool_calls" not in message:
            return message
        calls = [{**call, "function": {**call["function"], "name": self.nonce}} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Parts of a rendered text, and for each whether it is template text (True) or was marked.

        Raises:
            ConfigurationError: the template has cut a marked string.
        """
        pieces = self._marked.split(rendered)
        if any(self.nonce in piece for piece in pieces):
            raise ConfigurationError(
                "this model's chat template cuts arguments or definitions of tools, so that text of the template and "
                "text of users cannot be told apart. Write what the model should read into a message's content."
            )
        return [(piece, number % 2 == 0) for number, piece in enumerate(pieces)]


def unmarked(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Keys and strings of definitions that :meth:`Marks.definition` leaves as they are."""
    found: dict[str, None] = {}

    def visit(value: Any, plain: bool) -> None:
        if isinstance(value, Mapping):
            for key, each in value.items():
                found[str(key)] = None
                visit(each, key in _UNMARKED)
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each, plain)
        elif plain and isinstance(value, str):
            found[value] = None

    for tool in tools:
        visit(tool, False)
    return list(found)


def call_schema(tools: Sequence[Mapping[str, Any]], only: str | None = None) -> dict[str, Any]:
    """JSON schema of one call, for answers that must be a call (``SamplingParams(json_schema=…)``).

    Args:
        only: name of the tool that must be called; None: any of them.

    Raises:
        ConfigurationError: there are no tools, or none with this name.
    """
    checked = check_tools(tools)
    wanted = [tool["function"] for tool in checked if only in (None, tool["function"]["name"])]
    if not wanted:
        raise ConfigurationError(f"no tool {only or ''!r} to be called. Known: {', '.join(tool_names(checked))}.")
    calls: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}
    for number, function in enumerate(wanted):
        parameters = _moved(function.get("parameters") or {"type": "object", "properties": {}}, f"#/$defs/{number}.")
        for key in _SHARED:  # references start at the root of the whole schema
            shared |= {f"{number}.{name}": each for name, each in parameters.pop(key, {}).items()}
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": properties, "required": [*properties]})
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": shared} if shared else schema


_SHARED = ("$defs", "definitions")
"""Keys of a schema under which references find their targets."""


def _moved(value: Any, to: str) -> Any:
    """A schema whose references to shared definitions begin with ``to``."""
    if isinstance(value, list | tuple):
        return [_moved(each, to) for each in value]
    if not isinstance(value, Mapping):
        return value
    moved = {key: _moved(each, to) for key, each in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and (found := re.match(r"#/(\$defs|definitions)/", reference)):
        moved["$ref"] = to + reference[found.end() :]
    return moved


# -- in an answer -----------------------------------------------------------------------------------------------------

_JSON = json.JSONDecoder(strict=False)
"""Models write line ends and tabs into strings as they are."""
_OPENINGS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>")
_MAY_BE_CALL = re.compile(r"\s*(\{\s*(\"|$)|\[\s*(\{|$)|$)")
"""Beginning of an answer that may be a call without a marker."""
_NAMED = re.compile(r"([A-Za-z0-9_.:/-]{1,256})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]{1,64}\s*)?(?:\[ARGS\])?\s*(?=\{)")
_FUNCTION = re.compile(r"\s*<function=([A-Za-z0-9_.:/-]{1,256})>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
Parameters = Mapping[str, Mapping[str, Any]]
"""Names of tools, each with the JSON schema of its arguments; empty if it has none."""
_Found = tuple[list[ToolCall], int]
"""Calls, and where the text after them begins."""


class CallReader:
    """Separates calls from an answer's text while it is written.

    Formats: ``<tool_call>{…}</tool_call>`` (Hermes, Qwen); ``<function=name><parameter=key>value</parameter>…
    </function>``, usually between the same markers (Qwen 3 Coder); ``[TOOL_CALLS] [{…}]`` and
    ``[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`` with or without the id (Mistral); and an answer that is nothing but
    ``{"name": …, "parameters": {…}}``, a list of these, or several with ``;`` between them, perhaps after
    ``<|python_tag|>`` (Llama 3). ``arguments`` and ``parameters`` mean the same. Without a marker, the name must be
    that of a known tool. What cannot be read as a call stays text. Every call gets a new id.

    Args:
        tools: the known tools. Values that are not written as JSON get their types from the schema of the arguments.
    """

    def __init__(self, tools: Parameters) -> None:
        self._tools = tools
        self._held = ""
        self._began = False
        """Whether text or a call was given out."""
        self._after_call = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; returns what is certain: text, and the calls after it."""
        return self._read(text, last=False)

    def close(self) -> tuple[str, list[ToolCall]]:
        """The rest, after the last text."""
        return self._read("", last=True)

    def _read(self, text: str, *, last: bool) -> tuple[str, list[ToolCall]]:
        self._held += text
        given: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._began and _MAY_BE_CALL.match(self._held):
                if not last:
                    break
                found = _plain_calls(self._held, self._tools)
                if found is not None:
                    calls, self._held = found, ""
                    break
            places = [(at, opening) for opening in _OPENINGS if (at := self._held.find(opening)) >= 0]
            if not places:
                self._give(given, len(self._held) - (0 if last else _may_begin(self._held)))
                break
            at, opening = min(places)
            self._give(given, at)
            read = _calls_after(opening, self._held[len(opening) :], last, self._tools)
            if read is None and not last:
                break
            if read is None:
                self._give(given, len(opening))
                continue
            calls += read[0]
            self._held = self._held[len(opening) + read[1] :]
            self._began = self._after_call = True
        return "".join(given), calls

    def _give(self, given: list[str], length: int) -> None:
        piece, self._held = self._held[:length], self._held[length:]
        if self._after_call:
            piece = piece.lstrip()
        if piece:
            self._after_call = False
            self._began = self._began or not piece.isspace()
            given.append(piece)


def _may_begin(text: str) -> int:
    """Length of the longest end of ``text`` that may begin a marker."""
    longest = max(map(len, _OPENINGS)) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(o.startswith(text[-n:]) for o in _OPENINGS)), 0)


def _calls_after(opening: str, text: str, last: bool, tools: Parameters) -> _Found | None:
    """Calls at the beginning of the text after a marker; None if there are none, or not yet."""
    if opening == "<|python_tag|>":
        calls = _plain_calls(text, None) if last else None
        return None if calls is None else (calls, len(text))
    if opening == "[TOOL_CALLS]":
        return _named_call(text) or _json_calls(text)
    if opening == "<function=":
        found = _xml_call(opening + text, tools)
        if found is None or found[0][0].name not in tools:
            return None
        found = found[0], found[1] - len(opening)
    else:
        found = _xml_call(text, tools) or _json_calls(text)
    return found and _closed(found, text, last)


def _closed(found: _Found, text: str, last: bool) -> _Found | None:
    """Calls with the closing marker after them, if there is one; None if it may still come."""
    calls, end = found
    rest = text[end:].lstrip()
    if not last and "</tool_call>".startswith(rest) and rest != "</tool_call>":
        return None
    if rest.startswith("</tool_call>"):
        end = text.index("</tool_call>", end) + len("</tool_call>")
    return calls, end


def _json_calls(text: str) -> _Found | None:
    """A call as a JSON object, or several as a list."""
    value, end = _value_at(text, 0)
    found = [_call_of(each, None) for each in (value if isinstance(value, list) else [value])]
    calls = [call for call in found if call is not None]
    return (calls, end) if calls and len(calls) == len(found) else None


def _named_call(text: str) -> _Found | None:
    """A name, perhaps an id, and arguments as a JSON object."""
    named = _NAMED.match(text, len(text) - len(text.lstrip()))
    if named is None:
        return None
    value, end = _value_at(text, named.end())
    call = _call_of({"name": named[1], "arguments": value}, None) if isinstance(value, dict) else None
    return None if call is None else ([call], end)


def _xml_call(text: str, tools: Parameters) -> _Found | None:
    """A call whose arguments are written one by one."""
    head = _FUNCTION.match(text)
    if head is None or "</function>" not in text:
        return None
    schema, end = tools.get(head[1]) or {}, head.end()
    properties = schema.get("properties") or {}
    arguments: dict[str, Any] = {}
    while (found := _PARAMETER.match(text, end)) is not None:
        arguments[found[1]] = _typed(found[2], _types(properties.get(found[1]), schema))
        end = found.end()
    call = _call_of({"name": head[1], "arguments": arguments}, None)
    return ([call], end + len("</function>")) if call and text.startswith("</function>", end) else None


_JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What models write for JSON's words."""


def _typed(text: str, types: frozenset[str]) -> Any:
    """The JSON value that ``text`` stands for, if it has one of the ``types``; else the text."""
    try:
        value = json.loads(_PYTHON.get(text, text), strict=False)
    except (ValueError, RecursionError):
        return text
    return value if types.intersection(_JSON_TYPES.get(type(value), ())) else text


def _types(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """JSON types other than text that a schema allows."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {*filter(lambda each: isinstance(each, str), named or ())}
    for value in [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]:
        found.update(_JSON_TYPES.get(type(value), ()))
    others = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key, ())]
    reference = str(schema.get("$ref", "")).split("/")
    if reference[0] == "#" and len(reference) == 3:
        others.append((root.get(reference[1]) or {}).get(reference[2]))
    return frozenset(found.union(*(_types(each, root, depth - 1) for each in others)))


def _value_at(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value at ``begin``, and its end; None for what is no JSON."""
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    try:
        return _JSON.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin


def _plain_calls(text: str, names: Collection[str] | None) -> list[ToolCall] | None:
    """The calls that a text consists of; None if it holds anything else."""
    calls: list[ToolCall] = []
    text = text.strip()
    while text:
        value, end = _value_at(text, 0)
        for each in value if isinstance(value, list) and value else [value]:
            call = _call_of(each, names)
            if call is None:
                return None
            calls.append(call)
        text = text[end:].lstrip(" \t\r\n;,")
    return calls or None


def _call_of(value: Any, names: Collection[str] | None) -> ToolCall | None:
    """A call from its JSON object; None if it is none, or not of a known tool."""
    if not isinstance(value, dict):
        return None
    name, given = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or (names is not None and name not in names):
        return None
    if given is None and names is None and set(value) <= {"name", "id", "type"}:
        given = {}  # between markers, a call without arguments is certain
    arguments = _as_object(given)
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a character
        return None
    return None if arguments is None else ToolCall(name, arguments)


def read_calls(events: Iterable[Event], tools: Parameters) -> Iterator[Event]:
    """The events of an answer with its calls taken out of the text, into ``tool_calls`` of events and answer.

    Text that may still be withdrawn is held back, because a call cannot be withdrawn. The number of events stays.
    """
    reader = CallReader(tools)
    waiting, passed = "", 0
    texts: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        if event.revised_from is not None:
            waiting = waiting[: event.revised_from - passed]
        waiting += event.text
        final = waiting if event.is_final else ""
        waiting, passed = waiting[len(final) :], passed + len(final)
        text, found = reader.push(final)
        if event.answer is not None:
            rest, others = reader.close()
            text, found = text + rest, [*found, *others]
        texts.append(text)
        calls += found
        answer = event.answer and replace(event.answer, text="".join(texts), tool_calls=tuple(calls))
        yield replace(event, text=text, answer=answer, tool_calls=tuple(found), revised_from=None, is_final=True)


def parameters_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Names of definitions, checked, each with the schema of its arguments."""
    functions = [tool["function"] for tool in check_tools(tools)]
    return {function["name"]: function.get("parameters") or {} for function in functions}
