"""The one form in which texts are compared: what a reader sees, however it is written, without white space.

Letters with their accents apart, escapes of JSON and markup, ligatures and full-width letters become the letters that
they show, and typographic signs those of typewriters. White space, quotation marks, backslashes, ``>`` and characters
that nobody sees are left out. So a text that was quoted, escaped, wrapped or written by another system has the same
form. The form is for finding only: KV is reused where the prompt's own tokens are those of the stored text.

Catalogs hold places in this form. A text whose form changes with a version of the package is still found
(:mod:`~cacheclip_rag.finding.search`), and ``cacheclip store repair`` writes its places anew.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Column = np.ndarray[Any, np.dtype[Any]]

_SEEN_BY_NOBODY = (
    *range(9, 14),
    *map(ord, ' ">\\\x85\xa0\xad\u034f\u061c\u1680\u180e\u202f\u205f\u3000\ufeff'),
    *range(0x2000, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2060, 0x2070),
    *range(0xFE00, 0xFE10),
)
"""White space, quotation marks, backslashes, ``>``, and what shows nothing: soft hyphens, joiners, direction marks,
variation selectors."""
_LEFT_OUT = np.zeros(1 << 16, dtype=bool)
"""By code point; the last for all above."""
_LEFT_OUT[[*_SEEN_BY_NOBODY]] = True
_TAGS = 0xE0
"""Code points above ``0xFFFF`` that nobody sees either, shifted right by 12."""


def _utf8(mark: str) -> str:
    """A pattern for one character that is not ASCII, whose bytes are written with two hexadecimal digits each."""
    more = f"(?:{mark}[89abAB][0-9a-fA-F])"
    first = (("[c-dC-D][0-9a-fA-F]", 1), ("[eE][0-9a-fA-F]", 2), ("[fF][0-4]", 3))
    return "|".join(f"{mark}{lead}{more}{{{count}}}" for lead, count in first)


ESCAPES = re.compile(
    f"({_utf8('%(?:25)*')}|%(?:25)*[2-7a-fA-F][0-9a-fA-F]|{_utf8('=')}|"
    + _utf8(r"\\+x")
    + r"|\\+3(?:[0-3][0-7](?:\\+2[0-7]{2})|[45][0-7](?:\\+2[0-7]{2}){2}|6[0-4](?:\\+2[0-7]{2}){3}))"
    r"|(?:\\+|%)u([dD][89abAB][0-9a-fA-F]{2})(?:\\+|%)u([dD][c-fC-F][0-9a-fA-F]{2})|(?:\\+|%)u([0-9a-fA-F]{4})"
    r"|\\+(?:U000([0-9a-fA-F]{5})|x([0-9a-fA-F]{2})|[ux]\{0{0,8}((?:10|[0-9a-fA-F])?[0-9a-fA-F]{1,4})\})"
    r"|'(?:[\\\"]*')+"
    r"|&(?:amp;)*(#?[0-9A-Za-z]{1,31};)"
)
"""Bytes in hexadecimal or octal digits, as URLs, mails and C have them; escapes of JSON and other code, and of HTML and
XML, also where they are escaped once more; apostrophes of SQL and of shells."""
_BYTES = re.compile(r"\\+([0-7]{3})|(?:%(?:25)*|=|\\+x)([0-9a-fA-F]{2})")
OF_URLS, _OF_MAILS = re.compile("%[2-7a-fuA-F][0-9a-fA-F]"), re.compile("=[C-F][0-9A-F]=[89AB]")
_DOUBLED = re.compile(r"'[\\\"]*'")
_SOME = (OF_URLS, _OF_MAILS, _DOUBLED)
"""What texts with such bytes, or such apostrophes, have."""
_TYPED = np.array([*map(ord, "------\u2016\u2017''''\"\"\"\"")], dtype=np.uint32)
"""What stands for U+2010 to U+201F: dashes and quotation marks."""
_LINE_ENDS = np.array([*map(ord, "nrt")], dtype=np.uint32)
"""After a backslash, these are left out: they stand for the end of a line, or a tabulator."""
_SHOWN_ALIKE = frozenset({"<compat>", "<wide>", "<narrow>", "<initial>", "<medial>", "<final>", "<isolated>"})
"""Kinds of characters that Unicode writes as others which look the same. (Fractions, raised and circled digits and
letters of other fonts do not.)"""


def code_points(text: str) -> Column:
    """The code points of a text, ``(len(text),)`` uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def fold(text: str) -> tuple[Column, Column, Column]:
    """The bytes of a text that are compared, and for each the characters ``[start, stop)`` of the text that it stands
    for: ``(num_bytes,)`` uint8 and twice int64."""
    spans = None
    if "\\" in text or "&" in text or any(each.search(text) for each in _SOME):
        text, spans = rewritten(text, ESCAPES, unescaped, None)
    if not (is_ascii := text.isascii()):
        text, spans = _composed(text, spans)
    codes = np.frombuffer(text.encode(), dtype=np.uint8) if is_ascii else _typed(code_points(text))
    kept = ~_LEFT_OUT[codes if is_ascii else np.minimum(codes, len(_LEFT_OUT) - 1)]
    if "\\" in text:
        escaped = np.flatnonzero(codes[:-1] == ord("\\")) + 1
        kept[escaped[np.isin(codes[escaped], _LINE_ENDS)]] = False
    places = np.flatnonzero(kept if is_ascii else kept & (codes >> 12 != _TAGS))
    compared = codes[places]
    if not is_ascii:
        widths = 1 + (compared >= 0x80).astype(np.int64) + (compared >= 0x800) + (compared >= 0x10000)
        places = np.repeat(places, widths)
        written = compared.tobytes().decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass")
        compared = np.frombuffer(written, dtype=np.uint8)
    return (compared, places, places + 1) if spans is None else (compared, spans[0][places], spans[1][places])


def _typed(codes: Column) -> Column:
    signs = codes >> 4 == 0x201
    if not signs.any():
        return codes
    codes = codes.copy()
    codes[signs] = _TYPED[codes[signs] & 0xF]
    return codes


def rewritten(
    text: str, pattern: re.Pattern[str], written: Callable[[re.Match[str]], str], spans: Column | None
) -> tuple[str, Column | None]:
    """A text with what ``written`` gives for each match of a pattern, and where each of its characters stood before,
    ``(2, len(text))``. ``spans``: where those of ``text`` stood; None: where they stand."""
    changes = [(*match.span(), new) for match in pattern.finditer(text) if (new := written(match)) != match[0]]
    if not changes:
        return text, spans
    counts = np.ones(len(text), dtype=np.int64)
    last = np.arange(len(text))
    pieces, position = [], 0
    for start, stop, new in changes:
        pieces += [text[position:start], new]
        counts[start:stop] = 0
        counts[start], last[start], position = len(new), stop - 1, stop
    first = np.repeat(np.arange(len(text)), counts)
    last = last[first]
    both = np.stack([first, last + 1] if spans is None else [spans[0][first], spans[1][last]])
    return "".join([*pieces, text[position:]]), both


def unescaped(match: re.Match[str]) -> str:
    """What an escape stands for."""
    written, high, low, *codes, entity = match.groups()
    if entity:
        return html.unescape(f"&{entity}")
    if match[0][0] == "'":
        return "'"
    if written:
        digits = bytes(int(octal, 8) if octal else int(other, 16) for octal, other in _BYTES.findall(written))
        return digits.decode("utf-8" if len(digits) > 1 else "latin-1", "ignore") or match[0]
    if high:
        return chr(0x10000 + (int(high, 16) % 0x400 << 10) + int(low, 16) % 0x400)
    return chr(int(next(filter(None, codes)), 16))


def _composed(text: str, spans: Column | None) -> tuple[str, Column | None]:
    """A text with letters and their marks as one character each, and characters as those which they show."""
    shown, changed, clusters = _shown()
    if changed.search(text):
        text, spans = rewritten(text, changed, lambda match: shown[match[0]], spans)
    if not unicodedata.is_normalized("NFC", text):
        text, spans = rewritten(text, clusters, lambda match: unicodedata.normalize("NFC", match[0]), spans)
    return text, spans


@cache
def _shown() -> tuple[dict[str, str], re.Pattern[str], re.Pattern[str]]:
    """What characters show that is written with others, a pattern for these, and one for letters with marks."""
    shown, marks = dict[str, str](), {*map(chr, range(0x1161, 0x1200))}  # of Hangul
    for character in map(chr, range(0xA0, 1 << 16)):
        kind, _, parts = unicodedata.decomposition(character).partition(" ")
        if kind in _SHOWN_ALIKE:
            shown[character] = unicodedata.normalize("NFKC", character)
        elif kind and not parts:  # the same character twice, as the sign of Ångström and the letter
            shown[character] = unicodedata.normalize("NFC", character)
        elif unicodedata.combining(character):
            marks.add(character)
        if parts and not kind.startswith("<"):
            marks.update(unicodedata.normalize("NFD", character)[1:])
    return shown, re.compile(f"[{''.join(shown)}]"), re.compile(f".[{''.join(marks)}]+", re.DOTALL)
