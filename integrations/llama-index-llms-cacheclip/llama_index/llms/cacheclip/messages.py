"""Messages from LlamaIndex to the engine, and answers back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    MessageRole,
    TextBlock,
)

from cacheclip_rag import ConfigurationError
from cacheclip_rag.adapters import (
    as_name,
    past_calls,
    telemetry,
    token_usage,
)

if TYPE_CHECKING:
    from cacheclip_rag import Answer, Event, ToolCall

_PASSED_OVER = {"ThinkingBlock", "ToolCallBlock", "CachePoint"}
"""Names of blocks without text for the prompt: reasoning, tool calls, marks. By name, because older versions of
LlamaIndex lack some of these classes."""
_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


def engine_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages in the engine's format. Raises ConfigurationError for content that is no text, but in earlier turns and
    in answers, where it is left out."""
    roles = [_role(message) for message in messages]
    last = max((number for number, role in enumerate(roles) if role == "user"), default=0)
    lenient = [role == "assistant" or (role != "system" and number < last) for number, role in enumerate(roles)]
    return [
        {"role": role, "content": _content(message, is_lenient=is_lenient), **_calling(message, role)}
        for message, role, is_lenient in zip(messages, roles, lenient, strict=True)
    ]


def _calling(message: ChatMessage, role: str) -> dict[str, Any]:
    """What a message says beside its content: an assistant's message calls and reasoning, a tool message which call it
    answers."""
    if role == "tool":
        return {name: as_name(str(message.additional_kwargs.get(name) or "")) for name in ("tool_call_id", "name")}
    if role != "assistant":
        return {}
    reasoning = _reasoning(message)
    return {"tool_calls": past_calls(calls_of(message)), **({"reasoning_content": reasoning} if reasoning else {})}


def _reasoning(message: ChatMessage) -> str:
    blocks: list[Any] = [block for block in message.blocks if type(block).__name__ == "ThinkingBlock"]
    return "\n".join(block.content for block in blocks if isinstance(block.content, str))


def calls_of(message: ChatMessage) -> list[dict[str, Any]]:
    """A message's calls in OpenAI's format: from ``additional_kwargs``, else from its blocks."""
    named = message.additional_kwargs.get("tool_calls")
    if named:
        return [call if isinstance(call, dict) else call.model_dump() for call in named]
    blocks: list[Any] = [block for block in message.blocks if type(block).__name__ == "ToolCallBlock"]
    return [
        {"id": block.tool_call_id, "function": {"name": block.tool_name, "arguments": block.tool_kwargs}}
        for block in blocks
    ]


def as_arguments(given: Any) -> dict[str, Any]:
    return dict(json.loads(given) if isinstance(given, str) else given or {})


def _role(message: ChatMessage) -> str:
    role = _ROLES.get(message.role)
    if role is None:
        raise ConfigurationError(
            f"CacheClipLLM takes system, user, assistant and tool messages, got role {message.role.value!r}. Give its "
            "content as a user message."
        )
    return role


def _content(message: ChatMessage, *, is_lenient: bool) -> str:
    kinds = {type(block).__name__ for block in message.blocks if not isinstance(block, TextBlock)} - _PASSED_OVER
    if kinds and not is_lenient:
        raise ConfigurationError(
            f"CacheClipLLM reads text only, got a message with {', '.join(sorted(kinds))}. Leave it out, or describe "
            "it in words."
        )
    return message.content or ""


def _details(answer: Answer) -> dict[str, Any]:
    """Token counts (for LlamaIndex's token counter) and fusion statistics."""
    extra = {"cacheclip": answer.stats.to_dict(), "finish_reason": answer.finish_reason, **telemetry(answer)}
    if answer.reasoning:
        extra["reasoning_content"] = answer.reasoning
    return {"raw": {"usage": token_usage(answer)}, "additional_kwargs": extra}


def completion_response(answer: Answer) -> CompletionResponse:
    return CompletionResponse(text=answer.text, **_details(answer))


def chat_response(answer: Answer) -> ChatResponse:
    return ChatResponse(message=_said(answer.text, answer.tool_calls, answer.reasoning), **_details(answer))


def _said(text: str, calls: Iterable[ToolCall], reasoning: str) -> ChatMessage:
    named = [call.to_dict() for call in calls]
    extra = {"additional_kwargs": {"tool_calls": named}} if named else {}
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text, **extra)
    if reasoning:
        message.blocks = [*_thinking(reasoning), *message.blocks]
    return message


def _thinking(reasoning: str) -> list[Any]:
    """Reasoning as a block of a message, if this version of LlamaIndex has such blocks."""
    kind = getattr(types, "ThinkingBlock", None)
    return [] if kind is None else [kind(content=reasoning)]


def completion_responses(events: Iterator[Event]) -> CompletionResponseGen:
    text = ""
    for event in events:
        text = event.answer.text if event.answer else text + event.text
        details = _details(event.answer) if event.answer else {}
        yield CompletionResponse(text=text, delta=event.text, **details)


def chat_responses(events: Iterator[Event]) -> ChatResponseGen:
    text = reasoning = ""
    calls: list[ToolCall] = []
    for event in events:
        text = event.answer.text if event.answer else text + event.text
        reasoning += event.reasoning
        calls += event.tool_calls
        details = _details(event.answer) if event.answer else {}
        if event.reasoning:  # as LlamaIndex's agents read it
            details["additional_kwargs"] = {**details.get("additional_kwargs", {}), "thinking_delta": event.reasoning}
        yield ChatResponse(message=_said(text, calls, reasoning), delta=event.text, **details)
