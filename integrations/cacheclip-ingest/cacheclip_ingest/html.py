"""What a browser shows of an HTML page, as text."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice

from .html_view import Letters, draws, is_styled, style_of, why_unseen
from .markup import tokens
from .text import DocumentText, notes_on_media
from .unseen import Unseen, note_on_unseen

_MOST_COLUMNS = 100
"""Columns up to which high cells fill a table. A page of them would give a thousand times its size."""
_MOST_OPEN = 100
"""Elements within an element whose end was left out."""


class _Page:
    """What a browser shows of a page, as Markdown as far as headings, lists and tables go."""

    _OTHERS = frozenset("audio canvas embed frame iframe object video".split())
    """Elements that show something else than their text."""
    _UNSEEN = _OTHERS | set("annotation datalist noscript script style template title".split())
    _VOID = frozenset("area base br col embed frame hr img input link meta source track wbr".split())
    _BLOCKS = frozenset(
        (
            "address article aside blockquote center details dialog div dl fieldset figcaption figure footer form "
            "header hgroup hr legend main menu nav ol p pre search section summary table ul"
        ).split()
    )
    _APART = frozenset("button option select text textarea".split())
    """Elements that stand apart from the text around them, in its line. ``text`` is a drawing's."""
    _ENDS = {
        **{each: frozenset({"p"}) for each in (*_BLOCKS, "h1", "h2", "h3", "h4", "h5", "h6")},
        **dict.fromkeys(("dd", "dt"), frozenset({"dd", "dt", "p"})),
        **dict.fromkeys(("td", "th"), frozenset({"td", "th"})),
        **dict.fromkeys(("tr", "tbody", "tfoot"), frozenset({"td", "th", "tr", "thead", "tbody"})),
        **{"li": frozenset({"li", "p"}), "option": frozenset({"option"})},
    }
    """Elements whose ends may be left out before another one, by what stands before them."""
    _KEEPS = {
        **dict.fromkeys(("td", "th", "tr", "tbody", "tfoot"), frozenset({"table"})),
        "option": frozenset({"select"}),
    }
    _HOLDERS = frozenset("button caption dl object ol table td th ul".split())
    """What an element begins in such a one ends nothing outside it."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.title = ""
        self.pictures = self.hidden = self.others = self.num_open = 0
        self.left_out: set[Unseen] = set()
        self._open: list[tuple[str, bool, Letters]] = []
        """Elements that are open, whether each is hidden itself, and the letters around it."""
        self._letters = Letters()
        self._is_styled = self._has_ground = False
        """Whether other colours than those of the elements may count, and whether something drawn may be behind."""
        self._names = Counter[str]()
        self._unseen = self._cells = self._rows = self._empty = 0
        self._taken: dict[int, int] = {}
        """Columns whose cell reaches further down, and by how many rows."""

    def _close(self) -> str:
        tag, hidden, self._letters = self._open.pop()
        self._names[tag] -= 1
        self._unseen -= hidden
        return tag

    def read(self, source: str) -> None:
        self._is_styled = self._has_ground = is_styled(source)
        for token in tokens(source):
            if token.kind == "text":
                self._add_text(token.text)
            elif token.kind == "begin":
                self._begin(token.text, token.attributes)
            elif token.kind == "end":
                self._end(token.text)
            else:
                self.num_open = len(token.text)

    def _begin(self, tag: str, given: dict[str, str]) -> None:
        style = style_of(given)
        why = why_unseen(tag, given, style)
        hidden = why is not None or (tag == "option" and "selected" not in given)
        self._has_ground = self._has_ground or draws(tag, given, style)
        self.others += (tag in self._OTHERS or tag == "svg") and not (hidden or self._unseen)
        self._end_before(tag)
        letters = self._letters.within(tag, given, style, self._is_styled)
        hidden |= letters.hidden and tag in ("img", "input")
        if tag not in self._VOID:
            if why is not None and not self._unseen:
                self._leave_out(why)
            unseen = hidden or tag in self._UNSEEN
            self._open.append((tag, unseen, self._letters))
            self._letters = letters
            self._names[tag] += 1
            self._unseen += unseen
        if self._unseen:
            return
        if tag == "img" and not hidden:
            self.pictures += 1
            self.pieces.append(f" {given.get('alt', '')} ")
        elif tag == "input":
            kind = given.get("type", "").strip().casefold()
            if kind == "password" and given.get("value"):
                self._leave_out(Unseen.SECRET)
            elif not hidden and kind not in ("hidden", "password", "checkbox", "radio"):
                self.pieces.append(f" {given.get('value', '')} ")
        elif tag in ("br", "dt", "dd"):
            self.pieces.append("\n")
        elif tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.pieces.append(f"\n\n{'#' * int(tag[1])} ")
        elif tag == "li":
            self.pieces.append("\n- ")
        elif tag == "tr":
            self._end_row()
        elif tag in ("td", "th"):
            self._begin_cell(*(_span(given.get(name)) for name in ("colspan", "rowspan")))
        elif tag in self._APART:
            self.pieces.append(" ")
        elif tag in self._BLOCKS:
            self.pieces.append("\n\n")
            if tag == "table":
                self._rows, self._taken = 0, {}

    def _end_before(self, tag: str) -> None:
        """End what the beginning of an element ends, and what is open in it."""
        ended, num_ended = self._ENDS.get(tag, frozenset()), 0
        if not any(self._names[each] for each in ended):
            return
        for number, (name, _, _) in enumerate(islice(reversed(self._open), _MOST_OPEN), 1):
            if name in ended:
                num_ended = number
            elif name in self._KEEPS.get(tag, self._HOLDERS):
                break
        for _ in range(num_ended):
            self._close()

    def _begin_cell(self, columns: int, rows: int) -> None:
        """Begin a cell, after those that its row has from rows above and from wide cells, which are empty."""
        self.pieces.append(" |" * self._empty + (" |" if self._cells else "\n|"))
        self._pass_taken()
        self.pieces.append(" ")
        if rows > 1 and self._cells < _MOST_COLUMNS:
            self._taken |= {self._cells + n: rows for n in range(columns)}
        self._cells, self._empty = self._cells + columns, columns - 1

    def _pass_taken(self) -> None:
        while self._taken.get(self._cells, 0):
            self._cells += 1
            self.pieces.append(" |")

    def _end_row(self) -> None:
        if self._cells:
            self.pieces.append(" |" * (self._empty + 1))
            self._pass_taken()
            self._rows += 1
            self.pieces.append(f"\n|{'---|' * self._cells}" if self._rows == 1 else "")
            self._taken = {column: rows - 1 for column, rows in self._taken.items() if rows > 1}
        self._cells = self._empty = 0

    def _end(self, tag: str) -> None:
        seen = not self._unseen
        if self._names[tag]:
            while self._close() != tag:
                pass
        if not seen:
            return
        if tag in ("tr", "table"):
            self._end_row()
        if tag in self._BLOCKS or re.fullmatch("h[1-6]", tag):
            self.pieces.append("\n\n")
        elif tag in self._APART:
            self.pieces.append(" ")

    def _add_text(self, data: str) -> None:
        if self._open and self._open[-1][0] == "title":
            self.title += data
        elif not self._unseen and self._shows(data):
            self.pieces.append(data.replace(" ", "\0") if self._names["pre"] else re.sub(r"[ \t\r\n\f]+", " ", data))

    def _shows(self, data: str) -> bool:
        """Whether readers see letters here."""
        why = self._letters.why_unseen(self._has_ground) if data.strip() else None
        if why is None:
            return True
        self._leave_out(why)
        return False

    def _leave_out(self, why: Unseen) -> None:
        self.hidden += 1
        self.left_out.add(why)


def _span(given: str | None) -> int:
    """How many columns or rows a cell takes."""
    return min(int(given), 100) if given and re.fullmatch(r"[1-9]\d{0,3}", given) else 1


def html_text(source: str) -> DocumentText:
    """What a reader sees of an HTML page: no scripts, styles or hidden parts."""
    page = _Page()
    page.read(source)
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r" *\n *", "\n", re.sub(r" {2,}", " ", "".join(page.pieces))))
    text = text.strip().replace("\0", " ")  # of code, whose spaces stay
    notes = notes_on_media(page.pictures, page.others)
    if page.hidden:
        notes.append(note_on_unseen(f"{page.hidden} hidden part(s) were", page.left_out))
    if page.num_open:
        notes.append(f"it ends within a comment, tag or script: its last {page.num_open} characters were left out.")
    if not text and page.title:
        notes.append("nothing but the title can be read; a script may draw the rest.")
    title = " ".join(page.title.split())
    is_new = title and title.casefold() not in text[: 4 * len(title) + 8].casefold()
    return DocumentText(f"# {title}\n\n{text}".strip() if is_new else text, notes)
