"""Blocks of KV by token ids in a tree, and runs of equal tokens of two prompts, wherever they stand.

Such runs are found by fingerprints. Source: winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003): of every
:data:`_WINDOW` neighbouring hashes of :data:`SIZE` tokens the least is a fingerprint, so that two equal runs of
:data:`LEAST_RUN` tokens have one in common.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from ..finding.common_parts import smallest
from .base import KVPart, KVRun, KVSource

SIZE = 16
"""Tokens of which a fingerprint is the hash."""
LEAST_RUN = 32
"""Two equal runs of so many tokens, or more, have a fingerprint in common. Shorter ones are not moved."""
LEAST_PAST = 0.8
"""Share of the last :data:`_PAST` tokens before a token, in its earlier prompt or now where they are more, that must be
among those in both: else it is computed."""
_PAST = 1024
_MOST_SOURCES = 8
"""Places of one fingerprint that are known, the latest ones. Boilerplate stands in every prompt."""
_WINDOW = LEAST_RUN - SIZE + 1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
Array = np.ndarray[Any, Any]
END = "end"
"""In place of a method: exact KV of a prompt's last tokens, and what a model keeps beside KV once it has read them."""
EXACT = (None, END)


def fingerprints(ids: Array) -> tuple[Array, Array]:
    """The fingerprints of ``ids``, ``(num_tokens,)`` int64: the first token of each, ascending, and its hash; int64."""
    count = len(ids) - SIZE + 1
    if count < _WINDOW:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    words, hashes = ids.astype(np.uint64) + np.uint64(1), np.zeros(count, np.uint64)
    for at in range(SIZE):
        hashes = (hashes + words[at : at + count]) * _FACTOR
        hashes ^= hashes >> np.uint64(29)
    least = dict(smallest(hashes, 1 << (_WINDOW.bit_length() - 1)))
    width, places = max(least.items())
    # two that overlap are one window
    left, right = places[: len(places) - (_WINDOW - width)], places[_WINDOW - width :]
    first = np.where(hashes[left] <= hashes[right], left, right)
    first = first[np.append(True, first[1:] != first[:-1])]  # they ascend
    return first, hashes[first].view(np.int64)


@dataclass(eq=False, repr=False, slots=True)
class KVBlock:
    """Neighbouring tokens of a prompt. The root has none."""

    parent: KVBlock | None
    key: tuple[Hashable, bytes]
    """In its parent's children: method, and token ids as bytes. No method: the KV is exact, also of all before it."""
    ids: Array
    start: int
    num_bytes: int
    refs: int = 1
    """References by matches and inserts. A parent never has fewer references than its child."""
    kv: Any = None
    """What the runtime's state gives of these tokens (:class:`KeptKV`). None while it is being copied."""
    stale: Array | None = None
    past: float = 1.0
    """The least of its tokens'."""
    turns: int = 0
    is_known: bool = True
    """Whether a match can find it."""
    children: dict[tuple[Hashable, bytes], KVBlock] = field(default_factory=dict)
    hashes: list[tuple[int, int]] = field(default_factory=list)
    """Fingerprints that end in it: hash, and its first token in the prompt."""
    stop: int = field(init=False)
    method: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.stop, self.method = self.start + len(self.ids), self.key[0]

    @classmethod
    def root(cls) -> KVBlock:
        return cls(None, (None, b""), np.zeros(0, np.int64), 0, 0)

    @staticmethod
    def key_of(method: Hashable, ids: Array) -> tuple[Hashable, bytes]:
        return method, ids.tobytes()

    @property
    def num_stale(self) -> int:
        return 0 if self.stale is None else int(self.stale.sum())

    def walk(self, tokens: Array, method: Hashable, size: int) -> list[KVBlock]:
        """The blocks of ``tokens``, ``size`` each, behind it, of exact KV or in the branch of a method."""
        blocks, block = list[KVBlock](), self
        while block.parent is None or len(block.ids) == size:  # others end a prompt
            following = block.children.get(self.key_of(method, tokens[block.stop : block.stop + size]))
            if following is None or following.kv is None:
                break
            block = following
            blocks.append(block)
        return blocks

    def most_equal_child(self, tokens: Array, allows: Callable[[KVBlock], bool] = lambda child: True) -> KVBlock | None:
        """The child that begins with the most of ``tokens``, of equal ones that of exact KV; None if none does."""
        begun = [
            (equal, child.method is None, child)
            for child in self.children.values()
            if child.kv is not None and allows(child) and (equal := num_equal(child.ids, tokens))
        ]
        return max(begun, key=lambda each: each[:2])[2] if begun else None

    def ends(self, tokens: Array) -> list[KVBlock]:
        """Of prompts that end in blocks behind it, and begin like ``tokens``, which come next."""
        children = (child for child in self.children.values() if child.method == END and child.kv is not None)
        return [child for child in children if num_equal(child.ids, tokens) == len(child.ids)]

    @staticmethod
    def last_end(path: Sequence[KVBlock], tokens: Array) -> list[KVBlock]:
        """The blocks of the longest earlier prompt that ``tokens`` begin with. ``path``: the root, and their blocks."""
        ends = [end for block in path for end in block.ends(tokens[block.stop :])]
        return max(ends, key=lambda end: end.stop).path() if ends else []

    def path(self) -> list[KVBlock]:
        """The blocks from the prompt's first one to this one."""
        blocks, block = list[KVBlock](), self
        while block.parent is not None:
            blocks.append(block)
            block = block.parent
        return blocks[::-1]


@dataclass(frozen=True, slots=True)
class EqualRun:
    """Equal tokens of a prompt and of an earlier one."""

    blocks: Sequence[KVBlock]
    start: int
    stop: int
    at: int
    """Where it starts in the earlier prompt."""
    pasts: Sequence[float] = ()
    """Of each block, as :attr:`KVBlock.past`, before this prompt's tokens."""

    @classmethod
    def around(cls, tokens: Array, place: int, block: KVBlock, source: int, least: int) -> EqualRun | None:
        """The run, none of whose tokens is before ``least``, around token ``place``, which is ``source`` in the prompt
        of a block. None if it is short, or not all of its KV is there yet."""
        blocks, start, at = [block], place, source
        while start > least:
            head = blocks[0]
            count = min(start - least, at - head.start)
            equal = num_equal(tokens[start - count : start][::-1], head.ids[: at - head.start][::-1])
            start, at = start - equal, at - equal
            if equal < count or at > head.start or head.parent is None or head.parent.parent is None:
                break
            blocks.insert(0, head.parent)
        stop, end = place, source
        while True:
            tail = blocks[-1]
            equal = num_equal(tokens[stop:], tail.ids[end - tail.start :])
            stop, end = stop + equal, end + equal
            if end < tail.stop or stop == len(tokens):
                break
            following = tail.most_equal_child(tokens[stop:])
            if following is None:
                break
            blocks.append(following)
        blocks = [each for each in blocks if each.stop > at and each.start < end]
        is_whole = all(each.kv is not None for each in blocks)
        return cls(blocks, start, stop, at) if is_whole and stop - start >= LEAST_RUN else None

    def rank(self) -> tuple[int, bool]:
        return self.stop - self.start, self.blocks[-1].method is None

    def with_past(self, now: dict[int, int]) -> list[EqualRun]:
        """The parts of the run whose tokens have :data:`LEAST_PAST` of their past, both where their KV was computed and
        now. ``now``: where fingerprints first stand in the prompt."""
        first, first_now = max(0, self.at - _PAST), max(0, self.start - _PAST)
        places = [each for block in self.blocks[0].path() if block.stop > first for each in block.hashes]
        before = [value for value, place in places if first <= place <= self.at - SIZE]
        both = [value for value in before if first_now <= now.get(value, self.start) <= self.start - SIZE]
        past, same = min(max(self.at, self.start), _PAST), (self.at - first) * len(both) / max(len(before), 1)
        inside = np.array([max(block.start - self.at, 0) for block in self.blocks])
        shares = np.minimum(1.0, (same + inside) / np.clip(past + inside, 1, _PAST))
        shares[past + inside == 0] = 1.0
        pasts = shares * [block.past for block in self.blocks]
        parts = list[EqualRun]()
        for is_kept, group in groupby(
            zip(self.blocks, pasts.tolist(), strict=True), lambda each: each[1] >= LEAST_PAST
        ):
            blocks, of_blocks = zip(*group, strict=True)
            at, end = max(blocks[0].start, self.at), min(blocks[-1].stop, self.at + self.stop - self.start)
            if is_kept and end - at >= LEAST_RUN:
                moved = self.start - self.at
                parts.append(EqualRun(blocks, at + moved, end + moved, at, of_blocks))
        return parts

    def as_part(self) -> KVPart:
        return part_of_prompt(KVSource.MOVED, self.blocks, self.start, self.at, self.stop, self.pasts)


class Places:
    """Where fingerprints stand in blocks: by hash, the block and the first token in its prompt."""

    def __init__(self) -> None:
        self.by_hash: dict[int, list[tuple[KVBlock, int]]] = {}

    def add(self, tokens: Array, blocks: Sequence[KVBlock], first: int) -> None:
        """Note the fingerprints of ``blocks``, which begin with a prompt's first one; those from token ``first`` on
        are new."""
        begin = max(0, first - 2 * LEAST_RUN)
        places, hashes = fingerprints(tokens[begin : end_of(blocks)])
        size = len(blocks[0].ids) if blocks else 1
        for place, value in zip((places + begin).tolist(), hashes.tolist(), strict=True):
            block = blocks[(place + SIZE - 1) // size]
            if (value, place) not in block.hashes:
                block.hashes.append((value, place))
                there = self.by_hash.setdefault(value, [])
                there.append((block, place))
                del there[:-_MOST_SOURCES]  # a token that is repeated has one hash, thousands of times

    def remove(self, block: KVBlock) -> None:
        for value, _ in block.hashes:
            self.by_hash[value] = [each for each in self.by_hash.get(value, ()) if each[0] is not block]
            if not self.by_hash[value]:
                del self.by_hash[value]

    def runs(self, tokens: Array, first: int) -> Iterator[EqualRun]:
        """Runs of a prompt from token ``first`` on, in its order, that have kept enough of their past."""
        if not self.by_hash:
            return
        places, hashes = (each.tolist() for each in fingerprints(tokens))
        now = dict(zip(hashes[::-1], places[::-1], strict=True))  # the first of each
        stop = first
        for place, value in zip(places, hashes, strict=True):
            there = self.by_hash.get(value)
            if there is None or place < stop:
                continue
            end = SIZE - 1  # their last token, which is in the block
            runs = [
                run
                for block, source in reversed(there)  # of equally long ones the latest
                if (run := EqualRun.around(tokens, place + end, block, source + end, stop)) is not None
            ]
            runs.sort(key=EqualRun.rank, reverse=True)
            usable = [parts for run in runs[:2] if (parts := run.with_past(now))]
            chosen = max(usable, key=lambda parts: sum(part.stop - part.start for part in parts), default=[])
            yield from chosen
            if runs:  # what has not enough past is computed
                stop = max(run.stop for run in (runs[0], *chosen))


def part_of_prompt(
    source: KVSource, blocks: Sequence[KVBlock], start: int, at: int, stop: int, pasts: Sequence[float]
) -> KVPart:
    """Tokens ``[start, stop)`` of a prompt, which begin at ``at`` in the blocks' own. ``pasts``: of each block."""
    skip, stale, past = at - blocks[0].start, None, None
    if any(block.stale is not None for block in blocks):
        marks = [np.zeros(len(block.ids), np.bool_) if block.stale is None else block.stale for block in blocks]
        stale = np.concatenate(marks)[skip : skip + stop - start]
    if min(pasts) < 1:
        past = np.repeat(pasts, [len(block.ids) for block in blocks])[skip : skip + stop - start]
    run = KVRun(source, start, stop, max(block.turns for block in blocks), stale, at, past)
    return KVPart(run, [block.kv for block in blocks], skip)


def end_of(blocks: Sequence[KVBlock]) -> int:
    return blocks[-1].stop if blocks else 0


def num_equal(left: Array, right: Array) -> int:
    """Leading elements that are equal."""
    most = min(len(left), len(right))
    same = left[:most] == right[:most]
    return most if same.all() else int(same.argmin())
