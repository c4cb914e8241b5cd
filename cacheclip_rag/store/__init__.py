"""The chunk-cache store: content-addressed KV of chunks. Nothing here knows a model.

The rest of the package uses :class:`ChunkStore`, through one :class:`TenantStore` per namespace. It is built from these
parts: a :class:`Backend` stores bytes (memory, disk); :class:`Tiers` chains backends; ``codecs`` turns KV into bytes
and back; :class:`Catalog` lists entries, limits, texts and sources; :class:`TextIndex` finds stored texts in a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.keys import chunk_key, text_digest
from ..base.late import late_names
from ..finding.texts import TextIndex
from .ahead import ReadAgain, ReadAhead
from .backend import Backend, Sink
from .catalog import Catalog
from .chunk_store import ChunkStore, is_store
from .codecs import (
    CODECS,
    KV,
    FrameError,
    StoredKV,
    bytes_of,
    decode_frame,
    encode_frame,
    frame_bytes,
    keeps,
    layer_of,
    part_of,
)
from .disk import CAN_DROP_PAGE_CACHE, PAGE_CACHE, DiskBackend
from .joined import Joined, join
from .memory import MemoryBackend
from .opening import open_chunk_store
from .reader import StoreReader
from .speed import TimedRead, has_room, measure_reads
from .tenant import ReadBuffer, TenantStore
from .tiers import Tiers, TierStats

if TYPE_CHECKING:
    from .care import clear, collect_garbage, repair, verify

__all__ = [
    "CAN_DROP_PAGE_CACHE",
    "CODECS",
    "KV",
    "PAGE_CACHE",
    "Backend",
    "Catalog",
    "ChunkStore",
    "DiskBackend",
    "FrameError",
    "Joined",
    "MemoryBackend",
    "ReadAgain",
    "ReadAhead",
    "ReadBuffer",
    "Sink",
    "StoreReader",
    "StoredKV",
    "TenantStore",
    "TextIndex",
    "TierStats",
    "Tiers",
    "TimedRead",
    "bytes_of",
    "chunk_key",
    "clear",
    "collect_garbage",
    "decode_frame",
    "encode_frame",
    "frame_bytes",
    "has_room",
    "is_store",
    "join",
    "keeps",
    "layer_of",
    "measure_reads",
    "open_chunk_store",
    "part_of",
    "repair",
    "text_digest",
    "verify",
]

__getattr__ = late_names(
    __name__,
    {
        "clear": "care",
        "collect_garbage": "care",
        "repair": "care",
        "verify": "care",
    },
)
