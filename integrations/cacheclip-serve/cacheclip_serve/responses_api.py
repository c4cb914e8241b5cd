"""``/v1/responses``, OpenAI's newer API: its requests as chats, and answers in its form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cacheclip_rag import Answer
from cacheclip_rag.adapters import says_nothing

from .errors import RequestError, unsupported
from .parts import AnswerPart, PartsReply
from .replies import chat_logprobs, statistics
from .translating import ChatWriter, Translated, as_function, list_of, missing, object_of

_KEPT = "this server keeps no answers. Give the earlier items in input"
_REFUSED = {
    "previous_response_id": _KEPT,
    "conversation": _KEPT,
    "prompt": "this server has no templates of prompts. Give instructions and input",
    "messages": "give input instead",
    "n": "a response is one answer",
}
_IGNORED = frozenset({"include", "max_tool_calls", "stream_options"})
"""Fields on what this server does not do: it keeps nothing encrypted, runs no tools, and pads no stream."""
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema.schema": "text.format.schema",
    "verbosity": "text.verbosity",
}
_LOGPROBS = "message.output_text.logprobs"


def responses_as_chat(stated: dict[str, Any]) -> Translated:
    """Raises RequestError: it is malformed, or has items or fields that would change the answer and are not read."""
    own = {name: value for name, value in stated.items() if not says_nothing(value)}
    for name, why in _REFUSED.items():
        if name in own and own[name] != 1:
            raise unsupported(name, f"{name} is not supported: {why}.")
    written = ChatWriter()
    if "instructions" in own:
        written.add("instructions", {"role": "system", "content": own.pop("instructions")})
    asked = own.pop("input", None)
    if asked is None:
        raise missing("input")
    if isinstance(asked, str):
        written.add("input", {"role": "user", "content": asked})
    else:
        for number, item in enumerate(list_of(asked, "input")):
            _add_item(written, object_of(item, f"input[{number}]"), f"input[{number}]")
    chat = {name: value for name, value in own.items() if name not in _IGNORED}
    body = {**_settings(chat, own), **chat, "messages": written.messages}
    return Translated(body, written.places, _NAMES, sorted(_IGNORED.intersection(own)))


def _add_item(written: ChatWriter, item: dict[str, Any], place: str) -> None:
    match item.get("type") or "message":
        case "message":
            message = {name: value for name, value in item.items() if name not in ("type", "id", "status", "phase")}
            if message.get("role") == "assistant":
                written.answer(place, "content", "tool_calls").update(message)
            else:
                written.add(place, message)
        case "reasoning":
            parts = item.get("content") or item.get("summary")
            texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            reasoning = "".join(text for text in texts if isinstance(text, str))
            written.answer(place, "content", "tool_calls", "reasoning_content")["reasoning_content"] = reasoning
        case "function_call":
            written.add_call(place, item.get("call_id"), item.get("name"), item.get("arguments"))
        case "function_call_output":
            written.add(place, {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        case "item_reference":
            raise unsupported(place, f"{place} names an item: {_KEPT}.")
        case kind:
            raise unsupported(
                f"{place}.type",
                f"{place} has type {str(kind)[:80]!r}. This server reads items of type message, reasoning, "
                "function_call and function_call_output.",
            )


def _settings(chat: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What a chat states in other words, taken out of ``chat``. ``own``: all that was stated."""
    found: dict[str, Any] = {}
    if "max_output_tokens" in chat:
        found["max_completion_tokens"] = chat.pop("max_output_tokens")
    if "tools" in chat:
        tools = list_of(chat.pop("tools"), "tools")
        found["tools"] = [as_function(tool, f"tools[{number}]", "parameters") for number, tool in enumerate(tools)]
    if isinstance(reasoning := chat.get("reasoning"), dict):
        del chat["reasoning"]
        if reasoning.get("effort"):
            found["reasoning"] = {"effort": reasoning["effort"]}
    if own.get("truncation") == "disabled":
        del chat["truncation"]
    text = object_of(chat.pop("text", {}), "text")
    if text.get("verbosity"):
        found["verbosity"] = text["verbosity"]
    if (wanted := text.get("format")) is not None:
        wanted = object_of(wanted, "text.format")
        named = {name: value for name, value in wanted.items() if name != "type"}
        found["response_format"] = {"type": wanted.get("type"), **({"json_schema": named} if named else {})}
    if "top_logprobs" in own or _LOGPROBS in list_of(own.get("include", []), "include"):
        found["logprobs"] = True
    return found


class ResponsesReply(PartsReply):
    """An answer of ``/v1/responses``."""

    prefix = "resp_"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number = 0
        """Of the next event."""
        self._items: list[dict[str, Any]] = []
        """Parts that have ended."""

    def opening(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def broken_off(self, error: RequestError) -> dict[str, Any]:
        return self._event("error", code=error.code or error.kind, message=error.message, param=error.param)

    def _body(self, answer: Answer) -> dict[str, Any]:
        usage = self._usage([answer])
        tokens = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        is_whole = answer.finish_reason != "length"
        found = self._response("completed" if is_whole else "incomplete")
        cut_off = None if is_whole else {"reason": "max_output_tokens"}
        return {**found, "incomplete_details": cut_off, "usage": tokens, **statistics(answer)}

    def _response(self, status: str) -> dict[str, Any]:
        asked = self.asked
        repeated = ("instructions", "max_output_tokens", "reasoning", "temperature", "top_p", "user")
        return {
            **{"id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model},
            **{"output": [*self._items], "error": None, "incomplete_details": None, "usage": None},
            **{name: asked.get(name) for name in repeated},
            **{"metadata": asked.get("metadata") or {}, "text": asked.get("text") or {"format": {"type": "text"}}},
            **{"tools": asked.get("tools") or [], "tool_choice": asked.get("tool_choice") or "auto"},
            **{"parallel_tool_calls": asked.get("parallel_tool_calls") is not False, "truncation": "disabled"},
            **{"previous_response_id": None, "store": False, "background": False},
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of(self, part: AnswerPart, kind: str, /, **fields: Any) -> dict[str, Any]:
        """An event about a part; about the only content of its item, if it is no call."""
        place = {"item_id": part.id, "output_index": part.index}
        content = {} if part.kind == "call" else {"content_index": 0}
        return self._event(f"response.{kind}", **place, **content, **fields)

    def _opens(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        item = {**_item(part, "in_progress", None), **({} if part.kind == "call" else {"content": []})}
        yield self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind != "call":
            yield self._of(part, "content_part.added", part=_content(part, None))

    def _grows(self, part: AnswerPart, text: str) -> Iterator[dict[str, Any]]:
        logprobs: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        yield self._of(part, f"{_EVENTS[part.kind]}.delta", delta=text, **logprobs)

    def _closes(self, part: AnswerPart, answer: Answer | None) -> Iterator[dict[str, Any]]:
        item = _item(part, "completed", answer)
        self._items.append(item)
        if part.kind == "call":
            yield self._of(part, f"{_EVENTS['call']}.done", arguments=part.text, name=part.name)
        else:
            (content,) = item["content"]
            logprobs = {"logprobs": content["logprobs"]} if part.kind == "text" else {}
            yield self._of(part, f"{_EVENTS[part.kind]}.done", text=part.text, **logprobs)
            yield self._of(part, "content_part.done", part=content)
        yield self._event("response.output_item.done", output_index=part.index, item=item)

    def _end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        body = self._body(answer)
        yield self._event(f"response.{body['status']}", response=body)


_EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _content(part: AnswerPart, answer: Answer | None) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    logprobs = chat_logprobs(answer.logprobs) if answer is not None and answer.logprobs else []
    for each in [*logprobs, *(other for token in logprobs for other in token["top_logprobs"])]:
        each["bytes"] = each["bytes"] or []
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}


def _item(part: AnswerPart, status: str, answer: Answer | None) -> dict[str, Any]:
    if part.kind == "call":
        named = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
        return {"id": part.id, "type": "function_call", "status": status, **named}
    content = [_content(part, answer)]
    if part.kind == "reasoning":
        return {"id": part.id, "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": part.id, "type": "message", "status": status, "role": "assistant", "content": content}
