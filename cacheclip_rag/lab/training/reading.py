"""Prompts from which a chunk context is learned: chunks in any order, and several questions about them.

They come from synthetic samples, from records with answers, and from documents. What is asked matters less than that
the questions differ: the teacher is the model's own full prefill, and a right answer is only the text along which both
are compared.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ConfigurationError
from ...ingest.documents import find_files, read_document
from ...runtime.base import Runtime
from ...selection.sentences import sentence_spans
from ..evaluation.records import Record, read_records
from .families import Split, synthetic_samples
from .given import passages_of, told_apart

__all__ = ["Reading", "Readings"]

_MAX_CHUNKS = 8
_HELD_OUT = 10
"""One in so many passages is held out."""
_TRIES = 300
"""Drafts of one prompt. Texts that leave no room for two chunks fail."""
_ABOUT = (
    'What does the text that begins with "{opening}" say next?',
    'Repeat one fact from the text that begins with "{opening}".',
    'What is the text that begins with "{opening}" about?',
    'Continue: "{opening}"',
)
_OPEN = ("What are these texts about?", "Summarize the texts in one sentence.", "What does the last text say?")


@dataclass(frozen=True, slots=True)
class Reading:
    """Chunks, and questions about them."""

    chunks: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    """Each question with a text that answers it."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A record's question, its right answers and its chunks; a chunk that holds an answer comes first, if any does."""

    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]

    @classmethod
    def of(cls, record: Record) -> _Asked:
        chunks = [chunk.as_read.strip() for chunk in record.chunks]
        chunks.sort(key=lambda chunk: not any(answer.lower() in chunk.lower() for answer in record.answers))
        return cls(record.question, record.answers, tuple(chunks))


class Readings:
    """An endless supply of prompts; number ``n`` is always the same."""

    def __init__(
        self,
        runtime: Runtime,
        data: Sequence[str | Path] = (),
        *,
        seed: int = 0,
        context_tokens: int = 450,
        num_questions: int = 3,
        held_out: bool = False,
    ) -> None:
        """
        Args:
            runtime: counts the tokens.
            data: records (``.jsonl``, ``.jsonl.gz``) and documents; none: synthetic texts only.
            context_tokens: most tokens of a prompt's chunks.
            num_questions: most questions of a prompt.
            held_out: False: the texts to learn from; True: those to judge by, about every tenth passage and synthetic
                texts of the families for tests. The digest of a passage decides, so that the same text in two records
                or files is never in both parts. A record goes with the passage that holds its answer.

        Raises:
            ConfigurationError: the files hold no text to learn from.
            DocumentError: a document cannot be read.
        """
        self._runtime, self._seed = runtime, seed
        self._context_tokens, self._num_questions = context_tokens, num_questions
        self._held_out = held_out
        datasets, documents = told_apart(data)
        records = [_Asked.of(record) for path in datasets for record in read_records(path).records]
        self._records = [
            replace(record, chunks=tuple(filter(self._is_own, record.chunks)))
            for record in records
            if self._is_own(record.chunks[0])
        ]
        texts = ((path, read_document(path)) for path in find_files(documents))
        passages = [*passages_of(runtime.tokenizer, texts), *(c for each in records for c in each.chunks)]
        self._passages = [text for text in dict.fromkeys(passages) if self._is_own(text) and self._fits(text)]
        if data and not self._passages and not held_out:
            raise ConfigurationError(
                f"expected text to learn from in {', '.join(map(str, data))}, found no passage of at most "
                f"{context_tokens // 2} tokens. Give other data, or none."
            )

    def __getitem__(self, number: int) -> Reading:
        rng = random.Random(f"{self._seed}/{number}")
        for _ in range(_TRIES):
            kind = rng.random()
            if self._records and kind < 0.5:
                chunks, questions = self._of_record(rng)
            elif self._passages and kind < 0.75:
                chunks, questions = rng.sample(self._passages, min(_MAX_CHUNKS, len(self._passages))), []
            else:
                chunks, questions = self._synthetic(rng)
            found = self._cut(rng, chunks, questions)
            if found is not None:
                return found
        raise ConfigurationError(
            f"no prompt with two chunks fits {self._context_tokens} tokens of model {self._runtime.name!r}. Give data "
            "with shorter passages, or train a model with a longer context."
        )

    @property
    def sha256(self) -> str:
        """Digest of all texts, for the identity of a training."""
        found = hashlib.sha256()
        for text in (*self._passages, *(str(record) for record in self._records)):
            found.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))
        return found.hexdigest()

    def _is_own(self, text: str) -> bool:
        """Whether a passage belongs to this part."""
        number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
        return (number % _HELD_OUT == 0) is self._held_out

    def _fits(self, text: str) -> bool:
        return len(text.split()) >= 20 and len(self._runtime.tokenize(text)) <= self._context_tokens // 2

    def _of_record(self, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
        """The chunks with the answer first, so that they are not cut off."""
        record = rng.choice(self._records)
        answer = rng.choice(record.answers)
        chunks = list(record.chunks)
        rng.shuffle(chunks)
        chunks.sort(key=lambda chunk: answer.lower() not in chunk.lower())
        if rng.random() < 0.3 or len(chunks) < 2:
            chunks = chunks[:3] + rng.sample(self._passages, min(5, len(self._passages)))
        return chunks, [(record.question, answer)]

    def _synthetic(self, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
        seed, count = rng.randrange(1 << 30), rng.randint(1, 2)
        num_chunks, chunk_words = rng.randint(2, 4), rng.randint(20, max(90, self._context_tokens // 6))
        split: Split = "test" if self._held_out else "train"
        samples = synthetic_samples(split, 12, seed=seed, num_chunks=num_chunks, chunk_words=chunk_words)
        picked = rng.sample(samples, count)
        chunks = [chunk for sample in picked for chunk in sample.chunks]
        if self._passages and rng.random() < 0.5:
            chunks += rng.sample(self._passages, min(2, len(self._passages)))
        return chunks, [(sample.question, sample.answer) for sample in picked]

    def _cut(self, rng: random.Random, chunks: list[str], questions: list[tuple[str, str]]) -> Reading | None:
        """A prompt of the first chunks that have room, in random order, with questions added."""
        kept: list[str] = []
        used, most = 0, rng.randint(2, _MAX_CHUNKS)
        for chunk in dict.fromkeys(chunks):
            count = len(self._runtime.tokenize(chunk))
            if count and used + count <= self._context_tokens and len(kept) < most:
                kept.append(chunk)
                used += count
        if len(kept) < 2:
            return None
        rng.shuffle(kept)
        questions = list(questions)
        if rng.random() < 0.1:
            questions.append((rng.choice(_OPEN), kept[-1]))
        while len(questions) < self._num_questions:
            questions.append(_about(rng, rng.choice(kept)))
        return Reading(tuple(kept), tuple(questions[: self._num_questions]))


def _about(rng: random.Random, chunk: str) -> tuple[str, str]:
    """A question about a chunk, and one of its first sentences."""
    sentences = [chunk[start:end] for start, end in sentence_spans(chunk)] or [chunk]
    number = rng.randrange(min(3, len(sentences)))
    words = sentences[number].split()
    opening = " ".join(words[: rng.randint(2, 6)])
    rest = " ".join(words[len(opening.split()) :]) or sentences[(number + 1) % len(sentences)]
    return rng.choice(_ABOUT).format(opening=opening), rest
