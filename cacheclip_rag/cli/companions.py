"""What other distributions keep in stores beside chunk caches, such as documents: whom commands ask about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..config import EngineConfig


class Companion(Protocol):
    """A distribution that keeps something in stores. It is asked about every store, also about those in which it keeps
    nothing, and then answers with None or nothing; it raises StoreError if what it keeps cannot be used."""

    def config(self, store: str, typed: Mapping[str, Any]) -> EngineConfig | None:
        """Settings of an engine on a store, as what is kept there needs them, with those that the user gave; None:
        nothing is kept in this store.

        Args:
            store: a folder or URL.
            typed: settings of the engine by name, only those that were given.

        Raises:
            ConfigurationError: what was given contradicts what is kept.
        """

    def counts(self, folder: Path) -> dict[str, int]:
        """How many of each thing, for ``cacheclip store stats``."""

    def problems(self, folder: Path) -> list[str]:
        """What is wrong with its files, in sentences, for ``cacheclip store verify``. Changes nothing."""

    def repair(self, folder: Path) -> list[str]:
        """Mend its files, for ``cacheclip store repair``. Returns what was done, in sentences."""

    def texts(self, folder: Path) -> Iterable[str]:
        """Its texts, for ``cacheclip explain-miss``."""


COMPANIONS: list[Companion] = []
"""Of the distributions whose commands were loaded."""
