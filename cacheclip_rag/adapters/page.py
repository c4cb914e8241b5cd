"""The frame of HTML pages: each is one file, fetches nothing, and runs no script."""

from __future__ import annotations

import base64
import hashlib
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
small { color: var(--faint); font-weight: 400; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
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
