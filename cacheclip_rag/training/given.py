"""Samples from data of one's own: datasets with answers, or documents that the primary is asked to question."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..engine import CacheClipEngine
from ..errors import ConfigurationError
from ..evaluation.records import Record, read_records
from ..ingest.documents import MARKDOWN_SUFFIXES, find_files, read_document
from ..ingest.splitting import Splitter
from ..progress import progress_bar
from ..sampling import SamplingParams
from .families import Sample, Span

__all__ = ["given_samples", "sample_of_record", "samples_of_documents"]

logger = logging.getLogger(__name__)

_PASSAGE_TOKENS = 128
_MIN_SENTENCE_WORDS = 6
_QUESTION_TOKENS = 40
_ASK = "Read this sentence:\n\n{sentence}\n\nWrite one short question that this sentence answers, and nothing else."
_SENTENCE = re.compile(r"[^\s].*?(?:[.!?]+[\"'”’)\]]*(?=\s)|[。！？]|$)", re.DOTALL)


def given_samples(
    engine: CacheClipEngine, paths: Sequence[str | Path], *, limit: int = 40, num_chunks: int = 4, seed: int = 0
) -> list[Sample]:
    """At most ``limit`` samples from files: records (``.jsonl``, ``.jsonl.gz``) whose answers stand in their chunks,
    and text, from which the primary makes questions.

    Raises:
        ConfigurationError: nothing in the files says where an answer comes from.
        DocumentError: a file that cannot be read.
    """
    datasets = [Path(path) for path in paths if str(path).endswith((".jsonl", ".jsonl.gz"))]
    documents = [path for path in paths if not str(path).endswith((".jsonl", ".jsonl.gz"))]
    found: list[Sample] = []
    for path in datasets:
        for record in read_records(path).records:
            if len(found) == limit:
                break
            sample = sample_of_record(record)
            if sample is not None:
                found.append(sample)
    if documents and len(found) < limit:
        texts = [(path, read_document(path)) for path in find_files(documents)]
        found += samples_of_documents(engine, texts, limit=limit - len(found), num_chunks=num_chunks, seed=seed)
    if not found:
        raise ConfigurationError(
            f"no evidence in {', '.join(map(str, paths))}: a record's answer must stand in one of its chunks word for "
            "word, and a document must have at least two passages with whole sentences. Give other data, or none."
        )
    return found


def sample_of_record(record: Record) -> Sample | None:
    """A record whose evidence is every sentence that holds one of its answers; None where none does.

    ``yes`` and ``no`` are in no text what they are as answers, and a single letter is in all.
    """
    chunks = tuple(passage.as_read.strip() for passage in record.chunks)
    answers = [answer for answer in record.answers if len(answer) > 1 and answer.lower() not in ("yes", "no")]
    evidence: list[Span] = []
    values: list[Span] = []
    for number, chunk in enumerate(chunks):
        for sentence in _sentences(chunk):
            inside = [
                (sentence.start() + found.start(), sentence.start() + found.end())
                for answer in answers
                for found in re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", sentence.group(), re.IGNORECASE)
            ]
            if inside:
                evidence.append((number, sentence.start(), sentence.end()))
                values += [(number, *span) for span in inside]
    if len(chunks) < 2 or not evidence:
        return None
    return Sample(record.task, chunks, record.question, answers[0], tuple(evidence), tuple(values))


def _sentences(text: str) -> Iterator[re.Match[str]]:
    return (found for found in _SENTENCE.finditer(text) if found.group())


def samples_of_documents(
    engine: CacheClipEngine,
    documents: Sequence[tuple[Path, str]],
    *,
    limit: int = 40,
    num_chunks: int = 4,
    seed: int = 0,
) -> list[Sample]:
    """Questions about sentences of documents, made by the engine's primary; the other chunks are passages from
    anywhere."""
    splitter = Splitter(engine.primary.tokenizer, _PASSAGE_TOKENS)
    passages = [
        passage
        for path, text in documents
        for passage in splitter.split(text, markdown=path.suffix.lower() in MARKDOWN_SUFFIXES)
    ]
    passages = list(dict.fromkeys(passages))
    rng = random.Random(seed)
    candidates = [
        (number, sentence.start(), sentence.end())
        for number, passage in enumerate(passages)
        for sentence in _sentences(passage)
        if len(sentence.group().split()) >= _MIN_SENTENCE_WORDS and sentence.group()[-1] in ".!?\"'”’)。！？"
    ]
    if len(passages) < 2:
        return []
    found: list[Sample] = []
    picked = rng.sample(candidates, min(limit, len(candidates)))
    with progress_bar("making questions", len(picked), "questions") as advance, torch.inference_mode():
        for done, (number, start, end) in enumerate(picked, 1):
            sentence = passages[number][start:end]
            messages = [{"role": "user", "content": _ASK.format(sentence=sentence)}]
            params = SamplingParams(max_tokens=_QUESTION_TOKENS)
            answer = engine.generate(messages, params, method="full").text.strip()
            question = answer.splitlines()[0].strip() if answer else ""
            advance(done)
            if not question.endswith(("?", "？")) or question in sentence:
                logger.info("no question came of %r: %r", sentence, answer)
                continue
            others = [n for n in range(len(passages)) if n != number]
            order = [number, *rng.sample(others, min(num_chunks - 1, len(others)))]
            rng.shuffle(order)
            span = (order.index(number), start, end)
            chunks = tuple(passages[n] for n in order)
            found.append(Sample("document", chunks, question, sentence, (span,), (span,)))
    return found
