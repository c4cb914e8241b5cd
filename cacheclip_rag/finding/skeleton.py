"""Consonants and digits of texts, by which a text is found again that was rewritten: without its accents or umlauts, in
other case, with marks around words, in a wrong encoding. It shares hardly a token with the stored one, so that it is
only counted as missed."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

import numpy as np

from .common_parts import window_hashes
from .folding import ESCAPES, OF_URLS, Column, code_points, rewritten, unescaped

_ONE_OF = 64
"""Windows of a skeleton, one of which is an anchor: one in about 100 characters of prose."""
_OTHER = np.int64(0x5DEECE66D5DEECE6)
"""Makes these anchors others than those of whole texts."""
_KEPT = frozenset("bcdfghjklmnpqrstvwxyz0123456789")
_NOT_SHOWN = re.compile(r"<[^<>\n]{1,200}>|\]\([^()\s]{1,300}\)")
"""Tags, and targets of links."""


def skeleton(text: str) -> tuple[Column, Column]:
    """The consonants and digits of a text, ``(num_kept,)`` uint8, and the characters that they are, int64. Letters of
    other scripts are kept without their marks."""
    spans = None
    if OF_URLS.search(text):  # there, a space may be a plus sign
        text, spans = rewritten(text, ESCAPES, unescaped, None)
    if "<" in text or "](" in text:
        text = _NOT_SHOWN.sub(lambda match: " " * len(match[0]), text)
    codes = _table()[np.minimum(code_points(text), 0xFFFF)]
    places = np.flatnonzero(codes)
    return codes[places], places if spans is None else spans[0][places]


def loose_anchors(codes: Column) -> tuple[Column, Column]:
    """Hashes of some windows of a skeleton, and their places. The same window is an anchor in every text."""
    hashes = window_hashes(codes)
    places = np.flatnonzero(hashes % _ONE_OF == 0)
    return hashes[places] ^ _OTHER, places


@cache
def _table() -> Column:
    """By code point: what stands for a character; 0 for what is left out."""
    table = np.zeros(1 << 16, dtype=np.uint8)
    for code in (*range(0x30, 0x80), *range(0xC0, 0xD800), *range(0xE000, 0xFFFF)):  # signs come of wrong encodings
        base = unicodedata.normalize("NFKD", chr(code))[0].lower()[0]
        if base in _KEPT:
            table[code] = ord(base)
        elif base >= "\u0250" and unicodedata.category(base)[0] in "LN":
            table[code] = 0x80 | ord(base) * 37 % 0x80
    return table
