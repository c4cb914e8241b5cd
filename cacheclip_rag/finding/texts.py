"""An index of stored texts, which finds them in a prompt.

A framework passes one string to its language model, and the chunks are somewhere in it. Every window of ``WINDOW``
characters has a hash. A text's anchor is the smallest hash among its first ``reach`` windows; the reach is a power of
two. In a prompt that contains the text, the anchor is the smallest hash of ``reach`` neighbouring windows. Only these
hashes are looked up in the store's catalog: about 2 / (reach + 1) of the prompt's windows. The place of an anchor gives
the text's place; then a hash of the whole text is compared, and last its digest. So a match is never wrong, and nothing
is kept in memory. (Source: winnowing, Schleimer et al., SIGMOD 2003. An automaton over all texts was rejected: 60 kB
per chunk, and a rebuild at each insert. A table in memory was rejected: every process would read all of it before its
first answer.) Parts of texts are found by :mod:`~cacheclip_rag.finding.excerpts`.

Hostile texts and prompts can make every place a candidate. A search therefore stops with a warning after a number of
comparisons; chunks that it did not find are computed as fresh text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..base.database import Database, OutageWarning
from ..base.errors import StoreError
from ..base.keys import text_digest
from .common_parts import WINDOW, Compared, TextMatch, ranges, smallest, window_hashes
from .excerpts import SCHEMA as EXCERPTS_SCHEMA
from .excerpts import ExcerptIndex
from .folding import Column, code_points

logger = logging.getLogger(__name__)

REACH = 256
"""Most windows at a text's start and at its end from which its anchor and its ending are chosen."""

_POPULAR = 512
"""Texts with the same anchor. From here on rows are looked up by anchor and ending, not read one by one."""
_MOST_ROWS = 1 << 18
"""Most rows of one reach per search."""
_MOST_SLICES = 1 << 22
"""Most slices of a prompt whose hash is compared per search."""
_MOST_WRONG = 256
"""Most slices per search that have a text's hash but not its digest."""
_MOST_NEAR = 1 << 13
"""Most pairs of a message and a given text that are compared for one request."""
_BLOCK, _LONGEST_BLOCK = 1 << 11, 1 << 14
"""Slices compared at once: few after a match, which may cover what comes next; never more than fit in a processor's
cache."""

SCHEMA = f"""{EXCERPTS_SCHEMA}
CREATE TABLE IF NOT EXISTS texts (
    namespace TEXT NOT NULL, reach INTEGER NOT NULL, anchor INTEGER NOT NULL, ending INTEGER NOT NULL,
    digest BLOB NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, whole INTEGER NOT NULL,
    PRIMARY KEY (namespace, reach, anchor, ending, digest)
) WITHOUT ROWID;
"""
_COLUMNS = "digest, reach, anchor, start, length, ending, whole"
WRITE = f"INSERT OR IGNORE INTO texts (namespace, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
"""Adds a text: namespace, then the fields of its :class:`TextRow`."""
_THIS_ROW = "FROM texts WHERE namespace = ? AND reach = ? AND anchor = ? AND ending = ? AND digest = ?"
_REACHES = "SELECT value FROM json_each(?) WHERE EXISTS (SELECT 1 FROM texts WHERE namespace = ? AND reach = value)"
_ANCHORS = (
    "SELECT value, (SELECT count(*) FROM (SELECT 1 FROM texts WHERE namespace = ? AND reach = ? AND anchor = value "
    "LIMIT ?)) AS num_texts FROM json_each(?) WHERE num_texts"
)
# "+": the endings of the rows are tested. Without it, SQLite looks up each pair of anchor and ending.
_ROWS, _ROWS_OF_POPULAR = (
    f"SELECT {_COLUMNS} FROM texts WHERE namespace = ? AND reach = ? AND anchor IN (SELECT value FROM json_each(?)) "
    f"AND {ending} IN (SELECT value FROM json_each(?)) AND length <= ? LIMIT ?"
    for ending in ("+ending", "ending")
)


class TextRow(NamedTuple):
    """What the index stores of a text. Hashes are signed 64-bit numbers."""

    digest: bytes
    """16 bytes, see :func:`~cacheclip_rag.base.keys.text_digest`."""
    reach: int
    """The largest power of two up to ``REACH`` and up to the text's number of windows."""
    anchor: int
    """The smallest hash among the first ``reach`` windows."""
    start: int
    """Start of the first window with that hash."""
    length: int
    """Characters."""
    ending: int
    """The smallest hash among the last ``reach`` windows."""
    whole: int
    """Hash of the text."""


def text_row(text: str) -> TextRow | None:
    """The row of a text; None if the text is shorter than ``WINDOW``."""
    hashes = window_hashes(code_points(text))
    if not len(hashes):
        return None
    reach = min(REACH, 1 << (len(hashes).bit_length() - 1))
    start = int(hashes[:reach].argmin())
    ending = int(hashes[-reach:].min())
    whole = int(_Sums.of(hashes).sums[-1])
    return TextRow(text_digest(text), reach, int(hashes[start]), start, len(text), ending, whole)


class GivenTexts:
    """Documents of one request, whose messages are searched one by one. Each document is hashed once, and searched for
    only in messages that hold an anchor of it."""

    def __init__(self, texts: Iterable[str], is_wanted: Callable[[], None] = lambda: None) -> None:
        """``texts`` are normalised. ``is_wanted`` is called before each search; raises if nobody waits for the request
        any more."""
        self.texts = list(dict.fromkeys(texts))
        self._is_wanted = is_wanted
        self._room = _MOST_NEAR
        # one table of anchors for texts as a whole, one for parts of them
        rows = [(row.anchor, number) for number, text in enumerate(self.texts) for row in _rows_of([text])]
        anchors = [(number, Compared(text).anchors[0]) for number, text in enumerate(self.texts)]
        of_parts = [np.stack([found, np.full(len(found), number)], 1) for number, found in anchors]
        self._of_wholes = np.array(rows, np.int64).reshape(-1, 2)
        self._of_parts = np.concatenate([np.empty((0, 2), np.int64), *of_parts])

    def near(self, prompt: str, hashes: Column) -> list[str]:
        """The texts that may stand in ``prompt``, as a whole or in part; ``hashes`` are those of its windows."""
        self._is_wanted()
        if not self.texts or not len(hashes):
            return []
        wanted = ((self._of_wholes, hashes), (self._of_parts, Compared(prompt).anchors[0]))
        numbers = [table[np.isin(table[:, 0], found), 1] for table, found in wanted]
        near = np.unique(np.concatenate(numbers)).tolist()
        if len(near) > self._room:
            logger.warning("too many documents look like too many messages; some are computed as fresh text")
        near = near[: max(0, self._room)]
        self._room -= len(near)
        return [self.texts[number] for number in near]


class TextIndex:
    """Texts of one namespace, shared by processes through the store's catalog. Keeps nothing in memory."""

    def __init__(self, database: Database, namespace: str) -> None:
        """``database``: has the table of ``SCHEMA``."""
        self._database = database
        self._namespace = namespace
        self._excerpts = ExcerptIndex(database, namespace)
        self._outage = OutageWarning(
            logger, "stored texts are not found in prompts, and are computed as fresh text: %s"
        )

    def add(self, texts: Iterable[str]) -> None:
        """Add texts. Texts shorter than ``WINDOW`` are left out. Raises StoreError if the catalog cannot be used."""
        texts = list(texts)
        self.add_rows(_rows_of(texts))
        self._excerpts.add(texts)

    def add_rows(self, rows: Iterable[TextRow]) -> None:
        """Add texts by their rows. They are found as a whole, but not in part."""
        self._database.execute_many([(WRITE, (self._namespace, *row)) for row in rows])

    def mend(self, texts: Iterable[str]) -> None:
        """Make what the index holds agree, and add ``texts`` again. Raises StoreError if the catalog cannot be used."""
        self._excerpts.mend()
        self.add(texts)

    def remove(self, texts: Iterable[str]) -> None:
        """Remove texts, for every process. Raises StoreError if the catalog cannot be used."""
        texts = list(texts)
        self._excerpts.remove(texts)
        self._database.execute_many([(f"DELETE {_THIS_ROW}", self._name(row)) for row in _rows_of(texts)])

    def texts(self) -> Iterator[str]:
        """All texts of the namespace that can be found in part, so not those of a few words. Raises StoreError if the
        catalog cannot be used."""
        return self._excerpts.texts()

    def known(self, text: str) -> bool:
        """Whether a text was added and not removed since."""
        return any(self.holds(row) for row in _rows_of([text]))

    def holds(self, row: TextRow) -> bool:
        """Whether the text of a row was added and not removed since."""
        return bool(self._database.query(f"SELECT 1 {_THIS_ROW}", self._name(row)))

    def find(self, prompt: str, documents: Iterable[str] | GivenTexts = (), *, parts: bool = True) -> list[TextMatch]:
        """Stored texts and ``documents`` that occur in ``prompt``, as a whole or in part (``parts``), in its order: of
        those that overlap, the longest.

        A document that is not stored is no match where stored texts and parts of them cover it: they can be reused now.
        If the catalog cannot be used, only ``documents`` are found, and the first search says so in a warning."""
        places = _places_in(prompt)
        if isinstance(documents, GivenTexts):
            documents = documents.near(prompt, places.hashes)
        documents = list(dict.fromkeys(documents))
        if not len(places.hashes):
            return []  # too short for any
        if not parts:
            return self.find_whole(prompt, documents)
        whole = self._stored_whole(prompt, places)
        found = {prompt[match.start : match.stop] for match in whole}
        others = [text for text in documents if text not in found]
        stored = [text for text in others if self._is_known(text)]
        given = [text for text in others if text not in stored]
        given_whole = _Search(prompt, places.hashes, _Rows.of([*_rows_of(given)])).matches(places.smallest)
        found = {prompt[match.start : match.stop] for match in given_whole}
        given = [text for text in given if text not in found]
        return self._excerpts.find(prompt, whole, stored, given, given_whole)

    def find_whole(self, prompt: str, documents: Iterable[str] = ()) -> list[TextMatch]:
        """Stored texts and ``documents`` that occur in ``prompt`` as a whole: leftmost, longest, not overlapping, in
        order."""
        return self._stored_whole(prompt, _places_in(prompt), _rows_of(documents))

    def _stored_whole(self, prompt: str, places: _Places, given: Iterable[TextRow] = ()) -> list[TextMatch]:
        rows = _Rows.of([*given, *self._stored(places.hashes, places.smallest)])
        return _Search(prompt, places.hashes, rows).matches(places.smallest)

    def _is_known(self, text: str) -> bool:
        """Whether a text is stored. False if the catalog cannot be used."""
        with suppress(StoreError):
            return self.known(text)
        return False

    def _name(self, row: TextRow) -> tuple[str, int, int, int, bytes]:
        return self._namespace, row.reach, row.anchor, row.ending, row.digest

    def _stored(self, hashes: Column, places: dict[int, Column]) -> list[TextRow]:
        """Rows of stored texts that may be in a prompt."""
        try:
            with self._database.lock:  # of a document that is replaced meanwhile, one version is found
                reaches = self._database.query(_REACHES, (json.dumps([*places]), self._namespace))
                found = [row for (reach,) in reaches for row in self._rows(reach, hashes, places[reach])]
        except StoreError as error:
            self._outage.failed(error)
            return []
        self._outage.worked()
        return found

    def _rows(self, reach: int, hashes: Column, places: Column) -> Iterator[TextRow]:
        """Rows whose anchor and ending are both among the smallest hashes of a prompt."""
        smallest, most = json.dumps(np.unique(hashes[places]).tolist()), len(hashes) + WINDOW - 1
        counts = self._database.query(_ANCHORS, (self._namespace, reach, _POPULAR, smallest))
        popular = [anchor for anchor, count in counts if count == _POPULAR]
        others = [anchor for anchor, count in counts if count < _POPULAR]
        for sql, chosen in ((_ROWS, others), (_ROWS_OF_POPULAR, popular)):
            if chosen:
                arguments = (self._namespace, reach, json.dumps(chosen), smallest, most, _MOST_ROWS)
                rows = self._database.query(sql, arguments)
                if len(rows) == _MOST_ROWS:
                    logger.warning("too many texts have the same start and end; some are not found in the prompt")
                # a catalog that something else wrote to may hold anything
                yield from (TextRow(*row) for row in rows if [*map(type, row)] == [bytes, *[int] * (len(row) - 1)])


class _Places(NamedTuple):
    """Where texts may start in a prompt."""

    hashes: Column
    smallest: dict[int, Column]
    """By reach, see :func:`~cacheclip_rag.finding.common_parts.smallest`."""


def _places_in(prompt: str) -> _Places:
    hashes = window_hashes(code_points(prompt))
    return _Places(hashes, dict(smallest(hashes, REACH)))


def _rows_of(texts: Iterable[str]) -> Iterator[TextRow]:
    """Rows of texts; short texts are left out."""
    return (row for text in texts if (row := text_row(text)) is not None)


# -- hashes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Sums of window hashes times powers of an odd number, modulo 2**64: hashes of slices in constant time. (Of window
    hashes, because two different texts with equal sums of characters are known.)"""

    inverse: Column
    """``(num_windows + 1,)`` int64: powers of the number's inverse."""
    sums: Column
    """``(num_windows + 1,)`` int64: sum over the windows before."""

    @classmethod
    def of(cls, hashes: Column) -> _Sums:
        sums = np.zeros(len(hashes) + 1, np.int64)
        np.cumsum(hashes * _powers(_FACTOR, len(hashes)), out=sums[1:])
        return cls(_powers(_INVERSE, len(hashes) + 1), sums)

    def hashes(self, starts: Column, counts: Column, stops: Column) -> Column:
        """Hashes of slices ``[start, stop)`` of ``WINDOW`` or more characters, cut at the end of the text. Each start
        stands for the next ``count`` slices."""
        found: Column = self.sums.take(stops - (WINDOW - 1), mode="clip")
        found -= np.repeat(self.sums[starts], counts)
        found *= np.repeat(self.inverse[starts], counts)
        return found


_FACTOR = 0x5851F42D4C957F2D
_INVERSE = pow(_FACTOR, -1, 1 << 64)


def _powers(number: int, count: int) -> Column:
    """The first powers of a number, modulo 2**64."""
    factors = np.full(count, number, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors).view(np.int64)


# -- search ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Which slices of a prompt may be texts. Many texts of one key and length cost one comparison."""

    keys: Column
    """int64: each key once, in order. A key is one number for reach, anchor and start (``anchor + start + reach *
    REACH``). Equal keys of different anchors only cost a comparison."""
    first: Column
    """First length of each key."""
    counts: Column
    """Lengths of each key."""
    lengths: Column
    """Ordered by key; each length of a key once."""
    wholes: Column
    """Hashes of all texts, in order."""
    digests: frozenset[bytes]

    @classmethod
    def of(cls, rows: list[TextRow]) -> _Rows:
        numbers = np.array([row[1:] for row in rows], np.int64).reshape(-1, 6)
        reaches, anchors, starts, lengths, _, wholes = numbers.T
        keys = anchors + starts + reaches * REACH
        order = np.lexsort((lengths, keys))
        keys, lengths = keys[order], lengths[order]
        is_first = np.ones(len(keys), dtype=bool)
        is_first[1:] = (keys[1:] != keys[:-1]) | (lengths[1:] != lengths[:-1])
        keys, first, counts = np.unique(keys[is_first], return_index=True, return_counts=True)
        return cls(keys, first, counts, lengths[is_first], np.unique(wholes), frozenset(row.digest for row in rows))


class _Search:
    """One search of a prompt."""

    def __init__(self, prompt: str, hashes: Column, rows: _Rows) -> None:
        self._prompt, self._hashes, self._rows = prompt, hashes, rows
        self._sums = _Sums.of(hashes)
        self._compared = self._wrong = 0

    def matches(self, places: dict[int, Column]) -> list[TextMatch]:
        """Matches from left to right. ``places``: see :func:`~cacheclip_rag.finding.common_parts.smallest`."""
        found: list[TextMatch] = []
        if not len(self._rows.keys) or not places:
            return found
        starts, numbers = self._candidates(places)
        counts = self._rows.counts[numbers]
        before = np.cumsum(counts) - counts
        first, end, size = 0, 0, _BLOCK
        while first < len(starts) and not self._exhausted:
            after = max(first + 1, int(np.searchsorted(before, before[first] + size)))
            after = int(np.searchsorted(starts, starts[after - 1], side="right"))  # the longest of a start wins
            block = slice(first, after)
            self._compared += int(counts[block].sum())
            size = min(2 * size, _LONGEST_BLOCK)
            for match in self._matches(starts[block], numbers[block], end):
                found.append(match)
                end, size = match.stop, _BLOCK
            first = max(after, int(np.searchsorted(starts, end)))
        if self._exhausted:
            logger.warning(
                "the search for stored texts in a prompt of %d characters was stopped: too many places look alike. "
                "Texts after that are computed as fresh text.",
                len(self._prompt),
            )
        return found

    def _candidates(self, places: dict[int, Column]) -> tuple[Column, Column]:
        """Where texts may start, in order, and the numbers of their keys."""
        found = []
        for reach, least in places.items():
            keys = self._hashes[least] + least - np.arange(len(least)) + reach * REACH
            numbers = np.minimum(np.searchsorted(self._rows.keys, keys), len(self._rows.keys) - 1)
            known = np.flatnonzero(self._rows.keys[numbers] == keys)
            found.append((known, numbers[known]))
        starts, numbers = map(np.concatenate, zip(*found, strict=True))
        order = np.argsort(starts, kind="stable")
        return starts[order], numbers[order]

    def _matches(self, starts: Column, numbers: Column, end: int) -> Iterator[TextMatch]:
        """Matches that begin at some of ``starts``, and not before ``end``."""
        counts = self._rows.counts[numbers]
        ends = self._rows.lengths[ranges(self._rows.first[numbers], counts)] + np.repeat(starts, counts)
        hashes, wholes = self._sums.hashes(starts, counts, ends), self._rows.wholes
        fits = np.flatnonzero(wholes[np.minimum(np.searchsorted(wholes, hashes), len(wholes) - 1)] == hashes)
        fits = fits[ends[fits] <= len(self._prompt)]
        starts, stops = np.repeat(starts, counts)[fits], ends[fits]
        order = np.lexsort((-stops, starts))
        for start, stop in zip(starts[order].tolist(), stops[order].tolist(), strict=True):
            if start < end or self._wrong > _MOST_WRONG:
                continue
            if text_digest(self._prompt[start:stop]) in self._rows.digests:
                yield TextMatch(start, stop)
                end = stop
            else:
                self._wrong += 1

    @property
    def _exhausted(self) -> bool:
        return self._compared > _MOST_SLICES or self._wrong > _MOST_WRONG
