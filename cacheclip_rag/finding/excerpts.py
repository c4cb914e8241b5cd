"""Finds parts of stored texts in a prompt, where a framework cut, joined or rewrote a text.

A prompt and a stored text that have a part in common share an anchor (:mod:`~cacheclip_rag.finding.common_parts`),
which is looked up. The place of an anchor in both texts says how they lie on each other. There the texts themselves are
compared, so that a match is never wrong. Of overlapping matches the longest wins.

Places in the catalog only say which texts to look at: where a place is not that of the text's form, the text's anchors
are made again.

The catalog holds the texts (compressed) and their anchors: 1 for about 20 bytes of prose, and 1 for 5 to 10 bytes of
numbers, tables or Chinese; and 1 more for about 100 characters, by which texts are counted that were rewritten.
"""

from __future__ import annotations

import json
import logging
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..base.database import Database, OutageWarning
from ..base.errors import StoreError
from ..base.keys import text_digest
from .common_parts import (
    LEAST_SURE,
    WINDOW,
    Compared,
    Part,
    TextMatch,
    cover,
    is_more_than_a_window,
    pieces_in,
    ranges,
    smallest,
)
from .folding import Column
from .skeleton import loose_anchors, skeleton

logger = logging.getLogger(__name__)

_NEIGHBOURS = 8
"""Anchors of a prompt of which one is looked up first. The others are looked up where nothing was found."""
_SHARED_BY = 8
"""Most stored places of one anchor that are looked at: boilerplate that more texts share need not be found in each of
them. A text's own words lead to it, and the comparison then covers the boilerplate too."""
_PER_ANCHOR = 4
"""Most texts that are compared with the prompt for each of its anchors: those that share the most anchors with it."""
_MOST_PAIRS = 1 << 12
"""Most pairs of a place in the prompt and a place in a stored text, per search; two more for each anchor."""
_MOST_CANDIDATES = 1 << 9
"""Most comparisons of a text with the prompt per search; one more for 64 bytes of the prompt."""
_MOST_COMPARED = 1 << 22
"""Most bytes that are compared per search; ``_PER_BYTE`` more for each byte of the prompt."""
_PER_BYTE = 16
_LONGEST_TEXT = 1 << 24
"""Longest text in bytes that is unpacked: something else may have written it, and a megabyte can become a gigabyte."""
_MOST_UNPACKED = 1 << 26
"""Most characters that are unpacked per search."""
_MOST_GIVEN = 1 << 22
"""Most characters of given texts that are searched for parts."""
_COVERED = 0.9
"""Share of a given text from which on stored texts are reused for it."""
_MOST_PIECES = 2
"""Most pieces of stored texts that stand for a given text: a window of sentences may lie across two chunks."""
_LEAST_SHARED = 3
"""Anchors that a text shares with a stretch of the prompt in which it may stand with short insertions."""
_SHORT = 8
"""Bytes of a run that such a text and the stretch have in common."""
_MOST_ALTERED = _MOST_REWRITTEN = 1 << 6
"""Most such texts that are looked at per search, and most rewritten ones."""
_LEAST_LOST = 128
"""Characters of a prompt of which nothing was found, from which on texts are looked for that were rewritten."""
_BATCH = 256
"""Texts that are added in one transaction: other processes wait meanwhile."""

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
_PLACES = (
    "SELECT value, (SELECT group_concat(content || ' ' || place, ' ') FROM "
    "(SELECT content, place FROM anchors WHERE anchor = value LIMIT ?)) FROM json_each(?)"
)
# "+": without it, SQLite reads all of the tenant's digests
_CONTENTS = "SELECT id, text FROM contents WHERE +namespace = ? AND id IN (SELECT value FROM json_each(?))"


class _AnchorPlaces(NamedTuple):
    """Places of anchors in texts, one column each."""

    anchors: Column
    contents: Column
    """Numbers of the texts: ids of stored ones; given ones from -1 down."""
    places: Column


class ExcerptIndex:
    """Parts of the texts of one namespace, shared by processes through the store's catalog."""

    def __init__(self, database: Database, namespace: str) -> None:
        """``database``: has the tables of ``SCHEMA``."""
        self._database, self._namespace = database, namespace
        # tenants have other anchors, so that none of them makes an anchor of another one popular
        self._salt = np.int64(xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "surrogatepass")) >> 1)
        self._outage = OutageWarning(logger, "parts of stored texts are not found in prompts: %s")

    def mend(self) -> None:
        """Remove contents that are damaged, and add the anchors of all others again."""
        for rows in self._batches():
            whole = []
            for content, digest, written in rows:
                text = _unpacked(written)
                if text_digest(text) == digest:
                    whole.append(text)
                else:
                    self._database.execute("DELETE FROM contents WHERE id = ?", (content,))
            self.add(whole, again=True)
        self._database.execute("DELETE FROM anchors WHERE content NOT IN (SELECT id FROM contents)")

    def add(self, texts: Iterable[str], *, again: bool = False) -> None:
        """Add texts. Those that are too short to have an anchor are left out. ``again``: write the anchors of texts
        that are there, too."""
        found = [(text, *_few_of_each(*_all_anchors(text))) for text in texts]
        found = [(text, anchors, places) for text, anchors, places in found if len(anchors)]
        for first in range(0, len(found), _BATCH):
            with self._database.transaction() as run:
                rows: list[tuple[int, int, int]] = []
                for text, anchors, places in found[first : first + _BATCH]:
                    digest = text_digest(text)
                    known = run(_OF_CONTENT, (self._namespace, digest)).fetchone()
                    if known is None:
                        written = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
                        sql = "INSERT INTO contents (namespace, digest, text) VALUES (?, ?, ?) RETURNING id"
                        known = run(sql, (self._namespace, digest, written)).fetchone()
                    elif not again:
                        continue
                    salted = (anchors ^ self._salt).tolist()
                    rows += zip(salted, [known[0]] * len(salted), places.tolist(), strict=True)
                rows.sort()  # neighbours are written together
                run(
                    "INSERT OR IGNORE INTO anchors SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), "
                    "json_extract(value, '$[2]') FROM json_each(?)",
                    (json.dumps(rows),),
                )

    def remove(self, texts: Iterable[str]) -> None:
        for text in texts:
            with self._database.transaction() as run:
                found = run(_OF_CONTENT, (self._namespace, text_digest(text))).fetchall()
                for content in found:
                    anchors = (_all_anchors(text)[0] ^ self._salt).tolist()
                    run(
                        "DELETE FROM anchors WHERE content = ? AND anchor IN (SELECT value FROM json_each(?))",
                        (*content, json.dumps(anchors)),
                    )
                    run("DELETE FROM contents WHERE id = ?", content)

    def find(
        self,
        prompt: str,
        whole: Sequence[TextMatch],
        also: Iterable[str] = (),
        given: Iterable[str] = (),
        given_whole: Sequence[TextMatch] = (),
    ) -> list[TextMatch]:
        """The best cover of ``prompt`` by stored texts and parts of them, in order: the longest first, no overlap.
        ``whole``: whole stored texts that were found. ``also``: stored texts to look for whose contents the catalog may
        lack. ``given``: texts that are not stored, which take part where stored texts do not cover them."""
        compared = Compared(prompt)
        also = list(also)
        # numbered from -1 down: stored texts have numbers from 1 up
        lengths = accumulate(map(len, texts := [*also, *given]))
        sources = {
            -1 - n: Compared(text)
            for n, (text, length) in enumerate(zip(texts, lengths, strict=True))
            if length <= _MOST_GIVEN
        }
        comparison = _TextComparison(compared, whole, sources)
        parts = [*self._parts(comparison, compared, sources, len(also))]
        stored = [part for part in parts if part.number >= -len(also)]
        of_stored = cover(compared, stored, whole)
        if len(stored) == len(parts) and not given_whole:
            of_stored = comparison.with_altered(of_stored, -len(also))
            return self._with_rewritten(of_stored, prompt) if comparison.longest_free >= _LEAST_LOST else of_stored
        whole_ones = [compared.range_of(match.start, match.stop) for match in of_stored if match.of is None]
        pieces = [compared.range_of(start, stop) for start, stop in pieces_in(of_stored)]

        def is_covered(start: int, stop: int) -> bool:
            """Whether whole stored texts and few pieces of others cover it. A text of scraps is better stored as a
            chunk of its own."""

            def shared(ranges: Iterable[tuple[int, int]]) -> list[int]:
                return sorted(max(0, min(stop, last) - max(start, first)) for first, last in ranges)

            found = sum(shared(whole_ones)) + sum(shared(pieces)[-_MOST_PIECES:])
            return stop > start and found >= _COVERED * (stop - start)

        alone = [match for match in given_whole if not is_covered(*compared.range_of(match.start, match.stop))]
        whole_ones += [compared.range_of(match.start, match.stop) for match in alone]
        others = [part for part in parts if part.number < -len(also) and not is_covered(part.start, part.stop)]
        found = cover(compared, [*stored, *others], [*whole, *alone]) if others or alone else of_stored
        found = comparison.with_altered(found, -len(also))
        return self._with_rewritten(found, prompt) if comparison.longest_free >= _LEAST_LOST else found

    def _with_rewritten(self, found: list[TextMatch], prompt: str) -> list[TextMatch]:
        """What was found, and stored texts of which half or more stands elsewhere with other letters, or other marks
        around its words (:mod:`~cacheclip_rag.finding.skeleton`). They are told to be counted."""
        edges = [0, *(edge for match in found for edge in (match.start, match.stop)), len(prompt)]
        more, known, left, room = list[TextMatch](), {match.of for match in found}, _MOST_REWRITTEN, _MOST_UNPACKED
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            if end - begin < _LEAST_LOST or left <= 0:
                continue
            codes, places = skeleton(prompt[begin:end])
            anchors, at = loose_anchors(codes)
            if not len(anchors):
                continue
            numbers, counts = np.unique(_pairs(anchors, at, self._places(anchors)).contents, return_counts=True)
            numbers = numbers[np.argsort(-counts, kind="stable")][:left]
            left -= len(numbers)
            written, stretch = self._contents({*numbers.tolist()}), _short_runs(codes)
            free = np.ones(len(stretch), dtype=bool)
            for number in numbers.tolist():
                text = _unpacked(written.get(number), min(_LONGEST_TEXT, room)) if number in written else ""
                room -= len(text)
                there = _short_runs(skeleton(text)[0])
                fits = np.flatnonzero(free & np.isin(stretch, there))
                if text in known or not len(fits):
                    continue
                taken, middle = np.flatnonzero(~free), fits[len(fits) // 2]
                first, last = taken[taken < middle].max(initial=-1), taken[taken > middle].min(initial=len(free))
                fits = fits[(fits > first) & (fits < last)]
                if 2 * np.isin(there, stretch[fits]).sum() < len(there):
                    continue
                known.add(text)
                first, last = fits[0], fits[-1] + _SHORT
                free[max(0, first - _SHORT + 1) : last] = False
                # behind its end: tokens that happen to be alike were computed behind other words
                more.append(TextMatch(begin + int(places[first]), begin + int(places[last - 1]) + 1, text, len(text)))
        return sorted([*found, *more], key=lambda match: match.start)

    def _parts(
        self, comparison: _TextComparison, compared: Compared, given: Mapping[int, Compared], num_stored: int
    ) -> Iterator[Part]:
        """Common parts of the prompt and stored texts, of which ``num_stored`` are also given, then of given texts."""
        anchors, places = compared.anchors
        also = {number: text for number, text in given.items() if number >= -num_stored}
        others = {number: text for number, text in given.items() if number < -num_stored}
        few = np.zeros(len(anchors), dtype=bool)  # the smallest among neighbours: a long part has one of them
        for width, smallest_ones in smallest(anchors, _NEIGHBOURS):
            if width == _NEIGHBOURS or len(anchors) < 2 * width:
                few[smallest_ones] = True
        yield from self._stored_parts(comparison, anchors[few], places[few], also)
        found = (comparison.longest[places] > 0) & (comparison.longest[places + WINDOW - 1] > 0)
        rest = ~few & ~found
        yield from self._stored_parts(comparison, anchors[rest], places[rest], also)
        if others:
            pairs = _pairs(anchors, places, _joined(_places_of(others)))
            yield from comparison.parts(comparison.candidates(places, pairs))

    def _stored_parts(
        self, comparison: _TextComparison, anchors: Column, places: Column, also: Mapping[int, Compared]
    ) -> Iterator[Part]:
        """Parts of stored texts at some anchors of the prompt."""
        if len(anchors):
            pairs = _pairs(anchors, places, _joined([self._places(anchors), *_places_of(also)]))
            candidates = comparison.candidates(places, pairs)
            comparison.written |= self._contents({content for content, *_ in candidates if content >= 0})
            yield from comparison.parts(candidates)

    def _places(self, anchors: Column) -> _AnchorPlaces:
        try:
            salted = np.unique(anchors ^ self._salt)  # in order: neighbours are read together
            rows = self._database.query(_PLACES, (_SHARED_BY, json.dumps(salted.tolist())))
        except StoreError as error:
            self._outage.failed(error)
            return _NOWHERE
        self._outage.worked()
        found = [row for row in rows if row[1]]
        counts = [written.count(" ") // 2 + 1 for _, written in found]
        salted = np.repeat(np.array([anchor for anchor, _ in found], dtype=np.int64), counts)
        try:
            numbers = np.array(" ".join([written for _, written in found]).split(), dtype=np.int64)
            return _AnchorPlaces(salted ^ self._salt, numbers[::2], numbers[1::2])
        except (TypeError, ValueError, OverflowError):
            logger.warning("the catalog holds something else than places of anchors. Run cacheclip store repair.")
            return _NOWHERE

    def _contents(self, wanted: set[int]) -> dict[int, object]:
        try:
            sql = (self._namespace, json.dumps(sorted(wanted)))
            return dict(self._database.query(_CONTENTS, sql)) if wanted else {}
        except StoreError as error:
            self._outage.failed(error)
            return {}

    def texts(self) -> Iterator[str]:
        """All texts of the namespace of which parts can be found. Raises StoreError if the catalog cannot be used."""
        for rows in self._batches():
            for *_, written in rows:
                with suppress(zlib.error, UnicodeDecodeError, TypeError):
                    yield _decoded(written)

    def _batches(self) -> Iterator[list[Any]]:
        """Id, digest and compressed text of all contents of the namespace, some at a time."""
        sql, last = "SELECT id, digest, text FROM contents WHERE namespace = ? AND id > ? ORDER BY id LIMIT ?", 0
        while rows := self._database.query(sql, (self._namespace, last, _BATCH)):
            yield rows
            last = max(last + 1, rows[-1][0])


class _TextComparison:
    """Compares texts with a prompt where they share anchors, as long as there is room for it."""

    def __init__(self, compared: Compared, whole: Sequence[TextMatch], sources: Mapping[int, Compared]) -> None:
        self._compared, self._sources = compared, dict(sources)
        self.written: dict[int, object] = {}
        """Other texts, as they are in the catalog."""
        self._edges = [compared.range_of(match.start, match.stop) for match in whole]
        self._done = set[tuple[int, int]]()
        self._renewed = set[int]()
        """Texts whose places in the catalog are not those of their form."""
        self._places = [-1, len(compared)]
        """Where anchors were looked up, and the ends."""
        self._shared: list[_AnchorPlaces] = []
        """Anchors that were found, as :func:`_pairs` gives them."""
        self._unpacked_room = _MOST_UNPACKED
        self._room = _MOST_COMPARED + _PER_BYTE * len(compared)
        self.longest_free = 0
        """Most neighbouring bytes of which nothing was found; 0 if there was no room to look at all of them."""
        self.longest = np.zeros(len(compared), dtype=np.int64)
        """For each byte, the length of the longest part or whole text that has it."""
        for start, stop in self._edges:
            self.longest[start:stop] = stop - start

    def candidates(self, places: Column, pairs: _AnchorPlaces) -> list[list[int]]:
        """Which texts to compare: number, how far it is moved, its first and its last anchor in the prompt, at the
        places where anchors were looked up. Those that share the most anchors come first. A text that shares anchors
        with one whole text of the prompt only is left out: no part of it is much longer."""
        self._places = sorted({*self._places, *places.tolist()})
        if not len(pairs[0]):
            return []
        self._shared.append(pairs)
        order = np.lexsort((pairs[0], pairs[2], pairs[1]))
        here, contents, shifts = (column[order] for column in pairs)
        is_first = np.ones(len(here), dtype=bool)
        is_first[1:] = (contents[1:] != contents[:-1]) | (shifts[1:] != shifts[:-1])
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(here)) - 1
        counts = last - first + 1
        inside = np.zeros(len(first), dtype=bool)
        if self._edges:
            starts, stops = np.array(self._edges, dtype=np.int64).T
            owners = np.searchsorted(starts, here[first], side="right") - 1
            inside = (owners >= 0) & (here[last] < stops[owners])
        # of the texts at an anchor, those that share the most
        group = np.cumsum(is_first) - 1
        pair = np.flatnonzero(~inside[group])
        pair = pair[np.lexsort((-counts[group[pair]], here[pair]))]
        kept = np.unique(group[pair[_ranks(here[pair]) < _PER_ANCHOR]])
        kept = kept[np.argsort(-counts[kept], kind="stable")]
        found: list[list[int]] = np.stack([contents[first], shifts[first], here[first], here[last]], 1)[kept].tolist()
        return found[: _MOST_CANDIDATES + len(self._compared) // 64]

    def parts(self, candidates: Iterable[Sequence[int]]) -> Iterator[Part]:
        ours = self._compared
        for content, shift, first, last in candidates:
            # it hardly reaches the anchors before and after those that it shares
            before = self._places[bisect_left(self._places, first) - 1]
            after = self._places[bisect_right(self._places, last)]
            if self.longest[first : last + 1].min() >= after - before + 2 * LEAST_SURE:
                continue
            if (content, shift) in self._done or (source := self._source(content)) is None:
                continue
            self._done.add((content, shift))
            there = slice(max(0, first - shift), first - shift + WINDOW)
            if source.bytes[there].tobytes() != ours.bytes[first : first + WINDOW].tobytes():
                yield from self._renewed_parts(content, source)
                continue
            begin, end = max(0, shift), min(len(ours), len(source) + shift)
            if end <= begin:
                continue  # something else wrote to the catalog
            if first == last and not is_more_than_a_window(ours, source, first, first - shift):
                continue
            self._room -= end - begin
            if self._room < 0:
                logger.warning("the search for parts of stored texts was stopped: too many places look alike.")
                return
            equal = ours.bytes[begin:end] == source.bytes[begin - shift : end - shift]
            for start, stop in ours.sure_runs(equal, begin):
                np.maximum(self.longest[start:stop], stop - start, out=self.longest[start:stop])
                yield Part(start, stop, shift, source, content)

    def with_altered(self, found: list[TextMatch], least: int) -> list[TextMatch]:
        """What was found, and texts, by number up to ``least``, of which half or more stands elsewhere in short pieces:
        with a mark or a name in each line, or with words set off. Hardly a token of these can be reused; they are
        counted."""
        ours = self._compared
        free = np.ones(len(ours), dtype=bool)
        for match in found:
            free[slice(*ours.range_of(match.start, match.stop))] = False
        if self._room >= 0:
            self.longest_free = int(np.diff(np.flatnonzero(~free), prepend=-1, append=len(ours)).max()) - 1
        if not self._shared:
            return found
        here, contents, shifts = map(np.concatenate, zip(*self._shared, strict=True))
        wanted = free[here] & (contents >= least)
        here, contents, shifts = here[wanted], contents[wanted], shifts[wanted]
        numbers, counts = np.unique(contents, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] >= _LEAST_SHARED][:_MOST_ALTERED]
        more = []
        for content in numbers[order].tolist():
            own = contents == content
            if len(np.unique(shifts[own])) < 2 or (source := self._source(content)) is None:
                continue
            self._room -= WINDOW * len(source)
            if self._room < 0:
                break
            middle = int(np.median(here[own]))
            near = own & (abs(here - middle) <= 2 * len(source))
            if not near.any():
                continue
            first, last = int(here[near].min()), int(here[near].max())
            # with what is inserted, what is before and after these anchors is at most twice as long
            begin = max(0, first - 2 * int((here - shifts)[near].min()))
            end = min(len(ours), last + 2 * (len(source) - int((here - shifts)[near].max())))
            if not begin <= middle < end:
                continue  # something else wrote to the catalog
            # what was found around the stretch is no part of it
            taken = np.flatnonzero(~free[begin:end]) + begin
            edges = np.array([begin - 1, *taken, end])
            after = int(np.searchsorted(edges, middle))
            begin, end = int(edges[after - 1]) + 1, int(edges[after])
            there, stretch = _short_runs(source.bytes), _short_runs(ours.bytes[begin:end])
            is_there = np.isin(there, stretch)
            covered = np.zeros(len(source), dtype=bool)
            for first in range(_SHORT):
                covered[first : first + len(is_there)] |= is_there
            if not is_there.any() or 2 * covered.sum() < len(source):
                continue
            fits = np.flatnonzero(np.isin(stretch, there)) + begin
            first, last = int(fits[0]), int(fits[-1]) + _SHORT - 1
            free[first : last + 1] = False
            more.append(TextMatch(int(ours.starts[first]), int(ours.stops[last]), source.text))
        return sorted([*found, *more], key=lambda match: match.start)

    def _renewed_parts(self, content: int, source: Compared) -> Iterator[Part]:
        """Common parts with a text that was added by a version of the package whose form was another, or whose places
        are damaged."""
        self._room -= WINDOW * len(source)
        if content in self._renewed or self._room < 0:
            return
        self._renewed.add(content)
        anchors, places = self._compared.anchors
        pairs = _pairs(anchors, places, _joined(_places_of({content: source})))
        yield from self.parts(self.candidates(places, pairs))

    def _source(self, content: int) -> Compared | None:
        """A text; None if it was removed meanwhile, or is another tenant's."""
        if content not in self._sources and content in self.written:
            text = _unpacked(self.written[content], min(_LONGEST_TEXT, self._unpacked_room))
            self._unpacked_room -= len(text)
            self._sources[content] = Compared(text)
        return self._sources.get(content)


_NOTHING = np.empty(0, dtype=np.uint8)
_NOWHERE = _AnchorPlaces(*np.empty((3, 0), dtype=np.int64))


def _all_anchors(text: str) -> tuple[Column, Column]:
    """Anchors of a text, and those by which it is found if it was rewritten, with their places."""
    anchors, places = Compared(text).anchors
    loose, others = loose_anchors(skeleton(text)[0]) if len(anchors) else (anchors, places)
    return np.concatenate([anchors, loose]), np.concatenate([places, others])


def _short_runs(column: Column) -> Column:
    """Every run of ``_SHORT`` neighbouring bytes, as one number each."""
    if len(column) < _SHORT:
        return np.empty(0, dtype=np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(column, _SHORT)
    return np.ascontiguousarray(runs).view(np.uint64).ravel()


def _decoded(written: Any, most: int = _LONGEST_TEXT) -> str:
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(written, max(1, most))
    if not unpacker.eof:
        raise zlib.error("the text is longer than any that is stored, or cut off")
    return unpacked.decode("utf-8", "surrogatepass")


def _unpacked(written: object, most: int = _LONGEST_TEXT) -> str:
    """A text of the catalog; empty, with a warning, if it is damaged."""
    try:
        return _decoded(written, most)
    except (zlib.error, UnicodeDecodeError, TypeError):
        logger.warning("a text in the catalog is damaged, and parts of it are not found in prompts")
        return ""


def _few_of_each(anchors: Column, places: Column) -> tuple[Column, Column]:
    """The first ``_SHARED_BY`` places of each anchor of a text: no more are looked at."""
    order = np.argsort(anchors, kind="stable")
    kept = np.sort(order[_ranks(anchors[order]) < _SHARED_BY])
    return anchors[kept], places[kept]


def _ranks(values: Column) -> Column:
    """How many of the neighbours before each value are equal to it."""
    first = np.concatenate(([True], values[1:] != values[:-1])) if len(values) else np.empty(0, dtype=bool)
    numbers = np.arange(len(values))
    return numbers - np.maximum.accumulate(np.where(first, numbers, 0))


def _places_of(sources: Mapping[int, Compared]) -> Iterator[_AnchorPlaces]:
    for number, source in sources.items():
        anchors, places = source.anchors
        yield _AnchorPlaces(anchors, np.full(len(anchors), number), places)


def _joined(places: Iterable[_AnchorPlaces]) -> _AnchorPlaces:
    return _AnchorPlaces(*map(np.concatenate, zip(*places, strict=True)))


def _pairs(anchors: Column, places: Column, others: _AnchorPlaces) -> _AnchorPlaces:
    """For each pair of equal anchors: the place in the prompt, the text, and how far the text is moved to lie there.
    Anchors that are in many places are left out if there are too many pairs."""
    order = np.argsort(anchors, kind="stable")
    anchors, places = anchors[order], places[order]
    first = np.searchsorted(anchors, others.anchors)
    counts = np.searchsorted(anchors, others.anchors, side="right") - first
    fewest = np.argsort(counts, kind="stable")
    most = _MOST_PAIRS + 2 * len(places)
    fewest = fewest[: np.searchsorted(np.cumsum(counts[fewest]), most, side="right")]
    chosen = np.repeat(fewest, counts[fewest])
    here = places[ranges(first[fewest], counts[fewest])]
    return _AnchorPlaces(here, others.contents[chosen], here - others.places[chosen])
