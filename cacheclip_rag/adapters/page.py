"""The frame of HTML pages: each is one file, fetches nothing, and runs no script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c1e21; --faint: #5d636b; --line: #d9dce0; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181b; --ink: #e6e8ea; --faint: #9ea5ad; --line: #363b41; }
}
body { margin: 0 auto; max-width: 88rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
thead th { vertical-align: bottom; }
th:first-child, .text { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; }
small { color: var(--faint); font-weight: 400; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 45rem) {
  table, tbody { display: block; } thead, th:empty, td:empty { display: none; }
  tbody tr { display: flex; flex-wrap: wrap; gap: .1rem .9rem; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  tbody tr th, tbody tr td { border: 0; padding: 0; text-align: left; white-space: normal; overflow-wrap: anywhere; }
  tbody tr td.text { flex: 1 0 80%; } td[data-title]::before { content: attr(data-title) " "; color: var(--faint); }
}
"""


def whole_page(title: str, *parts: str, style: str = "") -> str:
    """A page of these parts of HTML, with more ``style`` beside that of all pages. Its policy lets no script run,
    nothing be fetched, and no style hold but its own ``style`` element: write classes, not ``style="…"``."""
    title, style = escape(title), _STYLE + style
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; form-action 'self'; base-uri 'none'"
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>",
            f"<h1>{title}</h1>",
            *parts,
            "</body>\n</html>\n",
        )
    )


def html_table(titles: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[str] = ()) -> str:
    """A table of HTML cells, the first of a row its heading. Columns are figures but those with a title in ``texts``.
    On a phone a row is a paragraph, and each figure stands behind its column's title."""
    names = [escape(title) for title in titles]
    texts = [' class="text" dir="auto"' * (title in texts) for title in titles]
    marks = [text or f' data-title="{name}"' for name, text in zip(names, texts, strict=True)][1:]
    head = "".join(f'<th scope="col"{text}>{name}</th>' for name, text in zip(names, texts, strict=True))
    lines = [
        (heading, "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, cells, strict=True)))
        for heading, *cells in rows
    ]
    body = "\n".join(f'<tr><th scope="row">{heading}</th>{cells}</tr>' for heading, cells in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
