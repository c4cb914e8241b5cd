"""Streams for frameworks, whose streams cannot withdraw text or calls, and token counts under the names that frameworks
and OpenTelemetry use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..base.errors import ModelError
from ..fusion.answer import Answer, Event


def final_events(events: Iterable[Event], *, one_call: bool = False, must_end: bool = False) -> Iterator[Event]:
    """The events with text that may still be withdrawn held back until it is final, so that no event is a revision.
    Text that turns out to be reasoning stays where it went; the last event's answer is without it. ``one_call``:
    without the calls of tools after the first. ``must_end``: the answer had to be JSON or a call, of which a part is of
    no use.

    Events whose text is held back keep their place, with empty text: a cancelled consumer still stops before the next
    token.

    Raises:
        ModelError: for a ValueError or TypeError of a library below, which frameworks take for an unusable answer; or a
            call or JSON that had to be written was cut off.
    """
    try:
        for event in _final(events, one_call):
            answer = event.answer
            if must_end and answer and answer.finish_reason == "length" and _is_part(answer):
                raise ModelError(
                    f"the answer had to be JSON or a call of a tool, and was cut off after {len(answer.token_ids)} "
                    "tokens. Raise max_tokens."
                )
            yield event
    except (ValueError, TypeError) as error:
        raise ModelError(f"the model could not answer: {type(error).__name__}: {error}") from error


def _is_part(answer: Answer) -> bool:
    try:
        return not answer.tool_calls and not json.loads(answer.text)
    except ValueError:
        return True


def _final(events: Iterable[Event], one_call: bool) -> Iterator[Event]:
    held, sent, called = "", 0, 0
    for event in events:
        revised_from, lead = event.revised_from, ""
        if revised_from is not None and revised_from < sent:  # it was reasoning, which nothing had opened
            held, sent, lead = "", 0, "\n\n"
        elif revised_from is not None:
            held = held[: revised_from - sent]
        held += event.text
        text = held if event.is_final else ""
        held = held[len(text) :]
        sent += len(text)
        event = replace(event, text=lead + text, revised_from=None, is_final=True)
        if one_call:
            answer = event.answer and replace(event.answer, tool_calls=event.answer.tool_calls[:1])
            event = replace(event, tool_calls=event.tool_calls[: 1 - called], answer=answer)
            called += len(event.tool_calls)
        yield event


def token_usage(answer: Answer) -> dict[str, Any]:
    """Token counts under OpenAI's names. ``prompt_tokens_details["cached_tokens"]`` counts tokens whose KV was
    reused."""
    prompt, completion = answer.stats.prompt_tokens, len(answer.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.stats.reused_tokens},
    }


def telemetry(answer: Answer) -> dict[str, int]:
    """Token counts under the names of OpenTelemetry's semantic conventions for generative AI."""
    return {
        "gen_ai.usage.input_tokens": answer.stats.prompt_tokens,
        "gen_ai.usage.output_tokens": len(answer.token_ids),
        "gen_ai.usage.cache_read.input_tokens": answer.stats.reused_tokens,
    }
