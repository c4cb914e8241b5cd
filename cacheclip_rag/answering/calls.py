"""The events of an answer with its calls of tools taken out of the text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..fusion.answer import Event
from ..prompt.calls import CallReader, Parameters
from ..prompt.tools import ToolCall


def read_calls(events: Iterable[Event], tools: Parameters) -> Iterator[Event]:
    """The events of an answer with its calls taken out of the text, into ``tool_calls`` of events and answer.

    Text that may still be withdrawn is held back, because a call cannot be withdrawn. The number of events stays.
    """
    reader = CallReader(tools)
    waiting, passed = "", 0
    texts: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        if event.revised_from is not None:
            waiting = waiting[: event.revised_from - passed]
        waiting += event.text
        final = waiting if event.is_final else ""
        waiting, passed = waiting[len(final) :], passed + len(final)
        text, found = reader.push(final)
        if event.answer is not None:
            rest, others = reader.close()
            text, found = text + rest, [*found, *others]
        texts.append(text)
        calls += found
        answer = event.answer and replace(event.answer, text="".join(texts), tool_calls=tuple(calls))
        yield replace(event, text=text, answer=answer, tool_calls=tuple(found), revised_from=None, is_final=True)
