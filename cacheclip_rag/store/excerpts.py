"""Finds parts of stored texts in a prompt, where a framework cut, joined or rewrote a text.

Texts are compared without white space, quotation marks, backslashes and ``>``, so that a quoted, JSON-escaped or
re-wrapped text still matches. Of every ``REACH`` neighbouring windows of 16 bytes, the one with the smallest hash is
an anchor. Every common part of ``LEAST_SURE`` bytes shares an anchor, and the place of an anchor in both texts says how
they lie on each other. There the texts themselves are compared, so that a match is never wrong. Of overlapping matches
the longest wins.

The catalog holds the texts (compressed) and their anchors, about 1 for 32 bytes of text.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash

from ..errors import StoreError
from .database import Database
from .keys import text_digest
from .winnowing import WINDOW, Column, code_points, smallest, window_hashes

__all__ = ["LEAST_SURE", "SCHEMA", "ExcerptIndex", "TextMatch"]

logger = logging.getLogger(__name__)

REACH = 64
"""Neighbouring windows of which one is an anchor."""
LEAST_SURE = REACH + WINDOW - 1
"""Bytes of a common part that is always found. Shorter parts of texts are not looked for."""

_SHARED_BY = 8
"""Most places of one anchor that are looked at, in stored texts and in the prompt: boilerplate that more texts share
need not be found in each of them. A text's own words lead to it, and the comparison then covers the boilerplate too."""
_PER_ANCHOR = 4
"""Most texts that are compared with the prompt for each of its anchors: those that share the most anchors with it."""
_MOST_COMPARED = 1 << 24
"""Most bytes that are compared per search."""
_MOST_GIVEN = 1 << 22
"""Most characters of given texts that are searched for parts."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS contents (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, digest BLOB NOT NULL, text BLOB NOT NULL,
    UNIQUE (namespace, digest)
);
CREATE TABLE IF NOT EXISTS anchors (
    anchor INTEGER NOT NULL, content INTEGER NOT NULL, place INTEGER NOT NULL, PRIMARY KEY (anchor, content, place)
) WITHOUT ROWID;
"""
_OF_CONTENT = "SELECT id FROM contents WHERE namespace = ? AND digest = ?"
_COUNTS = (
    "SELECT value, (SELECT count(*) FROM (SELECT 1 FROM anchors WHERE anchor = value LIMIT ?)) AS number "
    "FROM json_each(?) WHERE number"
)
_FOUND = "SELECT anchor, content, place FROM anchors WHERE anchor IN (SELECT value FROM json_each(?))"
_FOUND_AT = "SELECT anchor, content, place FROM anchors WHERE anchor = ? LIMIT ?"
_CONTENTS = "SELECT id, text FROM contents WHERE namespace = ? AND id IN (SELECT value FROM json_each(?))"

_LEAST_STRETCH = 8
"""Least characters of a match: shorter ones hold too few whole tokens."""

_SKIPPED = np.zeros(1 << 16, dtype=bool)
"""By code point (the last for all above): whether the character is not compared."""
_SKIPPED[[*range(9, 14), *map(ord, ' \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff">\\')]] = True
_SKIPPED[0x2000:0x200C] = True
_ESCAPED = np.array([*map(ord, "nrt")], dtype=np.uint32)
"""After a backslash, these are not compared either: JSON writes line ends so."""


@dataclass(frozen=True, slots=True)
class TextMatch:
    """``prompt[start:stop]`` is a stored text or a part of one."""

    start: int
    stop: int
    source: str | None = None
    """The stored text of which it is a part; None: it is the whole text."""
    at: int = 0
    """Where the part begins in ``source``. Characters that are not compared may differ, no others."""


class _Compared:
    """The bytes of a text that are compared."""

    def __init__(self, text: str) -> None:
        codes = code_points(text)
        kept = ~_SKIPPED[np.minimum(codes, len(_SKIPPED) - 1)]
        escaped = np.flatnonzero(codes[:-1] == ord("\\")) + 1
        kept[escaped[np.isin(codes[escaped], _ESCAPED)]] = False
        self.text = text
        places = np.flatnonzero(kept)
        codes = codes[places]
        widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        self.characters: Column = np.repeat(places, widths)
        """Character of each byte."""
        written = codes.tobytes().decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass")
        self.bytes: Column = np.frombuffer(written, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.bytes)

    @cached_property
    def anchors(self) -> tuple[Column, Column]:
        """Hashes and places of the anchors; none of a text that is too short."""
        hashes = window_hashes(self.bytes)
        if len(hashes) < REACH:
            return hashes[:0], np.empty(0, np.int64)
        *_, (_, every) = smallest(hashes, REACH)
        places = np.unique(every)
        return hashes[places], places

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        """The compared bytes of the characters ``[start, stop)``."""
        first, last = np.searchsorted(self.characters, [start, stop])
        return int(first), int(last)


class _Part(NamedTuple):
    """Bytes ``[start, stop)`` of the prompt that equal those of ``source`` from ``start - shift`` on."""

    start: int
    stop: int
    source: _Compared | None
    """None: a whole text, which the prompt has itself."""
    shift: int


class ExcerptIndex:
    """Parts of the texts of one namespace, shared by processes through the store's catalog."""

    def __init__(self, database: Database, namespace: str) -> None:
        """``database``: has the tables of ``SCHEMA``."""
        self._database, self._namespace = database, namespace
        # tenants have other anchors, so that none of them makes an anchor of another one popular
        self._salt = np.int64(xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "surrogatepass")) >> 1)
        self._warned = False

    def add(self, texts: Iterable[str]) -> None:
        """Add texts. Texts that are too short for parts of ``LEAST_SURE`` bytes are left out."""
        for text in texts:
            anchors, places = _Compared(text).anchors
            if not len(anchors):
                continue
            digest = text_digest(text)
            if self._database.query(_OF_CONTENT, (self._namespace, digest)):
                continue
            written = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
            with self._database.transaction() as run:
                run(
                    "INSERT OR IGNORE INTO contents (namespace, digest, text) VALUES (?, ?, ?)",
                    (self._namespace, digest, written),
                )
                ((content,),) = run(_OF_CONTENT, (self._namespace, digest)).fetchall()
                rows = json.dumps([*zip((anchors ^ self._salt).tolist(), places.tolist(), strict=True)])
                run(
                    "INSERT OR IGNORE INTO anchors "
                    "SELECT json_extract(value, '$[0]'), ?, json_extract(value, '$[1]') FROM json_each(?)",
                    (content, rows),
                )

    def remove(self, texts: Iterable[str]) -> None:
        """Remove texts, for every process."""
        for text in texts:
            with self._database.transaction() as run:
                found = run(_OF_CONTENT, (self._namespace, text_digest(text))).fetchall()
                for content in found:
                    anchors = (_Compared(text).anchors[0] ^ self._salt).tolist()
                    run(
                        "DELETE FROM anchors WHERE content = ? AND anchor IN (SELECT value FROM json_each(?))",
                        (*content, json.dumps(anchors)),
                    )
                    run("DELETE FROM contents WHERE id = ?", content)

    def find(self, prompt: str, whole: Sequence[TextMatch], given: Iterable[str] = ()) -> list[TextMatch]:
        """The best cover of ``prompt`` by stored texts and parts of them, in order: the longest first, no overlap.

        Args:
            whole: whole texts that were found.
            given: other texts that may be in the prompt in part, stored or not.
        """
        compared = _Compared(prompt)
        gaps = _gaps(compared, whole)
        if not gaps:
            return list(whole)
        anchors = _anchors_in(compared, gaps)
        if not anchors:
            return list(whole)
        sources = dict(self._given(given, {prompt[match.start : match.stop] for match in whole}))
        places = [*_places_of(anchors, sources), *self._places(anchors)]
        chosen = _chosen(anchors, places)
        sources.update(self._contents({content for content, _ in chosen if content >= 0}))
        return _cover(compared, [*self._parts(compared, chosen, sources)], whole)

    def _given(self, given: Iterable[str], found: set[str]) -> Iterator[tuple[int, _Compared]]:
        """Given texts that were not found as a whole, numbered from -1 down: stored texts have numbers from 1 up."""
        room = _MOST_GIVEN
        for number, text in enumerate(dict.fromkeys(given)):
            room -= len(text)
            if text not in found and room >= 0:
                yield -1 - number, _Compared(text)

    def _places(self, anchors: Mapping[int, list[int]]) -> list[tuple[int, int, int]]:
        """Anchor, content and place of stored texts, for anchors of the prompt."""
        salt = int(self._salt)
        query = self._database.query
        try:
            counts = query(_COUNTS, (_SHARED_BY + 1, json.dumps([anchor ^ salt for anchor in anchors])))
            rows = query(_FOUND, (json.dumps([anchor for anchor, count in counts if count <= _SHARED_BY]),))
            for anchor, count in counts:
                if count > _SHARED_BY:
                    rows += query(_FOUND_AT, (anchor, _SHARED_BY))
        except StoreError as error:
            self._warn(error)
            return []
        self._warned = False
        # a catalog that something else wrote to may hold anything
        return [(row[0] ^ salt, row[1], row[2]) for row in rows if [*map(type, row)] == [int, int, int]]

    def _contents(self, wanted: set[int]) -> Iterator[tuple[int, _Compared]]:
        if not wanted:
            return
        try:
            rows = self._database.query(_CONTENTS, (self._namespace, json.dumps(sorted(wanted))))
        except StoreError as error:
            self._warn(error)
            return
        for content, written in rows:
            try:
                yield content, _Compared(zlib.decompress(written).decode("utf-8", "surrogatepass"))
            except (zlib.error, UnicodeDecodeError, TypeError):
                logger.warning("a text in the catalog is damaged, and parts of it are not found in prompts")

    def _parts(
        self, compared: _Compared, chosen: Sequence[tuple[int, int]], sources: Mapping[int, _Compared]
    ) -> Iterator[_Part]:
        """The common parts of the prompt and each chosen text, as it lies on the prompt."""
        room = _MOST_COMPARED
        for content, shift in chosen:
            if (source := sources.get(content)) is None:
                continue  # removed meanwhile, or another tenant's
            first, last = max(0, shift), min(len(compared), len(source) + shift)
            room -= max(0, last - first)
            if room < 0:
                logger.warning("the search for parts of stored texts was stopped: too many places look alike.")
                return
            equal = compared.bytes[first:last] == source.bytes[first - shift : last - shift]
            for start, stop in _long_runs(equal):
                yield _Part(first + start, first + stop, source, shift)

    def texts(self) -> Iterator[str]:
        """All texts of the namespace of which parts can be found. Raises StoreError if the catalog cannot be used."""
        last = 0
        while rows := self._database.query(
            "SELECT id, text FROM contents WHERE namespace = ? AND id > ? ORDER BY id LIMIT 1000",
            (self._namespace, last),
        ):
            last = rows[-1][0]
            for _, written in rows:
                with suppress(zlib.error, UnicodeDecodeError, TypeError):
                    yield zlib.decompress(written).decode("utf-8", "surrogatepass")

    def _warn(self, error: StoreError) -> None:
        if not self._warned:
            logger.warning("parts of stored texts are not found in prompts: %s", error)
        self._warned = True


def _gaps(compared: _Compared, whole: Sequence[TextMatch]) -> list[tuple[int, int]]:
    """Compared bytes between whole texts, where a part of ``LEAST_SURE`` bytes has room."""
    edges = [0, *(edge for match in whole for edge in compared.range_of(match.start, match.stop)), len(compared)]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return [(start, stop) for start, stop in gaps if stop - start >= LEAST_SURE]


def _anchors_in(compared: _Compared, gaps: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Places of the prompt's anchors that lie in gaps, by anchor."""
    found: dict[int, list[int]] = defaultdict(list)
    anchors, places = compared.anchors
    for start, stop in gaps:
        for n in range(*np.searchsorted(places, [start, stop - WINDOW + 1]).tolist()):
            found[int(anchors[n])].append(int(places[n]))
    return found


def _places_of(anchors: Mapping[int, list[int]], sources: Mapping[int, _Compared]) -> Iterator[tuple[int, int, int]]:
    """Anchor, number and place of given texts, for anchors of the prompt."""
    for number, source in sources.items():
        for anchor, place in zip(*(column.tolist() for column in source.anchors), strict=True):
            if anchor in anchors:
                yield anchor, number, place


def _chosen(anchors: Mapping[int, list[int]], places: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Which texts to compare at which shift: for each anchor of the prompt, those that share the most anchors."""
    at: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for anchor, content, place in places:
        for own in anchors[anchor][:_SHARED_BY]:
            at[own].append((content, own - place))
    counts = Counter(each for found in at.values() for each in found)
    chosen: dict[tuple[int, int], None] = {}
    for found in at.values():
        chosen.update(dict.fromkeys(sorted(set(found), key=lambda each: (-counts[each], each))[:_PER_ANCHOR]))
    return list(chosen)


def _cover(compared: _Compared, parts: Iterable[_Part], whole: Sequence[TextMatch]) -> list[TextMatch]:
    """Parts from the longest on, each where none was before; of equally long ones, whole texts and then the first."""
    free = np.ones(len(compared), dtype=bool)
    is_whole = {compared.range_of(match.start, match.stop): match for match in whole}
    found: list[TextMatch] = []
    every = [*parts, *(_Part(start, stop, None, start) for start, stop in is_whole)]
    for part in sorted(every, key=lambda p: (p.start - p.stop, p.source is not None, p.start)):
        room = free[part.start : part.stop]
        if part.source is None:
            match = is_whole[part.start, part.stop]
            if room.all():
                found.append(match)
                room[:] = False
                continue
            part = part._replace(source=_Compared(compared.text[match.start : match.stop]))
        for first, last in _long_runs(room):
            found += _matches(compared, part._replace(start=part.start + first, stop=part.start + last))
            room[first:last] = False
    return _without_overlap(found)


def _long_runs(mask: Column) -> list[list[int]]:
    """Where a bool column is True ``LEAST_SURE`` times or more in a row: first place, place after the last."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    runs: list[list[int]] = edges.reshape(-1, 2).tolist()
    return [[start, stop] for start, stop in runs if stop - start >= LEAST_SURE]


def _matches(compared: _Compared, part: _Part) -> Iterator[TextMatch]:
    """The characters of a part: one match for each stretch in which both texts have equally many characters that are
    not compared."""
    assert part.source is not None, "a whole text is one match"
    ours, theirs = compared.characters, part.source.characters
    start, stop = part.start, part.stop
    # whole characters only
    while start < stop and start and ours[start - 1] == ours[start]:
        start += 1
    while start < stop < len(ours) and ours[stop] == ours[stop - 1]:
        stop -= 1
    if start == stop:
        return
    here, there = ours[start:stop], theirs[start - part.shift : stop - part.shift]
    ends = [*(np.flatnonzero(np.diff(here - there)) + 1).tolist(), len(here)]
    first = 0
    for last in ends:
        begin, end, at = int(here[first]), int(here[last - 1]) + 1, int(there[first])
        while begin and at and compared.text[begin - 1] == part.source.text[at - 1]:
            begin, at = begin - 1, at - 1
        after = at + end - begin
        while end < len(compared.text) and after < len(part.source.text):
            if compared.text[end] != part.source.text[after]:
                break
            end, after = end + 1, after + 1
        yield TextMatch(begin, end, part.source.text, at)
        first = last


def _without_overlap(found: Iterable[TextMatch]) -> list[TextMatch]:
    """Matches in order, each cut where the one before it ends: white space at their edges may belong to both."""
    ordered: list[TextMatch] = []
    for match in sorted(found, key=lambda match: (match.start, match.stop)):
        if ordered and match.start < ordered[-1].stop:
            if match.source is None:  # a whole text stays whole
                ordered[-1] = TextMatch(ordered[-1].start, match.start, ordered[-1].source, ordered[-1].at)
            else:
                cut = ordered[-1].stop - match.start
                match = TextMatch(match.start + cut, match.stop, match.source, match.at + cut)
        if match.start < match.stop:
            ordered.append(match)
    return [match for match in ordered if match.source is None or match.stop - match.start >= _LEAST_STRETCH]
