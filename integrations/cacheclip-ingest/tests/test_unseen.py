"""What readers of a PDF page do not see is not ingested, and a note says so. What they see stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cacheclip_ingest.pdf_view as view
import pytest
from cacheclip_ingest.documents import read_document
from cacheclip_ingest.html import html_text
from cacheclip_ingest.text import DocumentText
from cacheclip_ingest.unseen import Unseen
from pdf_cases import annotate, draw, form, image, pdf, stream, with_parts
from pypdf import PdfWriter
from pypdf.generic import ArrayObject, DictionaryObject, FloatObject, NameObject, NumberObject, TextStringObject
from thinned import some_of

THREE = NumberObject(3)
OTHER = b"BT /F1 12 Tf 72 600 Td (Other.) Tj ET "


def read(folder: Path, change: Callable[[PdfWriter], object]) -> DocumentText:
    (folder / "a.pdf").write_bytes(with_parts(pdf("Lease."), lambda writer: void(change(writer))))
    return read_document(folder / "a.pdf")


def void(value: object) -> None:
    """For functions whose result nobody wants."""


def numbers(*values: float) -> ArrayObject:
    return ArrayObject(map(FloatObject, values))


def entries(**values: Any) -> DictionaryObject:
    return DictionaryObject({NameObject(f"/{name}"): value for name, value in values.items()})


def is_seen(text: DocumentText) -> bool:
    """That both texts are there and nothing is noted; False: that one is, and a note says so."""
    assert text in ("Lease.\nOther.", "Lease.\n\nOther.", "Lease."), text
    assert (text == "Lease.") == any("hidden parts, which are left out" in note for note in text.notes), text.notes
    return text != "Lease."


def at(commands: bytes) -> bytes:
    """Commands between which and the end a text stands."""
    return b"q " + commands + b" " + OTHER + b"Q"


HIDDEN = {
    Unseen.TRANSPARENT: [
        *(at(b"3 Tr"), b"BT /F1 12 Tf 3 Tr 14 TL 72 600 Td (Oth) ' 0 0 (er) \" [(.) -300 (.)] TJ ET", at(b"/Clear gs"))
    ],
    Unseen.ON_WHITE: [
        *(at(b"1 g"), at(b"1 1 1 rg"), at(b"0 0 0 0 k"), at(b"0.99 0.98 0.99 rg"), at(b"/DeviceRGB cs 1 1 1 sc")),
        *(at(b"/Icc cs 1 1 1 scn"), at(b"1 g 0 500 600 200 re f"), at(b"0 g 0 0 99 99 re f 1 g")),
        *(at(b"0 0 0 RG 0 0 600 700 re S 1 g"), at(b"q 0 0 9 9 re W n 0 g 0 0 600 700 re f Q 1 g")),
    ],
    Unseen.TOO_SMALL: [
        *(at(b"0.01 0 0 0.01 72 600 cm"), b"BT /F1 0.1 Tf 72 600 Td (Other.) Tj ET"),
        b"BT /F1 12 Tf 0 0 0 0 72 600 Tm (Other.) Tj ET",
    ],
    Unseen.OUTSIDE: [
        *(at(b"1 0 0 1 2000 0 cm"), at(b"1 0 0 1 -300 0 cm"), at(b"1 0 0 1 0 300 cm"), at(b"1 0 0 1 0 -700 cm")),
        *(at(b"0 650 600 90 re W n"), at(b"0 0 m 9 0 l 9 9 l W* n"), at(b"0 0 600 9 re W n 0 700 600 9 re W n")),
        b"BT /F1 12 Tf 0 1 -1 0 900 100 Tm (Other.) Tj ET",
    ],
}
SEEN = [
    *(at(b""), at(b"0 g 60 590 300 30 re f 1 g"), at(b"0 g 60 590 m 300 590 l 300 620 l f 1 g"), at(b"0.8 g")),
    *(at(b"20 w 60 605 m 300 605 l S 1 g"), at(b"1 0 0 rg"), at(b"0 0 0 1 k"), at(b"1 1 1 0 k"), at(b"/Ink cs 1 scn")),
    *(at(b"q 3 Tr 1 g 0 0 9 9 re W n Q"), at(b"q 1 0 0 1 2000 0 cm Q"), at(b"1 g 0 g"), at(b"1 g 1 Tr"), at(b"1 Tr")),
    *(at(b"/Pattern cs 1 g /P scn"), at(b"/Mesh sh 1 g"), at(b"0 500 600 200 re W n"), at(b"/Clear gs /Full gs")),
    *(at(b"0 0 600 9 re n"), at(b"-1 0 0 1 200 0 cm"), at(b"3 Tr 0 Tr"), at(b"1 g q 0 g"), at(b"Q Q Q")),
    b"BT /F1 1 Tf 12 0 0 12 72 600 Tm (Other.) Tj ET",
    b"BT /F1 12 Tf 200 TL 72 800 Td (Other.) ' ET",
    b'BT /F1 12 Tf 200 TL 72 800 Td 0 0 (Other.) " ET',
    b"BT /F1 12 Tf -20 600 Td (Other.) Tj ET",
    b"BT /F1 12 Tf -72 600 Td (      ) Tj (Other.) Tj ET",
    b"BT /F1 12 Tf 620 600 Td [9000 (Other.)] TJ ET",
    b"BT /F1 -12 Tf 90 600 Td (Other.) Tj ET",
    at(b"(x) Tr Tf /F1 Tf EMC /OC BDC EMC /OC /No BDC EMC 1 re W n /No gs /No Do 5 cm /X w (x) g /No cs 1 scn 0 g"),
]


class TestDrawn:
    @staticmethod
    def read(folder: Path, commands: bytes) -> DocumentText:
        def change(writer: PdfWriter) -> None:
            icc = writer._add_object(stream(b"", N=NumberObject(3)))
            spaces = entries(
                Icc=ArrayObject([NameObject("/ICCBased"), icc]),
                Ink=ArrayObject([NameObject("/Separation"), NameObject("/Black"), NameObject("/DeviceGray")]),
            )
            states = entries(Clear=entries(ca=NumberObject(0)), Full=entries(ca=NumberObject(1)))
            draw(writer, commands, ColorSpace=spaces, ExtGState=states)

        return read(folder, change)

    @pytest.mark.some(3)
    @pytest.mark.parametrize(("reason", "commands"), [(reason, each) for reason in HIDDEN for each in HIDDEN[reason]])
    def test_what_is_not_seen(self, tmp_path: Path, reason: Unseen, commands: bytes) -> None:
        text = self.read(tmp_path, commands)
        assert text == "Lease." and text.notes == (f"page 1 of 1 with hidden parts, which are left out ({reason}).",)

    @pytest.mark.some(5)
    @pytest.mark.parametrize("commands", SEEN)
    def test_what_is_seen(self, tmp_path: Path, commands: bytes) -> None:
        text = self.read(tmp_path, commands)
        assert text.replace("\n", "") == "Lease.Other." and text.notes == ()

    @pytest.mark.parametrize(
        ("box", "seen"),
        [((0, 700, 612, 792), 0), ((0, 500, 612, 792), 1), ((612, 792, 0, 500), 1), ((900, 900, 990, 990), 1)],
    )
    def test_the_part_of_the_page_that_is_shown(self, tmp_path: Path, box: tuple[float, ...], seen: bool) -> None:
        def change(writer: PdfWriter) -> None:
            draw(writer, OTHER)
            writer.pages[0][NameObject("/CropBox")] = numbers(*box)

        assert is_seen(read(tmp_path, change)) == seen

    @pytest.mark.parametrize("first", [True, False], ids=["picture first", "text first"])
    @pytest.mark.parametrize(("left", "seen"), [(0, True), (300, False)])
    def test_what_ocr_read_stays_where_its_picture_is(self, tmp_path: Path, first: bool, left: int, seen: bool) -> None:
        parts = [b"q 300 0 0 700 %d 0 cm /Im0 Do Q " % left, at(b"3 Tr")]
        commands = b"".join(parts if first else parts[::-1])
        text = read(tmp_path, lambda writer: draw(writer, commands, XObject=image(writer, 9)))
        assert is_seen(text) == seen

    @pytest.mark.parametrize("inline", [True, False])
    def test_a_picture_is_a_ground_for_white_text(self, tmp_path: Path, inline: bool) -> None:
        shown = b"BI /W 8 /H 1 /BPC 1 /CS /G ID \x00 EI" if inline else b"/Im0 Do"
        commands = b"q 600 0 0 300 0 500 cm " + shown + b" Q " + at(b"1 g")
        assert is_seen(read(tmp_path, lambda writer: draw(writer, commands, XObject=image(writer, 9))))

    @pytest.mark.parametrize(
        ("matrix", "bounds", "commands", "seen"),
        [
            ((1, 0, 0, 1, 0, 0), (0, 0, 600, 700), OTHER, True),
            ((1, 0, 0, 1, 0, 0), (600, 700, 0, 0), OTHER, True),
            ((1, 0, 0, 1, 0, 0), (0, 0, 600, 90), OTHER, False),
            ((1, 0, 0, 1, 2000, 0), (0, 0, 600, 700), OTHER, False),
            ((1, 0, 0, 1, -2000, 0), (0, 0, 9000, 700), at(b"1 0 0 1 2000 0 cm"), True),
            ((1, 0, 0, 1, 0, 0), (0, 0, 600, 700), at(b"3 Tr"), False),
            ((1, 0, 0, 1, 0, 0), (0, 0, 600, 700), b"3 Tr 1 g q q /OC /No BDC", True),
        ],
    )
    def test_forms(
        self, tmp_path: Path, matrix: tuple[float, ...], bounds: tuple[float, ...], commands: bytes, seen: bool
    ) -> None:
        """A form is cut to its bounds, and leaves nothing behind for the commands after it."""

        def change(writer: PdfWriter) -> None:
            made = form(writer, commands)
            made.update({NameObject("/Matrix"): numbers(*matrix), NameObject("/BBox"): numbers(*bounds)})
            after = b"" if b"Other" in commands else OTHER
            draw(writer, b"/Fm0 Do " + after, XObject=entries(Fm0=writer._add_object(made)))

        assert is_seen(read(tmp_path, change)) == seen

    def test_a_page_of_many_places_costs_no_more(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compared, overlap = [], view.overlap
        monkeypatch.setattr(view, "overlap", lambda *boxes: compared.append(boxes) or overlap(*boxes))
        monkeypatch.setattr(view, "_MOST_BOXES", 10)
        commands = b"0 g" + b" 0 0 9 9 re f" * 300 + b" 1 g " + OTHER * 300
        text = read(tmp_path, lambda writer: draw(writer, commands))
        assert "Other" not in text and len(compared) <= 300 * (10 + 1) + 1


def layers(writer: PdfWriter, base: str = "ON") -> DictionaryObject:
    """Groups: ``Off`` is switched off, ``On`` is on; ``Own`` is as the file's base says."""
    made = {name: writer._add_object(entries(Type=NameObject("/OCG"))) for name in ("On", "Off", "Own")}
    default = entries(BaseState=NameObject(f"/{base}"), ON=ArrayObject([made["On"]]), OFF=ArrayObject([made["Off"]]))
    writer._root_object[NameObject("/OCProperties")] = entries(OCGs=ArrayObject(made.values()), D=default)
    for policy in ("AllOn", "AnyOn", "AnyOff", "AllOff"):
        for first, second in (("On", "Off"), ("Off", "Off"), ("On", "On")):
            members = ArrayObject([made[first], made[second]])
            each = entries(Type=NameObject("/OCMD"), OCGs=members, P=NameObject(f"/{policy}"))
            made[f"{policy}{first}{second}"] = writer._add_object(each)
    made["One"] = writer._add_object(entries(Type=NameObject("/OCMD"), OCGs=made["Off"]))
    made["None"] = writer._add_object(entries(Type=NameObject("/OCMD"), OCGs=ArrayObject()))
    return entries(**made)


LAYERS = {
    **{"On": True, "Off": False, "Own": True, "One": False, "None": True, "Unknown": True},
    **{"AllOnOnOff": False, "AllOnOnOn": True, "AnyOnOnOff": True, "AnyOnOffOff": False},
    **{"AnyOffOnOff": True, "AnyOffOnOn": False, "AllOffOnOff": False, "AllOffOffOff": True},
}


class TestLayers:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("name", LAYERS)
    @pytest.mark.parametrize("inner", [b"", b"/Span <</X 1>> BDC EMC /Artifact BMC EMC ", b"/OC /On BDC EMC "])
    def test_text(self, tmp_path: Path, name: str, inner: bytes) -> None:
        commands = b"/OC /%s BDC %s EMC" % (name.encode(), inner + OTHER)
        text = read(tmp_path, lambda writer: draw(writer, commands, Properties=layers(writer)))
        assert is_seen(text) == LAYERS[name]
        left_out = ("page 1 of 1 with hidden parts, which are left out (switched off).",)
        assert text.notes == (() if LAYERS[name] else left_out)

    def test_a_form_switches_nothing_behind_it_off(self, tmp_path: Path) -> None:
        def change(writer: PdfWriter) -> None:
            made = form(writer, b"q /OC /Off BDC", Properties=layers(writer))
            draw(writer, b"/Fm0 Do " + OTHER, XObject=entries(Fm0=writer._add_object(made)))

        assert is_seen(read(tmp_path, change))

    @pytest.mark.parametrize(
        ("name", "base", "seen"), [("Own", "ON", True), ("Own", "OFF", False), ("On", "OFF", True)]
    )
    def test_what_the_file_says_of_all(self, tmp_path: Path, name: str, base: str, seen: bool) -> None:
        commands = b"/OC /%s BDC %s EMC" % (name.encode(), OTHER)
        assert is_seen(read(tmp_path, lambda writer: draw(writer, commands, Properties=layers(writer, base)))) == seen

    @pytest.mark.parametrize("name", ["On", "Off"])
    @pytest.mark.parametrize("kind", ["form", "comment"])
    def test_forms_and_comments(self, tmp_path: Path, name: str, kind: str) -> None:
        def change(writer: PdfWriter) -> None:
            group = layers(writer).raw_get(f"/{name}")
            if kind == "comment":
                annotate(writer, Subtype="/FreeText", Contents="Other.")[NameObject("/OC")] = group
                return
            made = form(writer, OTHER)
            made[NameObject("/OC")] = group
            draw(writer, b"/Fm0 Do", XObject=entries(Fm0=writer._add_object(made)))

        assert is_seen(read(tmp_path, change)) == (name == "On")

    def test_a_picture_that_is_switched_off_is_no_ground(self, tmp_path: Path) -> None:
        def change(writer: PdfWriter) -> None:
            commands = b"/OC /Off BDC q 600 0 0 700 0 0 cm /Im0 Do Q EMC " + at(b"3 Tr")
            draw(writer, commands, XObject=image(writer, 9), Properties=layers(writer))

        assert not is_seen(read(tmp_path, change))

    @pytest.mark.parametrize("damage", [THREE, entries(D=THREE), entries(D=entries(OFF=THREE))])
    def test_damaged_lists_switch_nothing_off(self, tmp_path: Path, damage: Any) -> None:
        def change(writer: PdfWriter) -> None:
            draw(writer, b"/OC /Off BDC " + OTHER + b"EMC", Properties=layers(writer))
            writer._root_object[NameObject("/OCProperties")] = damage

        assert is_seen(read(tmp_path, change))


class TestFieldsAndComments:
    @some_of(
        7,
        kind=["/Text", "/FreeText", "/Widget", "/Stamp"],
        changed=[
            *(({"F": NumberObject(flags)}, seen) for flags, seen in ((0, True), (4, True), (2, False), (6, False))),
            *(({"F": NumberObject(flags)}, seen) for flags, seen in ((32, False), (36, False), (1 | 4 | 64, True))),
            ({"Rect": numbers(72, 500, 172, 520)}, True),
            ({"Rect": numbers(172, 520, 72, 500)}, True),
            ({"Rect": numbers(-200, 500, -100, 520)}, False),
            ({"Rect": numbers(72, 900, 172, 920)}, False),
            ({"Rect": numbers(72, 500)}, True),
            *(({"Rect": numbers(place, place, place, place)}, False) for place in (0, 100)),
            ({"F": NameObject("/Odd")}, True),
        ],
    )
    def test_flags_and_places(self, tmp_path: Path, kind: str, changed: tuple[dict[str, Any], bool]) -> None:
        change, seen = changed

        def add(writer: PdfWriter) -> None:
            drawn = writer._add_object(form(writer, b"BT /F1 9 Tf 1 1 Td (Other.) Tj ET"))
            said = {"AP": entries(N=drawn)} if kind in ("/Widget", "/Stamp") else {"Contents": "Other."}
            annotate(writer, Subtype=kind, **said, **change)  # type: ignore[arg-type]

        assert is_seen(read(tmp_path, add)) == seen

    @pytest.mark.parametrize(
        ("kind", "flags", "place", "seen"),
        [
            ("/Tx", 1 << 13, numbers(72, 500, 172, 520), False),
            ("/Tx", 1 << 12, numbers(72, 500, 172, 520), True),
            ("/Ch", 1 << 13, numbers(72, 500, 172, 520), True),
            ("/Tx", 0, numbers(0, 0, 0, 0), False),
            ("/Tx", 0, numbers(72, 500, 172, 500), False),
            ("/Tx", 0, numbers(72, 500, 72, 520), False),
        ],
    )
    @pytest.mark.parametrize("depth", [0, 1])
    def test_fields(self, tmp_path: Path, kind: str, flags: int, place: ArrayObject, seen: bool, depth: int) -> None:
        def add(writer: PdfWriter) -> None:
            field = annotate(writer, Subtype="/Widget", Rect=place)
            if depth:
                above = entries()
                field[NameObject("/Parent")] = writer._add_object(above)
                field = above
            field.update(entries(FT=NameObject(kind), Ff=NumberObject(flags)))
            field.update(entries(T=TextStringObject("code"), V=TextStringObject("hunter2")))

        text = read(tmp_path, add)
        assert text == ("Lease.\n\ncode: hunter2" if seen else "Lease.") and len(text.notes) == (not seen)

    def test_pictures_that_are_hidden_are_not_noted(self, tmp_path: Path) -> None:
        def add(writer: PdfWriter) -> None:
            drawn = writer._add_object(form(writer, b"/Im0 Do", XObject=image(writer, 200)))
            annotate(writer, Subtype="/Stamp", F=NumberObject(2), AP=entries(N=drawn))

        text = read(tmp_path, add)
        assert (text, text.notes) == ("Lease.", ())


WHITE = "color:#fff"
PAGES = {
    Unseen.SWITCHED_OFF: [
        *("<ul><li hidden><ul><li>Other.</ul></ul>", "<table><tr hidden><td><table><tr><td>Other.</table></table>"),
        *("<div hidden><p>Other.</div>", "<ul hidden><li>Other.<li>Other.</ul>", "<p hidden><button><div>Other."),
        *("<p hidden>Other.</p>", "<p style='DISPLAY : none'>Other.</p>", "<p style='visibility:hidden'>Other.</p>"),
        *("<dialog>Other.</dialog>", "<p aria-hidden=' TRUE '>Other.", "<p style='display:none!important'>Other.</p>"),
    ],
    Unseen.SECRET: ["<input type=password value=Other.>", "<input type=' PassWord ' value=Other.>"],
    Unseen.TRANSPARENT: [
        *(f"<p style='{each}'>Other.</p>" for each in ("opacity:0", "opacity:0.0", "opacity:0%", "color:transparent")),
        *(f"<p style='color:{each}'>Other.</p>" for each in ("rgba(0, 0, 0, 0)", "#0000", "rgb(1 2 3 / 0%)")),
        *(f"<p style='color:transparent;{each}'>Other.</p>" for each in ("text-shadow:none", "background:#fff")),
    ],
    Unseen.ON_WHITE: [
        *(f"<p style='color:{each}'>Other.</p>" for each in ("white", "#FFF", "#ffffff", "rgb(255, 255, 255)")),
        *(
            f"<div style='{WHITE}'>{each}</div>"
            for each in ("Other.", "<b>Other.</b>", "<p style='background:#fff'>Other.")
        ),
        *(
            f"<p style='{WHITE}'><b style='color:inherit'>Other.</b>",
            "<font color=white>Other.</font>",
            f"<p style='background:none;{WHITE}'>Other.</p>",
            f"<p style='{WHITE}!important;color:red'>Other.</p>",
        ),
    ],
    Unseen.TOO_SMALL: [
        *("<p style='font-size:0'>Other.</p>", "<style></style><p style='font-size:0'>Other.</p>"),
        *(f"<p style='font-size:0.0em'><b {each}>Other.</b>" for each in ("", "style='font-size:2em'")),
    ],
    Unseen.OUTSIDE: [
        f"<p style='position:{position};{side}:{far}'>Other.</p>"
        for position in ("absolute", "fixed")
        for side in ("left", "top")
        for far in ("-9999px", "-999em")
    ],
}
HOLDERS = ("font-size:0", WHITE, "color:transparent", "visibility:hidden")
SHOWN = [
    *(f"<p style='color:{each}'>Other.</p>" for each in ("#000", "rgb(0,0,0)", "#fffff0", "white;color:red")),
    *("<p style='opacity:0;transform:translateY(20px)'>Other.</p>", "<p style='opacity:.5'>Other.</p>"),
    # what another element or a style sheet may draw behind letters, or of them
    *(
        page
        for colour in (WHITE, "color:transparent")
        for how in (
            *("background:#000", "background:url(a;b)", "background:#ffe", "background:linear-gradient(red)"),
            *("background-color:transparent;background:#000", "background:#000;background-color:transparent"),
            *("-webkit-background-clip:text", "text-shadow:0 0 9px red", "-webkit-text-stroke:1px red"),
            *("-webkit-text-fill-color:red", "filter:invert(1)", "box-shadow:inset 0 0 0 99px red"),
        )
        for page in (
            f"<p style='{how};{colour}'>Other.</p>",
            f"<div style='{how}'><p style='{colour}'>Other.</p></div>",
            f"<p style='{how}'></p><p style='{colour}'>Other.</p>",
        )
    ),
    *(f"<table {each}><td style='{WHITE}'>Other.</table>" for each in ("bgcolor=navy", "background=a.png")),
    *(f"{each}<p style='{WHITE}'>Other.</p>" for each in ("<img src=a>", "<svg></svg>", "<canvas></canvas>")),
    *(
        page
        for sheet in (
            *("<style>p{background:red}</style>", "<LINK rel=stylesheet href=a>", "<script></script>"),
            "<meta name=color-scheme content=dark>",
        )
        for page in (f"{sheet}<p style='{WHITE}'>Other.</p>", f"<p style='{WHITE}'>Other.</p>{sheet}")
    ),
    "<div style='font-size:0'><p class=a>Other.</p></div><style>.a{font-size:9px}</style>",
    # what draws its letters in its own way
    *(f"<div style='{WHITE}'><{each}>Other.</div>" for each in ("a href", "mark", "button", "select><option selected")),
    *(f"<div style='font-size:0'><{each}>Other.</div>" for each in ("table><td", "button", "font size=3")),
    *(
        f"<div style='font-size:0'><b style='{each}'>Other.</b></div>"
        for each in ("font:9px x", "font:1em x", "font-size:small", "font-size:calc(1em + 9px)", "font-size:1rem")
    ),
    *(
        f"<div style='{each}'><b style='font-size:9px;color:red;visibility:visible'>Other.</b></div>"
        for each in HOLDERS
    ),
    *(f"<b style='{each}'></b>Other." for each in HOLDERS),
    *(f"<p style='{each}'><p>Other." for each in HOLDERS),
    "<div style='font-size:0'><textarea>Other.</textarea></div>",
    # what stands behind an end that was left out
    *(
        page
        for hidden in ("hidden", "style='opacity:0'", f"style='{WHITE}'")
        for page in (
            *(f"<p {hidden}><b>a<{each}>Other." for each in ("p", "div", "ul><li", "h2", "table><td")),
            *(f"<ul><li {hidden}>{each}a<li>Other.</ul>" for each in ("", "<b>", "<p>", "<div>")),
            *(f"<table><tr><td {hidden}>a{each}Other.</table>" for each in ("<td>", "<th>", "<tr><td>", "<tbody><td>")),
            *(f"<table><tr {hidden}><td>a{each}Other.</table>" for each in ("<tr><td>", "</tr><td>")),
            *(f"<dl><dt {hidden}>a<{each}>Other.</dl>" for each in ("dd", "dt")),
        )
    ),
    # what is moved or cut off, perhaps for a while
    *(
        f"<p style='{each}'>Other.</p>"
        for each in (
            *("left:-9999px", "position:absolute;left:-9px", "position:absolute;left:-100vw", "margin-left:-5000px"),
            *("position:relative;left:-9999px", "transform:translateX(-9999px)", "text-indent:-9999px", "height:0"),
            *("max-height:0;overflow:hidden", "height:0;overflow:hidden", "clip:rect(0,0,0,0)", "margin-top:-9999px"),
        )
    ),
    # what says less than it seems
    *("<p hidden style='display:block'>Other.</p>", "<dialog style='display:block'>Other.</dialog>"),
    *("<p style='/* display:none */'>Other.</p>", "<p style='/*;display:none;*/'>Other.</p>"),
    *("<p style='content:\";display:none\"'>Other.</p>", "<p style='display:block!important;display:none'>Other.</p>"),
    *("<p style='color'>Other.</p>", "<p style=';;:;color:'>Other.</p>", "<p color=white>Other.</p>"),
    *("<input value=Other.>", f"<input style='{WHITE};background:red' value=Other.>"),
]


class TestPages:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(("reason", "part"), [(reason, each) for reason in PAGES for each in PAGES[reason]])
    def test_what_is_not_seen(self, reason: Unseen, part: str) -> None:
        text = html_text(f"<p>Lease.</p>{part}")
        assert text == "Lease."
        [note] = text.notes
        assert re.fullmatch(rf"\d hidden part\(s\) were left out \({reason}\)\.", note)

    @pytest.mark.some(5)
    @pytest.mark.parametrize("part", SHOWN)
    def test_what_is_seen(self, part: str) -> None:
        text = html_text(f"<p>Lease.</p>{part}")
        assert text.split()[0] == "Lease." and "Other." in text
        assert ("left out" in "".join(text.notes)) == (">a" in part)

    def test_one_note_for_all_reasons(self) -> None:
        page = "<p>Lease.</p><p hidden>a</p><p style='opacity:0'>b</p><p hidden>c</p>"
        assert html_text(page).notes == ("3 hidden part(s) were left out (switched off, invisible).",)


class TestTexts:
    @pytest.mark.parametrize(
        ("said", "shown"),
        [
            ("a <!-- Other. --> b", "a  b"),
            ("a <!-- Other.\n--> b <!-- Other. --> c", "a  b  c"),
            ("<!-- Other. -->\n```\n<!-- code -->\n```\n", "\n```\n<!-- code -->\n```\n"),
            ("```\na\n```\n<!-- Other. -->", "```\na\n```\n"),
            ("~~~\n```\n~~~\n<!-- Other. -->", "~~~\n```\n~~~\n"),
            ("``a` <!-- Other. -->", "``a` "),
            *((each, each) for each in ("`` <!-- x --> ``", "`` a`b <!-- x -->``", "```<!-- x -->```", "```\n````\nb")),
            *((each, each) for each in ("````\n```\na\n```\n<!-- x -->\n````", "~~~~\n~~~\n<!-- x -->\n~~~~\n")),
            *((each, each) for each in ("```\n``` a\n<!-- x -->\n```", "`` a\nb <!-- x -->``", "```a\n````\n")),
            *((each, each) for each in ("`<!-- x -->`", "~~~\n<!-- x -->", "- a\n  ```\n  <!-- x -->\n  ```\n")),
            *((each, each) for each in ("a <!-- b", "    <!-- x -->", "a --> b", "> ```\n> <!-- x -->\n> ```")),
        ],
    )
    def test_comments_of_markdown(self, tmp_path: Path, said: str, shown: str) -> None:
        for name in ("a.md", "a.txt"):
            (tmp_path / name).write_text(f"Lease.\n{said}", newline="")
        text = read_document(tmp_path / "a.md")
        assert text == f"Lease.\n{shown}" and (text.notes == ()) == (said == shown)
        assert all("hidden part(s) were left out (comment)." in note for note in text.notes)
        assert read_document(tmp_path / "a.txt") == f"Lease.\n{said}", "of a text, readers see the same"

    def test_tags(self, tmp_path: Path) -> None:
        hidden = "".join(chr(0xE0000 + ord(each)) for each in "Other.")
        flag = "\U0001f3f4" + "".join(chr(0xE0000 + ord(each)) for each in "gbsct") + "\U000e007f"
        (tmp_path / "a.txt").write_text(f"Lease{hidden}. {flag}{hidden}")
        text = read_document(tmp_path / "a.txt")
        assert text == f"Lease. {flag}" and text.notes == ("2 hidden part(s) were left out (invisible).",)

    def test_forms_of_ideographs(self, tmp_path: Path) -> None:
        """An ideograph takes one of these selectors. More of them, and those behind other characters, hide data."""
        hidden, ideograph = "".join(chr(0xE0100 + ord(each) - 16) for each in "Other."), "\u845b\U000e0100"
        (tmp_path / "a.txt").write_text(f"Lease{hidden}. {ideograph}{ideograph}{hidden} \u2603\ufe0f\U000e0100")
        text = read_document(tmp_path / "a.txt")
        assert text == f"Lease. {ideograph}{ideograph} \u2603\ufe0f"
        assert text.notes == ("3 hidden part(s) were left out (invisible).",)
