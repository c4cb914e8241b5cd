"""What goes back: answers as OpenAI's objects, whole or as chunks of a stream, with our statistics in ``cacheclip``."""

from __future__ import annotations

import json
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any

from cacheclip_rag import Answer, Event, TokenLogprob
from cacheclip_rag.adapters import token_usage

from .errors import RequestError, error_body


def as_json(value: Any) -> bytes:
    """A value as JSON. Halves of characters become question marks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def server_sent(value: Any, name: str | None = None) -> bytes:
    """A value as one event of a stream."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + as_json(value) + b"\n\n"


@dataclass
class Reply:
    """Answers on their way, one if it is a stream. Kinds differ in the form of responses."""

    model: str
    """Served name."""
    include_usage: bool = False
    """Whether a stream ends with a chunk of token counts, if the API leaves it to the client."""
    each: int = 1
    """Answers to each prompt."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Body of the request, parts of which some replies repeat."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    prefix = ""
    """Of ids."""
    ended = b"data: [DONE]\n\n"
    """What a stream ends with."""

    def __post_init__(self) -> None:
        self.id = self.id or self.prefix + uuid.uuid4().hex

    @staticmethod
    def sent(chunk: Any) -> bytes:
        """A chunk of a stream as it is sent."""
        return server_sent(chunk)

    @staticmethod
    def refused(error: RequestError) -> dict[str, Any]:
        """The body of a response that is an error."""
        return error_body(error)

    def broken_off(self, error: RequestError) -> dict[str, Any]:
        """The last chunk of a stream that ends with an error."""
        return self.refused(error)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a response that is no stream."""
        raise NotImplementedError

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first text."""
        return iter(())

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """Chunks for an event; after the last event, also those that end the stream."""
        raise NotImplementedError

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Token counts of them all. A prompt counts once, however many answers it has."""
        usages = list(map(token_usage, answers))
        prompt = sum(each["prompt_tokens"] for each in usages[:: self.each])
        completion = sum(each["completion_tokens"] for each in usages)
        cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages[:: self.each])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class ChoicesReply(Reply):
    """Answers as choices. Kinds differ in the names of objects and in the form of a choice."""

    whole_kind = chunk_kind = ""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        # several answers have their statistics each in its choice
        is_one = len(answers) == 1
        choices = [
            {
                **{"index": index, **self._said(answer), **self._logprobs(answer), "finish_reason": _reason(answer)},
                **({} if is_one else statistics(answer)),
            }
            for index, answer in enumerate(answers)
        ]
        own = statistics(answers[0]) if is_one else {}
        return {**self._head(self.whole_kind), "choices": choices, "usage": self._usage(answers), **own}

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        for delta in self._deltas(event):
            yield self._chunk(delta, None)
        answer = event.answer
        if answer is None:
            return
        last = self._chunk({**self._delta(""), **self._logprobs(answer)}, _reason(answer))  # of all tokens
        if not self.include_usage:
            yield {**last, **statistics(answer)}
            return
        yield last
        yield {**self._head(self.chunk_kind), "choices": [], "usage": token_usage(answer), **statistics(answer)}

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": None, **delta, "finish_reason": reason}
        return {**self._head(self.chunk_kind), "choices": [choice], **({"usage": None} if self.include_usage else {})}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _deltas(self, event: Event) -> Iterator[dict[str, Any]]:
        if event.text:
            yield self._delta(event.text)

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        return {"logprobs": None if answer.logprobs is None else self._tokens(answer.logprobs)}

    def _said(self, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def _tokens(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class ChatReply(ChoicesReply):
    """An answer of ``/v1/chat/completions``."""

    _calls = 0
    prefix, whole_kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self) -> Iterator[dict[str, Any]]:
        yield self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def _said(self, answer: Answer) -> dict[str, Any]:
        calls = [call.to_dict() for call in answer.tool_calls]
        content = answer.text if answer.text or not calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        return {"message": {**message, **({"tool_calls": calls} if calls else {})}}

    def _tokens(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": chat_logprobs(found), "refusal": None}

    def _deltas(self, event: Event) -> Iterator[dict[str, Any]]:
        if event.reasoning:
            yield {"delta": {"reasoning_content": event.reasoning}}
        yield from super()._deltas(event)
        for call in event.tool_calls:
            yield {"delta": {"tool_calls": [{"index": self._calls, **call.to_dict()}]}}
            self._calls += 1

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


class CompletionReply(ChoicesReply):
    """An answer of ``/v1/completions``."""

    prefix, whole_kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def _said(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text}

    def _tokens(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        reader = getincrementaldecoder("utf-8")("replace")  # a character begins where its first part stands
        lengths = [len(each.token if each.encoded is None else reader.decode(each.encoded)) for each in found]
        return {
            "tokens": [_spelt(each.token, each.encoded) for each in found],
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [*map(_by_spelling, found)],
            "text_offset": [*accumulate(lengths, initial=0)][:-1],
        }

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}


def chat_logprobs(found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens of an answer to a chat, each with the likeliest ones at its place."""
    return [
        {
            **_token(each.token, each.logprob, each.encoded),
            "top_logprobs": [_token(*pair, own) for pair, own in _likeliest(each)],
        }
        for each in found
    ]


def _token(text: str, logprob: float, encoded: bytes | None) -> dict[str, Any]:
    """A token of a chat."""
    return {"token": text, "logprob": logprob, "bytes": None if encoded is None else list(encoded)}


def _likeliest(found: TokenLogprob) -> Iterator[tuple[tuple[str, float], bytes | None]]:
    return zip(found.likeliest, found.likeliest_encoded or repeat(None), strict=False)


def _spelt(text: str, encoded: bytes | None) -> str:
    """A token of a completion, in which a text is all that there is: parts of characters as OpenAI writes them."""
    return text if encoded is None or "\ufffd" not in text else _bytes_as_text(encoded)


def _bytes_as_text(encoded: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded)


def _by_spelling(found: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens of a completion. Of two with the same text, the less likely has its bytes as name."""
    named: dict[str, float] = {}
    for (text, logprob), encoded in _likeliest(found):
        name = _spelt(text, encoded)
        named.setdefault(name if name not in named or encoded is None else _bytes_as_text(encoded), logprob)
    return named


def _reason(answer: Answer) -> str:
    return "tool_calls" if answer.tool_calls else answer.finish_reason


def statistics(answer: Answer) -> dict[str, Any]:
    """The field ``cacheclip`` of a response: the answer's :class:`~cacheclip_rag.fusion.answer.FusionStats`, and its
    trace if the request asked for it, without stored texts, of which the prompt may have a part, and without their
    sources, which may be paths."""
    if answer.trace is None:
        return {"cacheclip": answer.stats.to_dict()}
    trace = answer.trace.to_dict()
    hidden = ("text", "sources")
    trace["texts"] = [{name: value for name, value in each.items() if name not in hidden} for each in trace["texts"]]
    return {"cacheclip": {**answer.stats.to_dict(), "trace": trace}}
