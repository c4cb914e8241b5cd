"""``cacheclip store create|compact``."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheclip_rag import ConfigurationError, EngineConfig
from cacheclip_rag.plugins import (
    Commands,
    ExistingStoreOption,
    JsonOption,
    is_url,
    look_after,
    print_json,
    shown_url,
    store_place,
)


def register(commands: Commands) -> None:
    """Called by the command line of the core, which found this function by its entry point."""
    commands.add("store create", create)
    commands.add("store compact", compact)


def create(
    store: Annotated[str, typer.Argument(metavar="URL", help="Such as s3://bucket/prefix.")],
    codec: Annotated[str | None, typer.Option("--codec", help="Codec of chunk caches, such as int8.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a store in object storage. Refuses storage that lets a writer replace what another one wrote."""
    from cacheclip_rag.store import store_kind

    if not is_url(store_place(store)):
        raise ConfigurationError(f"expected a URL such as s3://bucket/prefix, got {store!r}: folders need no create.")
    url = str(EngineConfig(store=store).store)
    made = store_kind(url).create(url, codec)
    if as_json:
        print_json({"store": store, **made})
    else:
        typer.echo(f"{shown_url(store)} is a store now" + (f", with codec {made['codec']}" if made["codec"] else ""))


def compact(store: ExistingStoreOption, as_json: JsonOption = False) -> None:
    """Put the small files of a shared store's catalog together."""
    if not is_url(store):
        raise ConfigurationError(
            f"expected the URL of a shared store, got {store!r}. For a folder: cacheclip store gc."
        )
    look_after(store, lambda kind: kind.compact(store), as_json)
