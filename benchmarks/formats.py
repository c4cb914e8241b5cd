"""How much of stored chunks is reused where a prompt writes them in another format: share of the chunks' tokens.

    python benchmarks/formats.py --model packaged:smollm2-135m

The chunks are paragraphs of the licences in ``examples/corpus``, with their line ends and indents, and the same
paragraphs as one line each. Only the tokenizer is used. A token that a format changes (a line end and the indent after
it, the first word of a line) is no longer a token of the chunk, so that the share has an upper bound for each format.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

from cacheclip_rag.measuring import lay_out, segment_text
from cacheclip_rag.models import load_model
from cacheclip_rag.runtime import Runtime
from cacheclip_rag.store import Catalog, TextIndex

CORPUS = Path(__file__).resolve().parent.parent / "examples" / "corpus"
FILES = ("apache-2.0.txt", "mpl-2.0.txt")

FORMATS: dict[str, Callable[[list[str]], str]] = {
    "plain": lambda texts: "\n\n".join(texts),
    "numbered": lambda texts: "\n".join(f"[{n}] {text}" for n, text in enumerate(texts, 1)),
    "XML": lambda texts: "\n".join(f"<document>{text}</document>" for text in texts),
    "quoted": lambda texts: "\n\n".join("\n".join(f"> {line}" for line in text.splitlines()) for text in texts),
    "quoted, 80 columns": lambda texts: "\n".join(f"> {line}" for text in texts for line in textwrap.wrap(text, 80)),
    "JSON": lambda texts: json.dumps([{"page_content": text, "metadata": {"page": 3}} for text in texts]),
    "one line": lambda texts: "\n\n".join(" ".join(text.split()) for text in texts),
    "80 columns": lambda texts: "\n\n".join("\n".join(textwrap.wrap(text, 80)) for text in texts),
    "60 columns": lambda texts: "\n\n".join("\n".join(textwrap.wrap(text, 60)) for text in texts),
    "split again": lambda texts: "\n\n".join(
        f"Source {n}:\n{piece}"
        for n, piece in enumerate((text[at : at + 300] for text in texts for at in range(0, len(text), 300)), 1)
    ),
}
"""Prompts' ways to write chunks, by name."""


def chunks(characters: int = 1500, most: int = 12) -> list[str]:
    """Neighbouring paragraphs of the licences, up to this many characters a chunk."""
    found: list[str] = []
    for name in FILES:
        text = ""
        for paragraph in re.split(r"(?<=\n\n)", (CORPUS / name).read_text(encoding="utf-8")):
            if text and len(text) + len(paragraph) > characters:
                found.append(text.strip())
                text = ""
            text += paragraph
    return [text for text in found if len(text) > 300][:most]


def shares(runtime: Runtime, texts: list[str]) -> dict[str, float]:
    """Tokens of the stored ``texts`` that are reused in a prompt with all of them, for each format."""
    index = TextIndex(Catalog().database, "formats")
    index.add(texts)
    total = sum(len(runtime.tokenize(text)) for text in texts)
    found = {}
    for name, write in FORMATS.items():
        segments = segment_text(f"Use these.\n\n{write(texts)}\n\nWho wrote them?", index)
        layout = lay_out(segments, runtime, cache(runtime.tokenize), [])
        found[name] = sum(len(span.tokens) for span in layout.chunks) / total
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="packaged:smollm2-135m", help="whose tokenizer is used")
    runtime = load_model(parser.parse_args().model)
    lines = chunks()
    written, flat = shares(runtime, lines), shares(runtime, [" ".join(text.split()) for text in lines])
    print("| format | text with line ends | one line a chunk |\n|---|---|---|")
    for name, share in written.items():
        print(f"| {name} | {share:.0%} | {flat[name]:.0%} |")


if __name__ == "__main__":
    main()
