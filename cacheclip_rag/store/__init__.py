"""The chunk-cache store: content-addressed KV of chunks, in composable tiers. Nothing here knows a model.

``ChunkStore`` is the interface (five members and a length); ``MemoryStore``, ``DiskStore`` and ``TieredStore`` keep
it; ``TextIndex`` remembers which texts were stored, so that they can be found again inside a prompt,
and ``SourceIndex`` where they come from.
"""

from __future__ import annotations

from .base import ChunkStore, StoreStats
from .codecs import CODECS, ChunkEntry, decode, encode, keeps
from .disk import DiskStore
from .keys import chunk_key
from .memory import MemoryStore
from .sources import SourceIndex
from .texts import TextIndex
from .tiered import TieredStore

__all__ = [
    "CODECS",
    "ChunkEntry",
    "ChunkStore",
    "DiskStore",
    "MemoryStore",
    "StoreStats",
    "SourceIndex",
    "TextIndex",
    "TieredStore",
    "chunk_key",
    "decode",
    "encode",
    "keeps",
]
