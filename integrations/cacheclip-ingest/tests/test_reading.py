"""Files as people have them: what becomes text, and what the notes say of the rest."""

from __future__ import annotations

import base64
import codecs
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import cacheclip_ingest.pdf as reading_pdf
import pytest
from cacheclip_ingest.documents import EmptyFileError, read_document
from cacheclip_ingest.html import _Page
from cacheclip_ingest.text import DocumentText, cleaned, notes_on_markdown
from pdf_cases import annotate, form, image, pdf, stream, with_parts
from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, DictionaryObject, NameObject, NumberObject, PdfObject, TextStringObject

from cacheclip_rag import DocumentError

SAID = "The boiler in hall 4 was inspected on 12 May. Its pressure is 6 bar: caf\u00e9 \u2603, \U0001f525.\n"


def read(folder: Path, name: str, data: bytes | str) -> DocumentText:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_document(path)


JAPANESE = "\u65e5\u672c\u8a9e\u306e\u6587\u66f8"


class TestEncodings:
    @pytest.mark.parametrize(
        ("mark", "encoding"),
        [
            (b"", "utf-8"),
            (codecs.BOM_UTF8, "utf-8"),
            (codecs.BOM_UTF8 * 2, "utf-8"),
            (codecs.BOM_UTF16_LE, "utf-16-le"),
            (codecs.BOM_UTF16_BE, "utf-16-be"),
            (codecs.BOM_UTF32_LE, "utf-32-le"),
            (codecs.BOM_UTF32_BE, "utf-32-be"),
        ],
    )
    def test_with_a_mark(self, tmp_path: Path, mark: bytes, encoding: str) -> None:
        text = read(tmp_path, "a.txt", mark + SAID.encode(encoding))
        assert (text, text.notes) == (SAID, ())

    @pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
    def test_plain_utf_16_and_32_without_a_mark_is_read_and_noted(self, tmp_path: Path, encoding: str) -> None:
        text = read(tmp_path, "a.txt", SAID.encode(encoding))
        assert text == SAID and encoding.upper() in " ".join(text.notes)

    @pytest.mark.parametrize("place", [0, 20, len(SAID), 70_000, 200_000])
    def test_zero_bytes_wherever_they_stand(self, tmp_path: Path, place: int) -> None:
        whole = SAID * 3000
        text = read(tmp_path, "a.txt", whole[:place] + "\0" * 5 + whole[place:])
        assert text == whole and "5 zero bytes" in " ".join(text.notes)

    @pytest.mark.parametrize(
        ("name", "start", "what"),
        [
            ("a.odt", b"PK\x03\x04\x14", "Office"),
            ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1", "Office"),
            ("a.rtf", rb"{\rtf1\ansi The boiler.}", "Rich Text"),
            ("a.txt", b"%PDF-1.7\n", "PDF"),
            ("a.png", b"\x89PNG\r\n\x1a\n", "picture"),
            ("a.bin", bytes(range(64)) * 9, "control characters"),
            ("a.dat", bytes(4000) + b"text", "zero bytes"),
        ],
    )
    def test_what_is_no_text_is_named(self, tmp_path: Path, name: str, start: bytes, what: str) -> None:
        with pytest.raises(DocumentError, match=f"looks binary.*{what}"):
            read(tmp_path, name, start)

    @pytest.mark.parametrize("name", ["letter.txt", "a b's.txt"])
    def test_the_advice_for_windows_1252_gives_the_text(self, tmp_path: Path, name: str) -> None:
        said = "The valve\u2019s price is \u20ac950 \u2014 \u201cas agreed\u201d.\n"
        with pytest.raises(DocumentError, match="is not UTF-8") as error:
            read(tmp_path, name, said.encode("cp1252"))
        command = re.search(r"iconv .*", str(error.value))
        assert command is not None
        if shutil.which("iconv"):
            subprocess.run(command[0], shell=True, check=True, cwd=tmp_path)
            assert [read_document(path) for path in tmp_path.glob("*-utf8.txt")] == [said]

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
    def test_damaged_after_its_mark(self, tmp_path: Path, encoding: str) -> None:
        with pytest.raises(DocumentError, match="is damaged") as error:
            read(tmp_path, "a.txt", SAID.encode(encoding)[:-1])
        assert "1252" not in str(error.value)

    @pytest.mark.parametrize(
        ("said", "encoding"),
        [
            *((JAPANESE, each) for each in ("shift-jis", "euc-jp", "gbk")),
            *(("\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440.", each) for each in ("cp1251", "koi8-r")),
            ("\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "cp1256"),
            ("\u0e44\u0e17\u0e22", "cp874"),
            *(("\u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 " * 50, each) for each in ("utf-16-le", "utf-16-be")),
        ],
    )
    def test_no_advice_where_windows_1252_cannot_be(self, tmp_path: Path, said: str, encoding: str) -> None:
        """Whoever follows it would store signs that stand for nothing, without another word."""
        wide = encoding.startswith("utf-16")
        with pytest.raises(DocumentError, match="UTF-16 without" if wide else "Find its encoding") as error:
            read(tmp_path, "a.txt", (said + " text").encode(encoding) if wide else said.encode(encoding) + b" text")
        assert "1252" not in str(error.value)

    @pytest.mark.parametrize("text", ["\u200b\u200b", "\u2060 \u00ad\n\x0c", "\ufeff\ufeff \u202e"])
    def test_what_nobody_sees_is_no_text(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(DocumentError, match="is empty"):
            read(tmp_path, "a.txt", text)

    def test_iso_2022_has_the_bytes_of_ascii(self, tmp_path: Path) -> None:
        text = read(tmp_path, "a.txt", f"Hall 4: {JAPANESE}\n".encode("iso2022_jp"))
        assert text == f"Hall 4: {JAPANESE}\n" and "ISO-2022-JP" in " ".join(text.notes)
        colours = b"\x1b[31mred\x1b[0m and \x1b$ are no Japanese.\n"
        assert read(tmp_path, "a.txt", colours) == colours.decode()

    @pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
    def test_line_ends(self, tmp_path: Path, end: str) -> None:
        assert read(tmp_path, "a.txt", f"one{end}{end}two{end}".encode()) == "one\n\ntwo\n"

    def test_halves_of_characters(self) -> None:
        assert cleaned("safe \ud83d\udd27") == "safe \U0001f527" and not cleaned("safe \ud83d\udd27").notes
        for lone in ("\ud83d", "\udd27"):
            text = cleaned(f"safe {lone} and sound")
            assert text == "safe \ufffd and sound" and "1 characters" in text.notes[0]


def letters(count: int, seed: int = 0) -> str:
    return base64.b64encode(random.Random(seed).randbytes(count)).decode()


SVG = "<svg xmlns='http://www.w3.org/2000/svg'>" + "<path d='M 1 2 L 3 4'/>\n" * 60 + "</svg>"
DATA: dict[str, tuple[str, str, str]] = {
    "picture of Markdown": (f"![x](data:image/png;base64,{letters(40_000)})", "![x](data:image/png)", "picture"),
    "picture in HTML": (f'<img src="data:image/jpeg;base64,{letters(900)}">', '<img src="data:image/jpeg">', "picture"),
    "by reference": (f"[1]: <data:image/png;base64,{letters(900)}>", "[1]: <data:image/png>", "picture"),
    "with a character set": (f"(data:text/css;charset=utf-8;base64,{letters(300)})", "(data:text/css)", "file"),
    "in a notebook": (f'"image/png": "{letters(4000)}"', '"image/png": ""', "file"),
    "in mail": ("\n".join(re.findall(".{1,76}", letters(4000))), "", "file"),
    "in short lines": ("\n".join(re.findall(".{1,40}", letters(4000))), "", "file"),
    "uuencoded": (codecs.encode(letters(900).encode(), "uu").decode().rstrip(), "", "file"),
    "drawing with spaces": (f"![x](data:image/svg+xml;utf8,{SVG})", "![x](data:image/svg+xml)", "picture"),
    "short drawing": (
        "<img src='data:image/svg+xml,<svg id=\"a\"> </svg>'>",
        "<img src='data:image/svg+xml'>",
        "picture",
    ),
    "drawing as it is": (SVG, "", "picture"),
}


class TestDataInText:
    @pytest.mark.parametrize("kind", DATA)
    def test_it_is_left_out_and_noted(self, kind: str) -> None:
        data, left, what = DATA[kind]
        text = cleaned(f"Inspected on 12 May.\n\n{data}\n\nThe valve was replaced.")
        assert text == f"Inspected on 12 May.\n\n{left}\n\nThe valve was replaced."
        assert len(text.notes) == 1 and f"1 {what}" in text.notes[0]

    @pytest.mark.parametrize(
        "text",
        [
            "See data:image/png for the type, and data: in general.",
            "\n".join(["ACGTTGCAAC" * 7] * 40),
            "\u6e2f\u306e\u706f\u53f0\u306f" * 900,
            "0123456789abcdef" * 4,
            "\n".join(f"OneNameOfAFunction{'OfMany' * n}WithNumber{n}" for n in range(3, 12)),
            "\n".join(" ".join(str(1000 + n * k) for k in range(1, 12)) for n in range(90)),
            "Write <svg width='3'><path d='M1 2'/></svg> for a line.",
            "begin 644 words\nend",
            "https://example.org/" + "a-long-path/" * 30,
        ],
    )
    def test_nothing_else_is(self, text: str) -> None:
        assert (cleaned(text), cleaned(text).notes) == (text, ())

    @pytest.mark.parametrize("after", ["more", "The valve.", "Valve", "A", ""])
    def test_words_behind_it_stay(self, after: str) -> None:
        for count, width in product((3000, 3030, 3029), (40, 60, 76)):
            text = "\n".join(["text", *re.findall(f".{{1,{width}}}", letters(count)), after])
            assert cleaned(text).split() == ["text", *after.split()]

    def test_long_runs_stay_and_are_noted(self) -> None:
        text = "let=a+1;" * 2000
        assert cleaned(text) == text and "16000 characters" in cleaned(text).notes[0]

    @pytest.mark.parametrize(
        "line", ["{place:08x}  {0} {1}  |....|", "{place:06X}: {0}-{1}", "> {place:04x} {0} {1}", "{2}"]
    )
    def test_hexadecimal_lines_stay_and_are_noted(self, line: str) -> None:
        data = random.Random(1).randbytes(1600)
        rows = [data[at : at + 16] for at in range(0, 1600, 16)]
        shown = [line.format(row[:8].hex(" "), row[8:].hex(" "), row.hex(), place=n) for n, row in enumerate(rows)]
        text = "\n".join(["The valve.", *shown])
        assert cleaned(text) == text and "100 line(s) of hexadecimal digits" in cleaned(text).notes[0]

    @pytest.mark.parametrize(
        ("shown", "said"),
        [
            *((each, "1 picture(s)") for each in ("![x](a.png)", "![][1]", "<img src=a>", "<svg id='a'></svg>")),
            *((f"<{each} src=a>", "1 embedded") for each in ("audio", "video", "iframe", "embed", "object", "canvas")),
            *((each, "") for each in ("`![](a.png)`", "```\n![](a)\n```", "[x](a.png)", "~~~\n<img src=a>\n~~~")),
        ],
    )
    def test_what_markdown_shows(self, tmp_path: Path, shown: str, said: str) -> None:
        found = read(tmp_path, "a.md", f"The boiler.\n\n{shown}\n\nIts valve.")
        assert (shown in found, len(found.notes)) == (True, bool(said)) and said in " ".join(found.notes)
        assert not read(tmp_path, "a.txt", f"The boiler. {shown}").notes, "of a text, readers see the same"

    @pytest.mark.some(4)
    @pytest.mark.parametrize(
        "text",
        [
            *("data:" * 40_000, "data:," + "a;" * 90_000, "A" * 99 + "\n" + "Ab1" * 60_000, "A" * 999 + " "),
            *("<svg " * 40_000, "<svg " * 40_000 + "</svg>", "begin 644 a\n" * 9_000, "ab " * 60_000, "![" * 90_000),
            *("<img " * 40_000, "begin 644 a\n" + "M\n" * 60_000, "`" * 90_001, "```\n" * 40_001, "> " * 90_000),
        ],
    )
    def test_hostile_texts_take_no_time(self, text: str) -> None:
        notes_on_markdown(cleaned(text))


def texts(*values: str) -> ArrayObject:
    return ArrayObject(map(TextStringObject, values))


def void(value: object) -> None:
    """For functions whose result nobody wants."""


def picture(writer: PdfWriter, number: int, side: int) -> None:
    writer.pages[number]["/Resources"][NameObject("/XObject")] = image(writer, side)  # type: ignore[index]


def inline_picture(writer: PdfWriter, number: int, side: int) -> None:
    writer.pages[number].get_contents()
    drawn = b"q BI /W %d /H %d /BPC 1 /CS /G ID " % (side, side) + bytes(side * side // 8) + b" EI Q\n"
    written = writer.pages[number].get_contents()
    assert written is not None
    writer.pages[number][NameObject("/Contents")] = writer._add_object(stream(drawn + written.get_data()))


def picture_in_form(writer: PdfWriter, number: int, side: int) -> None:
    drawn = b"BI\n/BPC 1 /Height %d /Width %d /CS /G\nID " % (side, side) + bytes(side * side // 8) + b"\nEI\n"
    objects = DictionaryObject({NameObject("/Fm0"): writer._add_object(form(writer, drawn))})
    writer.pages[number]["/Resources"][NameObject("/XObject")] = objects  # type: ignore[index]


class TestPdf:
    @pytest.mark.parametrize(
        "change",
        [
            lambda page: page.update({NameObject("/Annots"): NumberObject(3)}),
            lambda page: page["/Resources"].update(
                {NameObject("/XObject"): DictionaryObject({NameObject("/I"): NumberObject(1)})}
            ),
            lambda page: page.update({NameObject("/Contents"): NumberObject(3)}),
        ],
        ids=["annotations", "pictures", "text"],
    )
    def test_a_damaged_part_of_a_page_costs_that_part(self, tmp_path: Path, change: Callable[[Any], None]) -> None:
        data = with_parts(pdf("Lease.", "Two."), lambda writer: change(writer.pages[0]))
        (tmp_path / "a.pdf").write_bytes(data)
        found = read_document(tmp_path / "a.pdf")
        assert found.endswith("Two.")
        assert any("page 1 of 2" in note for note in found.notes)

    def test_pages_without_text(self, tmp_path: Path) -> None:
        text = read(tmp_path, "a.pdf", pdf("One.", "", "Three.", "", "", "", "Seven."))
        assert text == "One.\n\nThree.\n\nSeven."
        assert text.notes == ("pages 2, 4-6 of 7 without text; if scanned, run OCR first.",)

    @pytest.mark.parametrize(
        ("side", "words", "noted"), [(2000, 3, "hardly any text"), (100, 3, ""), (2000, 60, "pictures, in which")]
    )
    @pytest.mark.parametrize("draw", [picture, inline_picture, picture_in_form])
    def test_pictures(
        self, tmp_path: Path, side: int, words: int, noted: str, draw: Callable[[PdfWriter, int, int], None]
    ) -> None:
        data = with_parts(pdf("One.", "word " * words), lambda writer: draw(writer, 1, side))
        text = read(tmp_path, "a.pdf", data)
        assert len(text.notes) == bool(noted)
        assert all("page 2 of 2 with" in note and noted in note for note in text.notes)

    def test_forms_that_share_their_parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Many programs give every form the list of all forms. Each is looked through once."""
        looked, look = [], reading_pdf._largest_picture
        monkeypatch.setattr(reading_pdf, "_largest_picture", lambda *given: looked.append(given) or look(*given))

        def change(writer: PdfWriter) -> None:
            shared = DictionaryObject()
            listed = writer._add_object(shared)
            for number in range(30):
                made = form(writer, b"q Q")
                made[NameObject("/Resources")] = DictionaryObject({NameObject("/XObject"): listed})
                shared[NameObject(f"/Fm{number}")] = writer._add_object(made)
            writer.pages[0]["/Resources"][NameObject("/XObject")] = listed  # type: ignore[index]

        assert read(tmp_path, "a.pdf", with_parts(pdf("Lease."), change)) == "Lease."
        assert len(looked) == 31

    def test_what_people_wrote_on_it(self, tmp_path: Path) -> None:
        def change(writer: PdfWriter) -> None:
            annotate(writer, Subtype="/Widget", T="tenant", V="Piet Oduya")
            annotate(writer, Subtype="/Widget", T="pets", V="/Off")
            annotate(writer, Subtype="/Widget", T="rent")
            annotate(writer, Subtype="/FreeText", Contents="Deposit was paid.")
            annotate(writer, Subtype="/Link", Contents="not a comment")

        text = read(tmp_path, "a.pdf", with_parts(pdf("Lease."), change))
        assert text == "Lease.\n\ntenant: Piet Oduya\n\nDeposit was paid."

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (texts("cats", "dogs"), "cats, dogs"),
            (texts("c", "d"), "Cats (2), Dogs"),
            (ArrayObject(), None),
            (TextStringObject("d"), "Dogs"),
            (stream("two\nlines \u2603".encode("utf-16")), "two\nlines \u2603"),
        ],
        ids=["list", "list of other names", "empty list", "other name", "stream"],
    )
    @pytest.mark.parametrize("depth", [0, 2])
    def test_values_of_fields(self, tmp_path: Path, value: PdfObject, shown: str | None, depth: int) -> None:
        def change(writer: PdfWriter) -> None:
            options = ArrayObject([texts("c", "Cats (2)"), texts("d", "Dogs")])
            field = annotate(writer, Subtype="/Widget")
            for _ in range(depth):
                above = DictionaryObject()
                field[NameObject("/Parent")] = writer._add_object(above)
                field = above
            field.update({NameObject("/T"): TextStringObject("pets"), NameObject("/Opt"): options})
            field[NameObject("/V")] = writer._add_object(value)

        text = read(tmp_path, "a.pdf", with_parts(pdf("Lease."), change))
        assert (text, text.notes) == ("Lease." + (f"\n\npets: {shown}" if shown else ""), ())

    @pytest.mark.parametrize("kind", "Caret Circle FileAttachment Ink Line Polygon Squiggly Square Stamp New".split())
    def test_what_stands_in_comments_of_all_kinds(self, tmp_path: Path, kind: str) -> None:
        data = with_parts(pdf("Lease."), lambda writer: void(annotate(writer, Subtype=f"/{kind}", Contents="Agreed.")))
        assert read(tmp_path, "a.pdf", data) == "Lease.\n\nAgreed."

    @pytest.mark.parametrize("kind", ["/Link", "/Popup", "/Widget"])
    def test_what_readers_do_not_see_there(self, tmp_path: Path, kind: str) -> None:
        data = with_parts(pdf("Lease."), lambda writer: void(annotate(writer, Subtype=kind, Contents="not seen")))
        assert read(tmp_path, "a.pdf", data) == "Lease."

    @pytest.mark.parametrize("kind", ["/Stamp", "/Widget"])
    def test_text_that_is_drawn_only(self, tmp_path: Path, kind: str) -> None:
        def change(writer: PdfWriter) -> None:
            drawn = writer._add_object(form(writer, b"BT /F1 9 Tf 1 1 Td (APPROVED by Ada) Tj ET"))
            annotate(writer, Subtype=kind, T="sign", AP=DictionaryObject({NameObject("/N"): drawn}))

        assert read(tmp_path, "a.pdf", with_parts(pdf("Lease."), change)) == "Lease.\n\nAPPROVED by Ada"

    @pytest.mark.parametrize("states", [False, True])
    @pytest.mark.parametrize("said", ["", "Lease."])
    def test_pictures_in_stamps_are_noted(self, tmp_path: Path, states: bool, said: str) -> None:
        def change(writer: PdfWriter) -> None:
            drawn: PdfObject = writer._add_object(form(writer, b"/Im0 Do", XObject=image(writer, 200)))
            if states:
                drawn = DictionaryObject({NameObject("/On"): drawn})
            annotate(writer, Subtype="/Stamp", Contents="Paid.", AP=DictionaryObject({NameObject("/N"): drawn}))

        text = read(tmp_path, "a.pdf", with_parts(pdf(said, "Two."), change))
        assert text == "\n\n".join(filter(None, [said, "Paid.", "Two."]))
        assert len(text.notes) == 1
        assert ("page 1 of 2 with pictures" if said else "page 1 of 2 without text") in text.notes[0]

    def test_signs_that_are_no_letters(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for said, noted in (
            ("F\0 3 applies", "1 characters"),
            ("\ue001\ue002\ue003 a", "3 of 5 signs"),
            ("\uf0b7 " + "a" * 90, ""),
        ):
            monkeypatch.setattr("pypdf.PageObject.extract_text", lambda page, said=said, **visitors: said)
            text = read(tmp_path, "a.pdf", pdf("One."))
            assert text == said.replace("\0", "\ufffd") and len(text.notes) == bool(noted)
            assert noted in " ".join(text.notes)

    def test_attached_files_are_noted(self, tmp_path: Path) -> None:
        data = with_parts(pdf("Lease."), lambda writer: writer.add_attachment("a.txt", b"secret"))
        assert "1 file(s) attached" in " ".join(read(tmp_path, "a.pdf", data).notes)

    @pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
    @pytest.mark.parametrize("password", ["", "secret"])
    def test_encrypted(self, tmp_path: Path, algorithm: str, password: str) -> None:
        """Those that open without a password are read, or the error says what to install."""
        if algorithm.startswith("AES"):
            pytest.importorskip("cryptography")
        data = with_parts(pdf("Lease."), lambda writer: writer.encrypt(password, "owner", algorithm=algorithm))
        if password:
            with pytest.raises(DocumentError, match="Save it without a password"):
                read(tmp_path, "a.pdf", data)
        else:
            assert read(tmp_path, "a.pdf", data) == "Lease."

    def test_what_is_missing_to_decrypt_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from pypdf.errors import DependencyError

        def decrypt(self: PdfReader, password: str) -> None:
            raise DependencyError("cryptography>=3.1 is required for AES algorithm")

        data = with_parts(pdf("Lease."), lambda writer: writer.encrypt("", "owner", algorithm="RC4-128"))
        monkeypatch.setattr(PdfReader, "decrypt", decrypt)
        with pytest.raises(DocumentError, match=r"a\.pdf is encrypted with AES: .*pip install"):
            read(tmp_path, "a.pdf", data)


PAGE = """<!doctype html><html><head><title>Boilers</title><style>p{color:red}</style>
<script>var a="<p>no</p>";</script>
<body><nav hidden>menu</nav><h1>Hall&nbsp;4</h1><p>The <b>boiler</b>
 was inspected.<p>On 12 May.<div style="display: none">old text</div><template>never</template>
<ul><li>one<li>two</ul><!-- a comment --><img src="x.png" alt="the valve"><input type="hidden" value="token">
<table><tr><th>valve<th>bar</tr><tr><td>7</td><td>6</td></tr></table><pre>if a:
    b</pre></body></html>"""


class TestHtml:
    def test_what_a_browser_shows(self, tmp_path: Path) -> None:
        text = read(tmp_path, "a.html", PAGE)
        for gone in ("color", "var a", "<", "menu", "old text", "never", "comment", "token", "x.png"):
            assert gone not in text
        for there in (
            "# Boilers",
            "# Hall\u00a04",
            "The boiler was inspected.\n\nOn 12 May.",
            "- one\n- two",
            "the valve",
        ):
            assert there in text
        assert re.search(r"\| ?valve ?\| ?bar ?\|\n\|---\|---\|\n\| ?7 \| ?6 \|", text)
        assert "if a:\n    b" in text
        assert "1 picture(s)" in " ".join(text.notes) and "2 hidden part(s)" in " ".join(text.notes)

    @pytest.mark.parametrize(
        "shown",
        [
            "<iframe src='a.html'>no</iframe>",
            "<object data='a.pdf'>no</object>",
            "<embed src='a.pdf'>",
            "<video src=a controls>no</video>",
            "<canvas>no</canvas>",
            "<svg width='9'><path d='M1 2'/></svg>",
            "<object data='a'><embed src='a'>no</object>",
        ],
    )
    def test_what_is_embedded_is_noted(self, tmp_path: Path, shown: str) -> None:
        text = read(tmp_path, "a.html", f"<p>The boiler.</p>{shown}<p>Its valve.")
        assert text == "The boiler.\n\nIts valve." and "1 embedded page(s)" in " ".join(text.notes)
        hidden = read(tmp_path, "a.html", f"<p>The boiler.</p><div hidden>{shown}</div>")
        assert "embedded" not in " ".join(hidden.notes)

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("page", "said"),
        [
            *[
                (f"<{tag}>a</{tag}><{tag}>b</{tag}>c", "a\n\nb\n\nc")
                for tag in sorted(_Page._BLOCKS - {"hr", "dialog"})
            ],
            ("a<hr>b", "a\n\nb"),
            ("<dialog open>a</dialog>b<dialog>c</dialog>", "a\n\nb"),
            *[(f"<{tag}>a</{tag}><{tag}>b</{tag}>c", "a b c") for tag in ("button", "textarea")],
            ("<svg><text>a</text><text>b</text></svg>", "a b"),
            ("<select><option>a<option selected>b</select>c<datalist><option>d</datalist>", "b c"),
            ("<input type=checkbox value=on>a<input value=b>c", "a b c"),
            ("<span>a</span><b>b</b>", "ab"),
        ],
    )
    def test_what_stands_apart(self, tmp_path: Path, page: str, said: str) -> None:
        assert read(tmp_path, "a.html", page) == said

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            (["<th colspan=2>a<th>b", "<td>1<td>2<td>3"], ["| a | | b |", "|---|---|---|", "| 1 | 2 | 3 |"]),
            (
                ["<th rowspan=2>a<th colspan=2>b", "<th>c<th>d", "<td>1<td>2<td>3"],
                ["| a | b | |", "|---|---|---|", "| | c | d |", "| 1 | 2 | 3 |"],
            ),
            (
                ["<th>a<th rowspan=3>b", "<td>1", "<td>2", "<td>3<td>4"],
                ["| a | b |", "|---|---|", "| 1 | |", "| 2 | |", "| 3 | 4 |"],
            ),
            (["<th colspan=0>a<th rowspan=x>b", "<td>1<td>2"], ["| a | b |", "|---|---|", "| 1 | 2 |"]),
        ],
    )
    def test_every_cell_stands_in_its_column(self, tmp_path: Path, rows: list[str], said: list[str]) -> None:
        table = "".join(f"<tr>{row}" for row in rows)
        assert read(tmp_path, "a.html", f"<table>{table}</table>").splitlines() == said
        twice = read(tmp_path, "a.html", f"<table>{table}</table><table>{table}</table>")
        assert twice.splitlines() == [*said, "", *said]

    def test_a_page_that_a_script_draws_is_noted(self, tmp_path: Path) -> None:
        text = read(tmp_path, "a.html", "<html><head><title>App</title></head><script>draw()</script></html>")
        assert text == "# App" and "a script may draw the rest" in " ".join(text.notes)

    @pytest.mark.parametrize(
        ("given", "encoding", "said"),
        [
            ('<meta charset="iso-8859-1">', "cp1252", "caf\u00e9 \u20ac9"),
            ("<META CHARSET=latin1>", "cp1252", "caf\u00e9 \u20ac9"),
            ("<meta charset='iso-8859-2'>", "iso-8859-2", "\u0142\u00f3d\u017a"),
            ('<meta http-equiv="Content-Type" content="text/html; charset=shift_jis">', "cp932", "\u65e5\u672c\u2460"),
            ('<meta charset="gb2312">', "gb18030", "\u6e2f\u570b\u9555"),
            ('<meta charset="x-sjis">', "cp932", "\u65e5\u672c"),
            ('<meta charset="iso-2022-jp">', "iso2022_jp", "\u65e5\u672c\u8a9e"),
            ('<meta charset="koi8-u">', "koi8-u", "\u0434\u0456\u043c"),
            ('<?xml version="1.0" encoding="iso-8859-15"?>', "iso-8859-15", "\u20ac9"),
        ],
    )
    def test_the_page_says_its_encoding(self, tmp_path: Path, given: str, encoding: str, said: str) -> None:
        text = read(tmp_path, "a.html", f"<!-- <meta charset=x> -->{given}<p>{said}".encode(encoding))
        assert (text, text.notes) == (said, ())

    @pytest.mark.parametrize("given", ["iso-8859-1", "utf-16", "utf-7", "no-such", "base64", "unicode_escape", ""])
    def test_utf_8_is_read_whatever_the_page_says(self, tmp_path: Path, given: str) -> None:
        """Tools that convert pages leave the old name in them. Browsers would show wrong letters."""
        assert read(tmp_path, "a.html", f"<meta charset='{given}'><p>caf\u00e9 +AGE-") == "caf\u00e9 +AGE-"

    @pytest.mark.parametrize("given", ["utf-8", "utf-16", "utf-7", "base64", "rot13", "no-such", "unicode_escape"])
    def test_no_other_encoding_is_guessed(self, tmp_path: Path, given: str) -> None:
        with pytest.raises(DocumentError, match="is not UTF-8"):
            read(tmp_path, "a.html", f"<meta charset={given}><p>caf\u00e9".encode("cp1252"))

    def test_what_its_encoding_does_not_have_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DocumentError, match="is not CP932.*damaged"):
            read(tmp_path, "a.html", b"<meta charset=shift_jis><p>caf\xe9</p>\xff")

    @pytest.mark.parametrize("page", ["<div>" * 9000 + "x", "<p hidden>a<p>b", "</div>" * 20_000 + "x", "<td>" * 3000])
    def test_hostile_pages_end(self, tmp_path: Path, page: str) -> None:
        read(tmp_path, "a.html", f"<p>start</p>{page}")


@pytest.mark.parametrize("data", [b"", b" \n\t", codecs.BOM_UTF8])
def test_empty_files_have_a_type_of_their_own(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(EmptyFileError, match="is empty"):
        read(tmp_path, "a.txt", data)
