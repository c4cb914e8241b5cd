"""Backends in a row, fastest first: read from the first that has a payload, write to all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from .backend import Backend

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Tiers"]


class Tiers(Backend):
    """A backend made of backends. The last one holds everything; those before it hold copies, up to their own limits.

    Raises:
        ConfigurationError: no backend is given.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        if not backends:
            raise ConfigurationError("a chain of tiers needs at least one backend, got none.")
        self.backends = tuple(backends)

    def find(self, key: str) -> tuple[Buffer, int] | None:
        """A payload and the number of the tier that has it, or None. Nothing is copied to faster tiers yet: what comes
        from a slow one may be damaged."""
        for number, backend in enumerate(self.backends):
            found = backend.get_many([key])
            if key in found:
                return found[key], number
        return None

    def promote(self, key: str, data: Buffer, tier: int) -> None:
        """Copy a payload that was found in ``tier`` to all faster ones."""
        for faster in self.backends[:tier]:
            faster.put(key, data)

    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        found: dict[str, Buffer] = {}
        wanted = [*keys]
        for number, backend in enumerate(self.backends):
            new = backend.get_many([key for key in wanted if key not in found])
            for key, data in new.items():
                self.promote(key, data, number)
            found.update(new)
        return found

    def put(self, key: str, data: Buffer) -> None:
        for backend in reversed(self.backends):  # the last first: what a faster tier serves is already durable
            backend.put(key, data)

    def delete(self, keys: Iterable[str]) -> int:
        removed = [*keys]
        counts = [backend.delete(removed) for backend in reversed(self.backends)]
        return counts[0]

    def list(self) -> Iterator[str]:
        return self.backends[-1].list()

    def close(self) -> None:
        for backend in self.backends:
            backend.close()
