"""Streams for frameworks, whose streams cannot withdraw text or calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..base.errors import ModelError

if TYPE_CHECKING:
    from ..fusion.answer import Event

__all__ = ["final_events"]


def final_events(events: Iterable[Event], *, one_call: bool = False, must_call: bool = False) -> Iterator[Event]:
    """The events with text that may still be withdrawn held back until it is final, so that no event is a revision.
    ``one_call``: without the calls of tools after the first. ``must_call``: the answer had to be a call.

    Events whose text is held back keep their place, with empty text: a cancelled consumer still stops before the next
    token.

    Raises:
        ModelError: for a ValueError or TypeError of a library below, which frameworks take for an unusable answer; or a
            call that had to be made was cut off.
    """
    try:
        for event in _final(events, one_call):
            answer = event.answer
            if must_call and answer and answer.finish_reason == "length" and not answer.tool_calls:
                raise ModelError(
                    f"the answer had to be a call of a tool, and was cut off after {len(answer.token_ids)} tokens, so "
                    "that its arguments are incomplete. Raise max_tokens."
                )
            yield event
    except (ValueError, TypeError) as error:
        raise ModelError(f"the model could not answer: {type(error).__name__}: {error}") from error


def _final(events: Iterable[Event], one_call: bool) -> Iterator[Event]:
    held, sent, called = "", 0, 0
    for event in events:
        if event.revised_from is not None:
            held = held[: event.revised_from - sent]
        held += event.text
        text = held if event.is_final else ""
        held = held[len(text) :]
        sent += len(text)
        event = replace(event, text=text, revised_from=None, is_final=True)
        if one_call:
            answer = event.answer and replace(event.answer, tool_calls=event.answer.tool_calls[:1])
            event = replace(event, tool_calls=event.tool_calls[: 1 - called], answer=answer)
            called += len(event.tool_calls)
        yield event
