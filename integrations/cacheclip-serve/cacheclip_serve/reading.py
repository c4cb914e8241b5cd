"""The body of a request as JSON. Half characters in the history of a conversation are mended: they would come back with
every later question."""

from __future__ import annotations

import json
from typing import Any

from cacheclip_rag.adapters import with_whole_characters

from .bounds import check_size, check_values
from .errors import RequestError

_OF_HISTORY = frozenset({"assistant", "tool", "function", "function_call", "function_call_output", "reasoning"})
"""Roles of messages, or types of items without a role, that come back in every later request."""


def read_json(body: bytes) -> dict[str, Any]:
    """A request's body. Raises RequestError unless it is a JSON object whose texts can be written as UTF-8."""
    check_size(body)
    try:
        found = json.loads(body, parse_constant=_no_number)
        if b"\\u" in body and not _is_whole(found):
            _mend_history(found)
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError("the body holds half a character (a lone surrogate), which is no text.") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {str(error)[:200]}.") from error
    if not isinstance(found, dict):
        raise RequestError(f"the body must be a JSON object, got {type(found).__name__}.")
    check_values(found)
    return found


def _is_whole(value: Any) -> bool:
    """Whether no text is half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _mend_history(body: Any) -> None:
    """Put whole characters into answers, results of tools, and messages of users before the last one."""
    body = body if isinstance(body, dict) else {}
    for entries in (body.get("messages"), body.get("input")):
        if not isinstance(entries, list):
            continue
        roles = [each.get("role", each.get("type")) if isinstance(each, dict) else None for each in entries]
        last = max((number for number, role in enumerate(roles) if role == "user"), default=0)
        for number, role in enumerate(roles):
            if role in _OF_HISTORY or (role == "user" and number < last):
                entries[number] = with_whole_characters(entries[number])
            elif role == "user" and isinstance(blocks := entries[number].get("content"), list):
                blocks[:] = [with_whole_characters(each) if _is_result(each) else each for each in blocks]


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")
