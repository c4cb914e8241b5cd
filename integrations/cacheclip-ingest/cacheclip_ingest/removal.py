"""Takes documents out of a store."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from cacheclip_rag import CacheClipEngine, ConfigurationError, DocumentError, StoreError
from cacheclip_rag.plugins import did_you_mean, expanded, is_url

from .documents import printable
from .library import Library
from .survey import is_in


def remove_documents(
    store: str | Path, documents: Sequence[str] = (), *, under: str | None = None, namespace: str | None = None
) -> list[str]:
    """Take documents out of a store folder, or out of a shared store; returns their paths and URLs. KV that no other
    document needs goes too: at once in a folder, with the next cleaning in a shared store. Loads no model.

    Args:
        documents: paths or URLs of files that were ingested; they need not exist any more.
        under: takes all documents below this folder or URL.
        namespace: tenant; default the one that the store was made for.

    Raises:
        ConfigurationError: nothing was named, or ``namespace`` is not that of the store folder.
        DocumentError: the store has no such document; then nothing is removed.
        StoreError: there is no store, or it cannot be used.
    """
    if under == "" or not (documents or under):
        raise ConfigurationError("expected documents, or a path that they are under (--under PATH), got none.")
    if is_url(store):
        from .shared import remove_shared

        return remove_shared(str(store), namespace, lambda known: _chosen(known, documents, under))
    with Library.open(store) as library:
        return _remove_from(library, store, documents, under, namespace)


def _remove_from(
    library: Library, store: str | Path, documents: Sequence[str], under: str | None, namespace: str | None
) -> list[str]:
    assert library.settings is not None, "it was opened"
    if namespace not in (None, library.settings.namespace):
        raise ConfigurationError(
            f"the documents of {store} belong to namespace {library.settings.namespace!r}, not to {namespace!r}. Leave "
            "it out."
        )
    gone = _chosen(library.documents(), documents, under)
    done: list[str] = []
    with CacheClipEngine(library.settings.engine_config(store)) as engine:
        try:
            for name in gone:
                library.remove(name, engine.release)
                done.append(name)
        except StoreError as error:
            removed = ", ".join(map(printable, done)) or "none"
            raise StoreError(f"{error} Removed already: {removed}. Run it again for the others.") from error
    return gone


def _chosen(known: Collection[str], documents: Sequence[str], under: str | None) -> list[str]:
    """Documents of a store that were named. Raises DocumentError."""
    found: set[str] = set()
    for given in documents:
        names = {given, *_names(given)}.intersection(known)
        if not names:
            raise DocumentError(
                f"the store has no document {printable(given)}, so nothing is removed.{_hint(given, known)}"
            )
        found |= names
    if under is not None:
        below = _below(under, known)
        if not below:
            raise DocumentError(f"the store has no documents under {printable(under)}, so nothing is removed.")
        found |= below
    return sorted(found)


def _hint(given: str, known: Collection[str]) -> str:
    if below := _below(given, known):
        return f" It is a folder of {len(below)} documents: take them out with --under {printable(given)}."
    return did_you_mean(_names(given)[-1], known)


def _below(folder: str, known: Collection[str]) -> set[str]:
    return {name for name in known if any(is_in(name, root) for root in _names(folder))}


def _names(given: str) -> list[str]:
    """What a document or folder may be recorded as."""
    path = expanded(given)
    return [given.rstrip("/")] if is_url(given) else [os.path.realpath(path), os.path.abspath(path)]
