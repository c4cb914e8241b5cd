"""A PDF file of a few lines, and what people put on it, for tests."""

from __future__ import annotations

import io
from collections.abc import Callable

from pypdf import PdfReader, PdfWriter
from pypdf.generic import (
    ArrayObject,
    DecodedStreamObject,
    DictionaryObject,
    NameObject,
    NumberObject,
    PdfObject,
    StreamObject,
    TextStringObject,
)

__all__ = ["annotate", "draw", "form", "image", "pdf", "stream", "with_parts"]


def pdf(*pages: str) -> bytes:
    """A PDF file with a line of text on each page; an empty text gives a blank page."""
    numbers = range(len(pages))
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in numbers)
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for n, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {5 + 2 * n} 0 R >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    written, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(written))
        written += f"{number} 0 obj\n{each}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>"
    return written + f"{end}\nstartxref\n{len(written)}\n%%EOF\n".encode("latin-1")


def with_parts(data: bytes, change: Callable[[PdfWriter], None]) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(data)))
    change(writer)
    written = io.BytesIO()
    writer.write(written)
    return written.getvalue()


def annotate(writer: PdfWriter, **fields: str | PdfObject) -> DictionaryObject:
    """Adds an annotation to the first page. Each of its values is an object of its own, as many programs write them."""
    each = DictionaryObject({NameObject("/Type"): NameObject("/Annot")})
    for name, value in fields.items():
        if isinstance(value, str):
            value = NameObject(value) if value.startswith("/") else TextStringObject(value)
        each[NameObject(f"/{name}")] = writer._add_object(value)
    page = writer.pages[0]
    page[NameObject("/Annots")] = ArrayObject([*page.get("/Annots", []), writer._add_object(each)])
    return each


def stream(data: bytes, **fields: PdfObject) -> DecodedStreamObject:
    made = DecodedStreamObject()
    made.set_data(data)
    made.update({NameObject(f"/{name}"): value for name, value in fields.items()})
    return made


def form(writer: PdfWriter, data: bytes, **resources: PdfObject) -> DecodedStreamObject:
    of_page = writer.pages[0]["/Resources"]
    assert isinstance(of_page, DictionaryObject)
    own = DictionaryObject({NameObject(f"/{name}"): value for name, value in resources.items()})
    own[NameObject("/Font")] = of_page["/Font"]
    return stream(data, Subtype=NameObject("/Form"), Resources=own)


def image(writer: PdfWriter, side: int) -> DictionaryObject:
    made = StreamObject()
    made.update({NameObject("/Type"): NameObject("/XObject"), NameObject("/Subtype"): NameObject("/Image")})
    made.update({NameObject(name): writer._add_object(NumberObject(side)) for name in ("/Width", "/Height")})
    return DictionaryObject({NameObject("/Im0"): writer._add_object(made)})


def draw(writer: PdfWriter, commands: bytes, **resources: PdfObject) -> None:
    """Adds commands to those that draw the first page, and resources to those that it has."""
    drawn = writer.pages[0].get_contents()
    assert drawn is not None
    writer.pages[0][NameObject("/Contents")] = writer._add_object(stream(drawn.get_data() + b"\n" + commands))
    of_page = writer.pages[0]["/Resources"]
    assert isinstance(of_page, DictionaryObject)
    of_page.update({NameObject(f"/{name}"): value for name, value in resources.items()})
