"""The text of a PDF file, and what its pages show that is no text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import DocumentError, MissingExtraError
from .text import DocumentText

if TYPE_CHECKING:
    from pypdf import PageObject

__all__ = ["PYPDF", "pdf_text"]

PYPDF = "pypdf (needed for PDF files)"

_LITTLE = 100
"""Most characters of a page that is probably a picture with a stamp or a number, if a picture covers it."""
_SMALL, _LARGE = 100_000, 500_000
"""Least pixels of a picture that may hold text, and of one that covers a page."""
_PRIVATE = re.compile(r"[\ue000-\uf8ff]")
_MOST_PRIVATE = 0.05
"""Largest share of signs that only the file's fonts know, such as bullets."""
_COMMENTS = ("/FreeText", "/Text", "/Highlight", "/Underline", "/StrikeOut", "/Stamp")
_MOST_DEPTH = 4
"""Most pictures within pictures that are looked through."""


def pdf_text(path: Path, data: bytes) -> DocumentText:
    """Text of a PDF file; pages are separated by a blank line. What people typed into forms and wrote beside the text
    stands after each page's text.

    Raises:
        DocumentError: it is damaged, encrypted, or has no text.
        MissingExtraError: pypdf, or what it needs to decrypt the file, is not installed.
    """
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError
    except ImportError as error:
        raise MissingExtraError(PYPDF, "pdf") from error
    notes, pages = [], []
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{path} is encrypted. Save it without a password.")
        empty, scanned, pictured = [], [], []  # type: list[int], list[int], list[int]
        for number, page in enumerate(reader.pages, 1):
            text = page.extract_text().strip()
            if not text:
                empty.append(number)
            elif (pixels := _largest_picture(page.get("/Resources"))) >= _SMALL:
                (scanned if len(text) < _LITTLE and pixels >= _LARGE else pictured).append(number)
            pages.append("\n\n".join(filter(None, [text, *_written_on(page)])))
        attached = len(reader.attachments)
    except DocumentError:
        raise
    except DependencyError as error:
        needed = MissingExtraError("cryptography (needed to read it)", "pdf")
        raise DocumentError(f"{path} is encrypted with AES: {needed}") from error
    except Exception as error:  # damaged files raise many kinds
        raise DocumentError(f"{path} is no PDF file that pypdf can read ({type(error).__name__}: {error}).") from error
    if not any(pages):
        raise DocumentError(f"{path} has no text on its {len(pages)} pages; if they are scanned, run OCR first.")
    if empty:
        notes.append(f"{_pages(empty)} of {len(pages)} without text; if scanned, run OCR first.")
    if scanned:
        notes.append(
            f"{_pages(scanned)} of {len(pages)} with a picture and hardly any text; if scanned, run OCR first."
        )
    if attached:
        notes.append(f"{attached} file(s) attached to it are not read.")
    if pictured:
        notes.append(f"{_pages(pictured)} of {len(pages)} with pictures, in which no text is read.")
    text = "\n\n".join(filter(None, pages)).replace("\0", "\ufffd")  # signs without a letter in the file's fonts
    private = len(_PRIVATE.findall(text))
    if private > _MOST_PRIVATE * len(text):
        notes.append(
            f"{private} of {len(text)} signs have a letter in the file's fonts only; if it is unreadable, run OCR."
        )
    return DocumentText(text, notes)


def _pages(numbers: list[int]) -> str:
    """Pages by number: ``pages 2, 5-7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"page{'s' if len(numbers) > 1 else ''} " + ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    )


def _written_on(page: PageObject) -> Iterator[str]:
    """What stands in form fields and comments of a page, which is no part of the page's text."""
    for reference in page.get("/Annots") or ():
        annotation: Any = reference.get_object()
        parent: Any = annotation.get("/Parent")
        parent = parent.get_object() if parent is not None else {}
        if annotation.get("/Subtype") == "/Widget":
            value = annotation.get("/V", parent.get("/V"))
            name = annotation.get("/TU") or annotation.get("/T") or parent.get("/TU") or parent.get("/T") or "field"
            if isinstance(value, str) and value.strip() and value != "/Off":
                yield f"{name}: {value.removeprefix('/').strip()}"
        elif annotation.get("/Subtype") in _COMMENTS and isinstance(text := annotation.get("/Contents"), str):
            yield text.strip()


def _largest_picture(resources: Any, depth: int = 0) -> int:
    """Pixels of the largest picture among the resources of a page."""
    resources = resources.get_object() if resources is not None else {}
    objects = resources.get("/XObject")
    largest = 0
    for reference in (objects.get_object() if objects is not None else {}).values():
        each: Any = reference.get_object()
        if each.get("/Subtype") == "/Image":
            largest = max(largest, int(each.get("/Width", 0)) * int(each.get("/Height", 0)))
        elif each.get("/Subtype") == "/Form" and depth < _MOST_DEPTH:
            largest = max(largest, _largest_picture(each.get("/Resources"), depth + 1))
    return largest
