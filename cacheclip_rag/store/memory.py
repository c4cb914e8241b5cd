"""Payloads in the memory of this process; the least recently used are evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..base.errors import ConfigurationError
from .backend import Backend
from .codecs import new_memory, pins_memory

if TYPE_CHECKING:
    from typing_extensions import Buffer


class MemoryBackend(Backend):
    """Holds up to ``max_bytes`` bytes (None: no limit). A payload larger than the limit is not stored.

    Raises:
        ConfigurationError: a limit below 0.
    """

    name = "memory"
    in_memory = True

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = check_limit(max_bytes)
        self._payloads: OrderedDict[str, tuple[memoryview, int]] = OrderedDict()
        """With the bytes that each takes."""
        self.num_bytes = 0
        """Bytes held."""
        self.evictions = 0
        """Payloads dropped to stay within the limit."""
        self._lock = threading.Lock()

    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        payloads: dict[str, Buffer] = {}
        with self._lock:
            for key in keys:
                if key in self._payloads:
                    self._payloads.move_to_end(key)
                    payloads[key] = self._payloads[key][0]
        return payloads

    def put(self, key: str, data: Buffer) -> None:
        size, pins = memoryview(data).nbytes, pins_memory()
        takes = 1 << (size - 1).bit_length() if pins and size else size  # PyTorch's page-locked memory: powers of two
        if self._max_bytes is not None and takes > self._max_bytes:
            self.delete([key])  # an older version must not be read any more
            return
        # of its own: the caller's buffer may be a mapped file, or change later. A GPU copies from page-locked memory
        # without waiting
        own = memoryview(new_memory(size) if pins else bytearray(size))
        own[:] = memoryview(data).cast("B")
        with self._lock:
            self._remove(key)
            self._payloads[key] = own, takes
            self.num_bytes += takes
            while self._max_bytes is not None and self.num_bytes > self._max_bytes:
                self._remove(next(iter(self._payloads)))
                self.evictions += 1

    def delete(self, keys: Iterable[str]) -> int:
        with self._lock:
            return sum([self._remove(key) for key in keys])

    def list(self) -> Iterator[str]:
        with self._lock:
            return iter([*self._payloads])

    def close(self) -> None:
        """Nothing to release: the payloads stay."""

    def _remove(self, key: str) -> bool:
        payload = self._payloads.pop(key, None)
        self.num_bytes -= payload[1] if payload else 0
        return payload is not None


def check_limit(max_bytes: int | None) -> int | None:
    """Return the limit; raise ConfigurationError if it is negative."""
    if max_bytes is not None and max_bytes < 0:
        raise ConfigurationError(f"max_bytes must be 0 or more, or None for no limit, got {max_bytes}.")
    return max_bytes
