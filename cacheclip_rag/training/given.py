"""Samples from data of one's own: datasets with answers, or documents that the primary is asked to question."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ..engine import CacheClipEngine
from ..errors import ConfigurationError
from ..evaluation.records import Record, read_records
from ..ingest.documents import MARKDOWN_SUFFIXES, find_files, read_document
from ..ingest.splitting import Splitter
from ..progress import progress_bar
from ..prompt import Message
from ..sampling import SamplingParams
from ..selection.sentences import sentence_spans
from .families import Sample, Span

__all__ = ["given_samples", "sample_of_record", "samples_of_documents"]

logger = logging.getLogger(__name__)

_PASSAGE_TOKENS = 128
_MIN_SENTENCE_WORDS = 6
_QUESTION_TOKENS = 40
_ASKING = "You write questions about texts."
_ASK = "Read this sentence:\n\n{sentence}\n\nWrite one short question that this sentence answers, and nothing else."
_LATIN = re.compile(r"[A-Za-z0-9]")
_ROOM = 256
"""Tokens for what the prompt says beside the chunks, and for the answer."""


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
        records = read_records(path).records
        usable = [sample for record in records if (sample := sample_of_record(record)) is not None]
        fitting = [sample for sample in usable if _fits(engine, sample)]
        logger.info(
            "%s: %d records, %d of them with evidence, %d of these short enough",
            path,
            len(records),
            len(usable),
            len(fitting),
        )
        found += fitting
    if len(found) > limit:
        found = random.Random(seed).sample(found, limit)
    if documents and len(found) < limit:
        texts = [(path, read_document(path)) for path in find_files(documents)]
        found += samples_of_documents(engine, texts, limit=limit - len(found), num_chunks=num_chunks, seed=seed)
    if not found:
        raise ConfigurationError(
            f"no evidence in {', '.join(map(str, paths))}: a record's answer must stand in one of its chunks word for "
            "word, and a document must have at least two passages with whole sentences. Give other data, or none."
        )
    return found


def _fits(engine: CacheClipEngine, sample: Sample) -> bool:
    """Whether both models have room for it, an answer included."""
    auxiliary = engine.auxiliary_caches.kv_runtime
    primary = engine.primary
    rows = [len(auxiliary.tokenize(chunk)) for chunk in sample.chunks]
    asked = len(auxiliary.tokenize(sample.question))
    whole = sum(len(primary.tokenize(text)) for text in (*sample.chunks, sample.question))
    room = auxiliary.reuse_tokens - len(engine.auxiliary_caches.prefix_ids)
    return max(rows) + asked <= room and whole + _ROOM <= getattr(primary, "reuse_tokens", primary.context_tokens)


def sample_of_record(record: Record) -> Sample | None:
    """A record whose evidence is every sentence that holds one of its answers; None where none does.

    ``yes`` and ``no`` are in no text what they are as answers, and a single letter is in all.
    """
    chunks = tuple(passage.as_read.strip() for passage in record.chunks)
    answers = [answer for answer in record.answers if len(answer) > 1 and answer.lower() not in ("yes", "no")]
    evidence: list[Span] = []
    values: list[Span] = []
    for number, chunk in enumerate(chunks):
        for start, end in sentence_spans(chunk):
            inside = [
                (start + found.start(), start + found.end())
                for answer in answers
                for found in re.finditer(_as_words(answer), chunk[start:end], re.IGNORECASE)
            ]
            if inside:
                evidence.append((number, start, end))
                values += [(number, *span) for span in inside]
    if len(chunks) < 2 or not evidence:
        return None
    return Sample(record.task, chunks, record.question, answers[0], tuple(evidence), tuple(values))


def _as_words(answer: str) -> str:
    """A pattern that does not match within a word, in scripts that put space between words."""
    before, after = (
        ("(?<![A-Za-z0-9])" if _LATIN.match(answer) else ""),
        ("(?![A-Za-z0-9])" if _LATIN.match(answer[-1]) else ""),
    )
    return before + re.escape(answer) + after


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
        (number, start, end)
        for number, passage in enumerate(passages)
        for start, end in sentence_spans(passage)
        if len(passage[start:end].split()) >= _MIN_SENTENCE_WORDS and passage[end - 1] in ".!?\"'”’)。！？"
    ]
    if len(passages) < 2:
        return []
    found, refused = [], 0
    picked = rng.sample(candidates, min(limit, len(candidates)))
    with progress_bar("making questions", len(picked), "questions") as advance, torch.inference_mode():
        for done, (number, start, end) in enumerate(picked, 1):
            sentence = passages[number][start:end]
            messages: list[Message] = [
                {"role": "system", "content": _ASKING},
                {"role": "user", "content": _ASK.format(sentence=sentence)},
            ]
            params = SamplingParams(max_tokens=_QUESTION_TOKENS)
            answer = engine.generate(messages, params, method="full").text.strip()
            question = answer.splitlines()[0].strip() if answer else ""
            advance(done)
            if not question.endswith(("?", "？")) or question in sentence:
                logger.debug("no question came of %r: %r", sentence, answer)
                refused += 1
                continue
            others = [n for n in range(len(passages)) if n != number]
            order = [number, *rng.sample(others, min(num_chunks - 1, len(others)))]
            rng.shuffle(order)
            span = (order.index(number), start, end)
            chunks = tuple(passages[n] for n in order)
            found.append(Sample("document", chunks, question, sentence, (span,), (span,)))
    logger.info("%d questions were made from %d sentences", len(found), len(picked))
    if refused > len(found):
        logger.warning("of %d sentences %d gave no question: the primary may be too small to ask", len(picked), refused)
    return found
