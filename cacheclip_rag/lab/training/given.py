"""Samples from a user's data: datasets with answers, or documents about which the primary writes questions."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...base.checks import check_whole_number
from ...base.errors import ConfigurationError
from ...base.progress import progress_bar
from ...base.sampling import SamplingParams
from ...engine import CacheClipEngine
from ...ingest.documents import MARKDOWN_SUFFIXES, find_files, read_document
from ...ingest.splitting import Splitter
from ...runtime.base import Message
from ...selection.auxiliary_pass import question_ids
from ..evaluation.records import Record, read_records
from ..models import auxiliary_caches, transformers_model
from .families import FAMILIES, Sample, Span
from .folder import Kept, engine_inputs, resumable

__all__ = ["Candidates", "UserSamples", "data_of", "given_samples", "passages_of", "sample_of_record"]

logger = logging.getLogger(__name__)

_PASSAGE_TOKENS = 128
_NUM_CHUNKS = 4
_MIN_SENTENCE_WORDS = 6
_QUESTION_TOKENS = 40
_ASKING = "You write questions about texts."
_ASK = "Read this sentence:\n\n{sentence}\n\nWrite one short question that this sentence answers, and nothing else."
_LATIN = re.compile(r"[A-Za-z0-9]")
_END = re.compile(
    r"""
    [.!?…]+ ["'”’»)\]]* \s+         # Latin: a space must follow, or 3.14 and example.org would end one
    | [。！？｡．…]+ ["'”’」』》）】]* \s*  # Chinese and Japanese: none need follow
    | \s* \n \s*                    # titles, list items, lines of a table
    """,
    re.VERBOSE,
)
_ROOM = 256
"""Tokens reserved for the prompt's other text and for the answer."""


@dataclass(frozen=True, slots=True)
class UserSamples:
    """Samples from a user's data, with counts for the summary."""

    samples: tuple[Sample, ...]
    files: tuple[str, ...]
    """Names of the given files and folders, without their parent folders."""
    num_records: int = 0
    """Records in the files."""
    num_usable: int = 0
    """Records with evidence that fit both models."""
    num_taken: int = 0
    """Records among the samples."""
    num_sentences: int = 0
    """Sentences of documents that can be asked about."""
    num_asked: int = 0
    """Sentences for which the primary was asked to write a question."""

    @property
    def summary(self) -> str:
        """Numbers of used and available records and sentences."""
        said = []
        if self.num_records:
            said.append(
                f"{self.num_taken} of {self.num_usable} records that can be learned from ({self.num_records} in all)"
            )
        if self.num_sentences:
            made, asked = len(self.samples) - self.num_taken, f"{self.num_asked} of {self.num_sentences} sentences"
            said.append(f"{made} questions about documents, made from {asked}")
        return " and ".join(said) or "nothing"


def data_of(num_given: int, files: Sequence[str]) -> dict[str, Any]:
    """Description of a job's data, for its report."""
    data = "questions written by cacheclip_rag.lab.training.families (Apache-2.0)"
    if num_given:
        data += ", and questions that were given (under the licence of their files)"
    families = {split: list(of_split) for split, of_split in FAMILIES.items()}
    return {"data": data, "families": families, "given_from": list(files)}


def given_samples(
    engine: CacheClipEngine,
    paths: Sequence[str | Path],
    *,
    limit: int = 40,
    seed: int = 0,
    folder: Path | None = None,
) -> UserSamples:
    """At most ``limit`` samples from files: first records (``.jsonl``, ``.jsonl.gz``) whose answers are in their
    chunks, then questions that the primary writes about documents.

    Args:
        folder: where written questions are saved; None: not saved.

    Raises:
        ConfigurationError: no evidence can be found in the files, or ``limit`` is below 1.
        DocumentError: a file cannot be read.
        Interrupted: the user stopped the run; it can continue from the folder.
    """
    check_whole_number("limit", limit, least=1, of="samples")
    datasets, documents = told_apart(paths)
    found: list[Sample] = []
    num_records = 0
    for path in datasets:
        records = read_records(path).records
        num_records += len(records)
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
    num_usable = len(found)
    if num_usable > limit:
        found = random.Random(seed).sample(found, limit)
    num_taken = len(found)
    candidates = Candidates.of(engine, [(path, read_document(path)) for path in find_files(documents)])
    left = limit - num_taken
    kept = Kept(folder, engine_inputs(engine)) if folder else None
    with resumable(folder) if folder else nullcontext():
        found += samples_of_documents(engine, candidates, limit=left, seed=seed, kept=kept)
    if not found:
        raise ConfigurationError(
            f"no evidence in {', '.join(map(str, paths))}: a record's answer must be in one of its chunks word for "
            "word, and a document must have at least two passages with whole sentences. Give other data, or none."
        )
    files = tuple(Path(path).name for path in paths)
    sentences = len(candidates.sentences)
    return UserSamples(tuple(found), files, num_records, num_usable, num_taken, sentences, min(left, sentences))


def _fits(engine: CacheClipEngine, sample: Sample) -> bool:
    """Whether the sample and an answer fit both models."""
    auxiliary = transformers_model(engine.auxiliary)
    primary = engine.primary
    rows = [len(auxiliary.tokenize(chunk)) for chunk in sample.chunks]
    asked = len(question_ids(auxiliary, sample.question))
    whole = sum(len(primary.tokenize(text)) for text in (*sample.chunks, sample.question))
    room = auxiliary.reuse_tokens - len(auxiliary_caches(engine).prefix_ids)
    return max(rows) + asked <= room and whole + _ROOM <= getattr(primary, "reuse_tokens", primary.context_tokens)


def sample_of_record(record: Record) -> Sample | None:
    """A sample whose evidence is every sentence that contains an answer of the record; None if no sentence does.

    Answers ``yes`` and ``no`` and single letters are not used, because texts contain them with other meanings.
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
    return Sample(record.task, chunks, record.question, answers[0], tuple(evidence), tuple(values), (tuple(answers),))


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Start and end (exclusive) of each sentence in characters, without surrounding white space."""
    ends = [0, *_ends(text), len(text)]
    spans = []
    for start, end in pairwise(ends):
        sentence = text[start:end]
        if sentence.strip():
            spans.append((start + len(sentence) - len(sentence.lstrip()), start + len(sentence.rstrip())))
    return spans


def _ends(text: str) -> list[int]:
    return [found.end() for found in _END.finditer(text) if found.end() < len(text)]


def _as_words(answer: str) -> str:
    """A pattern that matches whole words only, in scripts with spaces between words."""
    before, after = (
        ("(?<![A-Za-z0-9])" if _LATIN.match(answer) else ""),
        ("(?![A-Za-z0-9])" if _LATIN.match(answer[-1]) else ""),
    )
    return before + re.escape(answer) + after


def told_apart(paths: Sequence[str | Path]) -> tuple[list[Path], list[str | Path]]:
    """Files of records, and documents or folders of them."""
    datasets = [Path(path) for path in paths if str(path).endswith((".jsonl", ".jsonl.gz"))]
    return datasets, [path for path in paths if not str(path).endswith((".jsonl", ".jsonl.gz"))]


def passages_of(tokenizer: Any, documents: Iterable[tuple[Path, str]]) -> list[str]:
    """Passages of documents, each given with its path, in order."""
    splitter = Splitter(tokenizer, _PASSAGE_TOKENS)
    return [
        passage
        for path, text in documents
        for passage in splitter.split(text, markdown=path.suffix.lower() in MARKDOWN_SUFFIXES)
    ]


class Candidates(NamedTuple):
    """Sentences of documents about which questions can be written."""

    passages: list[str]
    sentences: list[Span]
    """Number of the passage, start and end. Empty if there is only one passage."""

    @classmethod
    def of(cls, engine: CacheClipEngine, documents: Sequence[tuple[Path, str]]) -> Candidates:
        passages = list(dict.fromkeys(passages_of(engine.primary.tokenizer, documents)))
        sentences = [
            (number, start, end)
            for number, passage in enumerate(passages)
            for start, end in sentence_spans(passage)
            if len(passage[start:end].split()) >= _MIN_SENTENCE_WORDS and passage[end - 1] in ".!?\"'”’)。！？"
        ]
        return cls(passages, sentences if len(passages) > 1 else [])


def samples_of_documents(
    engine: CacheClipEngine,
    candidates: Candidates,
    *,
    limit: int,
    seed: int,
    kept: Kept | None,
) -> list[Sample]:
    """Questions about sentences of documents, written by the engine's primary. The other chunks are other passages.

    The answer is the whole sentence. No model repeats it word for word, so the samples have no ``parts``.

    Args:
        kept: folder of saved questions.
    """
    passages, sentences = candidates
    rng = random.Random(seed)
    found, refused = [], 0
    picked = rng.sample(sentences, min(limit, len(sentences)))
    if not picked:
        return []
    with progress_bar("making questions", len(picked), "questions") as advance, torch.inference_mode():
        for done, (number, start, end) in enumerate(picked, 1):
            sentence = passages[number][start:end]
            messages: list[Message] = [
                {"role": "system", "content": _ASKING},
                {"role": "user", "content": _ASK.format(sentence=sentence)},
            ]
            answer = _written(engine, messages, kept)
            question = answer.splitlines()[0].strip() if answer else ""
            advance(done)
            if not question.endswith(("?", "？")) or question in sentence:
                logger.debug("no question came of %r: %r", sentence, answer)
                refused += 1
                continue
            others = [n for n in range(len(passages)) if n != number]
            order = [number, *rng.sample(others, min(_NUM_CHUNKS - 1, len(others)))]
            rng.shuffle(order)
            span = (order.index(number), start, end)
            chunks = tuple(passages[n] for n in order)
            found.append(Sample("document", chunks, question, sentence, (span,), (span,)))
    logger.info("%d questions were made from %d sentences", len(found), len(picked))
    if refused > len(found):
        logger.warning(
            "the primary wrote no question for %d of %d sentences; it may be too small", refused, len(picked)
        )
    return found


def _written(engine: CacheClipEngine, messages: list[Message], kept: Kept | None) -> str:
    def write() -> str:
        return engine.generate(messages, SamplingParams(max_tokens=_QUESTION_TOKENS), method="full").text.strip()

    return kept.text("question", [messages, _QUESTION_TOKENS], write) if kept else write()
