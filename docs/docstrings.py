"""Docstrings as Markdown: what the site shows of them is read as such, and they are written for a terminal too."""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import Attribute, Docstring, ExprCall, Extension, Object

_ROLE = re.compile(r":(?:class|meth|mod|func|attr):`~?(?:[\w.]*\.)?([\w()]+)`")
_SESSION = re.compile(r"^>>>.*(?:\n(?:>>>|\.\.\.).*)*", re.MULTILINE)


class PlainMarkdown(Extension):
    """Cross references by role become code; sessions become code blocks; settings begin with their help text."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """As soon as it is read: signatures of data classes are made of their attributes' values."""
        _begin_with_help(attr)

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _SESSION.sub(lambda found: f"```pycon\n{found.group()}\n```", text)


def _begin_with_help(attribute: Attribute) -> None:
    """``NAME = _setting(DEFAULT, HELP)`` (``cacheclip_rag/config.py``) as ``NAME = DEFAULT`` with the whole text."""
    value = attribute.value
    if isinstance(value, ExprCall) and str(value.function) == "_setting":
        default, text = value.arguments
        rest = attribute.docstring.value if attribute.docstring else ""
        attribute.value = default
        attribute.docstring = Docstring(f"{ast.literal_eval(str(text))} {rest}".strip(), parent=attribute)
