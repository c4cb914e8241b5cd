"""``cacheclip models list``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from cacheclip_rag.plugins import JsonOption, format_bytes, print_json

from ..packaged.catalogue import PACKAGED_MODELS, PREFIX
from ..packaged.pull import model_folder


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
    return {**model, "supported": True, "folder": str(folder) if folder.is_dir() else None}
