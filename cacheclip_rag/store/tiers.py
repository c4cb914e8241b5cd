"""A chain of backends, fastest first: reads use the first backend that has the payload, writes go to all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from .backend import Backend

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Tiers"]


class Tiers(Backend):
    """A backend made of backends. The last backend holds everything; earlier ones hold copies, up to their limits.

    Raises:
        ConfigurationError: no backend is given.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        if not backends:
            raise ConfigurationError("a chain of tiers needs at least one backend, got none.")
        self.backends = tuple(backends)

    def find(self, key: str) -> tuple[Buffer, int] | None:
        """A payload and the number of its tier, or None. Faster tiers get no copy yet, because the payload may be
        damaged; see :meth:`promote`."""
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
        for backend in reversed(self.backends):  # the last tier first: faster tiers serve only durable payloads
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
