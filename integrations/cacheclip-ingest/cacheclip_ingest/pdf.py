"""The text of a PDF file, and what its pages show that is no text."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheclip_rag import DocumentError, MissingExtraError

from .pdf_lines import has_both_directions, read_in_order
from .pdf_view import EVERYWHERE, Box, Layers, PageView, entry, overlap, page_box, upright
from .text import DocumentText
from .unseen import Unseen, note_on_unseen

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
_HIDDEN, _PASSWORD = 2 | 32, 1 << 13
"""Flags of annotations that are not shown (Hidden, NoView), and of a field whose text is shown as dots."""
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
    notes, pages = [], _Pages()
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{path} is encrypted. Save it without a password.")
        layers = Layers(reader)
        for page in reader.pages:
            pages.read(page, layers, DependencyError)
        if pages.unread and not any(pages.texts):
            raise next(iter(pages.unread.values()))
        try:
            pages.attached = len(reader.attachments)
        except Exception:  # the list is damaged, and the pages are not
            notes.append("its list of attached files cannot be read.")
    except DocumentError:
        raise
    except DependencyError as error:
        needed = MissingExtraError("cryptography (needed to read it)", "pdf")
        raise DocumentError(f"{path} is encrypted with AES: {needed}") from error
    except Exception as error:  # damaged files raise many kinds
        raise DocumentError(f"{path} is no PDF file that pypdf can read ({type(error).__name__}: {error}).") from error
    notes += pages.notes_on_unseen()
    if not any(pages.texts):
        without = f"{path} has no text on its {len(pages.texts)} pages; if they are scanned, run OCR first."
        raise DocumentError(" ".join([without, *notes]))
    notes += pages.notes()
    text = "\n\n".join(filter(None, pages.texts)).replace("\0", "\ufffd")  # signs without a letter in the file's fonts
    private = len(_PRIVATE.findall(text))
    if private > _MOST_PRIVATE * len(text):
        notes.append(
            f"{private} of {len(text)} signs have a letter in the file's fonts only; if it is unreadable, run OCR."
        )
    return DocumentText(text, notes)


@dataclass
class _Pages:
    """Texts of the pages read so far, and by number, from 1, which lack what."""

    texts: list[str] = field(default_factory=list)
    unread: dict[int, Exception] = field(default_factory=dict)
    unseen: dict[int, set[Unseen]] = field(default_factory=dict)
    empty: list[int] = field(default_factory=list)
    scanned: list[int] = field(default_factory=list)
    pictured: list[int] = field(default_factory=list)
    unordered: list[int] = field(default_factory=list)
    attached: int = 0
    """Files."""

    def read(self, page: PageObject, layers: Layers, fatal: type[Exception]) -> None:
        """The next page. Of its errors, only the ``fatal`` ones are raised: a part of the page is damaged; pages after
        it, and what came before, are not."""
        number, parts, left_out = len(self.texts) + 1, list[str](), set[Unseen]()
        try:
            text, is_ordered = _drawn_on(page, layers, left_out)
            parts.append(text)
            parts += _written_on(page, layers, left_out)
            if not is_ordered:
                self.unordered.append(number)
            if not text:
                self.empty.append(number)
                return
            drawn = page.get_contents()
            pixels = _largest_picture(page, drawn.get_data() if drawn is not None else b"")
            if pixels >= _LARGE and len(text) < _LITTLE:
                self.scanned.append(number)
            elif pixels >= _SMALL or _has_picture_on_it(page, layers):
                self.pictured.append(number)
        except fatal:
            raise
        except Exception as error:
            self.unread[number] = error
        finally:
            self.texts.append("\n\n".join(filter(None, parts)))
            if left_out:
                self.unseen[number] = left_out

    def notes_on_unseen(self) -> Iterator[str]:
        if self.unseen:
            where = f"{_pages([*self.unseen])} of {len(self.texts)}"
            yield note_on_unseen(f"{where} with hidden parts, which are", set().union(*self.unseen.values()))

    def notes(self) -> Iterator[str]:
        for numbers, what in (
            ([*self.unread], "with something that cannot be read, which is left out"),
            (self.empty, "without text; if scanned, run OCR first"),
            (self.scanned, "with a picture and hardly any text; if scanned, run OCR first"),
            (self.unordered, "with text in two directions, whose order may be wrong"),
            (self.pictured, "with pictures, in which no text is read"),
        ):
            if numbers:
                yield f"{_pages(numbers)} of {len(self.texts)} {what}."
        if self.attached:
            yield f"{self.attached} file(s) attached to it are not read."


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


def _drawn_on(page: PageObject, layers: Layers, left_out: set[Unseen]) -> tuple[str, bool]:
    """The text that readers see of what is drawn on a page, and whether its order is known. Reasons why they do not see
    the rest are added to ``left_out``."""
    shown = page_box(page)
    view = PageView(page, layers, shown)
    text = page.extract_text(visitor_operand_before=view.before, visitor_operand_after=view.after)
    pictures = view.pictures.all if Unseen.TRANSPARENT in view.left_out else []
    if pictures:  # which may be drawn over what OCR read in them
        view = PageView(page, layers, shown, pictures=pictures)
        text = page.extract_text(visitor_operand_before=view.before, visitor_operand_after=view.after)
    left_out |= view.left_out
    if not has_both_directions(text):
        return text.strip(), True
    view = PageView(page, layers, shown, pictures=pictures)
    given, ordered, is_guess = read_in_order(partial(page.extract_text, visitor_operand_after=view.after), view.before)
    is_known = given == text  # else pypdf reports other pieces than it returns
    return (ordered if is_known else text).strip(), is_known and not is_guess


def _written_on(page: PageObject, layers: Layers, left_out: set[Unseen]) -> Iterator[str]:
    """What stands in form fields and comments of a page, which is no part of the page's text. Reasons why readers do
    not see some are added to ``left_out``."""
    shown = page_box(page)
    for annotation in _annotations(page):
        text, unseen = _said_in(page, annotation, layers, left_out), _why_unseen(annotation, layers, shown)
        if unseen is None:
            yield text
        elif text:
            left_out.add(unseen)


def _said_in(page: PageObject, annotation: Any, layers: Layers, left_out: set[Unseen]) -> str:
    if entry(annotation, "/Subtype") == "/Widget":
        name = _of_field(annotation, "/TU") or _of_field(annotation, "/T") or "field"
        value = _of_field(annotation, "/V")
        text = _shown(value, _of_field(annotation, "/Opt")) if value != "/Off" else ""
        text = text and f"{name}: {text}"
    else:
        text = _shown(entry(annotation, "/Contents"))
    return text or _drawn(page, annotation, layers, left_out)


def _why_unseen(annotation: Any, layers: Layers, shown: Box) -> Unseen | None:
    """Why readers do not see a field or comment; None if they do.

    Args:
        shown: part of the page that is shown.
    """
    if _flags(entry(annotation, "/F")) & _HIDDEN or layers.are_off(annotation.get("/OC")):
        return Unseen.SWITCHED_OFF
    is_field = entry(annotation, "/Subtype") == "/Widget"
    if is_field and _of_field(annotation, "/FT") == "/Tx" and _flags(_of_field(annotation, "/Ff")) & _PASSWORD:
        return Unseen.SECRET
    with suppress(TypeError, ValueError):  # a damaged place
        left, bottom, right, top = upright(entry(annotation, "/Rect") or shown)
        are_empty = left == right, bottom == top
        if any(are_empty) if is_field else all(are_empty):  # a comment may be drawn as a line
            return Unseen.TOO_SMALL
        if not overlap((left, bottom, right, top), shown):
            return Unseen.OUTSIDE
    return None


def _flags(number: Any) -> int:
    return number if isinstance(number, int) else 0


def _annotations(page: PageObject) -> Iterator[Any]:
    """Annotations that show something of their own."""
    for reference in entry(page, "/Annots") or ():
        annotation: Any = reference.get_object()
        if isinstance(annotation, dict) and entry(annotation, "/Subtype") not in _NO_COMMENTS:
            yield annotation


def _of_field(field: Any, key: str) -> Any:
    """An entry of a form field, or of the nearest field above that has it."""
    for _ in range(_MOST_DEPTH):
        found = entry(field, key)
        field = entry(field, "/Parent")
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
    normal = entry(entry(annotation, "/AP") or {}, "/N") or {}
    drawn = [normal] if hasattr(normal, "get_data") else [each.get_object() for each in normal.values()]
    return [each for each in drawn if hasattr(each, "get_data")]


def _drawn(page: PageObject, annotation: Any, layers: Layers, left_out: set[Unseen]) -> str:
    """The text that is drawn for an annotation which says nothing else: stamps, signatures. Not that of check boxes,
    which are drawn in more than one state."""
    drawn = _appearances(annotation)
    with suppress(Exception):  # a page with a damaged stamp is still worth reading
        if len(drawn) == 1:
            view = PageView(drawn[0], layers, ground=[EVERYWHERE])  # the page below
            text = page.extract_xform_text(
                drawn[0], visitor_operand_before=view.before, visitor_operand_after=view.after
            )
            left_out |= view.left_out
            return text.strip()
    return ""


def _has_picture_on_it(page: PageObject, layers: Layers) -> bool:
    """Whether people put a picture on the page, of any size: a stamp, a signature."""
    return any(
        _largest_picture(drawn, drawn.get_data())
        for annotation in _annotations(page)
        if _why_unseen(annotation, layers, page_box(page)) is None
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
    objects = entry(entry(drawn, "/Resources") or {}, "/XObject") or {}
    for each in map(_resolved, objects.values()):
        kind = entry(each, "/Subtype")
        if kind == "/Image":
            largest = max(largest, prod(int(entry(each, side) or 0) for side in ("/Width", "/Height")))
        elif kind == "/Form" and depth < _MOST_DEPTH and id(each) not in seen:
            seen[id(each)] = each
            largest = max(largest, _largest_picture(each, each.get_data(), depth + 1, seen))
    return largest
