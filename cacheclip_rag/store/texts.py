"""An index of stored texts, which finds them in a prompt.

A framework passes one string to its language model, and the chunks are somewhere in it. The index stores a signature of
each text: the window of ``WINDOW`` characters with the smallest hash, among the windows that start in the text's first
``REGION`` characters, and the text's last window. So texts with the same beginning (a metadata header, a licence
preamble) usually have different signatures. A search hashes every window of the prompt once. Where both windows of a
signature occur at the right distance, the slice between them is compared by digest. So a match is never wrong, and the
texts themselves need not be stored. (Source: content-defined anchors, Manber, "Finding similar files in a large file
system", 1994. An automaton over all texts was rejected: 60 kB per chunk, and a rebuild at each insert.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from .catalog import Catalog, TextRow
from .keys import text_digest

__all__ = ["WINDOW", "TextIndex", "TextMatch"]

WINDOW = 16
"""Characters per window. Shorter texts are not matched, because reusing them would save nothing."""
REGION = 256
"""The signature window starts within this many first characters of the text."""


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A stored text found in a prompt: ``prompt[start:stop]``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Signature:
    """What the index stores of a text."""

    value: int
    """Hash of the signature window."""
    start: int
    """Start of that window in the text."""
    length: int
    ending: int
    """Hash of the text's last window."""
    digest: bytes


class TextIndex:
    """Texts of one namespace, shared by processes through the store's catalog (default: in this process only).

    A text takes about 60 bytes of memory.
    """

    def __init__(self, catalog: Catalog | None = None, namespace: str = "default") -> None:
        self._catalog = catalog if catalog is not None else Catalog()
        self._namespace = namespace
        self._settled = _Rows.of([])
        self._recent = _Rows.of([])
        """Changes that are not yet merged into ``_settled``; they take precedence."""
        self._last_serial = 0
        self._lock = threading.Lock()

    def add(self, texts: Iterable[str]) -> None:
        """Add texts. Texts shorter than ``WINDOW`` are left out; known texts are not changed."""
        self._catalog.add_texts(self._namespace, _rows_of(texts))

    def remove(self, texts: Iterable[str]) -> None:
        """Remove texts, here and in every process that shares the catalog."""
        self._catalog.remove_texts(self._namespace, _rows_of(texts))

    def find(self, prompt: str, documents: Iterable[str] = ()) -> list[TextMatch]:
        """Stored texts and ``documents`` that occur in ``prompt``: leftmost, longest, not overlapping, in order."""
        signatures = [signature for text in documents if (signature := _signature_of(text)) is not None]
        with self._lock:
            self._refresh()
            tables = (_Rows.of([(signature, False) for signature in signatures]), self._recent, self._settled)
        hashes = _window_hashes(prompt)
        candidates = sorted(
            (start, -length, number, row)
            for number, rows in enumerate(tables)
            for start, length, row in rows.candidates(hashes)
        )
        found: list[TextMatch] = []
        end = 0
        for (start, length), same in groupby(candidates, key=itemgetter(0, 1)):
            if start < end:
                continue
            stop = start - length
            digest = text_digest(prompt[start:stop])
            # the first table that knows the text decides
            said = (tables[number].is_removed(row, digest) for _, _, number, row in same)
            if next((each for each in said if each is not None), True) is False:
                found.append(TextMatch(start, stop))
                end = stop
        return found

    def _refresh(self) -> None:
        """Read what this or another process added or removed since the last refresh."""
        while rows := self._catalog.texts_after(self._namespace, self._last_serial, _BATCH):
            new = [
                (_Signature(value, start, length, ending, digest), removed)
                for _, (digest, value, start, length, ending), removed in rows
            ]
            self._recent = _Rows.of(new).over(self._recent)
            self._last_serial = rows[-1][0]
            if len(self._recent) > max(_BATCH, len(self._settled) // 16):
                self._settled, self._recent = self._recent.over(self._settled).present(), _Rows.of([])


_BATCH = 4096
"""Rows per query, and most rows in ``_recent`` before they are merged into ``_settled``."""
_PAIRS = 200_000
"""Pairs of windows and texts per batch."""

_ENDINGS = 1 << 18
"""Number of hash classes for a first test of endings."""

_Column = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Signatures of texts in columns, ordered by window hash and digest, each text once."""

    windows: _Column
    """``(num_texts,)`` int64."""
    starts: _Column
    """uint16."""
    lengths: _Column
    """uint32."""
    endings: _Column
    """int64."""
    digests: _Column
    """``(num_texts, 2)`` uint64."""
    removed: _Column
    """bool."""

    @classmethod
    def of(cls, texts: Sequence[tuple[_Signature, bool]]) -> _Rows:
        """Rows of texts and their removal flags. The last pair of a text counts."""
        digests = b"".join(signature.digest for signature, _ in texts)
        return cls(
            np.array([signature.value for signature, _ in texts], np.int64),
            np.array([signature.start for signature, _ in texts], np.uint16),
            np.array([signature.length for signature, _ in texts], np.uint32),
            np.array([signature.ending for signature, _ in texts], np.int64),
            np.frombuffer(digests, np.uint64).reshape(-1, 2),
            np.array([removed for _, removed in texts], np.bool_),
        )._ordered()

    def __len__(self) -> int:
        return len(self.windows)

    def _map(self, change: Callable[[str], _Column]) -> _Rows:
        return _Rows(*(change(each.name) for each in fields(self)))

    def _at(self, which: _Column) -> _Rows:
        return self._map(lambda name: getattr(self, name)[which])

    def _ordered(self) -> _Rows:
        found = self._at(np.lexsort((self.digests[:, 1], self.digests[:, 0], self.windows)))  # stable
        same = (found.windows[1:] == found.windows[:-1]) & (found.digests[1:] == found.digests[:-1]).all(1)
        last = np.ones(len(found), np.bool_)
        last[:-1] = ~same
        return found._at(last)

    def over(self, older: _Rows) -> _Rows:
        """Both tables merged; rows of this table replace rows of the older table."""
        return self._map(lambda name: np.concatenate((getattr(older, name), getattr(self, name))))._ordered()

    def present(self) -> _Rows:
        """The rows of texts that are not removed."""
        return self._at(~self.removed)

    def candidates(self, hashes: _Column) -> Iterator[tuple[int, int, int]]:
        """Possible matches in a prompt as (start, length, row): both windows of a signature occur there.

        Args:
            hashes: hashes of the prompt's windows.
        """
        first = np.searchsorted(self.windows, hashes)
        counts = np.searchsorted(self.windows, hashes, side="right") - first
        positions = np.flatnonzero(counts)
        # thousands of texts may share a beginning: keep the rows whose ending may be in the prompt
        groups, here, group_of = np.unique(first[positions], return_index=True, return_inverse=True)
        sizes = counts[positions[here]]
        rows = _ranges(groups, sizes)
        ends = np.zeros(_ENDINGS, np.bool_)
        ends[hashes % _ENDINGS] = True
        ending = ends[self.endings[rows] % _ENDINGS]
        rows, sizes = rows[ending], np.bincount(np.repeat(np.arange(len(groups)), sizes)[ending], minlength=len(groups))
        first, counts = (np.cumsum(sizes) - sizes)[group_of], sizes[group_of]
        batches = np.cumsum(counts) // _PAIRS
        for batch in range(int(batches[-1]) + 1 if len(batches) else 0):
            chosen = batches == batch
            yield from self._candidates(
                hashes, positions[chosen], counts[chosen], rows[_ranges(first[chosen], counts[chosen])]
            )

    def _candidates(
        self, hashes: _Column, positions: _Column, counts: _Column, rows: _Column
    ) -> Iterator[tuple[int, int, int]]:
        """Possible matches for the windows at ``positions``; each has ``counts`` consecutive ``rows``."""
        starts = np.repeat(positions, counts) - self.starts[rows]
        lengths = self.lengths[rows].astype(np.int64)
        last = starts + lengths - WINDOW
        fits = np.flatnonzero((starts >= 0) & (last < len(hashes)))
        fits = fits[hashes[last[fits]] == self.endings[rows[fits]]]
        yield from zip(starts[fits].tolist(), lengths[fits].tolist(), rows[fits].tolist(), strict=True)

    def is_removed(self, row: int, digest: bytes) -> bool | None:
        """Whether a row's text was removed; None if the row belongs to another text."""
        return bool(self.removed[row]) if self.digests[row].tobytes() == digest else None


def _ranges(first: _Column, counts: _Column) -> _Column:
    """Concatenated ranges: ``count`` whole numbers from each ``first`` on."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum())


def _window_hashes(text: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Hash of every window of ``WINDOW`` characters, in order: ``(len(text) - WINDOW + 1,)`` int64."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    count = len(codes) - WINDOW + 1
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(WINDOW):  # a polynomial modulo 2**64; the finaliser below spreads the hashes
        hashes = hashes * np.uint64(0x100000001B3) + codes[offset : offset + count]
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (hashes ^ (hashes >> np.uint64(32))).view(np.int64)


def _signature_of(text: str) -> _Signature | None:
    if len(text) < WINDOW:
        return None
    hashes = _window_hashes(text[: REGION + WINDOW - 1])
    start = int(hashes.argmin())
    ending = int(_window_hashes(text[-WINDOW:])[0])
    return _Signature(int(hashes[start]), start, len(text), ending, text_digest(text))


def _rows_of(texts: Iterable[str]) -> Iterator[TextRow]:
    """Rows for the catalog; short texts are left out."""
    for text in texts:
        if (signature := _signature_of(text)) is not None:
            yield signature.digest, signature.value, signature.start, signature.length, signature.ending
