"""What caches of earlier prompts' KV, the exact one and the continued one, have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np


class KVSource(IntEnum):
    """Where the KV of a prompt's token comes from."""

    COMPUTED = 0
    """From nowhere: text between chunks, the question, missing chunks."""
    STORED = 1
    """A chunk's, as it was stored: approximate."""
    OWN_CONTEXT = 2
    """A chunk's, as it was stored, right behind the text that it was computed behind: exact."""
    PREFIX = 3
    """The shared prefix's, as it was stored: exact."""
    CACHED = 4
    """Earlier prompts' in the prefix cache: exact."""
    CONTINUED = 5
    """An earlier prompt's or answer's that began in the same way: approximate."""


class KVRun(NamedTuple):
    """Neighbouring tokens of a prompt whose KV a cache has."""

    source: KVSource
    start: int
    stop: int
    turns: int = 0
    """Answers whose approximate KV it is, one after the other."""
    stale: np.ndarray[Any, Any] | None = None
    """``(num_tokens,)`` bool, of these tokens: those whose KV is a chunk's as it was stored. None: none is."""


class KeptKV(Protocol):
    """A state whose exact KV the prefix cache can keep, and continued KV too. The cache does not look into blocks."""

    token_bytes: int
    """Bytes of the KV of one token."""

    def get_seq_length(self) -> int:
        """Number of tokens."""

    def blocks(self, first: int, count: int, size: int) -> Iterable[Any]:
        """Copies of the KV of ``count`` blocks of ``size`` tokens, from block ``first`` on."""

    def write_blocks(self, blocks: Sequence[Any], num_tokens: int, *, first: int = 0) -> None:
        """Take tokens ``first`` to ``num_tokens - 1`` of blocks that follow one another. Those before are there; if
        there are some, it is one block."""


class KVMatch:
    """What caches have of a prompt. It can be read until the ``with`` block ends, even if a cache drops it."""

    def __init__(
        self, parts: Sequence[tuple[KVRun, Callable[[], Sequence[Any]]]] = (), release: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            parts: runs in prompt order, from the first token on and without gaps; and what gives the KV of each, in
                blocks, when it is read.
            release: ends the hold on it.
        """
        self.parts: Sequence[tuple[KVRun, Callable[[], Sequence[Any]]]] | None = parts
        self._release, self._lock = release, threading.Lock()
        self.runs = tuple(run for run, _ in parts)
        self.num_tokens = self.runs[-1].stop if parts else 0
        self.num_exact = sum(run.stop - run.start for run in self.runs if run.source == KVSource.CACHED)
        """Tokens of them whose KV is from the prefix cache, and exact."""

    def write_to(self, cache: KeptKV) -> None:
        """Copy the KV into slots 0 to ``num_tokens - 1`` of ``cache``."""
        assert self.parts is not None, "a released match cannot be read: its KV may be evicted"
        for run, blocks in self.parts:
            cache.write_blocks(blocks(), run.stop, first=run.start)

    def release(self, *_: object) -> None:
        """End the hold. A second call does nothing."""
        with self._lock:
            release, self._release, self.parts = self._release, None, None
        if release is not None:
            release()

    def __enter__(self) -> KVMatch:
        return self

    __exit__ = release
