"""What of each prompt stood in earlier ones: at its beginning, moved with what was before it, or in other company.

Equal stretches are found by sampled hashes of windows of characters, as tokens of prompts are found by an engine
(:mod:`cacheclip_rag.runtime`). The measures are those of an engine, at four characters a token.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np
from numpy.typing import NDArray

from .requests import RecordedPrompt

CHARS_PER_TOKEN = 4.0
_LEAST_RUN = 128
"""Characters of an equal stretch that counts: 32 tokens."""
_WINDOW = 64
_EVERY = 16
"""One of so many windows is sampled."""
_BLOCK = 64
"""Characters of a prefix cache's block."""
_PAST = 4096
"""Characters before a stretch that its KV depends on most: 1,024 tokens."""
_LEAST_PAST = 0.8
"""Share of them that must still be before it, so that its KV is moved as it is."""
_REMEMBERED = 512
"""Prompts, the latest, in which stretches are looked for."""
_BASE = 0x9E3779B97F4A7C15

Chars = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Break:
    """Where the longest beginning that a prompt shares with an earlier one ends, although more of it is known."""

    part: str
    """Part of the prompt."""
    place: int
    """Characters before it."""
    before: str
    """The line's beginning that both have."""
    was: str
    """What stood there in the earlier prompt."""
    now: str
    lost: int
    """Characters behind it that stood in earlier prompts."""


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """Characters of one prompt, by what serves them."""

    session: str
    total: int
    prefix: int
    """Equal to an earlier prompt's beginning: an exact prefix cache serves them."""
    moved: int
    """At another place, with what stood before them: their KV is taken as it is."""
    recurring: int
    """In other company: a stored chunk, of which some tokens are computed again."""
    broken: Break | None

    @property
    def new(self) -> int:
        return self.total - self.prefix - self.moved - self.recurring


def measured(prompts: Iterable[RecordedPrompt]) -> Iterator[PromptReuse]:
    """The reuse of each prompt from those before it."""
    seen = _Seen()
    for prompt in prompts:
        yield seen.reuse_of(prompt)


def prefix_share(prompts: Iterable[RecordedPrompt]) -> float:
    """Share of all characters that an exact prefix cache serves."""
    prefixes, total, shared = _Prefixes(), 0, 0
    for number, prompt in enumerate(prompts):
        total += len(prompt.text)
        shared += prefixes.known(prompt.text)[0]
        prefixes.add(prompt.text, number)
    return shared / max(1, total)


class _Prefixes:
    """Beginnings of texts, by blocks."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        """By the hash of a beginning of whole blocks: a text that has it."""

    def _hashes(self, text: str) -> Iterator[int]:
        value = 0
        for start in range(0, len(text) - _BLOCK + 1, _BLOCK):
            value = hash((value, text[start : start + _BLOCK]))
            yield value

    def known(self, text: str) -> tuple[int, int | None]:
        """Characters of the longest known beginning of whole blocks, and a text that has it."""
        length, owner = 0, None
        for value in self._hashes(text):
            if (found := self._owners.get(value)) is None:
                break
            length, owner = length + _BLOCK, found
        return length, owner

    def add(self, text: str, number: int) -> None:
        for value in self._hashes(text):
            self._owners[value] = number


class _Seen:
    """Earlier prompts."""

    def __init__(self) -> None:
        self._prefixes = _Prefixes()
        self._texts: dict[int, tuple[RecordedPrompt, Chars, _Samples]] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """By the hash of a window: the latest prompt that has it, and where first."""
        self._order = deque[int]()
        self._count = 0

    def reuse_of(self, prompt: RecordedPrompt) -> PromptReuse:
        chars = np.frombuffer(prompt.text.encode("utf-32-le"), np.uint32)
        samples = _Samples.of(chars)
        prefix, owner = self._prefixes.known(prompt.text)
        if owner not in self._texts and self._order and not prefix:
            owner = self._order[-1]  # they may part within the first block
        if owner not in self._texts:
            owner = None
        if owner is not None:
            prefix = _num_equal(chars, self._texts[owner][1])
        moved = recurring = 0
        for length, begun in self._runs(chars, samples, prefix, owner):
            moved, recurring = moved + length - begun, recurring + begun
        broken = None
        if moved + recurring and owner is not None and prefix < len(self._texts[owner][1]):
            broken = _break(prompt, self._texts[owner][0], prefix, moved + recurring)
        self._add(prompt, chars, samples)
        return PromptReuse(prompt.session, len(prompt.text), prefix, moved, recurring, broken)

    def _runs(self, chars: Chars, samples: _Samples, begin: int, owner: int | None) -> Iterator[tuple[int, int]]:
        """Stretches of equal characters behind ``begin``, in order: how long each is, and how many of its first
        characters have too little of their past. ``owner``: the prompt that begins alike."""
        stop, latest = begin, owner
        moved_by = 0
        for place, value in samples.pairs():
            if place < stop:
                continue
            source = place + moved_by
            if latest is None or not _is_at(self._texts[latest][1], source, chars[place : place + _WINDOW]):
                latest, source = self._places.get(value, (None, 0))
                if latest not in self._texts:
                    latest = None
                    continue
            _, other, of_other = self._texts[latest]
            moved_by = source - place  # where a text repeats itself, what follows is looked for there first
            ahead = _num_equal(chars[place:], other[source:])
            behind = _num_equal(chars[stop:place][::-1], other[:source][::-1])
            if ahead + behind < _LEAST_RUN:
                continue
            now, before = (each.hashes_before(at - behind) for each, at in ((samples, place), (of_other, source)))
            stop, past = place + ahead, min(max(source, place) - behind, _PAST)
            same = min(source - behind, _PAST) * len(now & before) / len(before) if before else 0.0
            # the stretch itself is the past of its later characters
            lacking = min(_LEAST_PAST * _PAST - same, (_LEAST_PAST * past - same) / (1 - _LEAST_PAST))
            yield ahead + behind, min(ahead + behind, max(0, math.ceil(lacking)))

    def _add(self, prompt: RecordedPrompt, chars: Chars, samples: _Samples) -> None:
        number, self._count = self._count, self._count + 1
        self._prefixes.add(prompt.text, number)
        self._texts[number] = prompt, chars, samples
        pairs = [*samples.pairs()]
        self._places.update((value, (number, place)) for place, value in reversed(pairs))
        self._order.append(number)
        if len(self._order) > _REMEMBERED:
            del self._texts[self._order.popleft()]


class _Samples:
    """Sampled windows of a text: their places, ascending, and hashes."""

    def __init__(self, places: NDArray[np.int64], hashes: NDArray[np.uint64]) -> None:
        self._places, self._hashes = places, hashes

    @classmethod
    def of(cls, chars: Chars) -> _Samples:
        if len(chars) < _WINDOW:
            return cls(np.empty(0, np.int64), np.empty(0, np.uint64))
        # sum of char * base**place, wrapping at 64 bits; a window's sum times the inverse of its first power
        powers, inverses = _powers(len(chars))
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(chars * powers, dtype=np.uint64)))
        hashes = (sums[_WINDOW:] - sums[:-_WINDOW]) * inverses[: len(chars) - _WINDOW + 1]
        hashes ^= hashes >> np.uint64(29)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
        chosen = (hashes >> np.uint64(33)) % np.uint64(_EVERY) == 0
        return cls(chosen.nonzero()[0], hashes[chosen])

    def pairs(self) -> Iterator[tuple[int, int]]:
        return zip(self._places.tolist(), self._hashes.tolist(), strict=True)

    def hashes_before(self, place: int) -> set[int]:
        """Of the windows that end in the last characters before a place."""
        first, last = np.searchsorted(self._places, (place - _PAST, place - _WINDOW + 1))
        return set(self._hashes[first:last].tolist())


def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    bases = (_BASE, pow(_BASE, -1, 1 << 64))
    steps = [np.full(count, base, np.uint64) for base in bases]
    for step in steps:
        step[0] = 1
    powers, inverses = (np.cumprod(step, dtype=np.uint64) for step in steps)
    return powers, inverses


def _is_at(chars: Chars, place: int, window: Chars) -> bool:
    return place >= 0 and np.array_equal(chars[place : place + len(window)], window)


def _num_equal(left: Chars, right: Chars) -> int:
    """Leading characters that are equal."""
    done, size = 0, 256
    while True:
        one, other = left[done : done + size], right[done : done + size]
        most = min(len(one), len(other))
        same = one[:most] == other[:most]
        if not same.all():
            return done + int(same.argmin())
        done, size = done + most, 4 * size
        if most < size // 4:
            return done


def _break(prompt: RecordedPrompt, earlier: RecordedPrompt, place: int, lost: int) -> Break:
    line = prompt.text.rfind("\n", 0, place) + 1
    # a word, number or checksum that begins alike by chance is not a part of what both have
    while place > line and (prompt.text[place - 1].isalnum() or prompt.text[place - 1] in "-_"):
        place -= 1
    ends = [text.find("\n", place) for text in (earlier.text, prompt.text)]
    was, now = (
        text[place : end if end >= 0 else None] for text, end in zip((earlier.text, prompt.text), ends, strict=True)
    )
    return Break(prompt.part_at(place), place, prompt.text[line:place], was, now, lost)


def without_lines(
    prompts: Iterable[RecordedPrompt], beginning: str, *, word_only: bool = False
) -> Iterator[RecordedPrompt]:
    """The prompts without lines that begin alike, or only without the word behind that beginning."""
    rest = r"\S*" if word_only else r".*\n?"
    line = re.compile(f"^({re.escape(beginning)}){rest}", re.MULTILINE)
    for prompt in prompts:
        yield RecordedPrompt(prompt.session, line.sub(r"\1" if word_only else "", prompt.text), ())


@dataclass(frozen=True, slots=True)
class Cause:
    """Breaks of one kind: in lines that begin alike but for words with digits, in parts of one name."""

    part: str
    beginning: str
    """What all lines begin with; empty if they share nothing."""
    example: Break
    count: int
    lost: int
    """Characters that it cost, in all prompts together."""


def causes(reuses: Iterable[PromptReuse]) -> list[Cause]:
    """Kinds of breaks, the costliest first."""
    kinds = defaultdict[tuple[str, str], list[Break]](list)
    for reuse in reuses:
        if reuse.broken is not None:
            line = re.sub(r"\w*\d[\w.]*", "#", reuse.broken.before)
            kinds[re.sub(r" \d+", "", reuse.broken.part), line].append(reuse.broken)
    each = [
        Cause(
            part, commonprefix([one.before for one in of_kind]), of_kind[0], len(of_kind), sum(b.lost for b in of_kind)
        )
        for (part, _), of_kind in kinds.items()
    ]
    return sorted(each, key=lambda cause: -cause.lost)
