"""From a dataset record to the prompt for all methods, and to the metrics of its answers.

Source: LongBench's prompt for question answering on passages (instruction as system prompt, passages, question);
RULER's strings for needles. Departures: passages have no numbers, because a number before each passage would be text
without stored KV; RULER's answer prefix opens the assistant's turn; Chinese questions (``multifieldqa_zh``) use the
English instruction, where LongBench has a Chinese one. A record's ``meta`` may change the form: ``opening`` and
``closing`` (text before and after the passages), ``answer_prefix``, ``metric``, ``max_tokens``, ``chat_template``
(False: plain text that the model continues; no chunk is exact, because it does not begin with the shared prefix) and
``first_line`` (True: only the first line of an answer counts, because models continue with invented examples).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheclip_rag import CacheClipEngine, ConfigurationError, Fresh, Segment
from cacheclip_rag.measuring import segment_text
from cacheclip_rag.runtime import Message

from .records import Record
from .scores import check_metric

INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
"""System prompt for question answering, in every chunk's shared prefix."""
_ANSWER_TOKENS = {"f1_zh": 64}
_DEFAULT_ANSWER_TOKENS = 32
_ALWAYS = ("em", "contains")
_LONGBENCH_METRICS = {"qa_f1": "f1", "qa_f1_zh": "f1_zh"}
"""Names of metrics that differ here."""


@dataclass(frozen=True, slots=True)
class QuestionPrompt:
    """One record as a prompt."""

    record: Record
    segments: list[Segment]
    chunks: list[str]
    """Texts to precompute."""
    max_tokens: int
    """Longest answer."""
    metrics: tuple[str, ...]
    """Names, the dataset's own first."""
    first_line: bool = False
    """Whether only the first line of an answer counts."""

    def judged(self, answer: str) -> str:
        """The part of an answer that is scored."""
        return answer.lstrip("\n").partition("\n")[0] if self.first_line else answer


def ask(engine: CacheClipEngine, record: Record, *, date: str | None = None) -> QuestionPrompt:
    """The prompt of a record for an engine's model.

    Args:
        date: for chat templates that state the date; default today.

    Raises:
        ConfigurationError: the record's ``meta`` holds an unknown or invalid setting.
    """
    meta = record.meta
    metric = _setting(meta, "metric", "") or ("f1_zh" if _is_chinese(record.question) else "f1")
    metric = _LONGBENCH_METRICS.get(metric, metric)
    check_metric(metric)
    max_tokens = meta.get("max_tokens")
    if max_tokens is None:
        max_tokens = _ANSWER_TOKENS.get(metric, _DEFAULT_ANSWER_TOKENS)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ConfigurationError(f"max_tokens must be a whole number from 1, got {max_tokens!r}.")
    chunks = [passage.as_read.strip() for passage in record.chunks]
    if not all(chunks):
        raise ConfigurationError(f"every chunk must hold text, and number {chunks.index('') + 1} holds none.")
    segments = _segments(engine, record, chunks, date)
    return QuestionPrompt(record, segments, chunks, max_tokens, (metric, *_ALWAYS), _setting(meta, "first_line", False))


def _segments(engine: CacheClipEngine, record: Record, chunks: Sequence[str], date: str | None) -> list[Segment]:
    meta = record.meta
    opening = _setting(meta, "opening", "")
    closing = _setting(meta, "closing", f"\n\nQuestion: {record.question}\nAnswer:")
    prompt = opening + "\n\n".join(chunks) + closing
    if _setting(meta, "chat_template", True):
        messages: list[Message] = [{"role": "user", "content": prompt}]
        segments = engine.segment(messages, chunks, date=date)
    else:
        instruction = engine.config.system_prompt
        before = "" if opening or not instruction else f"{instruction}\n\n"
        text = segment_text(before + prompt, engine.texts.index, chunks)
        segments = [segment for segment in (Fresh(engine.primary.opening, control=True), *text) if segment.text]
    return [*segments, *([Fresh(prefix)] if (prefix := _setting(meta, "answer_prefix", "")) else [])]


def _setting(meta: Mapping[str, Any], key: str, default: Any) -> Any:
    """A setting of a record's ``meta``, of the default's type."""
    value = meta.get(key)
    if value is None:
        return default
    if not isinstance(value, type(default)):
        expected = "true or false" if isinstance(default, bool) else "text"
        raise ConfigurationError(f"{key} must be {expected}, got {value!r}.")
    return value


def _is_chinese(text: str) -> bool:
    return any("\u4e00" <= letter <= "\u9fff" for letter in text)
