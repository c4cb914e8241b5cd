"""The search of one prompt for texts whose anchors it holds: whole texts, and parts where a framework cut, joined or
rewrote a text.

Equal anchors of a text and the prompt say how the text lies on it. Whole texts are known by the hash of all their
characters there, and then by their digest. Elsewhere the texts themselves are compared in their folded form. A whole
text is a part that covers all: of what overlaps, the longest wins.

Places in the catalog only say which texts to look at: where a place is not that of the text's form, the text's anchors
are made again.

Hostile texts and prompts can make every place a candidate. A search therefore stops with a warning after a number of
comparisons; chunks that it did not find are computed as fresh text.
"""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..base.keys import text_digest
from .common_parts import (
    LEAST_SURE,
    WINDOW,
    AnchorPlaces,
    Compared,
    Part,
    TextMatch,
    cover,
    is_more_than_a_window,
    joined,
    pairs_of,
    pieces_in,
    places_of,
    ranks,
    smallest,
)
from .folding import Column
from .skeleton import loose_anchors, skeleton

logger = logging.getLogger(__name__)

_NEIGHBOURS = 8
"""Anchors of a prompt of which one is looked up first. The others are looked up where nothing was found."""
SHARED_BY = 8
"""Most stored places of one anchor that are looked at: boilerplate that more texts share need not be found in each of
them. A text's own words lead to it, and the comparison then covers the boilerplate too."""
_PER_ANCHOR = 4
"""Most texts that are compared with the prompt for each of its anchors: those that share the most anchors with it."""
_COVERED, _MOST_PIECES = 0.9, 2
"""Share of a given text from which on stored texts are reused for it, and how many pieces of them may stand for it: a
window of sentences may lie across two chunks."""
_LEAST_LOST = 128
"""Characters of a prompt of which nothing was found, from which on texts are looked for that were rewritten."""
_LEAST_SHARED, _SHORT = 3, 8
"""Anchors that a text shares with a stretch of the prompt in which it may stand with short insertions, and bytes of the
runs that both have in common."""

# Bounds of one search: something else may have written to the catalog, and a prompt may look like every text.
MOST_PAIRS, _OF_PARTS = 1 << 18, 1 << 12
"""Pairs of a place in the prompt and an equal anchor of a whole text, and of a text whose words are compared; two more
for each place."""
_MOST_WRONG = 256
"""Stretches that have a text's hash but not its digest."""
_ROOM, _PER_BYTE, _EACH = 1 << 24, 16, 1 << 11
"""Bytes that are compared or unpacked (a megabyte can become a gigabyte), more for each byte of the prompt, and what a
comparison counts at least."""
_MOST_LOST = 64
"""Texts that may stand in the prompt with other letters, and as many with insertions."""


_STOPPED = (
    "the search for stored texts in a prompt was stopped: too many places look alike. What it did not find is computed "
    "as fresh text."
)


def slice_sums(hashes: Column) -> tuple[Column, Column]:
    """Powers of an odd number, ``(num_windows,)``, and sums of the window hashes before each window times these powers,
    ``(num_windows + 1,)``, both int64 modulo 2**64. The hash of a text is its last sum; that of a slice from ``start``
    on is a difference of two sums divided by ``powers[start]``. (Of window hashes, because two different texts with
    equal sums of characters are known.)"""
    factors = np.full(len(hashes), 0x5851F42D4C957F2D, np.uint64)
    factors[:1] = 1
    powers = np.cumprod(factors).view(np.int64)
    sums = np.zeros(len(hashes) + 1, np.int64)
    np.cumsum(hashes * powers, out=sums[1:])
    return powers, sums


def whole_matches(
    prompt: str, hashes: Column, least: Mapping[int, Column], rows: Sequence[tuple[Any, ...]]
) -> list[TextMatch]:
    """Texts that occur in ``prompt`` as a whole: leftmost, longest, not overlapping, in order.

    Args:
        hashes: of the prompt's windows.
        least: by reach, see :func:`~cacheclip_rag.finding.common_parts.smallest`.
        rows: of the texts, see :class:`~cacheclip_rag.finding.texts.TextRow`.
    """
    matches: list[TextMatch] = []
    if not rows:
        return matches
    reaches, anchors, starts, lengths, _, wholes = np.array([row[1:] for row in rows], np.int64).T
    is_least = np.zeros(len(hashes), dtype=bool)
    for reach in {*reaches.tolist()} & {*least}:
        is_least[least[reach]] = True
    places = np.flatnonzero(is_least)
    places = places[np.isin(hashes[places], anchors)]
    of_rows = AnchorPlaces(anchors, np.arange(len(rows)), starts)
    _, texts, begins = pairs_of(hashes[places], places, of_rows, MOST_PAIRS)
    if len(np.unique(texts)) < np.isin(anchors, hashes[places]).sum():
        logger.warning(_STOPPED)
    ends = begins + lengths[texts]
    fits = np.flatnonzero((begins >= 0) & (ends >= begins + WINDOW) & (ends <= len(prompt)))
    begins, ends, texts = begins[fits], ends[fits], texts[fits]
    powers, sums = slice_sums(hashes)
    fits = np.flatnonzero(sums[ends - (WINDOW - 1)] - sums[begins] == wholes[texts] * powers[begins])
    fits = fits[np.lexsort((-ends[fits], begins[fits]))]
    digests, wrong, end = {row[0] for row in rows}, 0, 0
    for start, stop in zip(begins[fits].tolist(), ends[fits].tolist(), strict=True):
        if start < end:
            continue
        if text_digest(prompt[start:stop]) in digests:
            matches.append(TextMatch(start, stop))
            end = stop
        elif (wrong := wrong + 1) > _MOST_WRONG:
            logger.warning(_STOPPED)
            break
    return matches


class Search:
    """Looks for parts of texts in a prompt, beside the whole stored texts that were found."""

    def __init__(
        self,
        prompt: str,
        whole: Sequence[TextMatch],
        places: Callable[[Column], AnchorPlaces],
        contents: Callable[[set[int]], Mapping[int, object]],
    ) -> None:
        """``places``: looks anchors up in the catalog. ``contents``: texts by number, as they are in the catalog."""
        self._compared, self._whole = Compared(prompt), whole
        self._look_up, self._read = places, contents
        self._given_whole: Sequence[TextMatch] = ()
        self._sources: dict[int, Compared] = {}
        self._written: dict[int, object] = {}
        """Texts of the catalog that were not needed yet."""
        self._num_stored = 0
        """Given texts that are stored: numbers from -1 down."""
        self._edges = [self._compared.range_of(match.start, match.stop) for match in whole]
        self._done = set[tuple[int, int]]()
        self._renewed = set[int]()
        """Texts whose places in the catalog are not those of their form."""
        self._places = [-1, len(self._compared)]
        """Where anchors were looked up, and the ends."""
        self._shared: list[tuple[Column, Column, Column]] = []
        """Anchors that were found, as :func:`~cacheclip_rag.finding.common_parts.pairs_of` gives them."""
        self._room = _ROOM + _PER_BYTE * len(self._compared)
        self._longest = np.zeros(len(self._compared), dtype=np.int64)
        """For each byte, the length of the longest part or whole text that has it."""
        for start, stop in self._edges:
            self._longest[start:stop] = stop - start

    def take(self, stored: Sequence[str], documents: Sequence[str], given_whole: Sequence[TextMatch]) -> None:
        """Look for these texts too. ``stored``: texts whose words the catalog may lack. ``documents``: texts that are
        not stored, which take part where stored texts do not cover them; those found as a whole are
        ``given_whole``."""
        self._num_stored, self._given_whole = len(stored), given_whole
        whole = {self._compared.text[match.start : match.stop] for match in given_whole}
        for number, text in enumerate([*stored, *(text for text in documents if text not in whole)], 1):
            if len(text) <= self._room:
                self._room -= len(text)
                self._sources[-number] = Compared(text)

    def matches(self) -> list[TextMatch]:
        """The best cover of the prompt by whole texts and parts, in order: the longest first, no overlap. Texts that
        stand there in another form are told after them."""
        parts = [*self._parts()]
        stored = [part for part in parts if part.number >= -self._num_stored]
        matches = cover(self._compared, stored, self._whole)
        if len(stored) < len(parts) or self._given_whole:
            matches = self._with_given(matches, stored, [part for part in parts if part.number < -self._num_stored])
        free = np.ones(len(self._compared), dtype=bool)
        for match in matches:
            free[slice(*self._compared.range_of(match.start, match.stop))] = False
        gaps = np.diff(np.flatnonzero(~free), prepend=-1, append=len(free)) - 1
        if self._room >= 0 and sum(int(free[here].sum()) for here, *_ in self._shared) >= _LEAST_SHARED:
            matches = self._with_altered(matches, free)
        return self._with_rewritten(matches) if self._room >= 0 and gaps.max() >= _LEAST_LOST else matches

    def _with_given(self, of_stored: list[TextMatch], stored: list[Part], of_documents: list[Part]) -> list[TextMatch]:
        """The cover by stored and given texts. A given text that is covered by whole stored texts and few pieces of
        others takes no part. A text of scraps is better stored as a chunk of its own."""
        compared = self._compared
        whole = [compared.range_of(match.start, match.stop) for match in of_stored if match.of is None]
        pieces = [compared.range_of(start, stop) for start, stop in pieces_in(of_stored)]

        def is_covered(start: int, stop: int) -> bool:
            def shared(ranges: Iterable[tuple[int, int]]) -> list[int]:
                return sorted(max(0, min(stop, last) - max(start, first)) for first, last in ranges)

            covered = sum(shared(whole)) + sum(shared(pieces)[-_MOST_PIECES:])
            return stop > start and covered >= _COVERED * (stop - start)

        alone = [match for match in self._given_whole if not is_covered(*compared.range_of(match.start, match.stop))]
        whole += [compared.range_of(match.start, match.stop) for match in alone]
        others = [part for part in of_documents if not is_covered(part.start, part.stop)]
        return cover(compared, [*stored, *others], [*self._whole, *alone]) if others or alone else of_stored

    def _parts(self) -> Iterator[Part]:
        """Common parts of the prompt and stored texts, then of given texts."""
        anchors, places = self._compared.anchors
        also = [places_of(number, text) for number, text in self._sources.items() if number >= -self._num_stored]
        of_given = [places_of(number, text) for number, text in self._sources.items() if number < -self._num_stored]
        few = np.zeros(len(anchors), dtype=bool)  # the smallest among neighbours: a long part has one of them
        for width, smallest_ones in smallest(anchors, _NEIGHBOURS):
            if width == _NEIGHBOURS or len(anchors) < 2 * width:
                few[smallest_ones] = True
        yield from self._parts_at(anchors[few], places[few], also)
        covered = (self._longest[places] > 0) & (self._longest[places + WINDOW - 1] > 0)
        rest = ~few & ~covered
        yield from self._parts_at(anchors[rest], places[rest], also)
        if of_given:
            yield from self._parts_of(self._candidates(places, pairs_of(anchors, places, joined(of_given), _OF_PARTS)))

    def _parts_at(self, anchors: Column, places: Column, also: Sequence[AnchorPlaces]) -> Iterator[Part]:
        """Parts of stored texts at some anchors of the prompt."""
        if len(anchors):
            stored = self._look_up(anchors)
            pairs = pairs_of(anchors, places, joined([stored, *also]) if also else stored, _OF_PARTS)
            candidates = self._candidates(places, pairs)
            if candidates:
                self._written |= self._read({content for content, *_ in candidates if content >= 0})
                yield from self._parts_of(candidates)

    def _candidates(self, places: Column, pairs: tuple[Column, Column, Column]) -> list[list[int]]:
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
        kept = np.unique(group[pair[ranks(here[pair]) < _PER_ANCHOR]])
        kept = kept[np.argsort(-counts[kept], kind="stable")]
        rows: list[list[int]] = np.stack([contents[first], shifts[first], here[first], here[last]], 1)[kept].tolist()
        return rows[: max(0, self._room) // _EACH]

    def _parts_of(self, candidates: Iterable[Sequence[int]]) -> Iterator[Part]:
        ours = self._compared
        for content, shift, first, last in candidates:
            # it hardly reaches the anchors before and after those that it shares
            before = self._places[bisect_left(self._places, first) - 1]
            after = self._places[bisect_right(self._places, last)]
            if self._longest[first : last + 1].min() >= after - before + 2 * LEAST_SURE:
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
            self._room -= max(_EACH, end - begin)
            if self._room < 0:
                logger.warning(_STOPPED)
                return
            equal = ours.bytes[begin:end] == source.bytes[begin - shift : end - shift]
            for start, stop in ours.sure_runs(equal, begin):
                np.maximum(self._longest[start:stop], stop - start, out=self._longest[start:stop])
                yield Part(start, stop, shift, source, content)

    def _renewed_parts(self, content: int, source: Compared) -> Iterator[Part]:
        """Common parts with a text that was added by a version of the package whose form was another, or whose places
        are damaged."""
        self._room -= WINDOW * len(source)
        if content in self._renewed or self._room < 0:
            return
        self._renewed.add(content)
        anchors, places = self._compared.anchors
        yield from self._parts_of(
            self._candidates(places, pairs_of(anchors, places, places_of(content, source), _OF_PARTS))
        )

    def _source(self, content: int) -> Compared | None:
        """A text; None if it was removed meanwhile, or is another tenant's."""
        if content not in self._sources and content in self._written:
            self._sources[content] = Compared(self._unpacked(self._written.pop(content)))
        return self._sources.get(content)

    def _unpacked(self, written: object) -> str:
        """A text of the catalog; empty if it is damaged or there is no room for it."""
        text = decoded(written) if self._room > 0 else None
        self._room -= len(text or "")
        return text or ""

    # -- texts in another form ------------------------------------------------------------------------------------

    def _with_altered(self, matches: list[TextMatch], free: Column) -> list[TextMatch]:
        """What was found, and texts of which half or more stands where the prompt is ``free`` in short pieces: with a
        mark or a name in each line, or with words set off. Hardly a token of these can be reused; they are counted."""
        ours = self._compared
        here, contents, shifts = map(np.concatenate, zip(*self._shared, strict=True))
        wanted = free[here] & (contents >= -self._num_stored)
        here, contents, shifts = here[wanted], contents[wanted], shifts[wanted]
        numbers, counts = np.unique(contents, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] >= _LEAST_SHARED][:_MOST_LOST]
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
            edges = np.array([begin - 1, *(np.flatnonzero(~free[begin:end]) + begin), end])
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
        return sorted([*matches, *more], key=lambda match: match.start)

    def _with_rewritten(self, matches: list[TextMatch]) -> list[TextMatch]:
        """What was found, and stored texts of which half or more stands elsewhere with other letters, or other marks
        around its words (:mod:`~cacheclip_rag.finding.skeleton`). They are told to be counted."""
        prompt = self._compared.text
        edges = [0, *(edge for match in matches for edge in (match.start, match.stop)), len(prompt)]
        more, known, left = list[TextMatch](), {match.of for match in matches}, _MOST_LOST
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            if end - begin < _LEAST_LOST or left <= 0:
                continue
            codes, places = skeleton(prompt[begin:end])
            anchors, at = loose_anchors(codes)
            if not len(anchors):
                continue
            _, contents, _ = pairs_of(anchors, at, self._look_up(anchors), _OF_PARTS)
            numbers, counts = np.unique(contents, return_counts=True)
            numbers = numbers[np.argsort(-counts, kind="stable")][:left]
            left -= len(numbers)
            written, stretch = self._read({*numbers.tolist()}) if len(numbers) else {}, _short_runs(codes)
            free = np.ones(len(stretch), dtype=bool)
            for number in numbers.tolist():
                text = self._unpacked(written[number]) if number in written else ""
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
        return sorted([*matches, *more], key=lambda match: match.start)


def _short_runs(column: Column) -> Column:
    """Every run of ``_SHORT`` neighbouring bytes, as one number each."""
    if len(column) < _SHORT:
        return np.empty(0, dtype=np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(column, _SHORT)
    return np.ascontiguousarray(runs).view(np.uint64).ravel()


def decoded(written: Any) -> str | None:
    """A compressed text of the catalog; None, with a warning, if it is damaged."""
    unpacker = zlib.decompressobj()
    try:
        unpacked = unpacker.decompress(written, _ROOM)
        if unpacker.eof:
            return unpacked.decode("utf-8", "surrogatepass")
    except (zlib.error, UnicodeDecodeError, TypeError):
        pass
    logger.warning("a text in the catalog is damaged, and parts of it are not found in prompts")
    return None
