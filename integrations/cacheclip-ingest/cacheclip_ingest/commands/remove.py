"""``cacheclip store remove``."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheclip_rag.plugins import ExistingStoreOption, JsonOption, NamespaceOption, print_json, print_names


def remove(
    store: ExistingStoreOption,
    documents: Annotated[
        list[str] | None, typer.Argument(help="Paths or URLs of documents that were ingested; they may be gone.")
    ] = None,
    under: Annotated[str | None, typer.Option("--under", metavar="PATH", help="All documents below it.")] = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take documents of ingest, and the chunk caches that only they need, out of a store. Ingesting a folder in which
    they still are brings them back."""
    from ..removal import remove_documents

    removed = remove_documents(store, documents or [], under=under, namespace=namespace)
    if as_json:
        print_json({"store": store, "removed": removed})
    else:
        print_names("removed", removed)
