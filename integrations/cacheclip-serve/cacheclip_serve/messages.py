"""Messages of a request. The history of a conversation is read leniently: what is odd in it would be sent again with
every later question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cacheclip_rag.adapters import as_name, past_calls
from cacheclip_rag.runtime import Message

from .errors import RequestError, unsupported

_REFUSED_IN_MESSAGES = frozenset(
    {
        *("function_call", "prefix", "partial", "documents"),
        *("image", "images", "image_url", "video", "videos", "input_audio", "file", "files", "attachments"),
    }
)
"""Fields that shape a prompt where they are followed. Other fields of a message are no text of the conversation."""
_CONTINUED = frozenset({"prefix", "partial"})
"""Those that ask for the rest of an answer. The others mean nothing in an earlier answer."""
_COUNTED_IN_MESSAGES = frozenset(
    {
        *("refusal", "annotations", "audio", "provider_specific_fields", "cache_control", "id", "name", "created_at"),
        *("reasoning_details", "thinking_blocks", "thinking", "signature", "additional_kwargs", "metadata", "parts"),
        "content",
    }
)
"""Those that are counted by name if they are ignored."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts of a content, each with the field of its text."""
_REASONING_PARTS: dict[str, tuple[str, ...]] = {
    "thinking": ("thinking",),
    "reasoning": ("reasoning", "text", "summary"),
    "redacted_thinking": (),
    "reasoning_content": ("text",),
}
"""Kinds of parts with reasoning, each with the fields that may hold it: a text, or a list of parts."""
_CALL_PARTS = frozenset({"tool_use", "tool_call", "function_call"})
"""Calls of an earlier answer, which are also in its ``tool_calls``."""


class BodyPart(BaseModel):
    """An object in a body. Fields that it does not know stay beside it."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


def _text(value: Any) -> Any:
    """A content as one text: its parts, one a line."""
    if not isinstance(value, list):
        return value
    return "\n".join(text for text in map(_text_of, value) if text is not None)


def _text_of(part: Any) -> str | None:
    """A part's text; None for calls and reasoning. Raises ValueError for parts that are not read."""
    kind = (
        str(part.get("type", "text"))
        if isinstance(part, dict)
        else "text"
        if isinstance(part, str)
        else type(part).__name__
    )
    if kind in _REASONING_PARTS or kind in _CALL_PARTS:
        return None
    if kind not in _TEXT_PARTS:
        raise ValueError(f"this server reads parts of type 'text' only, got {kind[:80]!r}")
    text = part.get(_TEXT_PARTS[kind]) if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise ValueError(f"a part of type {kind!r} must have a string {_TEXT_PARTS[kind]!r}")
    return text


def _is_read(part: Any) -> bool:
    try:
        _text_of(part)
    except ValueError:
        return False
    return True


def _as_text(value: Any, *, is_result: bool) -> Any:
    """The content of an answer or of a tool's result, with what is neither text nor parts as JSON text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        is_parts = all(isinstance(each, str) or (isinstance(each, dict) and "type" in each) for each in value)
        if is_parts or not is_result:
            return value
    return json.dumps(value, ensure_ascii=False)


class RequestMessage(BodyPart):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    name: Any = None

    @property
    def ignored(self) -> set[str]:
        """Names of fields that were not read, as they are counted."""
        extra = {name for name, value in (self.model_extra or {}).items() if value}
        read = {"reasoning_content", "reasoning", "function_call"} if self.role == "assistant" else set()
        found = extra - read - ({"refusal"} if self.content is None else set())
        if self.name and self.role not in ("tool", "function"):
            found.add("name")
        if self.tool_calls and self.role != "assistant":
            found.add("tool_calls")
        if isinstance(self._data, list) and not all(map(_is_read, self._data)):
            found.add("content")
        return {name if name in _COUNTED_IN_MESSAGES | _REFUSED_IN_MESSAGES else "other" for name in found}

    def for_engine(self, place: str, *, is_old: bool = False) -> Message:
        """The message in the engine's format; ``is_old``: whether it comes back in every later request, as all but a
        user's new message and the beginning of the answer do."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if value}
        is_instruction = self.role in ("system", "developer")
        is_old = is_old and not is_instruction
        refused = _CONTINUED if self.role == "assistant" else _REFUSED_IN_MESSAGES
        for name in () if is_old else refused.intersection(extra):
            raise unsupported(f"{place}.{name}", f"a message has no {name!r} on this server. Leave it out.")
        if self.role == "assistant":
            return self._answer(extra, place)
        if self.tool_calls and not is_old:
            raise RequestError("only an assistant's message has tool_calls.", param=f"{place}.tool_calls")
        content = self._content(place, is_lenient=is_old)
        if self.role in ("tool", "function"):
            named = {key: as_name(value) for key in ("tool_call_id", "name") if (value := _stated(getattr(self, key)))}
            return {"role": "tool", "content": content or "", **named}
        if content is None and not is_old and not is_instruction:
            raise RequestError(f"{place}.content: a text is missing.", param=f"{place}.content")
        return {"role": "system" if self.role == "developer" else self.role, "content": content or ""}

    @property
    def _data(self) -> Any:
        """The content; of answers and of tools' results, which may be any JSON, as text or parts."""
        if self.role in ("assistant", "tool", "function"):
            return _as_text(self.content, is_result=self.role != "assistant")
        return self.content

    def _content(self, place: str, *, is_lenient: bool) -> str | None:
        """The content as one text. ``is_lenient``: without what is not read."""
        found = self._data
        if is_lenient:
            found = list(filter(_is_read, found)) if isinstance(found, list) else _as_text(found, is_result=False)
        try:
            content = _text(found)
        except ValueError as error:
            raise RequestError(f"{place}.content: {error}.", param=f"{place}.content") from error
        if content is not None and not isinstance(content, str):
            raise RequestError(f"{place}.content: Input should be a valid string.", param=f"{place}.content")
        return content

    def _answer(self, extra: Mapping[str, Any], place: str) -> Message:
        """An earlier answer, whatever it lacks."""
        content = self._content(place, is_lenient=True)
        message: Message = {
            "role": "assistant",
            "content": content if content is not None else _stated(extra.get("refusal")),
        }
        calls = self.tool_calls or [{"function": extra.get("function_call")}]  # the old name of a single one
        if found := past_calls(calls):
            message["tool_calls"] = found
        if reasoning := _stated(extra.get("reasoning_content") or extra.get("reasoning")) or _reasoning(self.content):
            message["reasoning_content"] = reasoning
        return message


def _stated(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _reasoning(content: Any) -> str:
    """Reasoning in the parts of a content."""
    found = []
    for part in content if isinstance(content, list) else ():
        names = _REASONING_PARTS.get(str(part.get("type")), ()) if isinstance(part, dict) else ()
        found.append(next(filter(None, (_joined(part.get(name)) for name in names)), ""))
    return "\n".join(filter(None, found))


def _joined(value: Any) -> str:
    """A text, or that of a list of parts."""
    if not isinstance(value, list):
        return _stated(value)
    return "".join(_stated(each.get("text")) for each in value if isinstance(each, dict))
