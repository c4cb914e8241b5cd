"""What one request may hold. Everything is checked before the question waits for its turn, so that no request costs
much more than an answer to a prompt of the model's length. The bounds are far above what applications send."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import RequestError

LARGE_BODY = 1 << 16
"""Bytes of a body from which on it is read in a thread, one of them at a time."""
MOST_VALUES = 200_000
"""Most values in a body: numbers, texts, lists, objects."""
MOST_DEPTH = 100
"""Most lists and objects inside one another."""
MOST_MESSAGES = 2048
MOST_CALLS = 2048
"""Calls in all messages."""
MOST_TOOLS = 1024
MOST_DOCUMENTS = 4096
MOST_PROMPTS, MOST_ANSWERS = 128, 8
"""Of a completion, and answers to each prompt."""
MOST_LOGPROBS = 20
"""Tokens whose probabilities are given at each place of an answer."""
MOST_STOPS, LONGEST_STOP = 64, 1024
MOST_CHARACTERS = 16
"""Most characters of a prompt for each token of the model's context. Prose has 4, and tables with much space 8."""
MOST_IN_DOCUMENTS = 64
"""Most characters of documents for each token of the model's context."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_WHOLE = 2**64


def check_size(body: bytes) -> None:
    """Raise RequestError if the JSON text ``body`` has too many values to be read."""
    if _separators(body) > MOST_VALUES and _separators(_STRING.sub(b"", body)) > MOST_VALUES:
        raise RequestError(f"the body holds more than {MOST_VALUES} values, the most that this server takes.")


def _separators(text: bytes) -> int:
    """One for each value, but for the last ones of lists and objects."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def check_values(body: Any) -> None:
    """Raise RequestError if lists or objects are nested too deep, or a number is too large for any use."""
    ahead, depth = [body], 0
    while ahead:
        if depth > MOST_DEPTH:
            raise RequestError(f"the body has lists or objects inside one another more than {MOST_DEPTH} times.")
        below: list[Any] = []
        for value in ahead:
            kind = type(value)
            if kind is dict:
                below.extend(value.values())
            elif kind is list:
                below.extend(value)
            elif (kind is int and not -_WHOLE < value < _WHOLE) or (kind is float and not math.isfinite(value)):
                raise RequestError("the body holds a number that is too large: whole numbers may have 64 bits.")
        ahead, depth = below, depth + 1


def check_counts(body: Mapping[str, Any], context_tokens: int) -> None:
    """Raise RequestError if a body holds more messages, prompts, calls, tools, documents, stop strings or text than one
    question to a model of ``context_tokens`` needs. What is malformed passes: whoever reads it says why."""
    messages, tools, stops = _list(body, "messages"), _list(body, "tools"), _list(body, "stop")
    own = body.get("cacheclip")
    documents = _list(own, "documents") if isinstance(own, Mapping) else []
    calls = [call for each in messages if isinstance(each, Mapping) for call in _list(each, "tool_calls")]
    prompts = [each for each in _list(body, "prompt") if isinstance(each, str)]
    for param, found, most in (
        ("messages", messages, MOST_MESSAGES),
        ("prompt", prompts, MOST_PROMPTS),
        ("messages.tool_calls", calls, MOST_CALLS),
        ("tools", tools, MOST_TOOLS),
        ("stop", stops, MOST_STOPS),
        ("cacheclip.documents", documents, MOST_DOCUMENTS),
    ):
        if len(found) > most:
            raise RequestError(
                f"{param} has {len(found)} entries, more than the {most} that one request may have.", param=param
            )
    if any(isinstance(each, str) and len(each) > LONGEST_STOP for each in (*stops, body.get("stop"))):
        raise RequestError(f"a stop string may have {LONGEST_STOP} characters.", param="stop")
    question = own.get("question") if isinstance(own, Mapping) else None
    prompt = _characters([messages, tools, body.get("prompt"), body.get("response_format"), question])
    for what, count, most in (
        ("the prompt", prompt, MOST_CHARACTERS * context_tokens),
        ("documents", _characters(documents), MOST_IN_DOCUMENTS * context_tokens),
    ):
        if count > most:
            raise RequestError(
                f"{what} has {count} characters, more than the {most} that this server reads for a model with a "
                f"context of {context_tokens} tokens. Shorten it, or use a model with a longer context.",
                code="context_length_exceeded",
            )


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    found = body.get(name)
    return found if isinstance(found, list) else []


def _characters(values: Iterable[Any]) -> int:
    """Characters of all texts, names of fields included."""
    count, ahead = 0, list(values)
    while ahead:
        value = ahead.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, list):
            ahead.extend(value)
        elif isinstance(value, dict):
            count += sum(map(len, value))
            ahead.extend(value.values())
    return count
