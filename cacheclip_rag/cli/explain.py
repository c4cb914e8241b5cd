"""``cacheclip explain-miss``: why a text in a prompt was not reused."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import DocumentError
from ..base.paths import expanded
from .common import JsonOption, print_json
from .companions import COMPANIONS
from .options import CommandSettings, engine_options, existing_folder, no_store

_MOST_TEXTS = 20
"""Most stored texts that are explained if none is named."""


@engine_options("store", "primary")
def explain_miss(
    prompt: Annotated[Path, typer.Argument(help="File with the prompt as the model got it.")],
    settings: CommandSettings,
    text: Annotated[
        list[Path] | None, typer.Option(help="File with a text that should be reused; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why texts were, or were not, reused in a prompt. Without --text, checks the stored texts that share most
    words with the prompt. Exit code 1 if a text is not reused."""
    store = existing_folder(settings.store)

    from ..adapters.explain import explain_miss as explain, plausible
    from ..engine import CacheClipEngine
    from ..store import is_store

    folder = expanded(store)
    if not is_store(folder):
        raise no_store(store)
    engine = CacheClipEngine(settings.store_config())
    written = _read(prompt)
    reused = (span.whole for span in engine.plan(written).layout.chunks)
    passages = chain.from_iterable(companion.texts(folder) for companion in COMPANIONS)
    known = chain(reused, engine.texts.index.texts(), engine.texts.texts(), passages)
    texts = [_read(path) for path in text or []] or plausible(known, written)[:_MOST_TEXTS]
    reports = [explain(engine, written, each) for each in dict.fromkeys(texts)]
    if as_json:
        print_json({"store": store, "texts": [report.to_dict() for report in reports]})
    else:
        for report in reports:
            label = {"hit": "hit ", "part": "part"}.get(report.reason, "miss")
            typer.echo(f"{label}  {report.text!r}\n      {report.explanation}")
        if not reports:
            typer.echo("no stored text resembles a part of the prompt. Name the expected text with --text FILE.")
    if not reports or not all(report.is_hit for report in reports):
        raise typer.Exit(1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"cannot read {path}: {error}. Give a text file in UTF-8.") from error
