"""The chunk-cache store: content-addressed KV of chunks. Nothing here knows a model.

The rest of the package uses :class:`ChunkStore`, through one :class:`TenantStore` per namespace. It is built from these
parts: a :class:`Backend` stores bytes (memory, disk); :class:`Tiers` chains backends; ``codecs`` turns KV into bytes
and back; :class:`Catalog` lists entries, limits, texts and sources; :class:`TextIndex` finds stored texts in a prompt.
"""

from __future__ import annotations

from .ahead import ReadAgain, ReadAhead
from .backend import Backend, Sink
from .catalog import Catalog, Entry
from .chunk_store import ChunkStore, StoreStats, is_store
from .codecs import CODECS, KV, FrameError, StoredKV, decode, encode, frame_bytes, keeps, layer_of, part_of
from .disk import DiskBackend
from .joined import Joined, join
from .keys import chunk_key, text_digest
from .memory import MemoryBackend
from .reader import StoreReader
from .tenant import ReadBuffer, TenantStats, TenantStore
from .texts import TextIndex
from .tiers import Tiers, TierStats

__all__ = [
    "CODECS",
    "KV",
    "Backend",
    "Catalog",
    "ChunkStore",
    "DiskBackend",
    "Entry",
    "FrameError",
    "Joined",
    "MemoryBackend",
    "ReadAgain",
    "ReadAhead",
    "ReadBuffer",
    "Sink",
    "StoreReader",
    "StoreStats",
    "StoredKV",
    "TenantStats",
    "TenantStore",
    "TextIndex",
    "TierStats",
    "Tiers",
    "chunk_key",
    "decode",
    "encode",
    "frame_bytes",
    "is_store",
    "join",
    "keeps",
    "layer_of",
    "part_of",
    "text_digest",
]
