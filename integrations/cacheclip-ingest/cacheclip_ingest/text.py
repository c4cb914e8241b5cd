"""The text of a file, and notes on what a reader of the file sees and the text lacks."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from cacheclip_rag import DocumentError

from .unseen import Unseen, note_on_unseen

HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})

_BOMS = {  # UTF-32 first: its mark begins like UTF-16's
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_SAID = re.compile(
    rb"<meta\b[^>]*?\bcharset\s*=\s*[\"']?\s*([\w.:-]+)|^\s*<\?xml\b[^>]*?\bencoding\s*=\s*[\"']([\w.:-]+)",
    re.IGNORECASE,
)
"""Where a page names its encoding."""
_JAPANESE = re.compile(rb"\x1b\$[@B][!-~]{2}")
"""ISO 2022 begins characters with it. The rest is ASCII, which says nothing."""
_NOT_WESTERN = re.compile(rb"[\x80-\xff]{3}")
"""Words of no language of Western Europe; in Windows-1252 and others like it, such a letter has a byte."""
_OF_PAGES = re.compile(r"ascii|cp(?:125\d|866|874|932|949)|iso8859|koi8|mac|tis|gb|big5|euc_|shift_jis|iso2022_jp")
_READ_AS = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "big5hkscs",
    "euc_kr": "cp949",
    "shift_jis": "cp932",
}
"""What browsers take for other encodings, which these contain (WHATWG, Encoding Standard). Names as in Python."""
ZIP_START = b"PK\x03\x04"
_OTHERS = {
    ZIP_START: "an Office file or another archive",
    b"\xd0\xcf\x11\xe0": "an older Office file",
    b"{\\rtf": "a file of Rich Text Format",
    b"%PDF-": "a PDF file whose name does not end in .pdf",
    b"\x1f\x8b": "a compressed file",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
}
"""What files begin with that are no text."""
SAVE_AS_TEXT = "Save it as text, Markdown, HTML or PDF first, for instance with LibreOffice or pandoc."
_MOST_ZEROS, _MOST_CONTROLS = 0.25, 0.001
"""Largest shares of zero bytes and of other control characters in a text. A file with more is no text."""
_CONTROLS = re.compile(r"[\x01-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_DATA = re.compile(
    r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+(?:=[\w.+-]+)?)*(?:;base64)?,[^\s\"'()<>\[\]]{64,}"
    r"(?:\s+[A-Za-z0-9+/=]{60,}(?=[\s)\"']))*"
)
"""Pictures and other files that stand in a text."""
_DRAWING = re.compile(r"(data:image/svg\+xml[^\s,\"'()<>]{0,60},\s*)?<svg\b.*?</svg>", re.DOTALL | re.IGNORECASE)
_DRAWING_END = re.compile("</svg>", re.IGNORECASE)
_BASE64 = re.compile(
    r"(?:[A-Za-z0-9+/]{32,100}\n[> \t]*){7,}(?:([A-Za-z0-9+/]+={0,2})(?![\w+/= ]))?|[A-Za-z0-9+/]{1000,}={0,2}"
)
"""Files that stand in a text without a word on what they are: mail, notebooks, keys."""
_SURE_WIDTH = 60
"""Lines of letters and digits that are shorter are a file only if all are equally long."""
_UUENCODED = re.compile(r"^begin [0-7]{3,4} [^\n]*\n(?:[!-`][ -`]{0,62}\n)+(?: ?\n)?end$", re.MULTILINE)
_DUMPED = re.compile(
    r"^[> \t]*(?:[0-9A-Fa-f]{4,16}[:h]?(?:[ \t-]+[0-9A-Fa-f]{2,8}){8,}.*|[0-9A-Fa-f]{32,100}$)", re.MULTILINE
)
"""A line of a file as hexadecimal digits, with or without its place."""
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(
    r"""
      ^(?:[\ \t>]|[-*+][\ \t]|[0-9]{1,9}[.)][\ \t])*+(?P<fence>`{3,}+(?=[^`\n]*$)|~{3,}+)
      .*?(?:^[\ \t>]*(?P=fence)[`~]*[\ \t]*$|\Z)
    | ^(?:\ {4}|\t)[^\n]*
    | (?<!`)(?P<ticks>`{1,9}+)(?!`)(?:[^`\n]++|\n(?![\ \t]*\n)|(?!(?P=ticks)(?!`))`++)*+(?P=ticks)
    | (?P<comment><!--.*?-->)
    | <!--.*
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
"""Code, which stays as it is; a comment; one that nothing ends, which stays, too."""
_TAGS = re.compile(
    "(\U0001f3f4[\U000e0020-\U000e007e]{1,9}\U000e007f"
    "|[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff][\U000e0100-\U000e01ef])"
    "|[\U000e0000-\U000e007f\U000e0100-\U000e01ef]+"
)
"""A flag, or a form of an ideograph; other characters of tags and forms, which nothing draws."""
_PICTURE = re.compile(r"!\[[^\[\]\n]*\][(\[](?!data:)|<(?:img|svg)\b(?![^<>]*\bdata:)", re.IGNORECASE)
_EMBEDDED = re.compile(r"<(?:audio|canvas|embed|iframe|object|video)\b", re.IGNORECASE)
_LONG_RUN = 1000
"""Least length of a run of ASCII without spaces that is worth a note."""


class DocumentText(str):
    """Text of a file, with :attr:`notes`."""

    notes: tuple[str, ...]
    """What a reader of the file sees and the text lacks, and what was changed: for people, each a sentence."""
    is_markdown: bool
    """Whether it is cut at headings and blocks first, and its comments are left out."""

    def __new__(cls, text: str, notes: Iterable[str] = (), *, is_markdown: bool = False) -> DocumentText:
        made = super().__new__(cls, text)
        made.notes, made.is_markdown = tuple(notes), is_markdown
        return made


def encoding_of_page(data: bytes) -> str | None:
    """The encoding that an HTML page names, by Python's name; None if it is none, unknown or of Unicode."""
    said = _SAID.search(re.sub(rb"<!--.*?-->", b"", data[:4096], flags=re.DOTALL))
    with suppress(LookupError):
        name = (said[1] or said[2]).decode("ascii", "replace").lower() if said else ""
        name = name.removeprefix("x-").removesuffix("-i")
        name = codecs.lookup(re.sub(r"^(?:windows|dos)-(?=\d{3})", "cp", name)).name
        return _READ_AS.get(name, name) if _OF_PAGES.match(name) else None
    return None


def decoded(path: Path, data: bytes, named: str | None = None) -> DocumentText:
    """Text of bytes: UTF-8, or UTF-16 or UTF-32 with a byte-order mark or plainly so, or what the file itself names.

    Args:
        named: encoding that is tried where the bytes are not UTF-8.

    Raises:
        DocumentError: the bytes are no text, or in another encoding.
    """
    notes: list[str] = []
    what = next((what for start, what in _OTHERS.items() if data.startswith(start)), None)
    if what is not None:
        raise DocumentError(f"{path} looks binary: it is {what}. {SAVE_AS_TEXT}")
    mark, encoding = next(((bom, name) for bom, name in _BOMS.items() if data.startswith(bom)), (b"", ""))
    if not encoding:
        encoding = _wide_without_mark(data) or ("iso2022_jp_ext" if not named and _JAPANESE.search(data) else "utf-8")
        if encoding != "utf-8":
            read_as = "ISO-2022-JP" if encoding.startswith("iso") else encoding.upper()
            notes.append(f"it has no byte-order mark and was read as {read_as}.")
        elif named is not None and (named.startswith("iso2022") or not _is_utf_8(data)):
            encoding = named  # a page that is UTF-8 was converted; ISO 2022 has ASCII's bytes
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(_encoding_advice(path, data, encoding, error)) from error
    zeros, controls = text.count("\0"), len(_CONTROLS.findall(text))
    if zeros > _MOST_ZEROS * len(text) or controls > _MOST_CONTROLS * len(text) + 2:
        raise DocumentError(
            f"{path} looks binary (it contains {zeros} zero bytes and {controls} other control characters); convert it "
            "to text or Markdown first."
        )
    if zeros:
        notes.append(f"{zeros} zero bytes were left out.")
    return DocumentText(text.replace("\0", "").lstrip("\ufeff"), notes)


def _is_utf_8(data: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        data.decode()
        return True
    return False


def _wide_without_mark(data: bytes) -> str | None:
    """UTF-32, if a beginning is nothing else; UTF-16, if every other byte of it is mostly zero."""
    start = data[: 1 << 16]
    for encoding in ("utf-32-le", "utf-32-be"):
        with suppress(UnicodeDecodeError):
            text = start[: len(start) // 4 * 4].decode(encoding)
            if text and "\0" not in text and len(_CONTROLS.findall(text)) <= _MOST_CONTROLS * len(text):
                return encoding
    for encoding, zeros, others in (("utf-16-le", start[1::2], start[::2]), ("utf-16-be", start[::2], start[1::2])):
        if zeros and zeros.count(0) > 0.7 * len(zeros) and others.count(0) < 0.01 * len(others):
            text = start[: len(start) // 2 * 2].decode(encoding, "replace")
            if len(_CONTROLS.findall(text)) <= _MOST_CONTROLS * len(text):
                return encoding
    return None


def _encoding_advice(path: Path, data: bytes, encoding: str, error: UnicodeDecodeError) -> str:
    wrong = f"{path} is not {encoding.upper()} (byte {error.start}: {error.reason})."
    if encoding != "utf-8":
        return f"{wrong} It says so itself, so it is damaged: save it again as UTF-8."
    if b"\0" in data:
        return (
            f"{wrong} It has zero bytes, so it may be UTF-16 without a byte-order mark: convert it to UTF-8 with "
            "iconv -f UTF-16LE (or UTF-16BE) -t UTF-8."
        )
    try:
        data.decode("ascii" if _NOT_WESTERN.search(data) else "cp1252")
    except UnicodeDecodeError:
        return f"{wrong} Find its encoding, for instance with 'file -i', and convert it to UTF-8 with iconv."
    name, new = shlex.quote(path.name), shlex.quote(f"{path.stem}-utf8{path.suffix}")
    return (
        f"{wrong} Convert it; a text of Windows in a language of Western Europe, for instance, with: "
        f"iconv -f WINDOWS-1252 -t UTF-8 {name} > {new}"
    )


class _FilesInside:
    """Files that stand in a text, which are left out."""

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = {}
        """Characters of each, by their kind."""

    def without(self, text: str) -> str:
        end = max((found.end() for found in _DRAWING_END.finditer(text)), default=0)  # behind it, a drawing has no end
        text = _DRAWING.sub(self._without_drawing, text[:end]) + text[end:]
        text = _BASE64.sub(self._without_base64, _DATA.sub(self._without_data, text))
        return _UUENCODED.sub(self._without_uuencoded, text)

    def notes(self) -> Iterator[str]:
        for kind, sizes in self.sizes.items():
            what = f"{len(sizes)} picture(s)" if kind.startswith("image/") else f"{len(sizes)} file(s)"
            yield f"{what} inside the text were left out ({kind}, {sum(sizes)} characters)."

    def _without_drawing(self, match: re.Match[str]) -> str:
        if match[1] is None and len(match[0]) < _LONG_RUN:
            return match[0]
        self.sizes.setdefault("image/svg+xml", []).append(len(match[0]))
        return "data:image/svg+xml" if match[1] else ""

    def _without_data(self, match: re.Match[str]) -> str:
        kind = match[1] or "text"
        self.sizes.setdefault(kind, []).append(len(match[0]))
        return f"data:{kind}"

    def _without_base64(self, match: re.Match[str]) -> str:
        found = match[0]
        if not (re.search("[a-z]", found) and re.search("[A-Z]", found) and re.search("[0-9]", found)):
            return found
        widths = [len(line) for line in re.findall("[A-Za-z0-9+/]+", found)[:-2]]  # the last ones are shorter
        if widths and min(widths) < _SURE_WIDTH and max(widths) > min(widths):
            return found
        word = match[1] if match[1] and not re.search("[0-9+/=]|.[A-Z]", match[1]) else ""  # of the text behind it
        self.sizes.setdefault("base64", []).append(len(found) - len(word))
        return word

    def _without_uuencoded(self, match: re.Match[str]) -> str:
        self.sizes.setdefault("uuencode", []).append(len(match[0]))
        return ""


def _notes_on_no_text(text: str) -> Iterator[str]:
    """On what is probably no text for people."""
    runs = [len(run) for run in re.findall(f"[!-~]{{{_LONG_RUN},}}", text)]
    if runs:
        yield (
            f"{len(runs)} run(s) of {_LONG_RUN} or more characters without a space, {sum(runs)} characters in all: "
            "probably no text for people. They take about a token for three characters."
        )
    dumped = [line[0] for line in _DUMPED.finditer(text)]
    if sum(map(len, dumped)) >= _LONG_RUN and 2 * sum(bool(re.search("[A-Fa-f]", line)) for line in dumped) > len(
        dumped
    ):
        yield (
            f"{len(dumped)} line(s) of hexadecimal digits, {sum(map(len, dumped))} characters in all: probably no text "
            "for people. They take about a token for two characters."
        )


def cleaned(text: str) -> DocumentText:
    """A text without files that stand in it, with line ends as ``\\n``, and with whole characters only."""
    notes: list[str] = []
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if any("\ud800" <= character <= "\udfff" for character in text):
        # the halves of a character that belong together become one
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if damaged := text.count("\ufffd"):
        notes.append(f"{damaged} characters are damaged or have no known letter, and stand as '\ufffd'.")
    if num_tags := sum(found[1] is None for found in _TAGS.finditer(text)):
        text = _TAGS.sub(lambda found: found[1] or "", text)
        notes.append(note_on_unseen(f"{num_tags} hidden part(s) were", [Unseen.TRANSPARENT]))
    inside = _FilesInside()
    text = inside.without(text)
    notes += [*inside.notes(), *_notes_on_no_text(text)]
    return DocumentText(text, notes)


def without_comments(text: str) -> DocumentText:
    """A text of Markdown without its comments. Those in code stay."""
    num_comments = 0

    def shown(found: re.Match[str]) -> str:
        nonlocal num_comments
        num_comments += found["comment"] is not None
        return found[0] if found["comment"] is None else ""

    text = _COMMENT.sub(shown, text)
    notes = [note_on_unseen(f"{num_comments} hidden part(s) were", [Unseen.COMMENT])] if num_comments else []
    return DocumentText(text, notes)


def notes_on_markdown(text: str) -> list[str]:
    """What readers of Markdown see and its text lacks."""
    shown = _CODE.sub("", text)
    return notes_on_media(len(_PICTURE.findall(shown)), len(_EMBEDDED.findall(shown)))


def notes_on_media(pictures: int, others: int) -> list[str]:
    """Notes on what a page shows that is no text."""
    notes = []
    if pictures:
        notes.append(f"{pictures} picture(s) are not read; the text has what the page says in their place.")
    if others:
        notes.append(f"{others} embedded page(s), recording(s) or drawing(s) are not read.")
    return notes
