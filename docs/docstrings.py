"""Docstrings as Markdown: what the site shows of them is read as such, and they are written for a terminal too."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|meth|mod|func|attr):`~?(?:[\w.]*\.)?([\w()]+)`")
_SESSION = re.compile(r"^>>>.*(?:\n(?:>>>|\.\.\.).*)*", re.MULTILINE)


class PlainMarkdown(Extension):
    """Cross references by role become code; sessions become code blocks."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _SESSION.sub(lambda found: f"```pycon\n{found.group()}\n```", text)
