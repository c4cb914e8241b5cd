"""Answers as a list of parts, reasoning, text and calls, each of which begins and ends in a stream."""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheclip_rag import Answer, Event

from .replies import Reply, server_sent

_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}


@dataclass(eq=False, slots=True)
class AnswerPart:
    """A part of an answer."""

    kind: str
    """``reasoning``, ``text`` or ``call``."""
    index: int
    text: str = ""
    """Of a call: its arguments as JSON text."""
    name: str = ""
    """Of a call, as its ``call_id``."""
    call_id: str = ""
    id: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self.id = self.id or _PREFIXES[self.kind] + uuid.uuid4().hex

    @property
    def arguments(self) -> Any:
        return json.loads(self.text)


class PartsReply(Reply):
    """An answer in parts. The chunks of its stream are events with a type."""

    ended = b""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parts: list[AnswerPart] = []
        self._is_open = False
        """Whether the last part goes on."""

    @staticmethod
    def sent(chunk: Any) -> bytes:
        return server_sent(chunk, chunk["type"])

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        for _ in self.chunks(Event(answer.text, answer, reasoning=answer.reasoning, tool_calls=answer.tool_calls)):
            pass
        return self._body(answer)

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        for kind, text in (("reasoning", event.reasoning), ("text", event.text)):
            if text:
                yield from self._goes_on(kind, text)
        for call in event.tool_calls:
            yield from self._closed(event.answer)
            yield from self._begun(AnswerPart("call", len(self._parts), name=call.name, call_id=call.id))
            yield from self._added(json.dumps(call.arguments, ensure_ascii=False))
        if event.answer is None:
            return
        yield from self._closed(event.answer)
        if all(part.kind == "reasoning" for part in self._parts):  # clients look for a text
            yield from self._begun(AnswerPart("text", len(self._parts)))
            yield from self._closed(event.answer)
        yield from self._end(event.answer)

    def _goes_on(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open or self._parts[-1].kind != kind:
            yield from self._closed(None)
            yield from self._begun(AnswerPart(kind, len(self._parts)))
        yield from self._added(text)

    def _begun(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        self._parts.append(part)
        self._is_open = True
        yield from self._opens(part)

    def _added(self, text: str) -> Iterator[dict[str, Any]]:
        self._parts[-1].text += text
        yield from self._grows(self._parts[-1], text)

    def _closed(self, answer: Answer | None) -> Iterator[dict[str, Any]]:
        """``answer``: if it is known already."""
        if self._is_open:
            self._is_open = False
            yield from self._closes(self._parts[-1], answer)

    @abstractmethod
    def _body(self, answer: Answer) -> dict[str, Any]:
        """The response, when all parts are there."""

    @abstractmethod
    def _opens(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """Chunks before the first text of a part."""

    @abstractmethod
    def _grows(self, part: AnswerPart, text: str) -> Iterator[dict[str, Any]]:
        """Chunks for new text of a part."""

    @abstractmethod
    def _closes(self, part: AnswerPart, answer: Answer | None) -> Iterator[dict[str, Any]]:
        """Chunks after the last text of a part."""

    @abstractmethod
    def _end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """Chunks that end the stream."""
