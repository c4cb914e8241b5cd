"""The form in which texts are compared."""

import html
import json
import quopri
import unicodedata
from collections.abc import Callable
from functools import partial
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cacheclip_rag.finding.folding import fold

LANGUAGES = {
    "English": 'The lease says: "no pets & no smoking". Rent < 900; it\'s due on the 1st - see C:\\new\\table.txt.',
    "apostrophes": "It's the keeper's lamp that wasn't lit, said O'Neill; the log doesn't tell who'd left it.",
    "French": "Le château fut bâti près de l’île\u00a0; l’évêque y reçut… où la façade fût réparée.",
    "Vietnamese": "Tiếng Việt có sáu thanh điệu, và một chữ có thể có hai dấu.",
    "Korean": "항구의 등대는 천팔백사십칠년에 세워졌다. 등대지기는 두 명의 조수와 살았다.",
    "Japanese": "ガスは、バルブで止める。東京タワーは高さ333メートルの電波塔です。",
    "Hindi": "दीपस्तंभ का निर्माण 1847 में हुआ था, और उसका दीपक तेल से जलता था।",
    "Hebrew": "\u05d1\u05bc\u05b0\u05e8\u05b5\u05d0\u05e9\u05b4\u05c1\u05d9\u05ea \u05d1\u05bc\u05b8\u05e8\u05b8\u05d0 "
    "\u05d0\u05b1\u05dc\u05b9\u05d4\u05b4\u05d9\u05dd \u05d0\u05b5\u05ea "
    "\u05d4\u05b7\u05e9\u05bc\u05c1\u05b8\u05de\u05b7\u05d9\u05b4\u05dd "
    "\u05d5\u05b0\u05d0\u05b5\u05ea \u05d4\u05b8\u05d0\u05b8\u05e8\u05b6\u05e5",
    "emoji": "The boiler \U0001f525 of hall 4 was inspected ✅, its valve not; \U0001d7ed\U0001d7ee parts.",
    "signs": "A ﬁne of 5 \u212b and 7 \u2126 (ＦＵＬＬ width, non\u2011breaking) … Ⅷ of the rules.",
}


def marked_up(text: str) -> str:
    """Markdown as converters write it."""
    return "".join(f"\\{c}" if c in "_*#.-()<>" else c for c in text)


FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "composed": partial(unicodedata.normalize, "NFC"),
    "decomposed": partial(unicodedata.normalize, "NFD"),
    "JSON": lambda text: json.dumps(text)[1:-1],
    "JSON, letters as they are": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "JSON with slashes escaped": lambda text: json.dumps(text)[1:-1].replace("/", "\\/"),
    "JSON in JSON": lambda text: json.dumps(json.dumps(text))[3:-3],
    "decomposed, then JSON": lambda text: json.dumps(unicodedata.normalize("NFD", text))[1:-1],
    "Python's ascii": lambda text: ascii(text)[1:-1],
    "escapes with braces": lambda text: "".join(c if c.isascii() else f"\\u{{{ord(c):x}}}" for c in text),
    "escapes of Perl": lambda text: "".join(c if c.isascii() else f"\\x{{{ord(c):04X}}}" for c in text),
    "a URL": quote,
    "a URL in JSON in JSON": lambda text: json.dumps(json.dumps(quote(text))),
    "a URL in a URL": lambda text: quote(quote(text)),
    "escape of JavaScript": lambda text: "".join(
        chr(each) if each < 0x80 and each != 0x25 else f"%{each:02X}" if each < 0x100 else f"%u{each:04X}"
        for each in np.frombuffer(text.encode("utf-16-le"), np.uint16).tolist()
    ),
    "SQL": lambda text: text.replace("'", "''"),
    "a shell": lambda text: text.replace("'", "'\"'\"'"),
    "a POSIX shell": lambda text: text.replace("'", "'\\''"),
    "a mail": lambda text: quopri.encodestring(text.encode(), quotetabs=False).decode().replace("=\n", ""),
    "bytes of C": lambda text: "".join(f"\\{byte:03o}" if byte > 127 else chr(byte) for byte in text.encode()),
    "bytes of Python": lambda text: str(text.encode())[2:-1],
    "bytes of Python in JSON": lambda text: json.dumps(str(text.encode())[2:-1]),
    "typographic signs": lambda text: text.translate(str.maketrans("\"'-", "\u201c\u2019\u2013")).replace(
        "...", "\u2026"
    ),
    "typed signs": lambda text: text.translate(str.maketrans("\u2019\u2018\u201c\u201e\u2014", "''\"\"-")),
    "HTML": html.escape,
    "HTML twice": lambda text: html.escape(html.escape(text)),
    "XML with decimal references": lambda text: html.escape(text).encode("ascii", "xmlcharrefreplace").decode(),
    "XML with hexadecimal references": lambda text: "".join(c if c.isascii() else f"&#x{ord(c):x};" for c in text),
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "entities for spaces": lambda text: text.replace(" ", "&nbsp;"),
    "Markdown": marked_up,
    "soft hyphens": lambda text: text.replace("t", "t\u00ad").replace("\ud56d", "\ud56d\u00ad"),
    "zero width": lambda text: text.replace(" ", " \u200b").replace(".", ".\u2060"),
    "variation selectors": lambda text: text.replace(" ", "\ufe0f "),
    "byte-order mark": lambda text: f"\ufeff{text}",
    "lines of Windows": lambda text: text.replace(" ", "\r\n", 3),
    "separators of Unicode": lambda text: text.replace(" ", "\u2028", 2).replace(" ", "\u2029", 2),
    "runs of blanks": lambda text: text.replace(" ", " \t  \u3000"),
}


def seen(text: str) -> str:
    return fold(text)[0].tobytes().decode("utf-8", "surrogatepass")


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_form_of_a_text_is_one(language: str) -> None:
    text = LANGUAGES[language]
    for form, write in FORMS.items():
        assert seen(write(text)) == seen(text), form


@pytest.mark.parametrize("form", ["JSON", "JSON in JSON", "Python's ascii", "bytes of Python"])
def test_escaped_ends_of_lines_are_left_out(form: str) -> None:
    text = "Rooms:\n\t4 halls and\r\na tower.\n"
    assert seen(FORMS[form](text)) == seen(text)


@pytest.mark.parametrize("language", LANGUAGES)
def test_compatible_letters_are_one(language: str) -> None:
    text = LANGUAGES[language].replace("\U0001d7ed\U0001d7ee", "")  # letters of another font look different
    for form in ("NFKC", "NFKD"):
        assert seen(unicodedata.normalize(form, text)) == seen(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [("x\u00b2 is", "x2 is"), ("\u00bd of it", "1/2 of it"), ("\u2460 first", "1 first"), ("caf\u00e9", "cafe"),
     ("\U0001d400", "A"), ("a < b", "a b"), ("it's", "its"), ("Stra\u00dfe", "Strasse"), ("\\q", "\\r")],
)  # fmt: skip
def test_texts_that_look_different_are_two(one: str, other: str) -> None:
    assert seen(one) != seen(other)


@pytest.mark.some(3)
@pytest.mark.parametrize("language", LANGUAGES)
def test_each_byte_names_its_characters(language: str) -> None:
    """What stands there shows the byte, and what is between two bytes' characters shows nothing."""
    for form, write in FORMS.items():
        text = write(LANGUAGES[language])
        found, starts, stops = fold(text)
        assert len(found) == len(starts) == len(stops) > 0, form
        assert (starts[1:] >= starts[:-1]).all() and (starts < stops).all() and stops[-1] <= len(text), form
        position = 0
        for byte, start, stop in zip(found.tolist(), starts.tolist(), stops.tolist(), strict=True):
            assert byte in fold(text[start:stop])[0], (form, start)
            assert position >= start or seen(text[position:start]) == "", (form, start)
            position = stop


@given(text=st.text(st.characters(), max_size=80))
def test_any_text(text: str) -> None:
    found, starts, stops = fold(text)
    assert len(found) == len(starts) == len(stops)
    assert (starts < stops).all() and (not len(stops) or stops.max() <= len(text))


NOTHING = [
    "&;", "&#;", "&#xffffffffff;", "&#1114112;", "&nosuchname;", "&#0;", "\ud83d&#55357;", "&" * 90, "&amp;" * 40,
    "%", "%zz", "%c3", "%ff%fe", "%c0%80", "%ed%a0%80", "=C3", "=FF=FE", "\\303", "\\377\\376", "\\xff\\xfe",
    "\\u{}", "\\x{110000}", "\\u{d83d}", "\\u{" * 90, "\\u12", "\\ud83d", "\\ud83d\\u0041", "\\U00110000",
    "\\" * 90,
]  # fmt: skip


def test_escapes_of_nothing() -> None:
    for text in NOTHING:
        found, starts, stops = fold(text)
        assert len(found) == len(starts) == len(stops), text
