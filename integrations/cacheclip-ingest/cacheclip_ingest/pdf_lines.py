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
_WORDS = re.compile(r"(?:(?<![^\s(\[{])[+\u2212-](?=\d))?\w(?:.*\w)?(?:[+#%]+(?![^\s)\]}]))?", re.DOTALL)
_UNIT = r"[%\u2030\u00b0$\u20ac\u00a3\u20aa]?"
_PLAIN_NUMBER = rf"{_UNIT}\d+(?:[.,:/\u066b\u066c-]\d+)*{_UNIT}"
_NUMBER = re.compile(
    rf"(?:(?<![^\s(\[{{])[+\u2212-])?"
    rf"(?:[1-9]\d{{0,2}}(?:[ \u00a0\u202f]\d{{3}}(?!\d))+(?:[.,]\d+)?{_UNIT}|{_PLAIN_NUMBER})"
)
_OPEN, _CLOSE = "([{<\u00ab\u2039", ")]}>\u00bb\u203a"
_MIRRORED = str.maketrans(_OPEN + _CLOSE, _CLOSE + _OPEN)
_BRACKETS = re.compile(f"[{re.escape(_OPEN + _CLOSE)}]")
_SIGN, _OTHER = r"[^\w\s.,:;!?'\"\u05f3\u05f4\u2018-\u201f()\[\]{}<>\u00ab\u00bb\u2039\u203a]", rf"[^\W_{_RIGHT}]"
_BESIDE = re.compile(rf"{_OTHER}{_SIGN}(?![{_RIGHT}\w])|(?<![{_RIGHT}\w]){_SIGN}{_OTHER}|\d[ \u00a0\u202f]+\d")
"""Signs beside numbers and words, and numbers side by side: programs draw them at either end."""
_NOT_TURNED = re.compile(
    r"[^\u0000-\u002f\u003a-\u0040\u2000-\u206f\u20a0-\u21ff\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]"
)
"""What begins a run from left to right for pypdf."""
_SHOWS = (b"Tj", b"TJ", b"'", b'"')


def has_both_directions(text: str) -> bool:
    """Whether a line has letters that are written from right to left, and numbers, brackets or other letters."""
    return any(
        _TO_LEFT.search(line) and (re.search(_OTHER, line) or _BRACKETS.search(line)) for line in text.splitlines()
    )


def read_in_order(extract: Callable[..., object], before: Callable[..., None]) -> tuple[str, str, bool]:
    """A page's text as pypdf gives it in pieces, and with its lines in the order in which people read them; whether
    that is a guess.

    Args:
        extract: extracts the text; takes pypdf's visitors.
        before: is called before each command.
    """
    lines = _Lines(before)
    extract(visitor_operand_before=lines.before, visitor_text=lines.take)
    lines.end_piece(0.0)
    shown = [_side_by_side(pieces) for pieces in lines.all]
    is_guess = any(_is_guess(each) for line in shown for each in line)
    return "".join(lines.given), "\n".join("".join(map(_as_read, line)) for line in shown), is_guess


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
        elif _NOT_TURNED.search(line):
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


def _side_by_side(pieces: list[tuple[float, str]]) -> list[str]:
    """Parts of a line. Pieces that were drawn from left to right are one; others were drawn as they are read."""
    texts = [text for _, text in pieces]
    return ["".join(texts)] if all(one[0] <= other[0] for one, other in pairwise(pieces)) else texts


def _as_read(shown: str) -> str:
    """What stands on a page from left to right, in the order in which it is read (the inverse of Unicode's annex 9, as
    far as letters, numbers and brackets go)."""
    to_left = _directions(shown)
    if not any(to_left):
        return shown
    return _turned(shown) if _is_from_right(to_left) else _AMONG_RIGHT.sub(lambda found: _turned(found[0]), shown)


def _directions(shown: str) -> list[bool]:
    """Of each letter, whether it is written from right to left."""
    return [_TO_LEFT.match(letter) is not None for letter in _LETTER.findall(shown)]


def _is_from_right(to_left: list[bool]) -> bool:
    """A line begins and ends with letters of its own direction; if one end has others, most letters decide."""
    return to_left[0] if to_left[0] == to_left[-1] else 2 * sum(to_left) >= len(to_left)


def _is_guess(shown: str) -> bool:
    """Whether a line that stands on a page so may be read in another order."""
    to_left = _directions(shown)
    if not any(to_left):
        return False
    if to_left[0] != to_left[-1]:
        return True
    if to_left[0]:
        return _is_part_a_guess(shown)
    # a number beside letters from right to left may be read before or after them
    among = _AMONG_RIGHT.sub("\u05d0", shown)
    return re.search(r"\d[\W_]*\u05d0|\u05d0[\W_]*\d", among) is not None or any(
        map(_is_part_a_guess, _AMONG_RIGHT.findall(shown))
    )


def _is_part_a_guess(shown: str) -> bool:
    words = (_WORDS.search(each) for each in _AMONG_LEFT.findall(shown) if _TO_RIGHT.search(each))
    return (
        not _are_pairs(_turned(shown))
        or any(each is not None and _BRACKETS.search(each[0]) for each in words)
        or _BESIDE.search(re.sub(_PLAIN_NUMBER, "0", shown)) is not None
    )


def _turned(shown: str) -> str:
    """Brackets are drawn the other way round; some files name what is drawn, and some what is meant."""
    drawn, meant = _from_right(shown, _MIRRORED), _from_right(shown, {})
    return meant if _are_pairs(meant) and not _are_pairs(drawn) else drawn


def _from_right(shown: str, mirrored: dict[int, int]) -> str:
    parts, at = [], 0
    for found in _AMONG_LEFT.finditer(shown):
        kind = _WORDS if _TO_RIGHT.search(found[0]) else _NUMBER
        for kept in kind.finditer(shown, found.start(), found.end()):
            end = kept.end()
            if end < len(shown) and not _are_pairs(kept[0]) and _are_pairs(shown[kept.start() : end + 1]):
                end += 1
            parts += [shown[at : kept.start()].translate(mirrored)[::-1], shown[kept.start() : end]]
            at = end
    parts.append(shown[at:].translate(mirrored)[::-1])
    return "".join(reversed(parts))


def _are_pairs(text: str) -> bool:
    """Whether each bracket that is opened is closed behind it."""
    depth = 0
    for each in re.findall(r"[()\[\]{}]", text):
        depth += 1 if each in "([{" else -1
        if depth < 0:
            return False
    return depth == 0
