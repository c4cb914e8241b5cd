"""``cacheclip store stats``."""

from __future__ import annotations

from pathlib import Path

import typer

from ..errors import StoreError
from .common import JsonOption, StoreOption, format_bytes, print_json

app = typer.Typer(help="The chunk-cache store.", no_args_is_help=True)


@app.command("stats")
def stats(store: StoreOption, as_json: JsonOption = False) -> None:
    """Entries, bytes and documents of a store."""
    from ..ingest.library import Library
    from ..store import ChunkStore, is_store

    folder = Path(store).expanduser()
    if not is_store(folder):
        raise StoreError(f"{store} is not a store: it has no catalog. Make one: cacheclip ingest PATH --store {store}")
    result = ChunkStore.open(folder).stats().to_dict()
    del result["hits"], result["misses"], result["evictions"]  # counters per process: always 0 here
    has_library = (folder / "library.sqlite3").is_file()
    library = Library.open(folder) if has_library else None
    documents = len(library.documents()) if library else 0
    passages = len(library.passages()) if library else 0
    result["max_bytes"] = library.max_bytes if library else None
    if as_json:
        print_json({"store": str(folder), **result, "documents": documents, "passages": passages})
        return
    limit = f", limit {format_bytes(result['max_bytes'])}" if result["max_bytes"] else ""
    typer.echo(f"chunk caches  {result['entries']}  ({format_bytes(result['bytes'] or 0)}{limit})")
    typer.echo(f"documents     {documents}\npassages      {passages}")
