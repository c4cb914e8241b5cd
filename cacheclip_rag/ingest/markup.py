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
      <!--(?:-?>|.*?(?:--!?>|\Z))
    | <(?:[!?]|/(?![a-z]))[^>]*+(?:>|\Z)
    | </(?P<end>[a-z][^\s/>]*+){_ATTRIBUTES}>
    | <(?P<holder>iframe|script|style|textarea|title)(?=[\s/>])(?P<of_holder>{_ATTRIBUTES})(?<!/)>
      (?P<inside>[^<]*+(?:<(?!/(?P=holder)[\s/>])[^<]*+)*+)
    | <(?P<begin>[a-z][^\s/>]*+)(?P<given>{_ATTRIBUTES})>
    | </?[a-z].*
    """,
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
"""Comments; what browsers take for one (declarations, ``<![CDATA[``); ends of elements; elements that hold text only;
other beginnings; a tag that the end of the page cuts off."""
_ATTRIBUTE = re.compile(r"""([^\s/=>]++)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s>]*+)))?+""")
_HOLD_LETTERS = ("textarea", "title")
"""Elements whose text may name characters: ``&amp;``."""


class Token(NamedTuple):
    kind: Literal["text", "begin", "end", "open"]
    text: str
    """The text, or the element's name in small letters. ``open``: what stands behind the last thing that was closed, in
    a comment, tag or script that is not."""
    attributes: dict[str, str] = {}


def tokens(source: str) -> Iterator[Token]:
    """Texts, and beginnings and ends of elements, in order, without comments. ``<br/>`` begins and ends."""
    at = 0
    for found in _MARKUP.finditer(source):
        yield Token("text", unescape(source[at : found.start()]))
        at = found.end()
        begun, holder = found["begin"], found["holder"]
        if found["end"]:
            yield Token("end", found["end"].lower())
        elif begun or holder:
            name, given = (begun or holder).lower(), found["given"] or found["of_holder"] or ""
            yield Token("begin", name, dict(map(_attribute, _ATTRIBUTE.finditer(given))))
            inside = found["inside"] or ""
            yield Token("text", unescape(inside) if name in _HOLD_LETTERS else inside)
            if given.endswith("/"):
                yield Token("end", name)
            if holder and at == len(source):
                yield Token("open", inside)
        elif at == len(source) and not found[0].endswith(">"):
            yield Token("open", found[0])
    yield Token("text", unescape(source[at:]))


def _attribute(found: re.Match[str]) -> tuple[str, str]:
    return found[1].lower(), unescape(found[2] or found[3] or found[4] or "")
