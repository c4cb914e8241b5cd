"""A chain of backends, fastest first: reads use the first backend that has the payload, writes go to all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..base.errors import ConfigurationError
from .backend import Backend, Sink
from .memory import MemoryBackend

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from .arena import Arena

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TierStats:
    """Counters of one tier since the store was opened in this process."""

    name: str
    hits: int = 0
    misses: int = 0
    """Look-ups that went on to the next tier, or found nothing."""
    damaged: int = 0
    """Payloads that did not match their checksums."""
    evictions: int = 0
    bytes: int = 0
    """Bytes held now."""
    read_s: float = 0.0
    """Seconds spent reading payloads that were found."""

    def to_dict(self) -> dict[str, str | int | float]:
        return asdict(self)


class Tiers(Backend):
    """A backend made of backends. The last backend holds everything; earlier ones hold copies, up to their limits.

    Raises:
        ConfigurationError: no backend is given.
    """

    name = "tiers"

    def __init__(self, backends: Sequence[Backend]) -> None:
        if not backends:
            raise ConfigurationError("a chain of tiers needs at least one backend, got none.")
        self.backends = tuple(backends)
        self._stats = [TierStats(backend.name) for backend in backends]
        self.gpu_bytes: int | None = None
        """Of the arena of each GPU (:class:`~.arena.Arena`), when it is made."""
        self._arenas: dict[torch.device, Arena] = {}
        self._lock = threading.Lock()
        self.reads_at_once, self.least_read = self.last.reads_at_once, self.last.least_read

    def arena(self, device: torch.device) -> Arena:
        """Copies of payloads in the memory of a GPU."""
        from .arena import Arena

        with self._lock:
            if device not in self._arenas:
                self._arenas[device] = Arena(device, self.gpu_bytes)
            return self._arenas[device]

    @property
    def _copies(self) -> list[Backend | Arena]:
        """What holds nothing but copies."""
        return [*self.backends[:-1], *self.arenas]

    @property
    def arenas(self) -> Sequence[Arena]:
        """Those that were made."""
        with self._lock:
            return [*self._arenas.values()]

    @property
    def last(self) -> Backend:
        """The backend that holds everything."""
        return self.backends[-1]

    def find(self, key: str, sink: Sink, first: int = 0) -> tuple[Buffer, int] | None:
        """A payload and the number of its tier, from ``first`` on, or None. Faster tiers get no copy yet, because the
        payload may be damaged; see :meth:`promote`."""
        for number, (backend, stats) in [*enumerate(zip(self.backends, self._stats, strict=True))][first:]:
            started = time.perf_counter()
            data = backend.read(key, sink)
            if data is not None:
                stats.hits += 1
                stats.read_s += time.perf_counter() - started
                return data, number
            stats.misses += 1
        return None

    def holder(self, key: str) -> Backend:
        """The tier from which a payload would be read; the last one if no other has it. Reads and counts nothing."""
        for backend in self.backends[:-1]:
            if backend.get_many([key]) if backend.in_memory else backend.occupied(key):
                return backend
        return self.last

    @property
    def has_parts(self) -> bool:  # type: ignore[override]
        """Whether payloads that are not in memory can be read in parts."""
        return all(backend.in_memory or backend.has_parts for backend in self.backends)

    def begin(self, key: str, num_bytes: int) -> tuple[Buffer, int, int] | None:
        """As :meth:`head`, of the fastest tier outside memory that has the payload; and the tier's number."""
        for number, backend in enumerate(self.backends):
            if not backend.in_memory and (head := backend.head(key, num_bytes)) is not None:
                return *head, number
        return None

    def read_part(self, key: str, start: int, target: memoryview, tier: int = -1) -> int:
        started = time.perf_counter()
        count = self.backends[tier].read_part(key, start, target)
        self._stats[tier].read_s += time.perf_counter() - started
        return count

    def count_hit(self, tier: int) -> None:
        """Count a payload that was read in parts, and the faster tiers that did not have it."""
        for stats in self._stats[:tier]:
            stats.misses += 1
        self._stats[tier].hits += 1

    def promote(self, key: str, data: Buffer, tier: int) -> None:
        """Copy a payload that was found in ``tier`` to all faster ones."""
        for faster in self.backends[:tier]:
            self._copy(faster, faster.offer, key, data)

    def _copy(self, tier: Backend, write: Callable[[str, Buffer], None], key: str, data: Buffer) -> None:
        """A copy that fails costs no answer and no write: the last tier has the payload."""
        try:
            write(key, data)
        except (OSError, MemoryError) as error:
            logger.warning("tier %s has no copy of chunk cache %s…: %s", tier.name, key[:12], error or type(error))
            with suppress(OSError):
                tier.delete([key])  # an older version must not be read any more

    def drop_copies(self, keys: Iterable[str]) -> None:
        """Remove payloads from all tiers but the last, for instance because another process deleted them there."""
        keys = [*keys]
        for faster in self._copies:
            faster.delete(keys)

    def drop_old_copies(self, unknown: Callable[[Sequence[str]], Iterable[str]]) -> None:
        """Remove copies in memory of what is no longer stored. ``unknown`` says which of some keys are not."""
        for faster in self._copies:
            if faster.in_memory and (keys := [*faster.list()]):
                faster.delete(unknown(keys))

    def count_damaged(self, tier: int) -> None:
        self._stats[tier].damaged += 1

    def count_evictions(self, count: int) -> None:
        self._stats[-1].evictions += count

    def stats(self) -> list[TierStats]:
        """Counters of each arena and each tier, fastest first. The last tier's bytes are in the catalog, and 0 here."""
        for backend, stats in zip(self.backends, self._stats, strict=True):
            if isinstance(backend, MemoryBackend):
                stats.bytes = backend.num_bytes
                if backend is not self.last:
                    stats.evictions = backend.evictions
        arenas = [
            TierStats(f"{each.device}", each.hits, each.misses, evictions=each.evictions, bytes=each.bytes_held)
            for each in self.arenas
        ]
        return [*arenas, *self._stats]

    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        payloads: dict[str, Buffer] = {}
        wanted = [*keys]
        for number, backend in enumerate(self.backends):
            new = backend.get_many([key for key in wanted if key not in payloads])
            for key, data in new.items():
                self.promote(key, data, number)
            payloads.update(new)
        return payloads

    def put(self, key: str, data: Buffer) -> None:
        self.last.put(key, data)  # first: faster tiers serve only durable payloads
        for faster in reversed(self.backends[:-1]):
            self._copy(faster, faster.put, key, data)

    def delete(self, keys: Iterable[str]) -> int:
        removed = [*keys]
        for arena in self.arenas:
            arena.delete(removed)
        counts = [backend.delete(removed) for backend in reversed(self.backends)]
        return counts[0]

    def list(self) -> Iterator[str]:
        return self.last.list()

    def close(self) -> None:
        for backend in self.backends:
            backend.close()

    def head(self, key: str, num_bytes: int) -> tuple[Buffer, int] | None:
        return self.last.head(key, num_bytes)

    def medium(self, key: str) -> str:
        return self.holder(key).medium(key)

    def drop_cached(self, keys: Iterable[str]) -> None:
        keys = [*keys]
        for backend in self.backends:
            backend.drop_cached(keys)

    def occupied(self, key: str) -> int:
        return self.last.occupied(key)

    def round_up(self, num_bytes: int) -> int:
        return self.last.round_up(num_bytes)
