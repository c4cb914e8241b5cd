"""Bodies of ``/v1/messages`` and ``/v1/responses`` as the chats that vLLM makes of them, as far as plans can follow.

vLLM's own endpoints answer. They take the token ids of a plan in place of their prompt, as chats do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from cacheclip_rag.adapters import says_nothing

from .requests import NotPlanned, PlannablePrompt, read_chat

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

_OF_BOTH = {"model", "stream", "temperature", "top_p", "top_k", "metadata", "service_tier", "cache_salt", "vllm_xargs"}
_OF_BOTH |= {"tools", "tool_choice", "chat_template_kwargs", "kv_transfer_params"}
_OF_MESSAGES = _OF_BOTH | {
    *("messages", "system", "thinking", "output_config", "max_tokens", "stop_sequences"),
    *("cache_control", "context_management", "inference_geo"),
}
_OF_RESPONSES = _OF_BOTH | {
    *("input", "instructions", "truncation", "background", "max_output_tokens", "max_tool_calls", "stream_options"),
    *("parallel_tool_calls", "include", "include_reasoning", "store", "text", "user", "safety_identifier"),
    *("top_logprobs", "min_p", "prompt_cache_key", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "request_id", "logit_bias", "structured_outputs", "priority"),
}
"""Fields that are read here, or do not shape the prompt. With any other, nothing is planned."""
_OF_ITEMS = {"type", "id", "status", "phase", "role", "content", "call_id", "name", "arguments", "output"}
"""Fields of items of ``/v1/responses``."""
_CHOICES = {"any": "required", "tool": "required"}
"""Of ``/v1/messages``, in a chat's words."""
_BILLING = "x-anthropic-billing-header"
"""How texts of the system begin that vLLM leaves out: Claude Code has another one in each request."""


def read_messages(body: Mapping[str, Any], name: str) -> PlannablePrompt:
    """The prompt of a body of ``/v1/messages``. Raises NotPlanned, as :func:`~.requests.read_chat`."""
    _check_fields(body, _OF_MESSAGES)
    thinking, wanted, choice = (body.get(field) for field in ("thinking", "output_config", "tool_choice"))
    if thinking is not None and _of(thinking, "type") not in ("enabled", "adaptive"):
        raise NotPlanned("thinking")
    if wanted is not None and _of(wanted, "effort") is not None:
        raise NotPlanned("reasoning_effort")
    system = "".join(text for text in _texts(body.get("system") or "") if not text.startswith(_BILLING))
    messages = [{"role": "system", "content": system}] if system else []
    for each in _list(body.get("messages")):
        messages += _of_message(each)
    chat = {**_shared(body), "messages": messages, "tools": [_function(tool) for tool in _list(body.get("tools"))]}
    if choice is not None:
        kind = _of(choice, "type")
        chat["tool_choice"] = _CHOICES.get(kind, kind)
    return read_chat(chat, name)


def read_response(body: Mapping[str, Any], name: str) -> PlannablePrompt:
    """The prompt of a body of ``/v1/responses``; as :func:`read_messages`."""
    _check_fields(body, _OF_RESPONSES)
    if body.get("truncation") not in (None, "disabled") or body.get("background"):
        raise NotPlanned("truncation" if not body.get("background") else "background")
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    asked = body.get("input")
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    else:
        for item in _list(asked):
            _add_item(messages, item)
        if asked and _of(asked[-1], "status") not in (None, "completed"):
            raise NotPlanned("continue_final_message")
    tools = [_flat_function(tool) for tool in _list(body.get("tools"))]
    return read_chat({**_shared(body), "messages": messages, "tools": tools, "tool_choice": _choice(body)}, name)


def add_system(path: str, body: dict[str, Any], prompt: str | None) -> None:
    """The settings' system prompt, for conversations without one."""
    field, turns = ("system", "messages") if path == MESSAGES else ("instructions", "input")
    listed = body.get(turns) if isinstance(body.get(turns), list) else []
    roles = {str(each.get("role")) for each in listed or () if isinstance(each, Mapping)}
    if prompt and not body.get(field) and not {"system", "developer"} & roles:
        body[field] = prompt


def as_counted(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A body with its texts where a chat has them, to be counted."""
    if path == MESSAGES:
        return {**body, "prompt": body.get("system"), "stop": body.get("stop_sequences")}
    asked = body.get("input")
    return {**body, "messages": asked, "prompt": [asked if isinstance(asked, str) else "", body.get("instructions")]}


# -- parts of a body --------------------------------------------------------------------------------------------------


def _check_fields(body: Mapping[str, Any], known: set[str]) -> None:
    if any(field not in known and not says_nothing(value) for field, value in body.items()):
        raise NotPlanned("another field")


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
    return {field: body[field] for field in ("model", "chat_template_kwargs") if field in body}


def _of(part: Any, field: str) -> Any:
    """A field of an object. Raises NotPlanned: it is none."""
    if not isinstance(part, Mapping):
        raise NotPlanned("malformed")
    return part.get(field)


def _list(part: Any) -> list[Any]:
    if not isinstance(part, list | None):
        raise NotPlanned("malformed")
    return part or []


def _texts(content: Any, kinds: tuple[str, ...] = ("text",)) -> Iterator[str]:
    """Texts of a content that holds nothing else."""
    if isinstance(content, str):
        yield content
        return
    for part in _list(content):
        text = _of(part, "text")
        if _of(part, "type") not in kinds or not isinstance(text, str):
            raise NotPlanned("parts of a content")
        yield text


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _of_message(message: Any) -> Iterator[dict[str, Any]]:
    """The messages of a chat that vLLM makes of one: results of tools come first, each as one."""
    role, content = _of(message, "role"), _of(message, "content")
    if role not in ("user", "assistant"):  # templates differ in where systems may stand
        raise NotPlanned("role of a message")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    calls, rest = list[dict[str, Any]](), list[Any]()
    for block in _list(content):
        match role, _of(block, "type"):
            case "assistant", "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "user", "tool_result":
                text = "\n".join(_texts(block.get("content") or ""))
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            case _:
                rest.append(block)
    texts = [text for text in _texts(rest) if text]
    if texts or role == "assistant":
        own = {"content": _content(texts)} if texts else {}
        yield {"role": role, **own, **({"tool_calls": calls} if calls else {})}


def _function(tool: Any) -> dict[str, Any]:
    """A tool of ``/v1/messages`` in a chat's form. vLLM reads no type."""
    schema = _of(tool, "input_schema")
    if not isinstance(schema, Mapping) or tool.get("defer_loading"):
        raise NotPlanned("definition of a tool")
    stated = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
    parameters = {"parameters": schema if "type" in schema else {**schema, "type": "object"}}
    return {"type": "function", "function": {**stated, **parameters}}


def _flat_function(tool: Any) -> dict[str, Any]:
    if _of(tool, "type") != "function":
        raise NotPlanned("definition of a tool")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(body: Mapping[str, Any]) -> Any:
    choice = body.get("tool_choice")
    if choice is not None and not isinstance(choice, str) and _of(choice, "type") != "function":
        raise NotPlanned("allowed tools")
    return choice


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    """An item of ``/v1/responses``. What a model says in several of them is one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, Mapping) and set(item) - _OF_ITEMS:
        raise NotPlanned("field of a message")
    match _of(item, "type") or "message":
        case "message" if item.get("name") is not None:  # templates may show it
            raise NotPlanned("field of a message")
        case "message" if item.get("role") == "assistant":
            texts = list(_texts(item.get("content"), ("output_text", "text", "input_text")))
            if len(texts) != 1:
                raise NotPlanned("parts of a content")
            if last is None or "content" in last:
                messages.append({"role": "assistant"})
            messages[-1]["content"] = texts[0]
        case "message":
            texts = list(_texts(item.get("content"), ("input_text", "text")))
            messages.append({"role": item.get("role"), "content": _content(texts)})
        case "function_call":
            if last is None:
                messages.append({"role": "assistant"})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output" if isinstance(item.get("output"), str):
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item["output"]})
        case _:
            raise NotPlanned("kind of an item")
