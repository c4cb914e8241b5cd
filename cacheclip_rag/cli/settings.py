"""Settings of engine and documents that agree with a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from cacheclip_ingest.library import MODELS, Library, LibrarySettings

from ..base.paths import expanded
from ..models.load import is_gguf

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
    """The absolute path of a model's folder or GGUF file, because the next command may run in another folder. A file
    keeps its name, by which it is known as GGUF, and its parts are found: it may be a link to another one."""
    path = expanded(str(value))
    if name in MODELS and (path / "config.json").is_file():
        return str(path.resolve())
    return str(path.absolute()) if name in MODELS and is_gguf(path.name) and path.is_file() else value
