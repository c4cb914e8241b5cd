"""The text of a PDF file, and what its pages show that is no text."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import DocumentError, MissingExtraError
from .text import DocumentText

if TYPE_CHECKING:
    from pypdf import PageObject

PYPDF = "pypdf (needed for PDF files)"

_LITTLE = 100
"""Most characters of a page that is probably a picture with a stamp or a number, if a picture covers it."""
_SMALL, _LARGE = 100_000, 500_000
"""Least pixels of a picture that may hold text, and of one that covers a page."""
_PRIVATE = re.compile(r"[\ue000-\uf8ff]")
_MOST_PRIVATE = 0.05
"""Largest share of signs that only the file's fonts know, such as bullets."""
_NO_COMMENTS = ("/Link", "/Popup")
"""Annotations that show nothing of their own: a popup repeats the comment to which it belongs."""
_MOST_DEPTH = 4
"""Most forms within forms, and fields above a field, that are looked through."""
_INLINE = re.compile(rb"(?<!\S)BI\s*(/.{0,500}?)\sID\s", re.DOTALL)
_WIDTH, _HEIGHT = (re.compile(rb"/%s\s+(\d{1,9})" % name) for name in (rb"W(?:idth)?", rb"H(?:eight)?"))
"""Of a picture that stands in the commands which draw a page."""


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
    unread: dict[int, Exception] = {}
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{path} is encrypted. Save it without a password.")
        empty, scanned, pictured = [], [], []  # type: list[int], list[int], list[int]
        for number, page in enumerate(reader.pages, 1):
            parts: list[str] = []
            try:
                parts.append(text := page.extract_text().strip())
                parts += _written_on(page)
                if not text:
                    empty.append(number)
                    continue
                drawn = page.get_contents()
                pixels = _largest_picture(page, drawn.get_data() if drawn is not None else b"")
                if pixels >= _LARGE and len(text) < _LITTLE:
                    scanned.append(number)
                elif pixels >= _SMALL or _has_picture_on_it(page):
                    pictured.append(number)
            except DependencyError:
                raise
            except Exception as error:  # a part of the page is damaged; pages after it, and what came before, are not
                unread[number] = error
            finally:
                pages.append("\n\n".join(filter(None, parts)))
        if unread and not any(pages):
            raise next(iter(unread.values()))
        try:
            attached = len(reader.attachments)
        except Exception:  # the list is damaged, and the pages are not
            notes.append("its list of attached files cannot be read.")
            attached = 0
    except DocumentError:
        raise
    except DependencyError as error:
        needed = MissingExtraError("cryptography (needed to read it)", "pdf")
        raise DocumentError(f"{path} is encrypted with AES: {needed}") from error
    except Exception as error:  # damaged files raise many kinds
        raise DocumentError(f"{path} is no PDF file that pypdf can read ({type(error).__name__}: {error}).") from error
    if not any(pages):
        raise DocumentError(f"{path} has no text on its {len(pages)} pages; if they are scanned, run OCR first.")
    if unread:
        notes.append(f"{_pages([*unread])} of {len(pages)} with something that cannot be read, which is left out.")
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
    for annotation in _annotations(page):
        if _entry(annotation, "/Subtype") == "/Widget":
            name = _of_field(annotation, "/TU") or _of_field(annotation, "/T") or "field"
            value = _of_field(annotation, "/V")
            text = _shown(value, _of_field(annotation, "/Opt")) if value != "/Off" else ""
            text = text and f"{name}: {text}"
        else:
            text = _shown(_entry(annotation, "/Contents"))
        yield text or _drawn(page, annotation)


def _annotations(page: PageObject) -> Iterator[Any]:
    """Annotations that show something of their own."""
    for reference in _entry(page, "/Annots") or ():
        annotation: Any = reference.get_object()
        if isinstance(annotation, dict) and _entry(annotation, "/Subtype") not in _NO_COMMENTS:
            yield annotation


def _entry(holder: Any, key: str) -> Any:
    """The object that an entry of a dictionary is or refers to; None without it."""
    found = holder.get(key)
    return None if found is None else found.get_object()


def _of_field(field: Any, key: str) -> Any:
    """An entry of a form field, or of the nearest field above that has it."""
    for _ in range(_MOST_DEPTH):
        found = _entry(field, key)
        field = _entry(field, "/Parent")
        if found is not None or field is None:
            return found
    return None


def _shown(value: Any, options: Any = None) -> str:
    """What readers see of a value: its text, and of several their texts. A value in ``options`` is shown by the name
    that stands beside it."""
    if isinstance(value, list):
        return ", ".join(filter(None, [_shown(each.get_object(), options) for each in value]))
    if hasattr(value, "get_data"):
        value = value.get_data()
    if isinstance(value, bytes):
        is_utf_16 = value.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        value = value.decode("utf-16" if is_utf_16 else "utf-8", "replace").lstrip("\ufeff")
    if not isinstance(value, str):
        return ""
    for option in map(_resolved, options if isinstance(options, list) else ()):
        if isinstance(option, list) and len(option) == 2 and _resolved(option[0]) == value:
            return _shown(_resolved(option[1]))
    return value.removeprefix("/").strip()


def _resolved(value: Any) -> Any:
    return value.get_object()


def _appearances(annotation: Any) -> list[Any]:
    """What is drawn for an annotation, in each of its states."""
    normal = _entry(_entry(annotation, "/AP") or {}, "/N") or {}
    drawn = [normal] if hasattr(normal, "get_data") else [each.get_object() for each in normal.values()]
    return [each for each in drawn if hasattr(each, "get_data")]


def _drawn(page: PageObject, annotation: Any) -> str:
    """The text that is drawn for an annotation which says nothing else: stamps, signatures. Not that of check boxes,
    which are drawn in more than one state."""
    drawn = _appearances(annotation)
    with suppress(Exception):  # a page with a damaged stamp is still worth reading
        return page.extract_xform_text(drawn[0]).strip() if len(drawn) == 1 else ""
    return ""


def _has_picture_on_it(page: PageObject) -> bool:
    """Whether people put a picture on the page, of any size: a stamp, a signature."""
    return any(
        _largest_picture(drawn, drawn.get_data())
        for annotation in _annotations(page)
        for drawn in _appearances(annotation)
    )


def _largest_picture(drawn: Any, commands: bytes, depth: int = 0, seen: dict[int, Any] | None = None) -> int:
    """Pixels of the largest picture of a page or form.

    Args:
        commands: which draw it.
        seen: forms that were looked through, by their ids. Forms often share one list of all forms.
    """
    largest, seen = 0, {} if seen is None else seen
    for (found,) in map(re.Match.groups, _INLINE.finditer(commands)):
        sizes = [pattern.search(found) for pattern in (_WIDTH, _HEIGHT)]
        largest = max(largest, prod(int(size[1]) if size else 0 for size in sizes))
    objects = _entry(_entry(drawn, "/Resources") or {}, "/XObject") or {}
    for each in map(_resolved, objects.values()):
        kind = _entry(each, "/Subtype")
        if kind == "/Image":
            largest = max(largest, prod(int(_entry(each, side) or 0) for side in ("/Width", "/Height")))
        elif kind == "/Form" and depth < _MOST_DEPTH and id(each) not in seen:
            seen[id(each)] = each
            largest = max(largest, _largest_picture(each, each.get_data(), depth + 1, seen))
    return largest
