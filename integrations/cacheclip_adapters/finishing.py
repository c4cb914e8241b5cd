"""Streams for frameworks, whose streams cannot withdraw text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheclip_rag.types import Event

__all__ = ["final_events"]


def final_events(events: Iterable[Event]) -> Iterator[Event]:
    """The events with text that may still be withdrawn held back until it is final, so that no event is a revision.

    Events whose text is held back keep their place, with empty text: a cancelled consumer still stops before the next
    token.
    """
    held, sent = "", 0
    for event in events:
        if event.revised_from is not None:
            held = held[: event.revised_from - sent]
        held += event.text
        text = held if event.is_final else ""
        held = held[len(text) :]
        sent += len(text)
        yield replace(event, text=text, revised_from=None, is_final=True)
