"""Evaluation data in one schema: JSON lines, one record per line, plain or gzip.

    {"id", "task", "question", "answers": [...], "chunks": [{"title", "text"}], "meta": {...}}

An unusable line is skipped and counted, with the reason. A score of zero would look like a wrong answer.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import check_choice, expanded

HALVES = ("dev", "test")
_GZIP_MAGIC = b"\x1f\x8b"
_SCHEMA = (
    '{"id": "…", "task": "…", "question": "…", "answers": ["…"], "chunks": [{"title": "…", "text": "…"}], "meta": {}}'
)
_REASONS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """One chunk of a record."""

    title: str
    """Empty without one."""
    text: str

    @property
    def as_read(self) -> str:
        """The text that the model reads: the title on its own line, then the text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class Record:
    """One question about chunks, with its answers."""

    id: str
    task: str
    question: str
    answers: tuple[str, ...]
    """At least one. The metric decides whether any or all of them are required."""
    chunks: tuple[RecordChunk, ...]
    """At least one."""
    meta: Mapping[str, Any]
    """Other fields of the record, unchanged: sources, gold chunks, or prompt parts (:mod:`.questions`)."""


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """A record that was left out."""

    where: str
    """``line 3`` of its file (counted from 1, blank lines included), or ``question q7`` once it was read."""
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The records of a file, and skipped lines."""

    name: str
    """File name without ``.gz`` and ``.jsonl``."""
    records: tuple[Record, ...]
    skipped: tuple[SkippedRecord, ...]


class _UnusableLine(Exception):
    """Why a line is skipped."""


def read_records(path: str | Path, *, limit: int | None = None, half: str | None = None) -> RecordFile:
    """Records of a file in order, at most ``limit``. Gzip is recognised by its first two bytes.

    Args:
        half: ``dev`` for the first record and every second after it, ``test`` for the others; None for all. What was
            chosen on one half is judged on the other.

    Raises:
        ConfigurationError: the file is missing, unreadable or damaged, or has no usable record; another half.
    """
    if half is not None:
        check_choice("half", half, HALVES)
    if limit is not None and limit < 1:
        raise ConfigurationError(f"expected a limit of at least 1 record, got {limit}. Leave it out to read all.")
    file = expanded(path)
    if not file.is_file():
        found = "a folder" if file.is_dir() else "nothing there"
        raise ConfigurationError(
            f"expected a file of evaluation records at {path}, got {found}. Name a .jsonl or .jsonl.gz file."
        )
    records: list[Record] = []
    ids: set[str] = set()
    skipped: list[SkippedRecord] = []
    try:
        for line, content in _lines(file):
            try:
                record = _record(content)
                if record.id in ids:
                    raise _UnusableLine(f"id {record.id!r} was there before")
                if half in (None, HALVES[len(ids) % 2]):
                    records.append(record)
                ids.add(record.id)
            except _UnusableLine as reason:
                skipped.append(SkippedRecord(f"line {line}", str(reason)))
            if len(records) == limit:
                break
    except (OSError, EOFError, zlib.error) as error:  # what gzip raises on damaged files is any of the three
        raise ConfigurationError(
            f"expected JSON lines, plain or gzip, in {path}, got an unreadable file: {error}. Fetch or pack it again."
        ) from error
    if ids and not records:
        raise ConfigurationError(f"expected at least 2 records in {path} for its half 'test', got 1. Leave --half out.")
    if not records:
        raise ConfigurationError(_nothing_usable(path, skipped))
    return RecordFile(_name(file), tuple(records), tuple(skipped))


def read_together(paths: Sequence[str | Path], *, limit: int | None = None, half: str | None = None) -> RecordFile:
    """Records of several files, at most ``limit`` of each, of the given half. File names are put before ids and lines.

    Raises:
        ConfigurationError: two files have the same name, or an error of :func:`read_records`.
    """
    if len(paths) == 1:
        return read_records(paths[0], limit=limit, half=half)
    found = [read_records(path, limit=limit, half=half) for path in paths]
    names = [file.name for file in found]
    if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise ConfigurationError(f"expected files with names of their own, got two named {twice!r}. Rename one.")
    return RecordFile(
        "+".join(names),
        tuple(replace(record, id=f"{file.name}/{record.id}") for file in found for record in file.records),
        tuple(replace(skipped, where=f"{file.name}, {skipped.where}") for file in found for skipped in file.skipped),
    )


def _name(file: Path) -> str:
    return file.name.removesuffix(".gz").removesuffix(".jsonl")


def _nothing_usable(path: str | Path, skipped: list[SkippedRecord]) -> str:
    got = f"{len(skipped)} that cannot be used ({first_few(skipped)})" if skipped else "an empty file"
    return f"expected evaluation records in {path}, got {got}. Write one object a line: {_SCHEMA}"


def first_few(skipped: Sequence[SkippedRecord]) -> str:
    """The first skipped records with their reasons, and the number of others."""
    more = f"; and {len(skipped) - _REASONS_SHOWN} more" if len(skipped) > _REASONS_SHOWN else ""
    return "; ".join(map(str, skipped[:_REASONS_SHOWN])) + more


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers, as bytes: text mode would not report which line is not UTF-8."""
    with file.open("rb") as plain:
        magic = plain.read(len(_GZIP_MAGIC))
        plain.seek(0)
        source = cast(IO[bytes], gzip.GzipFile(fileobj=plain)) if magic == _GZIP_MAGIC else plain
        for line, content in enumerate(source, 1):
            if content.strip():
                yield line, content


def _record(content: bytes) -> Record:
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _UnusableLine(f"not UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:  # nested too deeply, for the second
        raise _UnusableLine(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _UnusableLine(f"expected a JSON object, got {_kind(value)}")
    meta = value.get("meta", {})
    if not isinstance(meta, dict):
        raise _UnusableLine(f"meta: expected an object, got {_kind(meta)}")
    return Record(
        id=_text(value.get("id"), "id"),
        task=_text(value.get("task"), "task"),
        question=_text(value.get("question"), "question"),
        answers=_answers(value.get("answers")),
        chunks=_chunks(value.get("chunks")),
        meta=meta,
    )


def _answers(value: Any) -> tuple[str, ...]:
    """Blank ones are left out: they occur in every prediction. Lists of lists as in CacheBlend's wikimqa are joined."""
    found: list[str] = []
    for item in _list(value, "answers"):
        for answer in item if isinstance(item, list) else [item]:
            text = _text(answer, "answers", blank=True)
            found += [text] if text.strip() else []
    if not found:
        raise _UnusableLine("no answers")
    return tuple(found)


def _chunks(value: Any) -> tuple[RecordChunk, ...]:
    passages = []
    for number, chunk in enumerate(_list(value, "chunks")):
        where = f"chunks[{number}]"
        if not isinstance(chunk, dict):
            raise _UnusableLine(f"{where}: expected an object, got {_kind(chunk)}")
        title = chunk.get("title")
        title = "" if title is None else _text(title, f"{where}.title", blank=True)
        passages.append(RecordChunk(title, _text(chunk.get("text"), f"{where}.text")))
    return tuple(passages)


def _list(value: Any, field: str) -> list[Any]:
    if value is None or value == []:
        raise _UnusableLine(f"no {field}")
    if not isinstance(value, list):
        raise _UnusableLine(f"{field}: expected a list, got {_kind(value)}")
    return value


def _text(value: Any, field: str, *, blank: bool = False) -> str:
    if not isinstance(value, str):
        raise _UnusableLine(f"{field}: expected text, got {_kind(value)}")
    if not blank and not value.strip():
        raise _UnusableLine(f"{field}: expected text, got an empty one")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write it, no tokenizer takes it
        raise _UnusableLine(f"{field}: half a character ({value[error.start]!r} at {error.start})") from error
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names[type(value)]
