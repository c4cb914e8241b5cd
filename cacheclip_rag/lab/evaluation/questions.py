"""From a record of a dataset to the prompt that every method is given, and to the metrics that judge its answers.

Source: LongBench's prompt for question answering on passages (its instruction as system prompt, the passages, the
question), its few-shot tasks (no chat template, and only the first line of an answer counts), and RULER's for needles
(its strings to the letter). Departures: passages carry no numbers, since a number before each would be text that no
cache holds; the answer's beginning of RULER opens the assistant's turn; Chinese questions (``multifieldqa_zh``) are
asked in the same English words, where LongBench has Chinese ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...engine import CacheClipEngine
from ...errors import ConfigurationError
from ...prompt.segments import Fresh, Segment, segment_text
from ...types import Message
from .records import Record
from .scores import check_metric

__all__ = ["FORMS", "INSTRUCTION", "AskedQuestion", "TaskForm", "ask"]

INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
"""System prompt for question answering, in every chunk's shared prefix."""
_ANSWER_TOKENS = {"f1_zh": 64, "rouge_l": 128}
_DEFAULT_ANSWER_TOKENS = 32
_ALWAYS = ("em", "contains")
_LONGBENCH_METRICS = {"qa_f1": "f1", "qa_f1_zh": "f1_zh", "rouge": "rouge_l"}
"""Names that are others here."""


@dataclass(frozen=True, slots=True)
class TaskForm:
    """How the records of a task are asked and scored, where their ``meta`` does not say otherwise under these names."""

    opening: str = ""
    """Text before the passages."""
    closing: str = "\n\nQuestion: {question}\nAnswer:"
    """Text after them."""
    metric: str = ""
    """Empty: F1, for Chinese questions over Chinese words."""
    max_tokens: int | None = None
    """Longest answer; None: the metric's usual one."""
    chat_template: bool = True
    """False: the prompt is text that the model goes on with. It opens otherwise than the chunks' shared prefix, so that
    not even its first chunk is exact."""
    first_line: bool = False
    """True: only the first line of an answer counts, since models go on with an example of their own."""


_QUESTION = TaskForm()
_FEW_SHOT = TaskForm(closing="\n\n{question}", chat_template=False, first_line=True)
FORMS: dict[str, TaskForm] = {
    "multifieldqa_en": TaskForm(max_tokens=64),
    "multi_news": TaskForm(metric="rouge_l", max_tokens=512),
    "samsum": replace(
        _FEW_SHOT,
        opening="Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
        metric="rouge_l",
    ),
    "triviaqa": replace(
        _FEW_SHOT,
        opening="Answer the question based on the given passage. Only give me the answer and do not output any other "
        "words. The following are some examples.\n\n",
    ),
    "trec": replace(
        _FEW_SHOT,
        opening="Please determine the type of the question below. Here are some examples of questions.\n\n",
        max_tokens=64,
    ),
    "lsht": replace(_FEW_SHOT, opening="请判断给定新闻的类别，下面是一些例子。\n\n", max_tokens=64),
    "lcc": TaskForm(chat_template=False, max_tokens=64),
    "repobench-p": TaskForm(chat_template=False, max_tokens=64),
}
"""Tasks of LongBench that are not asked and scored as questions are."""


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
    first_line: bool = False
    """Whether only the first line of an answer counts."""

    def judged(self, answer: str) -> str:
        """The part of an answer that counts."""
        return answer.lstrip("\n").partition("\n")[0] if self.first_line else answer


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
    meta, form = record.meta, FORMS.get(record.task, _QUESTION)
    metric = _setting(meta, "metric", form.metric) or ("f1_zh" if _is_chinese(record.question) else "f1")
    metric = _LONGBENCH_METRICS.get(metric, metric)
    chosen = tuple(metrics) or (metric, *_ALWAYS)
    for name in chosen:
        check_metric(name)
    max_tokens = meta.get("max_tokens")
    if max_tokens is None:
        max_tokens = form.max_tokens or _ANSWER_TOKENS.get(metric, _DEFAULT_ANSWER_TOKENS)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ConfigurationError(f"max_tokens must be a whole number from 1, got {max_tokens!r}.")
    chunks = [passage.as_read.strip() for passage in record.chunks]
    if not all(chunks):
        raise ConfigurationError(f"every chunk must hold text, and number {chunks.index('') + 1} holds none.")
    segments = _segments(engine, record, form, chunks, date)
    return AskedQuestion(record, segments, chunks, max_tokens, chosen, _setting(meta, "first_line", form.first_line))


def _segments(
    engine: CacheClipEngine, record: Record, form: TaskForm, chunks: Sequence[str], date: str | None
) -> list[Segment]:
    meta = record.meta
    opening = _setting(meta, "opening", form.opening)
    closing = _setting(meta, "closing", form.closing.format(question=record.question))
    prompt = opening + "\n\n".join(chunks) + closing
    if _setting(meta, "chat_template", form.chat_template):
        messages: list[Message] = [{"role": "user", "content": prompt}]
        segments = engine.segment(messages, chunks, date=date)
    else:
        instruction = engine.config.system_prompt
        before = "" if opening or not instruction else f"{instruction}\n\n"
        text = segment_text(before + prompt, engine.library.index, chunks)
        segments = [segment for segment in (Fresh(engine.primary.opening, control=True), *text) if segment.text]
    return [*segments, *([Fresh(prefix)] if (prefix := _setting(meta, "answer_prefix", "")) else [])]


def _setting(meta: Mapping[str, Any], key: str, default: Any) -> Any:
    """What a record's ``meta`` says, true or false or text as the default is."""
    value = meta.get(key)
    if value is None:
        return default
    if not isinstance(value, type(default)):
        expected = "true or false" if isinstance(default, bool) else "text"
        raise ConfigurationError(f"{key} must be {expected}, got {value!r}.")
    return value


def _is_chinese(text: str) -> bool:
    return any("\u4e00" <= letter <= "\u9fff" for letter in text)
