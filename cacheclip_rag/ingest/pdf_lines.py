"""Lines of a PDF page in which text from right to left stands with numbers or with words from left to right.

pypdf turns each run of Hebrew or Arabic letters round, and leaves the runs in the order in which they stand on the
page, from left to right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

_RIGHT = r"\u0590-\u065f\u066e-\u06ef\u06fa-\u08ff\ufb1d-\ufdff\ufe70-\ufefe"
_TO_LEFT, _TO_RIGHT = re.compile(f"[{_RIGHT}]"), re.compile(rf"[^\W\d_{_RIGHT}]")
"""Letters that are written from right to left, and from left to right."""
_LETTER = re.compile(r"[^\W\d_]")
_AMONG_LEFT = re.compile(f"[^{_RIGHT}]+")
_AMONG_RIGHT = re.compile(rf"[{_RIGHT}](?:(?:[{_RIGHT}]|[\W\d_])*[{_RIGHT}])?")
_WORDS = re.compile(r"\w(?:.*\w)?", re.DOTALL)
_NUMBER = re.compile(
    r"[%\u2030\u00b0$\u20ac\u00a3\u20aa]?\d+(?:[.,:/\u066b\u066c-]\d+)*[%\u2030\u00b0$\u20ac\u00a3\u20aa]?"
)
_SHOWS = (b"Tj", b"TJ", b"'", b'"')


def has_both_directions(text: str) -> bool:
    """Whether a line has letters that are written from right to left, and numbers or other letters."""
    return any(_TO_LEFT.search(line) and re.search(rf"[^\W_{_RIGHT}]", line) for line in text.splitlines())


def read_in_order(extract: Callable[..., object], before: Callable[..., None]) -> tuple[str, str]:
    """A page's text as pypdf gives it in pieces, and with its lines in the order in which people read them.

    Args:
        extract: extracts the text; takes pypdf's visitors.
        before: is called before each command.
    """
    lines = _Lines(before)
    extract(visitor_operand_before=lines.before, visitor_text=lines.take)
    lines.end_piece(0.0)
    return "".join(lines.given), "\n".join(map(_ordered, lines.all))


class _Lines:
    """Takes from pypdf the pieces of a page's text, and the places where they begin."""

    def __init__(self, before: Callable[..., None]) -> None:
        self.given: list[str] = []
        self.all: list[list[tuple[float, str]]] = [[]]
        """Of each line the pieces: how far from the left each begins, and what stands there, from left to right."""
        self._before = before
        self._is_shown = self._is_turned = False
        self._piece: list[str] = []

    def before(self, operator: bytes, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        self._is_shown = operator in _SHOWS
        self._before(operator, operands, cm, tm)

    def take(self, text: str, cm: list[float], tm: list[float], font: Any, size: float) -> None:
        self.given.append(text)
        line = text.removesuffix("\n")
        if _TO_LEFT.search(line):
            self._is_turned = True
        elif re.search(r"[0-9]", line) or _TO_RIGHT.search(line):
            self._is_turned = False
        self._piece.append(line[::-1] if self._is_turned else line)
        if line != text or not self._is_shown:  # else a run of the other direction follows
            self.end_piece(tm[4] * cm[0] + tm[5] * cm[2] + cm[4])
        if line != text:
            self.all.append([])

    def end_piece(self, left: float) -> None:
        if any(self._piece):
            self.all[-1].append((left, "".join(self._piece)))
        self._piece = []


def _ordered(pieces: list[tuple[float, str]]) -> str:
    """A line. Pieces that were drawn from left to right are one; others were drawn as they are read."""
    if all(one[0] <= other[0] for one, other in pairwise(pieces)):
        return _as_read("".join(text for _, text in pieces))
    return "".join(_as_read(text) for _, text in pieces)


def _as_read(shown: str) -> str:
    """What stands on a page from left to right, in the order in which it is read (the inverse of Unicode's annex 9, as
    far as letters and numbers go)."""
    to_left = [_TO_LEFT.match(letter) is not None for letter in _LETTER.findall(shown)]
    if not any(to_left):
        return shown
    # a line begins and ends with letters of its own direction; if one end has others, the number of letters decides
    is_from_right = to_left[0] if to_left[0] == to_left[-1] else 2 * sum(to_left) >= len(to_left)
    return _turned(shown) if is_from_right else _AMONG_RIGHT.sub(lambda found: _turned(found[0]), shown)


def _turned(shown: str) -> str:
    return _AMONG_LEFT.sub(lambda found: _turned_back(found[0]), shown[::-1])


def _turned_back(other: str) -> str:
    """Words and numbers between letters that are written from right to left: between the words, too."""
    kind = _WORDS if _TO_RIGHT.search(other) else _NUMBER
    return kind.sub(lambda found: found[0][::-1], other)
