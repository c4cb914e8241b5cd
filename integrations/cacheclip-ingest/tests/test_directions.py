"""Lines of PDF files in Hebrew and Arabic, with numbers and with words of other languages among them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cacheclip_ingest.documents import read_document
from cacheclip_ingest.pdf_lines import _as_read, _is_guess
from cacheclip_ingest.text import DocumentText
from pdf_cases import draw, form, image, pdf, stream, with_parts
from pypdf import PageObject, PdfWriter
from pypdf.generic import ArrayObject, DictionaryObject, NameObject, NumberObject

HEBREW = "\u05d4\u05de\u05d2\u05d3\u05dc\u05d5\u05e8 \u05e0\u05d1\u05e0\u05d4"
MORE = "\u05e2\u05dc \u05d9\u05d3\u05d9"
ARABIC = "\u0627\u0644\u0645\u0646\u0627\u0631\u0629"
READ_AND_SHOWN = [
    (f"{HEBREW} {MORE}", f"{MORE[::-1]} {HEBREW[::-1]}"),
    (f"{HEBREW} 1847 {MORE}", f"{MORE[::-1]} 1847 {HEBREW[::-1]}"),
    (f"{HEBREW} 1847", f"1847 {HEBREW[::-1]}"),
    (f"1847 {HEBREW}", f"{HEBREW[::-1]} 1847"),
    (f"{HEBREW} 12/05/2024, 3.5% {MORE}", f"{MORE[::-1]} 3.5% ,12/05/2024 {HEBREW[::-1]}"),
    (f"{HEBREW} 10 \u2013 20 {MORE}", f"{MORE[::-1]} 20 \u2013 10 {HEBREW[::-1]}"),
    (f"{HEBREW} IBM Cloud 360 {MORE}", f"{MORE[::-1]} IBM Cloud 360 {HEBREW[::-1]}"),
    (f"{ARABIC} \u0661\u0668\u0664\u0667 {ARABIC}", f"{ARABIC[::-1]} \u0661\u0668\u0664\u0667 {ARABIC[::-1]}"),
    (f"{ARABIC}: 1847.", f".1847 :{ARABIC[::-1]}"),
    (f"The keeper wrote {HEBREW} 12 {MORE} in 1847.", f"The keeper wrote {MORE[::-1]} 12 {HEBREW[::-1]} in 1847."),
    ("The keeper wrote it in 1847.", "The keeper wrote it in 1847."),
    (f"{HEBREW} (1847) {MORE}", f"{MORE[::-1]} (1847) {HEBREW[::-1]}"),
    (f"{HEBREW} ({MORE})", f"({MORE[::-1]}) {HEBREW[::-1]}"),
    (f"{ARABIC} \u00ab{ARABIC}\u00bb", f"\u00ab{ARABIC[::-1]}\u00bb {ARABIC[::-1]}"),
    (f"{HEBREW} [IBM] {MORE}", f"{MORE[::-1]} [IBM] {HEBREW[::-1]}"),
    (f"{HEBREW} (1847) {MORE}", f"{MORE[::-1]} )1847( {HEBREW[::-1]}"),
    (f"{HEBREW} \u05d1-1847 {MORE}", f"{MORE[::-1]} 1847-\u05d1 {HEBREW[::-1]}"),
    (f"{HEBREW} e-mail {MORE}", f"{MORE[::-1]} e-mail {HEBREW[::-1]}"),
    (
        f"The keeper (C++) wrote {MORE} (12) {MORE} in -5.",
        f"The keeper (C++) wrote {MORE[::-1]} (12) {MORE[::-1]} in -5.",
    ),
    (f"{HEBREW} [{MORE}]", f"[{MORE[::-1]}] {HEBREW[::-1]}"),
]
GUESSED = [
    *((f"{HEBREW} {each} {MORE}", f"{MORE[::-1]} {each} {HEBREW[::-1]}") for each in ("-5", "+972-3", "1 000 000")),
    *((f"{HEBREW} {each} {MORE}", f"{MORE[::-1]} {each} {HEBREW[::-1]}") for each in ("C++", "IBM (Cloud)", "(-5)")),
    (f"{HEBREW} C++ {MORE}", f"{MORE[::-1]} ++C {HEBREW[::-1]}"),
    (f"{HEBREW} -5 {MORE}", f"{MORE[::-1]} 5- {HEBREW[::-1]}"),
    (f"\u05d0) {HEBREW}", f"{HEBREW[::-1]} (\u05d0"),
    (f"Name: {MORE[:2]}", f"Name: {MORE[1::-1]}"),
    (f"{HEBREW} IBM", f"IBM {HEBREW[::-1]}"),
    (f"The keeper wrote {MORE} 12 in it.", f"The keeper wrote {MORE[::-1]} 12 in it."),
]


def read(folder: Path, commands: str, font: str = "/F2") -> DocumentText:
    """A page that draws what stands between ``<`` and ``>``, letter by letter, from left to right."""
    parts = [each.partition(">") for each in commands.split("<")]
    codes = {each: code for code, each in enumerate(sorted({*"".join(shown for shown, end, _ in parts if end)}), 1)}
    hexed = ["".join(f"{codes[each]:02X}" for each in shown if end) for shown, end, _ in parts]
    drawn = "".join(f"<{h}>{after}" if end else shown for h, (shown, end, after) in zip(hexed, parts, strict=True))
    names = "".join(f"<{code:02X}> <{ord(each):04X}>\n" for each, code in codes.items())
    table = "begincmap 1 begincodespacerange <00> <FF> endcodespacerange\n"
    table += f"{len(codes)} beginbfchar\n{names}endbfchar endcmap"

    def change(writer: PdfWriter) -> None:
        fonts = writer.pages[0]["/Resources"]["/Font"]  # type: ignore[index]
        for name in ("/F2", "/F3"):
            made = {"/Type": NameObject("/Font"), "/Subtype": NameObject("/Type1"), "/BaseFont": NameObject("/X")}
            made |= {"/FirstChar": NumberObject(0), "/LastChar": NumberObject(255)}
            made["/ToUnicode"] = writer._add_object(stream(table.encode()))
            fonts[NameObject(name)] = DictionaryObject({NameObject(key): value for key, value in made.items()})
        moving = form(writer, b"1 0 0 1 9000 0 cm /OC /No BDC q")
        moving[NameObject("/Matrix")] = ArrayObject(map(NumberObject, (1, 0, 0, 1, 9000, 0)))
        objects = DictionaryObject({NameObject("/Fm0"): writer._add_object(moving), **image(writer, 9)})
        draw(writer, drawn.encode(), XObject=objects)

    (folder / "a.pdf").write_bytes(with_parts(pdf("Lease."), change))
    return read_document(folder / "a.pdf")


class TestDirections:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(("said", "shown"), GUESSED)
    def test_what_may_be_read_otherwise_is_noted(self, tmp_path: Path, said: str, shown: str) -> None:
        text = read(tmp_path, f"BT /F2 12 Tf 72 600 Td <{shown}> Tj ET")
        assert (text, len(text.notes)) == (f"Lease.\n{said}", 1)
        assert text.notes[0] == "page 1 of 1 with text in two directions, whose order may be wrong."

    @pytest.mark.some(3)
    @pytest.mark.parametrize(("said", "shown"), READ_AND_SHOWN)
    def test_each_line_for_itself(self, tmp_path: Path, said: str, shown: str) -> None:
        text = read(tmp_path, f"BT /F2 12 Tf 14 TL 72 600 Td <{shown}> Tj T* <{HEBREW[::-1]}> Tj T* <{shown}> ' ET")
        assert text.split("\n")[:3] == ["Lease.", said, HEBREW] and text.endswith(f"\n{said}") and not text.notes

    def test_pieces_that_are_drawn_from_left_to_right(self, tmp_path: Path) -> None:
        left, right = f"{MORE[::-1]} ", f" {HEBREW[::-1]}"
        one = f"BT /F2 12 Tf 1 0 0 1 72 600 Tm <{left}> Tj /F3 12 Tf <1847> Tj /F2 12 Tf <{right}> Tj ET"
        places = ((72, left), (99, "1847"), (150, right))
        apart = "".join(f"BT /F2 12 Tf 1 0 0 1 {place} 600 Tm <{each}> Tj ET " for place, each in places)
        for commands in (one, apart):
            text = read(tmp_path, commands)
            assert text.split() == ["Lease.", *HEBREW.split(), "1847", *MORE.split()] and not text.notes

    def test_pieces_that_are_drawn_as_they_are_read(self, tmp_path: Path) -> None:
        drawn = ((300, f" {HEBREW[::-1]}"), (270, "1847"), (200, f"{MORE[::-1]} "))
        text = read(tmp_path, "".join(f"BT /F2 12 Tf 1 0 0 1 {left} 600 Tm <{each}> Tj ET " for left, each in drawn))
        assert text.replace(" ", "") == f"Lease.\n{HEBREW}1847{MORE}".replace(" ", "") and not text.notes

    def test_an_order_that_is_not_known_is_noted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Versions of pypdf that report other pieces than they return."""
        extract = PageObject.extract_text
        monkeypatch.setattr(PageObject, "extract_text", lambda page, **visitors: extract(page, **visitors) + " more")
        text = read(tmp_path, f"BT /F2 12 Tf 72 600 Td <{MORE[::-1]} 1847 {HEBREW[::-1]}> Tj ET")
        assert text.endswith(" more") and "page 1 of 1 with text in two directions" in text.notes[0]

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        "line",
        [
            *(HEBREW + "a ( " * 50_000, (HEBREW + "a(") * 40_000, f"{HEBREW} 1 " * 10_000),
            *("1 " * 50_000 + HEBREW, HEBREW * 9 + "." * 200_000 + "a"),
        ],
    )
    def test_long_lines_end(self, line: str) -> None:
        assert len(_as_read(line)) == len(line)
        _is_guess(line)

    def test_what_is_hidden_stays_hidden(self, tmp_path: Path) -> None:
        shown = f"{MORE[::-1]} 1847"
        text = read(tmp_path, f"BT /F2 12 Tf 72 600 Td <{shown}> Tj 3 Tr 0 -20 Td <{shown}> Tj ET")
        assert text == f"Lease.\n1847 {MORE}" and "left out (invisible)" in text.notes[0]

    @pytest.mark.parametrize("in_form", [False, True])
    def test_lines_of_a_scanned_page(self, tmp_path: Path, in_form: bool) -> None:
        """What OCR read in a picture stays, and a form that is drawn before it changes nothing."""
        shown = f"{MORE[::-1]} 1847"
        commands = f"BT /F2 12 Tf 3 Tr 72 600 Td <{shown}> Tj ET q 600 0 0 700 0 0 cm /Im0 Do Q"
        text = read(tmp_path, f"q /Fm0 Do Q {commands}" if in_form else commands)
        assert text.startswith(f"Lease.\n1847 {MORE}") and "left out (" not in "".join(text.notes)
