"""Settings of engine and documents that agree with a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from cacheclip_rag import EngineConfig
from cacheclip_rag.plugins import model_place

from ..library import MODELS, Library, LibrarySettings

_NAMES = tuple(each.name for each in fields(LibrarySettings))


def merge_settings(library: Library, given: Mapping[str, Any]) -> LibrarySettings:
    """The library's settings (the defaults in a new library), overridden by those of ``given`` that they name.

    Raises:
        ConfigurationError: a given setting contradicts the library's.
    """
    known = library.settings
    chosen = given_settings(given)
    if known and chosen.get("dtype") == "auto":
        del chosen["dtype"]
    settings = replace(known or LibrarySettings(), **chosen)
    library.check_settings(settings)
    return settings


def given_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of documents among given ones; of models that are folders or files, their absolute paths."""
    return {name: model_place(value) if name in MODELS else value for name, value in given.items() if name in _NAMES}


def config_of(library: Library, given: Mapping[str, Any], **own: Any) -> EngineConfig:
    """Settings of an engine for the documents of a store. Where nothing is given, those of the documents hold.

    Args:
        given: settings of the engine by name, the store among them.
        own: settings that the command chooses itself; they may differ from those of the documents.

    Raises:
        ConfigurationError: what was given contradicts what the documents were stored with.
    """
    given = {name: value for name, value in given.items() if name not in own}
    return replace(merge_settings(library, given).engine_config(**given), **own)
