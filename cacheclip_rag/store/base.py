"""The interface of a chunk-cache store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .codecs import ChunkEntry

__all__ = ["ChunkStore", "StoreStats", "check_limit"]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds and how it has served, since it was opened."""

    entries: int
    """Stored chunk caches."""
    bytes: int
    """Bytes they take."""
    max_bytes: int | None
    """Limit above which the least recently used are evicted; None is no limit."""
    hits: int
    misses: int
    evictions: int

    def to_dict(self) -> dict[str, int | None]:
        return asdict(self)


class ChunkStore(ABC):
    """Maps keys (see :func:`~cacheclip_rag.store.keys.chunk_key`) to entries. Safe to share between threads.

    A missing key is None. A damaged or foreign entry is a miss and one warning, never wrong KV.
    """

    @abstractmethod
    def get(self, key: str) -> ChunkEntry | None:
        """The entry, or None; counts as a use for eviction. Its tensors must not be written to."""

    @abstractmethod
    def put(self, key: str, entry: ChunkEntry) -> None:
        """Keep ``entry``; whole or not at all. May evict others to stay within the limit."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Forget the key; True if it was there."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """All keys, least recently used first."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Sizes and counters."""

    @abstractmethod
    def codec_of(self, key: str) -> str | None:
        """Codec of the entry that ``get`` is expected to find, None if there is none; reads no payload, is no use."""

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.codec_of(key) is not None

    def touch(self, key: str) -> None:
        """Count a use that another tier served, so that eviction here does not take what is popular there."""
        return

    def close(self) -> None:
        """Release handles; the store may be used again afterwards. Does nothing by default."""
        return


def check_limit(max_bytes: int | None) -> int | None:
    from ..errors import ConfigurationError

    if max_bytes is not None and max_bytes < 0:
        raise ConfigurationError(f"max_bytes must be 0 or more, or None for no limit, got {max_bytes}.")
    return max_bytes
