"""Counts the chunks of a prompt: which pieces of text are one chunk, and how much of the chunk they are.

A chunk may stand in a prompt in several pieces: quoted line by line, split again, or in another order. Its pieces count
as one chunk. A piece of which half or more stood before, since the chunk last began, begins the chunk once more: a text
that stands twice counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .layout import Span

MOST_PARTIAL = 0.9
"""Largest share of a chunk's tokens in a partial hit."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A chunk, or what there is of it, in a prompt."""

    spans: tuple[Span, ...]
    """Its pieces, in prompt order."""
    share: float
    """Share of the chunk's tokens that stand here, each counted once."""


def occurrences(spans: Iterable[Span]) -> list[Occurrence]:
    """The chunks of a prompt, in the order in which they begin."""
    found: list[tuple[list[Span], npt.NDArray[np.bool_]]] = []
    last: dict[str, int] = {}
    for span in spans:
        number = last.get(span.whole)
        own = slice(span.first, span.first + len(span.tokens))
        if number is None or not (span.continues or 2 * int(found[number][1][own].sum()) < len(span.tokens)):
            number = last[span.whole] = len(found)
            found.append(([], np.zeros(span.whole_tokens, np.bool_)))
        pieces, there = found[number]
        pieces.append(span)
        there[own] = True
    return [Occurrence(tuple(pieces), _share(there)) for pieces, there in found]


def share_of(spans: Sequence[Span]) -> float:
    """Share of a chunk's tokens in spans of this chunk, each counted once."""
    there = np.zeros(spans[0].whole_tokens, np.bool_)
    for span in spans:
        there[span.first : span.first + len(span.tokens)] = True
    return _share(there)


def _share(there: npt.NDArray[np.bool_]) -> float:
    """The token at either end does not count as missing: the text around a chunk often changes it."""
    tokens = int(there.sum())
    return 1.0 if tokens + 2 >= len(there) else tokens / len(there)
