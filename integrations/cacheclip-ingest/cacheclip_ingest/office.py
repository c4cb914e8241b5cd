"""The text of Office files: what mammoth, python-pptx and openpyxl read of them, as a page of HTML, which is read as
others are. Hidden letters, slides and sheets are left out, with a note."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from cacheclip_rag import DocumentError, MissingExtraError

from .html import html_text
from .text import DocumentText, notes_on_media
from .unseen import Unseen, note_on_unseen

_NEEDED = {
    ".docx": ("mammoth", "mammoth"),
    ".pptx": ("pptx", "python-pptx"),
    ".xlsx": ("openpyxl", "openpyxl"),
}
"""The module that reads a type, and its distribution."""
OFFICE_SUFFIXES = frozenset(_NEEDED)
_MOST_BYTES = 1 << 29
"""Largest sum of the parts of a file, unpacked."""
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_BLOCK = re.compile(r"</?(?:p|ul|ol|li|h[1-6])>")
"""In a cell. A row of a table is one line."""
_WORDS = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


def missing_reader(suffix: str) -> MissingExtraError | None:
    """What must be installed before Office files of this type can be read; None: nothing, or it is another type."""
    module, distribution = _NEEDED.get(suffix, ("", ""))
    if not module or importlib.util.find_spec(module) is not None:
        return None
    return MissingExtraError(f"{distribution} (for {suffix} files)", "office")


def office_text(path: Path, data: bytes) -> DocumentText:
    """Text of a file, as Markdown, by the type that its name says.

    Raises:
        DocumentError: the file is larger than is read.
        Whatever the libraries raise at damaged files.
    """
    suffix = path.suffix.lower()
    with ZipFile(BytesIO(data)) as parts:
        if (size := sum(each.file_size for each in parts.infolist())) > _MOST_BYTES:
            raise DocumentError(
                f"{path} holds {size} bytes when it is unpacked, and at most {_MOST_BYTES} are read. Split it."
            )
    left_out = _LeftOut()
    readers: dict[str, Callable[[bytes, _LeftOut], Iterable[str]]] = {
        ".docx": _words,
        ".pptx": _slides,
        ".xlsx": _sheets,
    }
    found = html_text("\n".join(readers[suffix](data, left_out)))
    notes = notes_on_media(left_out.pictures, left_out.drawings)
    if left_out.hidden:
        notes.append(note_on_unseen(f"{left_out.hidden} hidden part(s) were", [Unseen.SWITCHED_OFF]))
    return DocumentText(found, [*found.notes, *notes], is_markdown=True)


class _LeftOut:
    """What of a file is no text, counted."""

    def __init__(self) -> None:
        self.pictures = self.drawings = self.hidden = 0


def _words(data: bytes, left_out: _LeftOut) -> Iterable[str]:
    """A text. Headers, footers and comments are no part of it."""
    import mammoth

    def picture(found: Any) -> list[Any]:
        left_out.pictures += 1
        return [mammoth.html.text(found.alt_text)] if found.alt_text else []

    found = str(mammoth.convert_to_html(BytesIO(_shown(data, left_out)), convert_image=picture).value)
    return [_CELL.sub(lambda cell: _BLOCK.sub(" ", cell[0]), found)]


def _shown(data: bytes, left_out: _LeftOut) -> bytes:
    """A text without hidden letters, which mammoth reads."""
    from defusedxml.ElementTree import fromstring, tostring

    with ZipFile(BytesIO(data)) as parts:
        written = {each.filename: parts.read(each) for each in parts.infolist()}
    name = "word/document.xml"
    if b"vanish" not in written.get(name, b""):
        return data
    tree = fromstring(written[name])
    for holder in tree.iter():
        for run in [*holder.iterfind(f"{_WORDS}r")]:
            mark = run.find(f"{_WORDS}rPr/{_WORDS}vanish")
            if mark is not None and mark.get(f"{_WORDS}val") not in ("0", "false", "off"):
                left_out.hidden += 1
                holder.remove(run)
    written[name] = tostring(tree)
    made = BytesIO()
    with ZipFile(made, "w") as parts:
        for name, part in written.items():
            parts.writestr(name, part)
    return made.getvalue()


def _slides(data: bytes, left_out: _LeftOut) -> Iterator[str]:
    """Slides in order, each with its title as a heading, and what the speaker notes about it."""
    from pptx import Presentation

    for slide in Presentation(BytesIO(data)).slides:
        if slide._element.get("show") in ("0", "false"):
            left_out.hidden += 1
            continue
        for shape in slide.shapes:
            yield from _of_shape(shape, left_out, "h2" if shape == slide.shapes.title else "p")
        if slide.has_notes_slide and (frame := slide.notes_slide.notes_text_frame) is not None:
            yield from _paragraphs(frame.text, "p")


def _of_shape(shape: Any, left_out: _LeftOut, tag: str) -> Iterator[str]:
    if hasattr(shape, "shapes"):  # a group
        for each in shape.shapes:
            yield from _of_shape(each, left_out, tag)
    elif getattr(shape, "has_table", False):
        yield _table([cell.text for cell in row.cells] for row in shape.table.rows)
    elif getattr(shape, "has_text_frame", False):
        yield from _paragraphs(shape.text_frame.text, tag)
    left_out.pictures += hasattr(shape, "image")
    left_out.drawings += bool(getattr(shape, "has_chart", False))


def _paragraphs(text: str, tag: str) -> Iterator[str]:
    yield from (f"<{tag}>{escape(line)}</{tag}>" for line in text.splitlines() if line.strip())


def _sheets(data: bytes, left_out: _LeftOut) -> Iterator[str]:
    """Sheets in order, each a table under its name: values as they were when the file was saved."""
    from openpyxl import load_workbook

    book = load_workbook(BytesIO(data), read_only=True, data_only=True)
    for sheet in book.worksheets:
        if sheet.sheet_state != "visible":
            left_out.hidden += 1
            continue
        sheet.reset_dimensions()  # what the file says of them may be wrong
        rows = (["" if value is None else str(value) for value in row] for row in sheet.iter_rows(values_only=True))
        yield f"<h2>{escape(sheet.title)}</h2>{_table(row for row in rows if any(row))}"


def _table(rows: Iterable[Iterable[str]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
