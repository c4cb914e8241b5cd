"""Splits documents into passages by token count, at sentence and paragraph borders if possible."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cacheclip_rag import ConfigurationError
from cacheclip_rag.adapters import normalise_chunk

_RULE = re.compile(r"[ \t>]*+\|?[ \t]*+:?-++:?[ \t]*+(?:\|[ \t]*+:?-++:?[ \t]*+)*+\|?[ \t]*+\n?")
"""The line below the header of a table of Markdown."""
_SEPARATOR = re.compile(r"sep=.\s*", re.IGNORECASE)
"""A first line by which spreadsheets name the character between values."""
_FENCE = re.compile(r"[ \t]*(?:```|~~~)")
_MOST_LINE = 20_000
"""Characters of a line above which it is cut at the end of a word or sentence, or anywhere if it has none."""
_LONG_LINE = re.compile(rf"[^\n]{{{_MOST_LINE},}}")
_ENDS = " .,;\u3002\uff0c"
_MOST_LEAD = 0.25
"""Largest share of a passage that a heading takes which is put before the first rows of a table."""
_WHOLE_TABLE = 0.9
"""Share of a passage up to which a table is cut with the text around it, which leaves it whole."""
_MOST_HEADER = 0.5
"""Largest share of a passage that a table's header takes. A longer one is not repeated."""


@dataclass(frozen=True, slots=True)
class Splitter:
    """Splits text into passages of at most ``chunk_tokens`` tokens of the given tokenizer."""

    tokenizer: Any
    """A transformers fast tokenizer, or what has ``count(text)``. The primary's makes sizes equal to tokens in the
    prompt."""
    chunk_tokens: int
    overlap_tokens: int = 0

    def __post_init__(self) -> None:
        check_sizes(self.chunk_tokens, self.overlap_tokens)

    def split(self, text: str, *, markdown: bool = False, table: bool = False) -> list[str]:
        """Passages in order, stripped, none empty.

        Args:
            markdown: cut at headings and blocks first. In any text, a table of Markdown that is longer than a passage
                is cut between rows, and each passage of it begins with the table's header.
            table: the text is a table, a row a line (CSV, TSV), whose first row is its header.
        """
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

        cls = MarkdownSplitter if markdown else TextSplitter
        splitter = self._cutter(cls, self.chunk_tokens, self.overlap_tokens)
        found: list[str] = []
        for part, rows in [(text, _records(text))] if table else self._tables(text):
            num_header = 1 + (not table or (bool(rows) and _SEPARATOR.fullmatch(rows[0]) is not None))
            header = "".join(rows[:num_header])
            if not rows or self._size(header) > _MOST_HEADER * self.chunk_tokens:
                found += _chunks(splitter, part)
                continue
            before = found.pop() if found and self._size(found[-1]) <= _MOST_LEAD * self.chunk_tokens else ""
            found += self._pieces(f"{before.strip()}\n\n" if before else "", header, rows[num_header:], cls)
        return [passage for chunk in found if (passage := normalise_chunk(chunk))]

    def _tables(self, text: str) -> Iterator[tuple[str, list[str]]]:
        """Parts of a Markdown text, and the rows of those that are a table about as long as a passage, or longer.
        Joined, the parts are the text."""
        lines = text.splitlines(keepends=True)
        first = number = 0
        is_code = False
        while number < len(lines):
            is_code ^= _FENCE.match(lines[number]) is not None
            stop = number
            if not is_code and "|" in lines[number] and number + 1 < len(lines) and _RULE.fullmatch(lines[number + 1]):
                while stop < len(lines) and "|" in lines[stop]:
                    stop += 1
            if stop - number > 2 and self._size("".join(lines[number:stop])) > _WHOLE_TABLE * self.chunk_tokens:
                if first < number:
                    yield "".join(lines[first:number]), []
                yield "".join(lines[number:stop]), lines[number:stop]
                first = stop
            number = max(stop, number + 1)
        if first < len(lines):
            yield "".join(lines[first:]), []

    def _pieces(self, before: str, header: str, rows: Iterable[str], splitter: Any) -> Iterator[str]:
        """Passages of a table, each with its header.

        Args:
            before: stands before the first one.
            splitter: cuts rows that are longer than a passage.
        """
        room = self.chunk_tokens - self._size(header)
        narrow = self._cutter(splitter, room, 0)
        taken, size = before + header, self._size(before)
        for row in rows:
            count = self._size(row)
            if size + count > room and size:
                yield taken
                taken, size = header, 0
            if count > room:
                yield from (header + piece for piece in _chunks(narrow, row))
            else:
                taken, size = taken + row, size + count
        if size:
            yield taken

    def _size(self, text: str) -> int:
        """Tokens of a text, without those that the tokenizer puts around it."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return int(self.tokenizer.count(text))
        return len(backend.encode(text, add_special_tokens=False).ids)

    def _cutter(self, splitter: Any, room: int, overlap: int) -> Any:
        """What cuts a text into passages of at most ``room`` tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return splitter.from_callback(self.tokenizer.count, room, overlap=overlap)
        return splitter.from_huggingface_tokenizer(backend, room, overlap=overlap)


def _chunks(splitter: Any, text: str) -> Iterator[str]:
    """Passages of a text. Long lines are cut before: the splitter counts what is left of a line for every passage."""
    at = 0
    for found in _LONG_LINE.finditer(text):
        stop = found.start()
        while found.end() - stop > _MOST_LINE:
            piece = text[stop : stop + _MOST_LINE]
            stop += (max(map(piece.rfind, _ENDS)) + 1) or _MOST_LINE
            yield from splitter.chunks(text[at:stop])
            at = stop
    yield from splitter.chunks(text[at:])


def _records(text: str) -> list[str]:
    """Rows of a table, each with its end. A line end between quotation marks ends no row."""
    lines = text.splitlines(keepends=True)
    if text.count('"') % 2:
        return lines
    found: list[list[str]] = []
    is_open = False
    for line in lines:
        if is_open:
            found[-1].append(line)
        else:
            found.append([line])
        is_open ^= line.count('"') % 2 == 1
    return ["".join(row) for row in found]


def check_sizes(chunk_tokens: int, overlap_tokens: int) -> None:
    """Raise ConfigurationError unless ``chunk_tokens`` is at least 16 and larger than ``overlap_tokens``."""
    if chunk_tokens < 16 or not 0 <= overlap_tokens < chunk_tokens:
        raise ConfigurationError(
            "expected chunk size >= 16 tokens and 0 <= overlap < chunk size, got "
            f"chunk size {chunk_tokens}, overlap {overlap_tokens}."
        )
