"""Requests of other APIs as chats, which are what this server reads. What is said of a chat's fields is said of theirs
again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cacheclip_rag import ConfigurationError
from cacheclip_rag.adapters import forced_tool

from .errors import RequestError, unsupported

_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")
_ROOT = re.compile(r"[\w.]+")


@dataclass(frozen=True, slots=True)
class Translated:
    """A request as the body of a chat."""

    body: dict[str, Any]
    places: list[str] = field(default_factory=list)
    """Where in the request each message stands."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Fields of the chat, each with its name in the request."""
    ignored: Sequence[str] = ()
    """Fields that the chat has not, because they change nothing."""

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Errors within the block name the fields of the request."""
        try:
            yield
        except RequestError as error:
            if self.places:
                error.message, error.param = self._renamed(error.message), error.param and self._renamed(error.param)
                error.args = (error.message,)
            raise

    def _renamed(self, text: str) -> str:
        text = _MESSAGE.sub(lambda match: self._place(int(match[1])), text)
        root = _ROOT.match(text)
        if root is not None and root[0] in self.names:
            text = self.names[root[0]] + text[root.end() :]
        return text

    def _place(self, number: int) -> str:
        return self.places[number] if number < len(self.places) else f"messages[{number}]"


def without_optional_tools(written: Translated) -> Translated:
    """Without tools that need not be called."""
    kept = drop_optional_tools(written.body)
    return written if kept is written.body else replace(written, body=kept, ignored=[*written.ignored, "tools"])


def drop_optional_tools(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat without its tools. It stays as it is if it has none, or one must be called; or if that cannot
    be read: whoever reads it says why."""
    try:
        is_forced, _ = forced_tool(body.get("tool_choice"))
    except ConfigurationError:
        return body
    if is_forced or not body.get("tools"):
        return body
    return {name: value for name, value in body.items() if name not in ("tools", "tool_choice", "parallel_tool_calls")}


class ChatWriter:
    """Messages of a chat, from what another API has in their place: there, an answer may be several items."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []

    def add(self, place: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.places.append(place)

    def answer(self, place: str, *taken: str) -> dict[str, Any]:
        """The assistant's message to which an item belongs: the last message, unless it is none or already has one of
        the fields ``taken``."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in taken):
            self.add(place, {"role": "assistant"})
        return self.messages[-1]

    def add_call(self, place: str, id: Any, name: Any, arguments: Any) -> None:
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.answer(place).setdefault("tool_calls", []).append(call)


def as_function(tool: Any, place: str, parameters: str) -> Any:
    """A tool in the form of a chat. ``parameters``: name of the field with its JSON schema. Raises RequestError: it is
    of a kind that the server of the API runs itself."""
    if not isinstance(tool, Mapping) or isinstance(tool.get("function"), Mapping):
        return tool
    kind = tool.get("type") or "function"
    if kind not in ("function", "custom") or (kind == "custom" and parameters not in tool):
        raise unsupported(place, f"{place} has type {str(kind)[:80]!r}: this server runs no tools. Give functions.")
    stated = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get(parameters)}
    return {"type": "function", "function": {name: value for name, value in stated.items() if value is not None}}


def list_of(stated: Any, place: str) -> list[Any]:
    """Raises RequestError unless it is a list."""
    if not isinstance(stated, list):
        raise RequestError(f"{place}: Input should be a valid list.", param=place, code="invalid_type")
    return stated


def object_of(stated: Any, place: str) -> dict[str, Any]:
    """Raises RequestError unless it is an object."""
    if not isinstance(stated, dict):
        raise RequestError(f"{place}: Input should be a valid object.", param=place, code="invalid_type")
    return stated


def missing(place: str) -> RequestError:
    return RequestError(f"{place}: Field required.", param=place, code="missing_required_parameter")
