"""The chunk-cache store: content-addressed KV of chunks. Nothing here knows a model.

The rest of the package uses a :class:`TieredStore`, through one :class:`TenantStore` per namespace. It is built from
these parts: a :class:`Backend` stores bytes (memory, disk); :class:`Tiers` chains backends; ``codecs`` turns KV into
bytes and back; a :class:`CatalogView` lists entries, texts and sources; :class:`TextIndex` finds stored texts in a
prompt. :class:`ChunkStore` is the one in a folder, whose :class:`Catalog` also has limits; what is behind a URL is
opened by a :class:`StoreKind` of another distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.keys import FRAME_VERSION, chunk_key, is_key, text_digest
from ..base.late import late_names
from ..finding.texts import TextIndex, text_row
from .ahead import ReadAgain, ReadAhead
from .backend import Backend, Sink
from .catalog import Catalog, SqliteCatalog, erase
from .chunk_store import ChunkStore, is_store
from .codecs import (
    CODECS,
    KV,
    Frame,
    FrameError,
    OtherVersionError,
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
from .entries import Entry, Total
from .joined import Joined, join
from .memory import MemoryBackend
from .opening import StoreKind, TenantsError, open_chunk_store, store_kind
from .reader import StoreReader
from .reading_pool import each_in_pool, later
from .sources import Sources
from .tenant import ReadBuffer, TenantStore
from .tiered import StoreStats, TieredStore
from .tiers import Tiers, TierStats
from .view import CatalogView, SourcesView

if TYPE_CHECKING:
    from ..base.database import (
        Database as Database,
        FormatError as FormatError,
        OutageWarning as OutageWarning,
        may_be_whole as may_be_whole,
        set_aside as set_aside,
    )
    from ..base.tensor_files import (
        READ_ERRORS as READ_ERRORS,
        read_tensors as read_tensors,
        write_tensors as write_tensors,
    )
    from .care import clear as clear, collect_garbage as collect_garbage, repair as repair, verify as verify


__getattr__, _LATE = late_names(
    __name__,
    {
        "..base.database": "Database FormatError OutageWarning may_be_whole set_aside",
        "..base.tensor_files": "READ_ERRORS read_tensors write_tensors",
        "care": "clear collect_garbage repair verify",
    },
)
__all__ = [
    "CAN_DROP_PAGE_CACHE",
    "CODECS",
    "FRAME_VERSION",
    "KV",
    "PAGE_CACHE",
    "Backend",
    "Catalog",
    "CatalogView",
    "ChunkStore",
    "DiskBackend",
    "Entry",
    "Frame",
    "FrameError",
    "Joined",
    "MemoryBackend",
    "OtherVersionError",
    "ReadAgain",
    "ReadAhead",
    "ReadBuffer",
    "Sink",
    "Sources",
    "SourcesView",
    "SqliteCatalog",
    "StoreKind",
    "StoreReader",
    "StoreStats",
    "StoredKV",
    "TenantStore",
    "TenantsError",
    "TextIndex",
    "TierStats",
    "TieredStore",
    "Tiers",
    "Total",
    "bytes_of",
    "chunk_key",
    "decode_frame",
    "each_in_pool",
    "encode_frame",
    "erase",
    "frame_bytes",
    "is_key",
    "is_store",
    "join",
    "keeps",
    "later",
    "layer_of",
    "open_chunk_store",
    "part_of",
    "store_kind",
    "text_digest",
    "text_row",
    *_LATE,
]
