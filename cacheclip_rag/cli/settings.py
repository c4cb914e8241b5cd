"""Settings of engine and documents that agree with a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..ingest.embedding import DEFAULT_EMBEDDING
from ..ingest.library import Library, LibrarySettings
from .tables import CHUNK_TOKENS

__all__ = ["DEFAULT_SETTINGS", "engine_config", "merge_settings"]

_DEFAULTS = EngineConfig()
DEFAULT_SETTINGS = LibrarySettings(
    primary=_DEFAULTS.primary,
    auxiliary=_DEFAULTS.auxiliary,
    embedding=DEFAULT_EMBEDDING,
    dtype=_DEFAULTS.dtype,
    namespace=_DEFAULTS.namespace,
    chunk_tokens=CHUNK_TOKENS,
    overlap_tokens=0,
    chunk_context=_DEFAULTS.chunk_context,
)

_NAMES = tuple(each.name for each in fields(LibrarySettings))
_MODELS = ("primary", "auxiliary", "embedding")


def merge_settings(library: Library | None, given: Mapping[str, Any]) -> LibrarySettings:
    """The library's settings (the defaults without a library), overridden by those of ``given`` that they name.

    Raises:
        ConfigurationError: a given setting contradicts the library's.
    """
    known = library.settings if library else None
    chosen = {name: _absolute(name, value) for name, value in given.items() if name in _NAMES}
    if known and chosen.get("dtype") == "auto":
        del chosen["dtype"]
    settings = replace(known or DEFAULT_SETTINGS, **chosen)
    if library:
        library.check_settings(settings)
    return settings


def _absolute(name: str, value: Any) -> Any:
    """The absolute path of a model's folder, because the next command may run in another folder."""
    folder = Path(str(value)).expanduser()
    return str(folder.resolve()) if name in _MODELS and (folder / "config.json").is_file() else value


def engine_config(settings: LibrarySettings, store: str, **options: object) -> EngineConfig:
    """Settings of an engine for a library, which fixes some of them; ``options`` are those of the others."""
    fixed = {name: getattr(settings, name) for name in _NAMES if hasattr(_DEFAULTS, name)}
    return EngineConfig.from_options(None, {**options, **fixed, "store": store})
