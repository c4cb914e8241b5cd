"""What a caller gives: a prompt, and the documents in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..base.errors import ConfigurationError, first_line
from ..runtime.base import Message
from .tools import calls_as_text

Prompt = str | Sequence[Message]
Documents = Iterable[str] | Mapping[str, Iterable[tuple[str, str]]]
"""Chunk texts known to be in a prompt. A mapping also gives each text's ``(source, document)`` pairs, as in
:meth:`CacheClipEngine.precompute` (the document may be empty). Texts stored after an answer get these sources."""

_MOST_CHARACTERS = 10_000
"""Of the variables of a chat template, as JSON."""
_NOT_VARIABLES = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "raise_exception", "strftime_now"),
        "processor",
    }
)
"""What shapes a prompt in other ways: arguments of transformers, and what it gives templates itself."""


def check_template_kwargs(kwargs: Any) -> dict[str, Any]:
    """Variables of a chat template, as ``chat_template_kwargs`` give them. Raises ConfigurationError: they are no JSON
    object of words, hold more than a few values, or one of them is not a variable of templates."""
    if not isinstance(kwargs, Mapping):
        raise ConfigurationError(
            'chat_template_kwargs must be a JSON object such as {"enable_thinking": false}, got '
            f"{type(kwargs).__name__}."
        )
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier() or name in _NOT_VARIABLES or name.endswith("_token"):
            raise ConfigurationError(
                f"chat_template_kwargs cannot set {str(name)[:80]!r}: give variables of the chat template, such as "
                "enable_thinking."
            )
    try:
        written = json.dumps(kwargs if isinstance(kwargs, dict) else dict(kwargs), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"chat_template_kwargs must be JSON: {first_line(error)}.") from error
    if len(written) > _MOST_CHARACTERS:
        raise ConfigurationError(
            f"chat_template_kwargs have {len(written)} characters as JSON, and at most {_MOST_CHARACTERS} are taken."
        )
    variables: dict[str, Any] = json.loads(written)
    return variables


def in_turns(messages: Iterable[Message]) -> list[Message]:
    """Messages in the order that every template takes: one of the system, then the user's and the answers in turn. What
    follows from one speaker is one message; results of tools stay apart. For histories that a template refuses: with a
    question whose answer failed, a late instruction, a greeting."""
    ordered = sorted(messages, key=lambda message: message["role"] != "system")
    first = next((number for number, message in enumerate(ordered) if message["role"] != "system"), None)
    if first is not None and ordered[first]["role"] == "assistant":
        ordered.insert(first, {"role": "user", "content": ""})
    turns: list[Message] = []
    for message in ordered:
        if turns and turns[-1]["role"] == message["role"] != "tool":
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    return turns


def system_in_user(messages: Sequence[Message]) -> list[Message]:
    """Messages whose system prompt is the beginning of the user's first message."""
    if [message["role"] for message in messages[:2]] != ["system", "user"]:
        return [*messages]
    contents = (message["content"] for message in messages[:2])
    return [{**messages[1], "content": "\n\n".join(filter(None, contents))}, *messages[2:]]


def _joined(before: Message, message: Message) -> Message:
    """Two messages of one speaker as one."""
    both = {**before, **message}
    for name in before.keys() & message.keys() - {"role"}:
        first, second = before[name], message[name]
        both[name] = [*first, *second] if isinstance(first, list) else "\n\n".join(filter(None, (first, second)))
    return both


def result_as_text(message: Message) -> Message:
    """A message without calls, or a tool's result as a user's message, for templates that know neither."""
    if message["role"] != "tool":
        return calls_as_text(message)
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
