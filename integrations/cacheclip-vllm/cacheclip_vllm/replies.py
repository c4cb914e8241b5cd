"""vLLM's responses on their way back: our statistics are added, and nothing else changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cacheclip_serve import as_json, server_sent

from cacheclip_rag import FusionStats
from cacheclip_rag.measuring import PHASES

from .parameters import EXACT, UNREADABLE
from .planners import Route

_END = b"data: [DONE]"
_UP_TO_FIRST = ("queue_time_ms", "time_to_first_token_ms")
"""vLLM's times up to the first token. The second one begins where the request is scheduled, when its KV was loaded."""
_TOO_LONG = ("maximum context length", "maximum model length")
"""What vLLM's errors of long prompts say; there are several, with no field in common."""
_NOT_USED = "vLLM did not use the plan; its log says why"
"""All that the token counts of a stream tell."""


@dataclass
class Result:
    """What is known of an answer, and the field ``cacheclip`` that says it."""

    way: Route
    record: Callable[[FusionStats, str, str | None], None]
    """Called once, with the statistics, the outcome and the reason for plain prefill."""
    shows_metrics: bool = False
    """Whether vLLM's ``metrics`` stay in the response."""
    began: float = field(default_factory=lambda: time.perf_counter())
    first: float | None = None
    """When the first bytes of a stream came."""
    outcome: str | None = None
    """What became of the plan, ``unknown`` if a stream had no token counts; None until the answer has ended."""
    reason: str | None = None
    """Why the answer was prefilled in full; None if it was not."""
    stats: FusionStats | None = None
    """The statistics; None until the answer has ended."""

    @property
    def may_be_damaged(self) -> bool:
        """Whether vLLM's workers may have failed to read the plan's chunks."""
        return self.reason in (UNREADABLE, _NOT_USED)

    def field_of(
        self, usage: Mapping[str, Any], told: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The field, from vLLM's token counts and times and the connector's outcome ``told``: None in streams, where
        vLLM does not hand it on, so that its token counts must tell."""
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        outcome, reason = self._outcome(cached, told, bool(usage))
        stats = self._stats(outcome, reason, usage, cached, told or {})
        elapsed = time.perf_counter() - self.began
        ttft_s = elapsed if self.first is None else self.first - self.began
        told_ms = [each for name in _UP_TO_FIRST if isinstance(each := (metrics or {}).get(name), int | float)]
        if self.first is None and len(told_ms) == len(_UP_TO_FIRST):
            ttft_s = min(elapsed, self.way.queued_s + self.way.planning_s + sum(told_ms) / 1000)
        in_vllm_s = max(0.0, ttft_s - self.way.queued_s - self.way.planning_s)
        read_s = min(float((told or {}).get("read_s") or 0.0), in_vllm_s)
        phases = {**stats.phases_s, "read": read_s, "recompute": in_vllm_s - read_s}
        stats = replace(stats, phases_s=phases, ttft_s=ttft_s, decode_s=elapsed - ttft_s, queued_s=self.way.queued_s)
        self.outcome, self.reason, self.stats = outcome, reason, stats
        self.record(stats, outcome, reason)
        own = {"outcome": outcome, "reason": reason, "planning_s": self.way.planning_s}
        return {**stats.to_dict(), **own}

    def _outcome(self, cached: int, told: Mapping[str, Any] | None, is_counted: bool) -> tuple[str, str | None]:
        planned = self.way.planned
        if planned is None or planned.fusion is None:
            is_exact = self.way.reason == EXACT and planned is not None and 2 * cached >= planned.stats.prompt_tokens
            return "exact" if is_exact else "plain", self.way.reason
        if told is not None:
            return str(told.get("outcome")), told.get("reason")
        ready = planned.fusion.num_ready
        if not is_counted:
            return "unknown", None
        if cached < ready:
            plain = planned.stats.prompt_tokens - cached
            is_exact = cached > planned.fusion.num_exact and plain < planned.fusion.num_rows
            return ("exact", EXACT) if is_exact else ("plain", _NOT_USED)
        # the connector loads up to there and no further; vLLM's own cache ends at a block's border behind it
        return ("cached" if cached > ready else "fused"), None

    def _stats(
        self, outcome: str, reason: str | None, usage: Mapping[str, Any], cached: int, told: Mapping[str, Any]
    ) -> FusionStats:
        planned = self.way.planned
        generated = int(usage.get("completion_tokens") or 0)
        if planned is not None and outcome not in ("plain", "exact"):
            return replace(planned.stats_of(told), generated_tokens=generated)
        known = _UNKNOWN if planned is None else planned.stats
        prompt = int(usage.get("prompt_tokens") or known.prompt_tokens)
        cached = min(cached, prompt)
        computed = (prompt - cached) / prompt if prompt else 1.0
        return replace(
            known,
            method="prefix" if cached else "full",
            fallback=reason,
            prompt_tokens=max(prompt, 1),
            prefix_tokens=cached,
            cached_prefix_tokens=cached,
            fresh_tokens=max(prompt - cached, 0 if cached else 1),
            chunk_tokens=0,
            exact_tokens=0,
            recomputed_tokens=0,
            partial_hits=0,
            partial_share=None,
            charged_ratio=computed,
            bypassed=outcome == "exact",
            generated_tokens=generated,
        )


_UNKNOWN = FusionStats(
    method="full",
    fallback=None,
    prompt_tokens=1,
    prefix_tokens=0,
    fresh_tokens=1,
    chunk_tokens=0,
    exact_tokens=0,
    recomputed_tokens=0,
    nominal_ratio=1.0,
    hits=0,
    misses=0,
    phases_s=dict.fromkeys(PHASES, 0.0),
    ttft_s=0.0,
)
"""Statistics of a prompt that was not planned."""


@dataclass
class WholeReply:
    """A response that is no stream."""

    result: Result

    def finish(self, body: bytes) -> bytes:
        """The body with our field. What is no JSON object stays as it is."""
        try:
            found = json.loads(body)
        except ValueError:
            return body
        usage = _usage_of(found)
        if usage is None:
            return body
        return as_json(_with_field(found, usage, self.result))


def _usage_of(found: Any) -> dict[str, Any] | None:
    """Token counts of a response in a chat's words; None if it is no answer."""
    if not isinstance(found, dict):
        return None
    usage = found.get("usage") or {}
    if "choices" in found:
        return dict(usage)
    if found.get("object") == "response":
        prompt, cached = usage.get("input_tokens"), (usage.get("input_tokens_details") or {}).get("cached_tokens")
    elif found.get("type") in ("message", "message_delta"):
        cached = usage.get("cache_read_input_tokens")
        prompt = sum(usage.get(name) or 0 for name in ("input_tokens", *_CACHED))
    else:
        return None
    if not usage:
        return {}
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": usage.get("output_tokens"), **details}


_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")


def _with_field(found: dict[str, Any], usage: Mapping[str, Any], result: Result) -> dict[str, Any]:
    """A whole answer with our field."""
    told, metrics = (found.get("kv_transfer_params") or {}).get("cacheclip"), found.get("metrics")
    hidden = ("kv_transfer_params",) if result.shows_metrics else ("kv_transfer_params", "metrics")
    shown = {name: None if name in hidden else value for name, value in found.items()}
    return {**shown, "cacheclip": result.field_of(usage, told, metrics)}


def with_code(body: bytes) -> bytes:
    """vLLM's error of status 400, with OpenAI's code if the prompt is too long for it. It may hold less than the model
    (``--max-model-len``), which planning does not know."""
    try:
        found = json.loads(body)
        is_too_long = any(words in found["error"]["message"] for words in _TOO_LONG)
    except (ValueError, KeyError, TypeError):
        return body
    if not is_too_long:
        return body
    found["error"]["code"] = "context_length_exceeded"
    return as_json(found)


@dataclass
class StreamReply:
    """A stream of events. Each goes on as soon as it is complete, but for the last one with text, which waits for
    vLLM's token counts behind it."""

    result: Result
    shows_usage: bool
    """Whether the client asked for token counts."""
    _rest: bytes = b""
    _held: dict[str, Any] | None = None
    _is_done: bool = False

    def feed(self, data: bytes) -> bytes:
        """What goes to the client now."""
        if self.result.first is None and data:
            self.result.first = time.perf_counter()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(map(self._read, events))

    def finish(self) -> bytes:
        """What is left when the stream ends."""
        rest, self._rest = self._rest, b""
        return self._let_go() + rest

    def _read(self, event: bytes) -> bytes:
        if event.startswith(_END):
            return self._let_go() + event + b"\n\n"
        chunk = _last_chunk(event)
        if chunk is None:
            return self._let_go_unchanged() + event + b"\n\n"
        if chunk["choices"]:
            before, self._held = self._let_go_unchanged(), chunk
            return before
        own = self._field(chunk)
        if not self.result.shows_metrics:
            chunk.pop("metrics", None)
        if self.shows_usage:
            return self._let_go_unchanged() + server_sent({**chunk, **own})
        held, self._held = self._held, None
        if held is None:
            return b""
        if chunk.get("system_fingerprint"):
            held["system_fingerprint"] = chunk["system_fingerprint"]
        return server_sent({**held, **own})

    def _field(self, chunk: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_done:
            return {}
        self._is_done = True
        return {"cacheclip": self.result.field_of(chunk.get("usage") or {}, None, chunk.get("metrics"))}

    def _let_go(self) -> bytes:
        """What was held back, with our field if no token counts came."""
        held, self._held = self._held, None
        return b"" if held is None else server_sent({**held, **self._field({})})

    def _let_go_unchanged(self) -> bytes:
        held, self._held = self._held, None
        return b"" if held is None else server_sent(held)


@dataclass
class EventsReply:
    """A stream of ``/v1/messages`` or ``/v1/responses``: events with a type, the last of which has token counts."""

    result: Result
    _rest: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """What goes to the client now."""
        if self.result.first is None and data:
            self.result.first = time.perf_counter()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._read(event) + b"\n\n" for event in events)

    def finish(self) -> bytes:
        """What is left when the stream ends."""
        return self._rest

    def _read(self, event: bytes) -> bytes:
        kind, _, text = event.partition(b"\ndata: ")
        if kind.removeprefix(b"event: ") not in _LAST or self.result.outcome is not None:
            return event
        try:
            chunk = json.loads(text)
            inside = chunk.get("response", chunk)
        except (ValueError, AttributeError):
            return event
        usage = _usage_of(inside)
        if usage is None:
            return event
        own = _with_field(inside, usage, self.result)
        return kind + b"\ndata: " + as_json({**chunk, "response": own} if "response" in chunk else own)


_LAST = (b"message_delta", b"response.completed", b"response.incomplete")


_TEXTS = {"text": "text", "text_delta": "text", "output_text": "text", "response.output_text.delta": "delta"}
"""Kinds of parts and events that have text of an answer, and under which name."""
_REASONING = {
    "thinking": "thinking",
    "thinking_delta": "thinking",
    "reasoning_text": "text",
    "response.reasoning_text.delta": "delta",
}
_CUT = ("length", "max_tokens", "incomplete")
"""Why answers ended that did not end by themselves."""


@dataclass
class ReplyText:
    """What a model said: in vLLM's response on any path, whole or a stream, of several choices in the first. Read while
    it passes: the text is kept, not the events."""

    text: str = ""
    """Without reasoning."""
    reasoning: str = ""
    end: str = ""
    """Why it ended, in the words of its path; empty until it has."""
    _rest: bytes = field(default=b"", compare=False, repr=False)

    @classmethod
    def of(cls, body: bytes | bytearray) -> ReplyText:
        """That of a response, or of the beginning of a stream. An event that is cut off is left out. Raises ValueError:
        it is neither."""
        reply = cls()
        reply.feed(bytes(body))
        reply.finish()
        return reply

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself, not at a number of tokens nor with calls. Of chats and completions."""
        return self.end == "stop"

    @property
    def finish_reason(self) -> str:
        return "length" if self.end in _CUT else "stop"

    def feed(self, data: bytes) -> None:
        """Read the next bytes. Raises ValueError: an event is no JSON."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            chunk = (b"\n" + event).partition(b"\ndata: ")[2]
            if chunk.startswith(b"{"):
                self._read(json.loads(chunk))

    def finish(self) -> None:
        """Read a response that is no stream, now that it is whole. Raises ValueError: it is no JSON."""
        rest, self._rest = self._rest, b""
        if rest.startswith(b"{"):
            self._read(json.loads(rest))

    def _read(self, said: dict[str, Any]) -> None:
        for choice in said.get("choices") or ():
            if not choice.get("index"):
                part = choice.get("message") or choice.get("delta") or choice
                self.reasoning += part.get("reasoning") or ""
                self.text += "".join(part.get(name) or "" for name in ("content", "text"))
                self.end = choice.get("finish_reason") or self.end
        delta, response = said.get("delta"), said.get("response") or {}
        parts = [said, delta] if isinstance(delta, dict) else [said]
        for end in (*(part.get("stop_reason") for part in parts), said.get("status"), response.get("status")):
            self.end = end or self.end
        parts += [part for each in (said, *(said.get("output") or ())) for part in each.get("content") or ()]
        for part in parts:
            kind = part.get("type", "")
            self.text += part.get(_TEXTS.get(kind, "")) or ""
            self.reasoning += part.get(_REASONING.get(kind, "")) or ""


def _last_chunk(event: bytes) -> dict[str, Any] | None:
    """The chunk of an event if it ends a choice or holds token counts; None for all others, which are not read."""
    ends = b'"finish_reason"' in event and b'"finish_reason":null' not in event
    if not event.startswith(b"data: ") or not (ends or b'"choices":[]' in event):
        return None
    try:
        chunk = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        return None
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
        return None
    is_last = not choices or any(each.get("finish_reason") is not None for each in choices)
    return chunk if is_last else None
