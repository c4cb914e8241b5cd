"""Settings of engine and documents that agree with a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from cacheclip_ingest.library import MODELS, Library, LibrarySettings

from ..models.load import loader_of

_NAMES = tuple(each.name for each in fields(LibrarySettings))


def merge_settings(library: Library | None, given: Mapping[str, Any]) -> LibrarySettings:
    """The library's settings (the defaults without a library), overridden by those of ``given`` that they name.

    Raises:
        ConfigurationError: a given setting contradicts the library's.
    """
    known = library.settings if library else None
    chosen = given_settings(given)
    if known and chosen.get("dtype") == "auto":
        del chosen["dtype"]
    settings = replace(known or LibrarySettings(), **chosen)
    if library:
        library.check_settings(settings)
    return settings


def given_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of documents among given ones."""
    return {name: _absolute(name, value) for name, value in given.items() if name in _NAMES}


def _absolute(name: str, value: Any) -> Any:
    """The absolute path of a model's folder or file, because the next command may run in another folder."""
    path = loader_of(value).path if name in MODELS and value else None
    return value if path is None else str(path)
