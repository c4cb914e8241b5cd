"""Names of earlier versions that are gone, each with what to use instead. They are refused for one version with their
sentence; after it, as any unknown name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .errors import ConfigurationError

__all__ = ["METHODS", "OPTIONS", "SETTINGS", "refuse_removed"]

METHODS: dict[str, str] = {}
"""Presets, by name."""

SETTINGS: dict[str, str] = {
    "chunk_context=auto": "chunk_context='auto' is gone: use chunk_context='passages'.",
    "chunk_context=trained": "chunk_context='trained' is gone: use chunk_context='passages'.",
}
"""Settings of :class:`~cacheclip_rag.config.EngineConfig`, by name, or their values, as ``name=value``."""

OPTIONS: dict[str, str] = {}
"""Options and commands of the command line; options with their dashes."""


def refuse_removed(given: Iterable[str], table: Mapping[str, str]) -> None:
    """Raise ConfigurationError with the sentence of each ``given`` name that is in ``table``."""
    found = [table[name] for name in given if name in table]
    if found:
        raise ConfigurationError(" ".join(found))
