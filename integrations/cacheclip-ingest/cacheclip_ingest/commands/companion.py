"""What commands of the core ask about the documents of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheclip_rag.plugins import expanded, is_url

if TYPE_CHECKING:
    from cacheclip_rag import EngineConfig

    from ..library import Library


class DocumentsBeside:
    """The documents beside chunk caches, a :class:`~cacheclip_rag.plugins.Companion`. Imports what it needs when it is
    asked, because it is made whenever a command starts."""

    def config(self, store: str, typed: Mapping[str, Any]) -> EngineConfig | None:
        from .settings import config_of, given_settings

        if is_url(store):
            from ..shared import read_settings

            known = read_settings(store)
            return replace(known, **given_settings(typed)).engine_config(**{**typed, "store": store}) if known else None
        with _library(expanded(store)) as library:
            return config_of(library, {**typed, "store": store}) if library else None

    def counts(self, folder: Path) -> dict[str, int]:
        from ..library import Library

        with Library(folder) as library:
            return {"documents": len(library.documents()), "passages": len(library.passages())}

    def problems(self, folder: Path) -> list[str]:
        from ..care import check_library

        return check_library(folder)

    def repair(self, folder: Path) -> list[str]:
        from ..care import repair_library

        return repair_library(folder)

    def texts(self, folder: Path) -> Iterable[str]:
        with _library(folder) as library:
            return [text for _, _, text in library.passages()] if library else []


@contextmanager
def _library(folder: Path) -> Iterator[Library | None]:
    """The documents of a folder; None if it has none."""
    from ..library import FILE_NAME, Library

    if not (folder / FILE_NAME).is_file():
        yield None
        return
    with Library(folder) as library:
        yield library
