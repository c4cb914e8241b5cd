"""Tags and texts of an HTML page.

Python's own parser looks for the end of each comment and tag in all that follows. Where none comes, that takes a time
which grows with the square of the page (before Python 3.13.6). Here each pattern takes all that it passes, up to the
end of the page, as browsers do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Literal, NamedTuple

_ATTRIBUTES = r"""(?:[^=>]++|=\s*+(?:"[^"]*+"|'[^']*+')?+)*+"""
_MARKUP = re.compile(
    rf"""
      <!--(?:-?>|.*?(?:--!?>|(?P<comment>\Z)))
    | <(?:[!?]|/(?![a-z]))[^>]*+(?:>|(?P<declaration>\Z))
    | </(?P<end>[a-z][^\s/>]*+){_ATTRIBUTES}>
    | <(?P<holder>iframe|script|style|textarea|title)(?=[\s/>])(?P<of_holder>{_ATTRIBUTES})(?<!/)>
      (?P<inside>[^<]*+(?:<(?!/(?P=holder)[\s/>])[^<]*+)*+)
    | <(?P<begin>[a-z][^\s/>]*+)(?P<given>{_ATTRIBUTES})>
    | (?P<tag></?[a-z].*)
    """,
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
"""Comments; what browsers take for one (declarations, ``<![CDATA[``); ends of elements; elements that hold text only;
other beginnings. A comment, declaration or tag that the end of the page cuts off is named."""
_ATTRIBUTE = re.compile(r"""([^\s/=>]++)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s>]*+)))?+""")
_HOLD_LETTERS = ("textarea", "title")
"""Elements whose text may name characters: ``&amp;``."""
_NUMBER = re.compile("&#0*([0-9]{1,8})[0-9]*")
"""Of a character: Python reads no number of thousands of digits, and characters have at most seven."""


class Token(NamedTuple):
    kind: Literal["text", "begin", "end", "open"]
    text: str
    """The text, or the element's name in small letters. ``open``: what stands behind the last thing that was closed, in
    a comment, tag or script that is not, and is no text."""
    attributes: dict[str, str] = {}


def tokens(source: str) -> Iterator[Token]:
    """Texts, and beginnings and ends of elements, in order, without comments. ``<br/>`` begins and ends."""
    at = 0
    for found in _MARKUP.finditer(source):
        yield Token("text", _unescape(source[at : found.start()]))
        at = found.end()
        begun, holder = found["begin"], found["holder"]
        if found["end"]:
            yield Token("end", found["end"].lower())
        elif begun or holder:
            name, given = (begun or holder).lower(), found["given"] or found["of_holder"] or ""
            yield Token("begin", name, dict(map(_attribute, _ATTRIBUTE.finditer(given))))
            inside = found["inside"] or ""
            yield Token("text", _unescape(inside) if name in _HOLD_LETTERS else inside)
            if given.endswith("/"):
                yield Token("end", name)
            if holder and name not in _HOLD_LETTERS and at == len(source):
                yield Token("open", inside)
        elif found.lastgroup:
            yield Token("open", found[0])
    yield Token("text", _unescape(source[at:]))


def _attribute(found: re.Match[str]) -> tuple[str, str]:
    return found[1].lower(), _unescape(found[2] or found[3] or found[4] or "")


def _unescape(text: str) -> str:
    return unescape(_NUMBER.sub(r"&#\1", text))
