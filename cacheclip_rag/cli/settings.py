"""From command-line options to settings of engine and library that agree with the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..ingest.library import Library, LibrarySettings
from ..models.packaged.catalogue import DEFAULT_AUXILIARY, DEFAULT_EMBEDDING, DEFAULT_PRIMARY

__all__ = ["DEFAULT_SETTINGS", "config_of_models", "engine_config", "merge_settings", "parse_auxiliary"]

DEFAULT_SETTINGS = LibrarySettings(
    primary=DEFAULT_PRIMARY,
    auxiliary=DEFAULT_AUXILIARY,
    embedding=DEFAULT_EMBEDDING,
    dtype="float32",
    namespace="default",
    chunk_tokens=512,
    overlap_tokens=0,
    chunk_context=EngineConfig().chunk_context,
)


_MODEL_OPTIONS = ("primary", "auxiliary", "embedding")


def parse_auxiliary(name: str | None) -> str | None:
    """``none`` on the command line means no auxiliary model."""
    return None if name == "none" else name


def config_of_models(
    primary: str | None, auxiliary: str | None, dtype: str | None, chunk_context: str | None = None, **settings: Any
) -> EngineConfig:
    """Settings of an engine for a command that measures models, without a library. None: the default.

    Args:
        auxiliary: as on the command line, where ``none`` means no auxiliary model.
    """
    return EngineConfig(
        primary=primary or DEFAULT_SETTINGS.primary,
        auxiliary=parse_auxiliary(auxiliary) if auxiliary else DEFAULT_SETTINGS.auxiliary,
        dtype=dtype or DEFAULT_SETTINGS.dtype,
        chunk_context=chunk_context or DEFAULT_SETTINGS.chunk_context,
        **settings,
    )


def merge_settings(library: Library | None, **given: str | int | None) -> LibrarySettings:
    """The library's settings (the defaults without a library), overridden by the given options.

    Raises:
        ConfigurationError: an option contradicts the library's settings.
    """
    known = library.settings if library else None
    chosen = {name: _absolute(name, value) for name, value in given.items() if value is not None}
    if "auxiliary" in chosen:
        chosen["auxiliary"] = parse_auxiliary(str(chosen["auxiliary"]))  # type: ignore[assignment]
    settings = replace(known or DEFAULT_SETTINGS, **chosen)  # type: ignore[arg-type]
    if library:
        library.check_settings(settings)
    return settings


def _absolute(option: str, value: str | int) -> str | int:
    """The absolute path of a model's folder, because the next command may run in another folder."""
    folder = Path(str(value)).expanduser()
    return str(folder.resolve()) if option in _MODEL_OPTIONS and (folder / "config.json").is_file() else value


def engine_config(settings: LibrarySettings, store: str, *, device: str, **options: object) -> EngineConfig:
    """Engine settings for a library."""
    base = EngineConfig(
        primary=settings.primary,
        auxiliary=settings.auxiliary,
        store=store,
        namespace=settings.namespace,
        dtype=settings.dtype,
        chunk_context=settings.chunk_context,
        codec=settings.codec,
        device=device,
    )
    return EngineConfig.from_options(base, options)
