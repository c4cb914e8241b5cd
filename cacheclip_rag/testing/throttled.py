"""A storage backend that is as slow as you say, and fails when you say: for tests and for benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ..store.backend import Backend, Sink

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ThrottledBackend(Backend):
    """Reads of another backend, one after the other at a given speed. Waiting takes no processor time.

    >>> ChunkStore(Catalog(folder), Tiers([ThrottledBackend(DiskBackend(folder), bytes_per_s=50e6)]))
    """

    name = "throttled"

    def __init__(
        self,
        backend: Backend,
        *,
        bytes_per_s: float | None = None,
        before_read: Callable[[str, int, int], None] | None = None,
        in_parts: bool = True,
    ) -> None:
        """
        Args:
            bytes_per_s: speed of all readers together; default that of the backend.
            before_read: called before each read with the key, the first byte, and the number of bytes (-1: all). It may
                wait, or raise OSError.
            in_parts: whether payloads can be read in parts, if the backend can do so.
        """
        self.backend, self.bytes_per_s, self._before_read = backend, bytes_per_s, before_read
        self.has_parts = in_parts and backend.has_parts  # type: ignore[misc]
        self._free_at = 0.0
        self._lock = threading.Lock()

    def _wait(self, num_bytes: int) -> None:
        if self.bytes_per_s is None:
            return
        with self._lock:
            until = self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self.bytes_per_s
        time.sleep(max(0.0, until - time.perf_counter()))

    def _asked(self, key: str, start: int, num_bytes: int) -> None:
        if self._before_read is not None:
            self._before_read(key, start, num_bytes)

    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        return self._read_each(keys)

    def read(self, key: str, sink: Sink) -> Buffer | None:
        self._asked(key, 0, -1)
        data = self.backend.read(key, sink)
        self._wait(memoryview(data or b"").nbytes)
        return data

    def read_part(self, key: str, start: int, target: memoryview) -> int:
        self._asked(key, start, target.nbytes)
        count = self.backend.read_part(key, start, target)
        self._wait(count)
        return count

    def head(self, key: str, num_bytes: int) -> tuple[Buffer, int] | None:
        found = self.backend.head(key, num_bytes)
        self._wait(memoryview(found[0]).nbytes if found is not None else 0)
        return found

    def put(self, key: str, data: Buffer) -> None:
        self.backend.put(key, data)

    def delete(self, keys: Iterable[str]) -> int:
        return self.backend.delete(keys)

    def list(self) -> Iterator[str]:
        return self.backend.list()

    def close(self) -> None:
        self.backend.close()

    def occupied(self, key: str) -> int:
        return self.backend.occupied(key)

    def round_up(self, num_bytes: int) -> int:
        return self.backend.round_up(num_bytes)
