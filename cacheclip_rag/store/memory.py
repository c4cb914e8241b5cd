"""The memory tier: entries in this process, least recently used evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from .base import ChunkStore, StoreStats, check_limit
from .codecs import ChunkEntry

__all__ = ["MemoryStore"]


class MemoryStore(ChunkStore):
    """Entries in memory up to ``max_bytes`` (None: no limit). An entry larger than the limit is not kept."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = check_limit(max_bytes)
        self._entries: OrderedDict[str, ChunkEntry] = OrderedDict()
        self._bytes = self._hits = self._misses = self._evictions = 0
        self._lock = threading.RLock()

    def get(self, key: str) -> ChunkEntry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return entry

    def put(self, key: str, entry: ChunkEntry) -> None:
        if self._max_bytes is not None and entry.num_bytes > self._max_bytes:
            self.delete(key)  # an older version must not go on being served
            return
        # A tensor read by another tier may be a view of a mapped file: keep our own copy.
        own = ChunkEntry({name: tensor.clone() for name, tensor in entry.tensors.items()}, entry.codec)
        with self._lock:
            self.delete(key)
            self._entries[key] = own
            self._bytes += own.num_bytes
            while self._max_bytes is not None and self._bytes > self._max_bytes:
                _, evicted = self._entries.popitem(last=False)
                self._bytes -= evicted.num_bytes
                self._evictions += 1

    def touch(self, key: str) -> None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)

    def delete(self, key: str) -> bool:
        with self._lock:
            entry = self._entries.pop(key, None)
            self._bytes -= entry.num_bytes if entry else 0
            return entry is not None

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._entries))

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                len(self._entries), self._bytes, self._max_bytes, self._hits, self._misses, self._evictions
            )

    def codec_of(self, key: str) -> str | None:
        with self._lock:
            entry = self._entries.get(key)
            return entry.codec if entry else None
