"""What readers of a file do not see, and what therefore is not ingested: one list for all formats.

What is unsure stays, and so do texts that something drawn later covers, and those in the colour of their ground, unless
both are white. Of HTML pages with a style sheet, a script or something drawn before the text, white and transparent
letters stay, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Unseen(StrEnum):
    """Why readers do not see a part of a file. The value stands in notes."""

    SWITCHED_OFF = "switched off"
    """HTML: ``hidden``, ``display: none``, ``visibility: hidden``, closed dialogs. PDF: layers, fields and comments
    that are not shown."""
    COMMENT = "comment"
    """Markdown. Nobody expects those of HTML, which are left out without a word."""
    SECRET = "password"
    """What somebody typed into a field that shows dots."""
    TRANSPARENT = "invisible"
    """Characters of Unicode's tags, and selectors of forms that nothing has. HTML: ``opacity: 0``, transparent letters.
    PDF: letters without ink, unless they stand over a picture: that is what OCR read in it."""
    ON_WHITE = "white on white"
    TOO_SMALL = "too small to read"
    """Or without a place."""
    OUTSIDE = "outside the page"
    """Or outside the part of it that is shown. HTML: thousands of pixels to the left of it, or above."""


def note_on_unseen(what: str, reasons: Iterable[Unseen]) -> str:
    """The note that a part was left out, with the reasons in the list's order."""
    return f"{what} left out ({', '.join(each for each in Unseen if each in {*reasons})})."
