"""Hashes of a text's windows, its anchors, and what two texts have in common.

Texts are compared in their folded form (:mod:`~cacheclip_rag.finding.folding`), as bytes. Among neighbouring windows of
16 bytes, the one with the smallest hash is an anchor. How many windows are neighbours depends on the bytes: few where
tokens have few bytes (digits, punctuation, Chinese), many in words. So every common part of 32 tokens or more shares an
anchor, and prose has few anchors. Which texts to compare is decided by :mod:`~cacheclip_rag.finding.search`.

Source: winnowing (Schleimer et al., SIGMOD 2003). Of ``reach`` neighbouring windows, the one with the smallest hash is
chosen. Two sequences that share ``reach`` neighbouring windows therefore share a chosen one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .folding import Column, fold

WINDOW = 16
"""Items per window."""
_REACH = 48
"""Weight of the bytes at which neighbouring windows begin. One of these windows is an anchor."""
_LEVELS = np.array([width.bit_length() for width in range(_REACH + 2)], np.uint8)
_IN_WORDS, _IN_OTHERS, _ALONE = 1, 3, 4
"""Weight of a byte: a lower-case letter; a byte of a character that is not ASCII; any other byte. What is not compared
weighs as much as the last, unless a letter follows. So 32 tokens weigh at least ``_REACH`` and a window."""
LEAST_SURE = _REACH // _IN_WORDS + WINDOW - 1
"""Bytes of a common part that is always found, whatever they are. Of digits and punctuation, 27 are enough."""
_GAP = 16
"""Most characters of white space, quotation marks and the like between parts that are one piece of a text."""
_LEAST_STRETCH = 8
"""Least characters of a match: shorter ones hold too few whole tokens."""
_WEIGHTS = np.full(256, _ALONE, dtype=np.int64)
"""By byte."""
_WEIGHTS[ord("a") : ord("z") + 1] = _IN_WORDS
_WEIGHTS[0x80:] = _IN_OTHERS
_AFTER_GAP = np.full(256, _ALONE, dtype=np.int64)
"""By byte: weight of what is not compared before it."""
_AFTER_GAP[ord("a") : ord("z") + 1] = _AFTER_GAP[ord("A") : ord("Z") + 1] = _AFTER_GAP[0x80:] = 0


def window_hashes(items: Column) -> Column:
    """Hash of every window of ``WINDOW`` items, in order: ``(len(items) - WINDOW + 1,)`` int64."""
    codes = items.astype(np.uint64)
    count = len(codes) - WINDOW + 1
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    # a polynomial modulo 2**64, of windows twice as wide at each step; the finaliser below spreads the hashes
    hashes, factor, width = codes, 0x100000001B3, 1
    while width < WINDOW:
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        factor, width = factor * factor % (1 << 64), 2 * width
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (hashes ^ (hashes >> np.uint64(32))).view(np.int64)


def smallest(hashes: Column, reach: int) -> Iterator[tuple[int, Column]]:
    """For each power of two up to ``reach``, the place of the first smallest hash among that many windows from window
    ``i`` on, for every ``i``."""
    places, width = np.arange(len(hashes)), 1
    while len(places):
        yield width, places
        if width >= reach:
            return
        is_first = hashes[:-width] <= hashes[width:]
        hashes = np.minimum(hashes[:-width], hashes[width:])
        places = np.where(is_first, places[:-width], places[width:])
        width *= 2


@dataclass(frozen=True, slots=True)
class TextMatch:
    """``prompt[start:stop]`` is a stored text or a part of one."""

    start: int
    stop: int
    of: str | None = None
    """The stored text of which it is a part; None: it is the whole text."""
    at: int = 0
    """Where the part begins in ``of``. Both show the same, but for white space and the like."""


class Compared:
    """A text in its folded form."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.bytes, self.starts, self.stops = fold(text)

    def __len__(self) -> int:
        return len(self.bytes)

    @cached_property
    def reaches(self) -> Column:
        """For each byte, the last window of those that are neighbours of the window which begins there."""
        weights = _WEIGHTS[self.bytes]
        if len(weights):
            gaps = np.flatnonzero(self.starts[1:] > self.stops[:-1]) + 1
            weights[gaps] += _AFTER_GAP[self.bytes[gaps]]
        until = np.cumsum(weights)
        # by sum: how many bytes end before it; quicker than a search for each
        counts = np.zeros(int(weights.sum()) + _REACH + 1, np.int64)
        counts[until + 1] = 1
        reaches: Column = np.cumsum(counts)[until - weights + _REACH]
        return reaches

    @cached_property
    def anchors(self) -> tuple[Column, Column]:
        """Hashes of the anchors, and their places; none of a text that is too short."""
        hashes = window_hashes(self.bytes)
        last = self.reaches[: len(hashes)]
        last = last[: np.searchsorted(last, len(hashes))]
        first = np.arange(len(last))
        levels = _LEVELS[last - first + 1]
        places = np.zeros(len(hashes), dtype=bool)
        for width, least in smallest(hashes, 1 << (_REACH.bit_length() - 1)) if len(last) else ():
            some = np.flatnonzero(levels == width.bit_length())
            left, right = least[some], least[last[some] - (width - 1)]
            places[np.where(hashes[left] <= hashes[right], left, right)] = True
        chosen = np.flatnonzero(places)
        return hashes[chosen], chosen

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        """The compared bytes of the characters ``[start, stop)``."""
        first, last = np.searchsorted(self.starts, [start, stop])
        return int(first), int(last)

    def sure_runs(self, mask: Column, first: int = 0) -> list[tuple[int, int]]:
        """Where a column for the bytes from ``first`` on is True so often in a row that an anchor is sure: first byte,
        byte after the last."""
        within = np.zeros(len(mask) + 2, dtype=bool)
        within[1:-1] = mask
        edges = np.flatnonzero(within[1:] != within[:-1]) + first
        starts, stops = edges[::2], edges[1::2]
        long = np.flatnonzero(stops - starts >= WINDOW)
        starts, stops = starts[long], stops[long]
        sure = self.reaches[starts] + WINDOW <= stops
        return [*zip(starts[sure].tolist(), stops[sure].tolist(), strict=True)]


class AnchorPlaces(NamedTuple):
    """Places of anchors in texts, one column each."""

    anchors: Column
    contents: Column
    """Numbers of the texts: ids of stored ones; given ones from -1 down."""
    places: Column


def places_of(number: int, text: Compared) -> AnchorPlaces:
    anchors, places = text.anchors
    return AnchorPlaces(anchors, np.full(len(anchors), number), places)


def joined(places: Iterable[AnchorPlaces]) -> AnchorPlaces:
    return AnchorPlaces(*map(np.concatenate, zip(*places, strict=True)))


def pairs_of(anchors: Column, places: Column, others: AnchorPlaces, most: int) -> tuple[Column, Column, Column]:
    """For each pair of equal anchors: the place in the prompt, the text, and how far the text is moved to lie there.
    Anchors that are in many places are left out if there are more pairs than ``most`` and two for each place."""
    order = np.argsort(anchors, kind="stable")
    anchors, places = anchors[order], places[order]
    first = np.searchsorted(anchors, others.anchors)
    counts = np.searchsorted(anchors, others.anchors, side="right") - first
    fewest = np.argsort(counts, kind="stable")
    fits = int(np.searchsorted(np.cumsum(counts[fewest]), most + 2 * len(places), side="right"))
    fewest = fewest[:fits]
    first, counts = first[fewest], counts[fewest]
    texts = np.repeat(fewest, counts)
    here = places[np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())]
    return here, others.contents[texts], here - others.places[texts]


def ranks(values: Column) -> Column:
    """How many of the neighbours before each value are equal to it."""
    first = np.concatenate(([True], values[1:] != values[:-1])) if len(values) else np.empty(0, dtype=bool)
    numbers = np.arange(len(values))
    return numbers - np.maximum.accumulate(np.where(first, numbers, 0))


def standing_in(prompt: str, texts: Iterable[str]) -> set[str]:
    """The texts that stand in a prompt as a whole, however both are written."""
    written = Compared(prompt).bytes.tobytes()
    return {text for text in texts if (wanted := Compared(text).bytes.tobytes()) and wanted in written}


class Part(NamedTuple):
    """Bytes ``[start, stop)`` of the prompt that equal those of a text from ``start - shift`` on."""

    start: int
    stop: int
    shift: int
    source: Compared | None
    """None: the prompt has the whole text."""
    number: int = 0
    """Of the text."""


def is_more_than_a_window(ours: Compared, source: Compared, here: int, there: int) -> bool:
    """Whether so much around an anchor is equal that it is a part, and not a phrase that both have by chance."""
    before = min(here, there, LEAST_SURE)
    ahead, their_ahead = ours.bytes[here : here + LEAST_SURE], source.bytes[there : there + LEAST_SURE]
    behind, their_behind = ours.bytes[here - before : here], source.bytes[there - before : there]
    start = here - _equal_bytes(behind.tobytes()[::-1], their_behind.tobytes()[::-1])
    stop = here + _equal_bytes(ahead.tobytes(), their_ahead.tobytes())
    return stop - start >= WINDOW and bool(ours.reaches[start] + WINDOW <= stop)


def _equal_bytes(one: bytes, other: bytes) -> int:
    """With how many equal bytes both begin."""
    count = min(len(one), len(other))
    differ = int.from_bytes(one[:count], "little") ^ int.from_bytes(other[:count], "little")
    return ((differ & -differ).bit_length() - 1) // 8 if differ else count


def pieces_in(matches: Iterable[TextMatch]) -> list[tuple[int, int]]:
    """Where parts of texts stand in a prompt. Parts that go on where the part before ends, but for white space, are one
    piece. (``Span.continues`` of a prompt's layout says the same of tokens.)"""
    pieces: list[tuple[int, int]] = []
    before: TextMatch | None = None
    for match in matches:
        if match.of is None:
            before = None
            continue
        if (
            before is not None
            and before.of == match.of
            and match.start - before.stop <= _GAP
            and abs(match.at - before.at - (match.start - before.start)) <= _GAP
        ):
            pieces[-1] = pieces[-1][0], match.stop
        else:
            pieces.append((match.start, match.stop))
        before = match
    return pieces


def cover(compared: Compared, parts: Iterable[Part], whole: Sequence[TextMatch]) -> list[TextMatch]:
    """Of all parts and whole texts the longest, then the longest of what is left; of equally long ones, whole texts and
    then the first."""
    free = np.ones(len(compared), dtype=bool)
    taken, kept = bytearray(len(compared.text)), bytearray(len(compared.text))
    """By character: whether a match has it; whether it belongs to a whole text."""
    matches = {compared.range_of(match.start, match.stop): match for match in whole}
    for match in whole:
        kept[match.start : match.stop] = b"\1" * (match.stop - match.start)
    every = [*parts, *(Part(start, stop, start, None) for start, stop in matches)]
    queue = [(part.start - part.stop, part.source is not None, part.start, n, part) for n, part in enumerate(every)]
    heapq.heapify(queue)
    number, chosen = len(queue), []
    while queue:
        part = heapq.heappop(queue)[-1]
        room = free[part.start : part.stop]
        is_free = room.all()
        if part.source is None:
            match = matches[part.start, part.stop]
            if is_free and 1 not in taken[match.start : match.stop]:
                chosen.append(match)
                taken[match.start : match.stop] = b"\1" * (match.stop - match.start)
                room[:] = False
                continue
            part = part._replace(source=Compared(compared.text[match.start : match.stop]))
        if is_free:
            chosen += _matches(compared, part, taken, kept)
            room[:] = False
            continue
        for start, stop in compared.sure_runs(room, part.start):
            heapq.heappush(queue, (start - stop, True, start, number, part._replace(start=start, stop=stop)))
            number += 1
    return sorted(chosen, key=lambda match: match.start)


def _matches(compared: Compared, part: Part, taken: bytearray, kept: bytearray) -> Iterator[TextMatch]:
    """The characters of a part: one match for each stretch in which both texts have the same characters, and equally
    many that are not compared. Each takes in equal characters around it that nothing else has.

    If the stretches are less than half of the part, as in a text with other accents, what lies between them is told
    too, although hardly any of its tokens are those of the stored text."""
    assert part.source is not None, "a whole text is one match"
    text, of = compared.text, part.source.text
    start, stop = part.start, part.stop
    # whole characters only
    while start < stop and start and compared.starts[start - 1] == compared.starts[start]:
        start += 1
    while start < stop < len(compared) and compared.starts[stop] == compared.starts[stop - 1]:
        stop -= 1
    if start == stop:
        return
    own, others = slice(start, stop), slice(start - part.shift, stop - part.shift)
    here, there = compared.starts[own], part.source.starts[others]
    alike = compared.stops[own] - here == part.source.stops[others] - there
    edges = np.flatnonzero((np.diff(here - there) != 0) | (alike[1:] != alike[:-1])) + 1
    stretches: list[TextMatch] = []
    for first, last in pairwise([0, *edges.tolist(), len(here)]):
        begin, end, at = int(here[first]), int(compared.stops[start + last - 1]), int(there[first])
        if not alike[first] or (stretches and begin < stretches[-1].stop):
            continue
        while begin and at and text[begin - 1] == of[at - 1] and not (taken[begin - 1] or kept[begin - 1]):
            begin, at = begin - 1, at - 1
        after = at + end - begin
        while end < len(text) and after < len(of) and text[end] == of[after] and not (taken[end] or kept[end]):
            end, after = end + 1, after + 1
        if end - begin >= _LEAST_STRETCH:
            taken[begin:end] = b"\1" * (end - begin)
            is_whole = not at and after == len(of) and text[begin:end] == of
            stretches.append(TextMatch(begin, end) if is_whole else TextMatch(begin, end, of, at))
    yield from stretches
    begin, end = int(here[0]), int(compared.stops[stop - 1])
    if 2 * sum(match.stop - match.start for match in stretches) >= end - begin:
        return
    at = int(there[0])
    for match in [*stretches, TextMatch(end, end, of)]:
        if match.start > begin:
            taken[begin : match.start] = b"\1" * (match.start - begin)
            yield TextMatch(begin, match.start, of, at)
        begin, at = match.stop, match.at + match.stop - match.start
