"""Hashes of the windows of a sequence, and those that every long enough common part of two sequences shares.

Source: winnowing (Schleimer et al., SIGMOD 2003). Of ``reach`` neighbouring windows, the one with the smallest hash is
chosen. Two sequences that share ``reach`` neighbouring windows therefore share a chosen one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["WINDOW", "Column", "code_points", "ranges", "smallest", "window_hashes"]

WINDOW = 16
"""Items per window."""

Column = np.ndarray[Any, np.dtype[Any]]


def code_points(text: str) -> Column:
    """The code points of a text, ``(len(text),)`` uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


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
        left, right = places[:-width], places[width:]
        places = np.where(hashes[left] <= hashes[right], left, right)
        width *= 2


def ranges(first: Column, counts: Column) -> Column:
    """Concatenated ranges: ``count`` whole numbers from each ``first`` on."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum())
