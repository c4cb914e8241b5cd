"""From a record of a dataset to the prompt that every method is given, and to the metrics that judge its answers.

Source: LongBench's prompt for question answering on passages (its instruction as system prompt, the passages, the
question), and RULER's for needles (its strings to the letter). Departures: passages carry no numbers, since a number
before each would be text that no cache holds; the answer's beginning of RULER opens the assistant's turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import CacheClipEngine
from ..errors import ConfigurationError
from ..prompt import Fresh, Message, Segment
from .records import Record
from .scores import check_metric

__all__ = ["INSTRUCTION", "AskedQuestion", "ask"]

INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
"""System prompt for question answering, in every chunk's shared prefix."""
_ANSWER_TOKENS = {"f1_zh": 64, "rouge_l": 128}
_DEFAULT_ANSWER_TOKENS = 32
_ALWAYS = ("em", "contains")


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """One record as a prompt."""

    record: Record
    segments: list[Segment]
    chunks: list[str]
    """Texts to precompute."""
    max_tokens: int
    """Longest answer."""
    metrics: tuple[str, ...]
    """Names, the dataset's own first."""


def ask(
    engine: CacheClipEngine, record: Record, metrics: Sequence[str] = (), *, date: str | None = None
) -> AskedQuestion:
    """The prompt of a record for an engine's model.

    Args:
        metrics: instead of those that the record or its task name.
        date: what a chat template that states the date writes, default today's.

    Raises:
        ConfigurationError: the record's ``meta`` asks for what there is not.
    """
    meta = record.meta
    chunks = [passage.as_read.strip() for passage in record.chunks]
    opening = _text(meta, "opening", "")
    closing = _text(meta, "closing", f"\n\nQuestion: {record.question}\nAnswer:")
    passages = "\n\n".join(chunks)
    messages: list[Message] = [{"role": "user", "content": f"{opening}{passages}{closing}"}]
    segments = engine.segment(messages, chunks, date=date)
    if prefix := _text(meta, "answer_prefix", ""):
        segments = [*segments, Fresh(prefix)]
    own = _text(meta, "metric", "") or ("f1_zh" if _is_chinese(record.question) else "f1")
    own = {"qa_f1": "f1", "qa_f1_zh": "f1_zh"}.get(own, own)
    chosen = tuple(metrics) or (own, *_ALWAYS)
    for name in chosen:
        check_metric(name)
    max_tokens = meta.get("max_tokens")
    if max_tokens is None:
        max_tokens = _ANSWER_TOKENS.get(own, _DEFAULT_ANSWER_TOKENS)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ConfigurationError(f"max_tokens must be a whole number from 1, got {max_tokens!r}.")
    return AskedQuestion(record, segments, chunks, max_tokens, chosen)


def _text(meta: Mapping[str, Any], key: str, default: str) -> str:
    value = meta.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ConfigurationError(f"{key} must be text, got {value!r}.")
    return value


def _is_chinese(text: str) -> bool:
    return any("\u4e00" <= letter <= "\u9fff" for letter in text)
