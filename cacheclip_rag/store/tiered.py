"""Tiers in a row: read from the first that has it, promote to those before, write to all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import ConfigurationError
from .base import ChunkStore, StoreStats
from .codecs import ChunkEntry

__all__ = ["TieredStore"]


class TieredStore(ChunkStore):
    """A store made of stores, fastest first. Sizes and keys are the last tier's, which holds everything."""

    def __init__(self, tiers: Sequence[ChunkStore]) -> None:
        if not tiers:
            raise ConfigurationError("a tiered store needs at least one tier, got none.")
        self.tiers = tuple(tiers)
        self._hits = self._misses = 0

    def get(self, key: str) -> ChunkEntry | None:
        for number, tier in enumerate(self.tiers):
            entry = tier.get(key)
            if entry is not None:
                for faster in self.tiers[:number]:
                    faster.put(key, entry)
                for slower in self.tiers[number + 1 :]:
                    slower.touch(key)
                self._hits += 1
                return entry
        self._misses += 1
        return None

    def put(self, key: str, entry: ChunkEntry) -> None:
        for tier in reversed(self.tiers):  # the last tier first: what a faster tier shows is already durable
            tier.put(key, entry)

    def delete(self, key: str) -> bool:
        return any([tier.delete(key) for tier in self.tiers])

    def keys(self) -> Iterator[str]:
        return self.tiers[-1].keys()

    def stats(self) -> StoreStats:
        last = self.tiers[-1].stats()
        return StoreStats(last.entries, last.bytes, last.max_bytes, self._hits, self._misses, last.evictions)

    def codec_of(self, key: str) -> str | None:
        return next((codec for tier in self.tiers if (codec := tier.codec_of(key)) is not None), None)

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
