"""Tools: their definitions and calls in a prompt. Calls in an answer are read by :mod:`~cacheclip_rag.prompt.calls`.

Definitions and calls have the format of OpenAI's API, which chat templates read too::

    {"type": "function", "function": {"name": "search", "description": "…", "parameters": {JSON schema}}}
    {"role": "assistant", "content": "", "tool_calls": [{"id": "…", "function": {"name": "search", "arguments": {…}}}]}
    {"role": "tool", "tool_call_id": "…", "content": "what the tool returned"}

Chat templates write definitions and calls into control text. So :class:`Marks` marks every string in them that a user,
a document or a tool server may have written, and what is marked never yields control tokens.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ..base.errors import ConfigurationError
from ..runtime.base import Message

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
"""What the name of a tool and the id of a call may be: templates write them as control text."""
_UNMARKED = frozenset({"name", "type", "format", "required", "$ref"})
"""Keys of a definition whose strings templates compare, so that they must not be marked."""
_MOST_LITERAL = 10_000
"""Most characters of arguments that are read as a Python literal."""
_MOST_DEPTH = 100
"""Most lists and objects inside one another in arguments of an earlier call."""
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


def check_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The definitions as a list. A definition may lack the outer ``{"type": "function", "function": …}``. Raises
    ConfigurationError: a definition lacks a name, has a name that is more than a word, or parameters that are no
    object."""
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise ConfigurationError(f"tools must be a list of definitions, got {type(tools).__name__}.")
    checked: list[dict[str, Any]] = []
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise ConfigurationError(f"a tool must be a dict in OpenAI's function format, got {type(tool).__name__}.")
        if "function" not in tool and tool.get("type", "function") != "function" and "name" not in tool:
            raise ConfigurationError(f"a tool of type {tool['type']!r} cannot be called here: give functions.")
        whole = dict(tool) if isinstance(tool.get("function"), Mapping) else {"function": dict(tool)}
        checked.append({"type": "function", **whole})
        name, parameters = whole["function"].get("name"), whole["function"].get("parameters")
        check_name("a tool's name", name)
        if parameters and not isinstance(parameters, Mapping):  # an empty list is how PHP writes an empty object
            raise ConfigurationError(
                f"the parameters of the tool {name!r} must be a JSON schema as a dict, got {type(parameters).__name__}."
            )
    return checked


def is_name(name: Any) -> TypeGuard[str]:
    """Whether ``name`` is one word, as names of tools and ids of calls are."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(what: str, name: Any) -> None:
    """Raise ConfigurationError unless ``name`` is one word."""
    if not is_name(name):
        shown = repr(name[:80]) if isinstance(name, str) else type(name).__name__
        raise ConfigurationError(f"{what} must be a word of letters, digits and _ . : / -, got {shown}.")


def check_calls(calls: Any) -> list[dict[str, Any]]:
    """A message's ``tool_calls`` with arguments as dicts, because templates write them as JSON themselves. Raises
    ConfigurationError: a call is malformed."""
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
    arguments = as_object(function.get("arguments") or {})
    if arguments is None:
        raise ConfigurationError(f"the arguments in a call of {function['name']!r} must be a JSON object.")
    Marks().mark(arguments)  # here, because templates say in many ways what they cannot write
    checked = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id"):
        check_name("the id of a tool call", call["id"])
        checked["id"] = call["id"]
    return checked


def past_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls in the history of a conversation, read leniently, as :func:`check_calls` wants them. A call that was cut
    off or malformed comes back in every later request, and must not end the conversation.

    Arguments that are no JSON object are kept in the argument ``arguments``, and half a character becomes U+FFFD. What
    is no call is left out.
    """
    past: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list | tuple) else ():
        if not isinstance(call, Mapping):
            continue
        function = call.get("function")
        if not isinstance(function, Mapping):  # OpenAI's custom tools have a text instead of arguments
            custom = call.get("custom")
            custom = custom if isinstance(custom, Mapping) else {}
            function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            continue
        id = {"id": as_name(call["id"])} if isinstance(call.get("id"), str) and call["id"] else {}
        arguments = _past_arguments(function.get("arguments"))
        past.append({**id, "type": "function", "function": {"name": as_name(name), "arguments": arguments}})
    return past


def _past_arguments(written: Any) -> dict[str, Any]:
    arguments = as_object(written)
    if arguments is None and isinstance(written, str):
        try:
            read = json.loads(written)
        except (ValueError, RecursionError):
            read = written
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                # Python's way
                arguments = as_object(ast.literal_eval(written) if len(written) <= _MOST_LITERAL else None)
        else:
            arguments = as_object(read)  # JSON in JSON
    else:
        read = written
    if arguments is None:
        arguments = {"arguments": read} if read else {}
    try:
        if not _is_deep(arguments):
            return dict(with_whole_characters(arguments))  # templates write them as JSON
    except (TypeError, ValueError, RecursionError):
        pass
    return {"arguments": with_whole_characters(str(written))}


def _is_deep(value: Any) -> bool:
    """Whether a value has more lists and objects inside one another than templates can write."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        lists = (each.values() if isinstance(each, Mapping) else each for each in level)
        level = [each for inner in lists if isinstance(inner, list | tuple | ValuesView) for each in inner]
        if not level:
            return False
    return True


def with_whole_characters(value: Any) -> Any:
    """A JSON value in whose texts and keys every half of a character (a lone surrogate) is U+FFFD."""
    written = json.dumps(value, ensure_ascii=False)
    return json.loads(written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def as_name(text: str) -> str:
    """A text as one word; see :func:`is_name`."""
    return re.sub(r"[^A-Za-z0-9_.:/-]", "_", text)[:256]


def as_object(value: Any) -> dict[str, Any] | None:
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
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n\n".join(filter(None, parts))}


def with_thinking(message: Message, *, joined: bool = False) -> Message:
    """The message with the reasoning before its calls where GPT-OSS's template reads it. That template refuses a
    content beside it: ``joined`` adds the content to the reasoning."""
    thoughts = [message.get("reasoning_content", ""), message["content"]]
    if "tool_calls" not in message or not thoughts[0]:
        return message
    if joined and thoughts[1]:
        return {**message, "thinking": "\n\n".join(thoughts), "content": ""}
    return {**message, "thinking": thoughts[0]}


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Messages in which every call stands in a message of its own, before its result: some templates write one only."""
    alone: list[Message] = []
    ahead = deque(messages)
    while ahead:
        message = ahead.popleft()
        if len(calls := message.get("tool_calls", ())) < 2:
            alone.append(message)
            continue
        results = []
        while ahead and ahead[0]["role"] == "tool":
            results.append(ahead.popleft())
        for call in calls:
            alone.append({**message, "tool_calls": [call]})
            message = {"role": message["role"], "content": ""}
            if own := next((each for each in results if each.get("tool_call_id") == call.get("id")), None):
                results.remove(own)
                alone.append(own)
        alone += results
    return alone


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
            own = message.get("tool_call_id")
            answered = _short_id(own) if own else waiting[0] if waiting else _short_id(str(number))
            waiting = [each for each in waiting if each != answered]
            message = {**message, "tool_call_id": answered}
        short.append(message)
    return short


def _short_id(id: str) -> str:
    return id if _SHORT.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


@dataclass(frozen=True)
class Marks:
    """Marks strings, and finds them in what a template made of them."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(12))
    """Random, so that no text can contain it."""

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

    def fields(self, message: Message) -> Message:
        """The message with the arguments of its calls marked, and its reasoning."""
        calls = [
            {**call, "function": {**call["function"], "arguments": self.mark(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        marked: dict[str, Any] = {"tool_calls": calls} if calls else {}
        for name in ("reasoning_content", "thinking"):
            if name in message:
                marked[name] = self.mark(message[name])
        return {**message, **marked}

    def renamed(self, messages: Iterable[Message]) -> tuple[list[Message], list[str]]:
        """The messages with calls of tools whose names nothing else holds, and these names, to see which calls a
        template writes."""
        names: list[str] = []

        def named(call: dict[str, Any]) -> dict[str, Any]:
            names.append(f"{self.nonce}{len(names)}z")
            return {**call, "function": {**call["function"], "name": names[-1]}}

        others = [{**m, "tool_calls": [*map(named, m["tool_calls"])]} if "tool_calls" in m else m for m in messages]
        return others, names

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Parts of a rendered text, and for each whether it is template text (True) or was marked. Raises
        ConfigurationError: the template has cut a marked string."""
        if self.nonce not in rendered:
            return [(rendered, True)]
        pieces = re.split(f"{self.nonce}a(.*?){self.nonce}z", rendered, flags=re.DOTALL)
        if any(self.nonce in piece for piece in pieces):
            raise ConfigurationError(
                "this model's chat template cuts arguments or definitions of tools, so that text of the template and "
                "text of users cannot be told apart. Write what the model should read into a message's content."
            )
        return [(piece, number % 2 == 0) for number, piece in enumerate(pieces)]


def unmarked(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Keys and strings of definitions that :meth:`Marks.definition` leaves as they are."""
    strings: dict[str, None] = {}

    def visit(value: Any, plain: bool) -> None:
        if isinstance(value, Mapping):
            for key, each in value.items():
                strings[str(key)] = None
                visit(each, key in _UNMARKED)
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each, plain)
        elif plain and isinstance(value, str):
            strings[value] = None

    for tool in tools:
        visit(tool, False)
    return list(strings)


def call_schema(
    tools: Sequence[Mapping[str, Any]], only: str | None = None, *, otherwise: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """JSON schema of one call, of the tool ``only`` or of any, for answers that must be a call
    (``SamplingParams(json_schema=…)``) or else follow the schema ``otherwise``. Raises ConfigurationError if there are
    no tools, or none with this name."""
    checked = check_tools(tools)
    wanted = [tool["function"] for tool in checked if only in (None, tool["function"]["name"])]
    if not wanted:
        names = ", ".join(tool["function"]["name"] for tool in checked)
        raise ConfigurationError(f"no tool {only or ''!r} to be called. Known: {names}.")
    calls: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}

    def own(schema: Mapping[str, Any], number: int) -> dict[str, Any]:
        moved: dict[str, Any] = _moved(schema, f"#/$defs/{number}.")
        for key in _SHARED:  # references start at the root of the whole schema
            if isinstance(moved.get(key), Mapping):
                shared.update({f"{number}.{name}": each for name, each in moved.pop(key).items()})
        return moved

    for number, function in enumerate(wanted):
        parameters = own(function.get("parameters") or {"type": "object", "properties": {}}, number)
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": properties, "required": [*properties]})
    if otherwise is not None:
        calls.append(own(otherwise, len(wanted)))
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
    if isinstance(reference, str) and (target := re.match(r"#/(\$defs|definitions)/", reference)):
        moved["$ref"] = to + reference[target.end() :]
    return moved
