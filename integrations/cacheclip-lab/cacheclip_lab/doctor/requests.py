"""Prompts of recorded requests: bodies of OpenAI's and Anthropic's APIs, and log lines of servers that hold them."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from cacheclip_rag import ConfigurationError

_WRAPPERS = ("request", "body", "request_body", "json", "data", "payload")
"""Fields in which recorders keep a body."""
_PROMPTS = ("messages", "prompt", "input")
_OF_VLLM = re.compile(r"prompt: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
"""A prompt in the log of ``vllm serve --enable-log-requests``, as Python writes a string."""

_LONGEST = 1 << 28
"""Bytes of a line that are read at once."""
_MOST_STARTS = 32
"""Places of a line at which an object is looked for."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that would change the terminal in which they are shown."""


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """The text of one request, in the order in which chat templates write it: tools, system prompt, messages."""

    session: str
    """Name of the file, with its folder where several have one name."""
    text: str
    parts: tuple[tuple[int, str], ...]
    """Where each part begins, in characters, and its name, such as ``system`` or ``message 3 (user)``."""

    def part_at(self, place: int) -> str:
        return next((name for start, name in reversed(self.parts) if start <= place), "prompt")


@dataclass(slots=True)
class RequestLog:
    """Files of recorded requests."""

    paths: Sequence[Path]
    unreadable: int = 0
    """Lines so far that hold no request."""

    def prompts(self) -> Iterator[RecordedPrompt]:
        """The prompts in their order. Raises ConfigurationError: a file cannot be read, or none holds a request."""
        count = 0
        names = Counter(path.stem for path in self.paths)
        for path in self.paths:
            name = path.stem if names[path.stem] == 1 else f"{path.parent.name}/{path.stem}"
            try:
                with path.open("rb") as lines:
                    while line := lines.readline(_LONGEST):
                        made = [recorded(name, each) for each in _bodies_if_any(line)]
                        self.unreadable += not made and not line.isspace()
                        count += len(made)
                        yield from made
            except OSError as error:
                raise ConfigurationError(f"cannot read {path}: {error}. Give a file of recorded requests.") from error
        if not count:
            raise ConfigurationError(
                f"expected JSON lines with messages, prompt or input, or a server's log that holds them, got "
                f"{self.unreadable:,} lines without. Record requests with cacheclip doctor FILE --record URL."
            )


Part = tuple[str, str]
"""A part's name and text."""


def recorded(session: str, parts: Sequence[Part]) -> RecordedPrompt:
    starts = accumulate((len(text) for _, text in parts), initial=0)
    places = tuple((start, name) for start, (name, _) in zip(starts, parts, strict=False))
    text = "".join(text for _, text in parts)
    # JSON may have halves of characters, which no file and no terminal takes
    return RecordedPrompt(session, _CONTROL.sub("?", text.encode(errors="replace").decode()), places)


def _bodies_if_any(line: bytes) -> list[list[Part]]:
    try:
        return [parts for parts in bodies(line.decode("utf-8", "replace")) if parts]
    except (ValueError, SyntaxError, TypeError, RecursionError):  # of a form that nobody expects
        return []


def bodies(line: str) -> list[list[Part]]:
    """The parts of each prompt that a line holds; empty if it holds none."""
    start, written = line.find("{"), _OF_VLLM.search(line)
    if written is not None and not 0 <= start < written.start():
        return [[("prompt", ast.literal_eval(written[1]))]]
    for _ in range(_MOST_STARTS):
        if start < 0:
            break
        try:
            value, end = json.JSONDecoder().raw_decode(line, start)
        except ValueError:
            end = start + 1
        else:
            if (body := _body_in(value)) is not None:
                return _prompts_of(body)
        start = line.find("{", end)
    return []


def _body_in(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, dict):
        return None
    if any(value.get(name) for name in _PROMPTS):
        return value
    return next((body for name in _WRAPPERS if (body := _body_in(value.get(name))) is not None), None)


def _prompts_of(body: dict[str, Any]) -> list[list[Part]]:
    before = [("tools", _text(tool) + "\n") for tool in _listed(body.get("tools"))]
    before += [("system", _text(body[name]) + "\n") for name in ("system", "instructions") if body.get(name)]
    messages = body.get("messages") or body.get("input")
    if messages:
        return [[*before, *(_message(number, each) for number, each in enumerate(_listed(messages)))]]
    prompts = body["prompt"]
    several = prompts if isinstance(prompts, list) and all(isinstance(each, str) for each in prompts) else [prompts]
    return [[*before, ("prompt", _text(each))] for each in several]


def _message(number: int, message: Any) -> Part:
    if not isinstance(message, dict):
        return f"message {number}", f"{_text(message)}\n"
    role = str(message.get("role") or message.get("type") or "item")
    content = message.get("content", {name: each for name, each in message.items() if name not in ("role", "type")})
    calls = "".join(_text(call) + "\n" for call in _listed(message.get("tool_calls")))
    name = "system" if role in ("system", "developer") else f"message {number} ({role})"
    return name, f"<|{role}|>\n{_text(content)}\n{calls}"


def _text(content: Any) -> str:
    """The text of a message's content or of one of its parts; of other parts, their JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and not all(isinstance(each, int) for each in content):
        return "\n".join(map(_text, content))
    if isinstance(content, dict):
        if isinstance(content.get("text"), str):
            return str(content["text"])
        if content.get("type") == "tool_result":
            return _text(content.get("content"))
    return "" if content is None else json.dumps(content, ensure_ascii=False)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
