"""``/v1/messages``, Anthropic's API: its requests as chats, and answers in its form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cacheclip_rag import Answer
from cacheclip_rag.adapters import says_nothing

from .errors import RequestError, unsupported
from .parts import AnswerPart, PartsReply
from .replies import statistics
from .translating import ChatWriter, Translated, as_function, list_of, missing, object_of

_IGNORED = frozenset({"cache_control", "context_management", "inference_geo", "speed"})
"""Where and at what price an answer is made, and what of earlier turns Anthropic's server may leave out."""
_REFUSED = {
    "container": "this server runs no code",
    "mcp_servers": "this server runs no tools",
    "n": "a message is one answer",
}
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.type": "output_config.format.type",
    "response_format.json_schema.schema": "output_config.format.schema",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status. Of others, the first is the client's and ``api_error`` ours."""


def messages_as_chat(stated: dict[str, Any]) -> Translated:
    """Raises RequestError: it is malformed, or has blocks or fields that would change the answer and are not read."""
    own = {name: value for name, value in stated.items() if not says_nothing(value)}
    for name, why in _REFUSED.items():
        if name in own:
            raise unsupported(name, f"{name} is not supported: {why}.")
    written = ChatWriter()
    if "system" in own:
        written.add("system", {"role": "system", "content": own.pop("system")})
    if "messages" not in own:
        raise missing("messages")
    for number, each in enumerate(list_of(own["messages"], "messages")):
        place = f"messages[{number}]"
        message = object_of(each, place)
        if message.get("role") == "assistant":
            _add_answer(written, message, place)
        elif isinstance(message.get("content"), list):
            _add_blocks(written, message, place)
        else:
            written.add(place, message)
    if written.messages and written.messages[-1].get("role") == "assistant":
        raise unsupported(place, f"{place}: this server does not go on with an answer. Let the user speak last.")
    chat = {name: value for name, value in own.items() if name not in _IGNORED}
    body = {**_settings(chat), **chat, "messages": written.messages}
    return Translated(body, written.places, _NAMES, sorted(_IGNORED.intersection(own)))


def _add_answer(written: ChatWriter, message: dict[str, Any], place: str) -> None:
    """An earlier answer. Its text and reasoning stay in its content."""
    written.add(place, {name: value for name, value in message.items() if name in ("role", "content")})
    content = message.get("content")
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and block.get("type") == "tool_use":
            written.add_call(place, block.get("id"), block.get("name"), block.get("input"))


def _add_blocks(written: ChatWriter, message: dict[str, Any], place: str) -> None:
    """A message of the user: results of tools are messages of their own."""
    rest: list[Any] = []
    for block in message["content"]:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            if rest:
                written.add(place, {**message, "content": rest})
                rest = []
            result = {"tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
            written.add(place, {"role": "tool", **result})
        else:
            rest.append(block)
    if rest or not message["content"]:
        written.add(place, {**message, "content": rest})


def _settings(chat: dict[str, Any]) -> dict[str, Any]:
    """What a chat states in other words, taken out of ``chat``."""
    found: dict[str, Any] = {}
    if "stop_sequences" in chat:
        found["stop"] = list_of(chat.pop("stop_sequences"), "stop_sequences")
    if "tools" in chat:
        tools = list_of(chat.pop("tools"), "tools")
        found["tools"] = [as_function(tool, f"tools[{number}]", "input_schema") for number, tool in enumerate(tools)]
    if "tool_choice" in chat:
        choice = object_of(chat.pop("tool_choice"), "tool_choice")
        if choice.get("type") == "tool":
            found["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        elif choice.get("type") in _CHOICES:
            found["tool_choice"] = _CHOICES[choice["type"]]
        else:
            raise RequestError("tool_choice must have type auto, any, tool or none.", param="tool_choice")
        if choice.get("disable_parallel_tool_use") is True:
            found["parallel_tool_calls"] = False
    wanted = object_of(chat.pop("output_config", {}), "output_config")
    if wanted.get("effort"):
        found["reasoning_effort"] = wanted["effort"]
    schema = wanted.get("format") or chat.pop("output_format", None)
    if schema is not None:
        schema = object_of(schema, "output_config.format")
        found["response_format"] = {"type": schema.get("type"), "json_schema": {"schema": schema.get("schema")}}
    return found


class MessagesReply(PartsReply):
    """An answer of ``/v1/messages``."""

    prefix = "msg_"

    @staticmethod
    def refused(error: RequestError) -> dict[str, Any]:
        kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else _KINDS[400])
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": None}

    def opening(self) -> Iterator[dict[str, Any]]:
        # the counts of the prompt are known at the end
        usage = {"input_tokens": 0, "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._head([]), "usage": usage}}

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        own = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**own, "stop_reason": None, "stop_sequence": None}

    def _body(self, answer: Answer) -> dict[str, Any]:
        content = [_block(part) for part in self._parts]
        return {**self._head(content), **_reason(answer), "usage": self._tokens(answer), **statistics(answer)}

    def _tokens(self, answer: Answer) -> dict[str, Any]:
        usage = self._usage([answer])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _opens(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        block = {**_block(AnswerPart(part.kind, part.index, "{}", part.name, part.call_id)), **_EMPTY[part.kind]}
        yield {"type": "content_block_start", "index": part.index, "content_block": block}

    def _grows(self, part: AnswerPart, text: str) -> Iterator[dict[str, Any]]:
        kind, name = _DELTAS[part.kind]
        yield {"type": "content_block_delta", "index": part.index, "delta": {"type": kind, name: text}}

    def _closes(self, part: AnswerPart, answer: Answer | None) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_stop", "index": part.index}

    def _end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": _reason(answer), "usage": self._tokens(answer), **statistics(answer)}
        yield {"type": "message_stop"}


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
_EMPTY: dict[str, dict[str, Any]] = {"reasoning": {"thinking": ""}, "text": {"text": ""}, "call": {"input": {}}}


def _block(part: AnswerPart) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": json.loads(part.text)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _reason(answer: Answer) -> dict[str, Any]:
    if answer.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    stopped_by = answer.stop_string
    return {"stop_reason": "end_turn" if stopped_by is None else "stop_sequence", "stop_sequence": stopped_by}
