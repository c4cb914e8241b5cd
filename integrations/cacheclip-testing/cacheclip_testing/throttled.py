"""A storage backend that is as slow and as far away as you say, and fails when you say: for tests and benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from cacheclip_rag.store import Backend, Sink

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ThrottledBackend(Backend):
    """Reads of another backend over a line of a given latency and speed. Waiting takes no processor time.

    >>> ChunkStore(Catalog(folder), Tiers([ThrottledBackend(DiskBackend(folder), bytes_per_s=50e6)]))
    """

    name = "throttled"

    def __init__(
        self,
        backend: Backend,
        *,
        bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        reads_at_once: int = 1,
        before_read: Callable[[str, int, int], None] | None = None,
        in_parts: bool = True,
    ) -> None:
        """
        Args:
            bytes_per_s: speed of all readers together; default that of the backend.
            latency_s: before the first byte of each read.
            reads_at_once: above 1, reads are as large as those of object storage.
            before_read: called before each read with the key, the first byte, and the number of bytes (-1: all). It may
                wait, or raise OSError.
            in_parts: whether payloads can be read in parts, if the backend can do so.
        """
        self.backend, self.bytes_per_s, self._before_read = backend, bytes_per_s, before_read
        self.latency_s, self.reads_at_once = latency_s, reads_at_once
        self.least_read = 1 << 20 if reads_at_once > 1 else backend.least_read
        self.has_parts = in_parts and backend.has_parts  # type: ignore[misc]
        self._free_at = 0.0
        self._lock = threading.Lock()

    def _wait(self, num_bytes: int) -> None:
        if self.bytes_per_s is None and not self.latency_s:
            return
        arrives = time.perf_counter() + self.latency_s
        with self._lock:
            until = max(self._free_at, arrives) + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)
            self._free_at = until if self.bytes_per_s else 0.0
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
        head = self.backend.head(key, num_bytes)
        self._wait(memoryview(head[0]).nbytes if head is not None else 0)
        return head

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
