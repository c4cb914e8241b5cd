"""Which texts were stored, and how to find them again inside a prompt.

A framework hands its language model one string; the chunks are somewhere in it. Each stored text is remembered by an
anchor: the window of ``WINDOW`` characters, among those that start in its first ``REGION`` characters, whose hash is
smallest. Texts that share a head (a metadata header, a licence preamble) still differ in their anchors. To search,
every window of the prompt is hashed once; where an anchor turns up, the slice it would belong to is compared by
digest. So a match is never wrong, and the texts themselves need not be kept. (Content-defined anchors: Manber,
"Finding similar files in a large file system", 1994. An automaton over all texts was rejected: 60 kB a chunk and a
rebuild at each insert.)
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .database import Database

__all__ = ["WINDOW", "TextIndex", "TextMatch"]

WINDOW = 16
"""Characters in an anchor; texts shorter than this are not matched (reusing them would save nothing)."""
REGION = 256
"""Anchors are chosen among the windows starting in this many first characters."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS texts (
    serial INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, digest BLOB NOT NULL, anchor INTEGER NOT NULL,
    start INTEGER NOT NULL, length INTEGER NOT NULL, removed INTEGER NOT NULL, UNIQUE (namespace, digest)
);
"""
# A text has one row, replaced under a new serial number when it is removed or added again: reading the rows behind the
# last serial seen, by one query, brings an index up to date whatever others did meanwhile.
_WRITE = "INSERT OR REPLACE INTO texts (namespace, digest, anchor, start, length, removed) SELECT ?, ?, ?, ?, ?, ?"
_UNLESS_THERE = " WHERE NOT EXISTS (SELECT 1 FROM texts WHERE namespace = ? AND digest = ? AND removed = 0)"


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A stored text found in a prompt: ``prompt[start:stop]``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Anchor:
    value: int
    start: int
    length: int
    digest: bytes


class TextIndex:
    """Texts of one namespace, shared by processes through the store's database (None: in this process only)."""

    def __init__(self, folder: Path | None = None, namespace: str = "default") -> None:
        self._database = Database(folder / "index.sqlite3" if folder else None, _SCHEMA)
        self._namespace = namespace
        self._anchors: dict[int, list[_Anchor]] = {}
        self._known: set[bytes] = set()
        self._last_serial = 0
        self._lock = threading.Lock()

    def add(self, texts: Iterable[str]) -> None:
        """Remember texts; those shorter than ``WINDOW`` are left out, known ones are kept as they are."""
        rows = [self._row(anchor, removed=0) for text in texts if (anchor := _anchor_of(text)) is not None]
        self._database.execute_many((_WRITE + _UNLESS_THERE, (*row, *row[:2])) for row in rows)

    def remove(self, texts: Iterable[str]) -> None:
        """Forget texts, here and in every process that shares the database."""
        rows = [self._row(anchor, removed=1) for text in texts if (anchor := _anchor_of(text)) is not None]
        self._database.execute_many((_WRITE, row) for row in rows)

    def _row(self, anchor: _Anchor, removed: int) -> tuple[str, bytes, int, int, int, int]:
        return self._namespace, anchor.digest, anchor.value, anchor.start, anchor.length, removed

    def find(self, prompt: str, candidates: Iterable[str] = ()) -> list[TextMatch]:
        """Stored texts and ``candidates`` occurring in ``prompt``: leftmost, longest, not overlapping, in order."""
        with self._lock:
            self._refresh()
            extra: dict[int, list[_Anchor]] = {}
            for text in candidates:
                if (anchor := _anchor_of(text)) is not None:
                    extra.setdefault(anchor.value, []).append(anchor)
            found = [
                match
                for position, value in enumerate(_window_hashes(prompt).tolist())
                if value in self._anchors or value in extra
                for anchor in (*self._anchors.get(value, ()), *extra.get(value, ()))
                if (match := _verify(prompt, position, anchor)) is not None
            ]
        return _leftmost_longest(found)

    def close(self) -> None:
        self._database.close()

    def _refresh(self) -> None:
        """Take in what this or another process added or removed since the last look."""
        rows = self._database.query(
            "SELECT serial, anchor, start, length, digest, removed FROM texts "
            "WHERE namespace = ? AND serial > ? ORDER BY serial",
            (self._namespace, self._last_serial),
        )
        for serial, value, start, length, digest, removed in rows:
            self._last_serial = serial
            # texts with one head share an anchor, so a bucket may be long: looked through only when it holds the text
            if digest in self._known:
                self._known.remove(digest)
                self._anchors[value] = [a for a in self._anchors[value] if a.digest != digest]
            if not removed:
                self._known.add(digest)
                self._anchors.setdefault(value, []).append(_Anchor(value, start, length, digest))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _window_hashes(text: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Hash of every window of ``WINDOW`` characters, in order: ``(len(text) - WINDOW + 1,)`` int64."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    count = len(codes) - WINDOW + 1
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(WINDOW):  # a polynomial modulo 2**64, then a finaliser so that "smallest" is not "earliest"
        hashes = hashes * np.uint64(0x100000001B3) + codes[offset : offset + count]
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (hashes ^ (hashes >> np.uint64(32))).view(np.int64)


def _anchor_of(text: str) -> _Anchor | None:
    if len(text) < WINDOW:
        return None
    hashes = _window_hashes(text[: REGION + WINDOW - 1])
    start = int(hashes.argmin())
    return _Anchor(int(hashes[start]), start, len(text), _digest(text))


def _verify(prompt: str, position: int, anchor: _Anchor) -> TextMatch | None:
    start = position - anchor.start
    stop = start + anchor.length
    if start < 0 or stop > len(prompt) or _digest(prompt[start:stop]) != anchor.digest:
        return None
    return TextMatch(start, stop)


def _leftmost_longest(matches: list[TextMatch]) -> list[TextMatch]:
    chosen: list[TextMatch] = []
    end = 0
    for match in sorted(matches, key=lambda m: (m.start, -m.stop)):
        if match.start >= end:
            chosen.append(match)
            end = match.stop
    return chosen
