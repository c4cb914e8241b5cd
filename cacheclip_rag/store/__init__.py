"""The chunk-cache store: content-addressed KV of chunks. Nothing here knows a model.

The rest of the package uses a :class:`TieredStore`, through one :class:`TenantStore` per namespace. It is built from
these parts: a :class:`Backend` stores bytes (memory, disk); :class:`Tiers` chains backends; ``codecs`` turns KV into
bytes and back; a :class:`CatalogView` lists entries, texts and sources; :class:`TextIndex` finds stored texts in a
prompt. :class:`ChunkStore` is the one in a folder, whose :class:`Catalog` also has limits; what is behind a URL is
opened by a :class:`StoreKind` of another distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.names import late_names

if TYPE_CHECKING:
    from ..base.database import (
        Database as Database,
        OutageWarning as OutageWarning,
        may_be_whole as may_be_whole,
    )
    from ..base.keys import (
        FRAME_VERSION as FRAME_VERSION,
        chunk_key as chunk_key,
        is_key as is_key,
        text_digest as text_digest,
    )
    from ..base.sqlite_file import FormatError as FormatError, set_aside as set_aside
    from ..base.tensor_files import (
        READ_ERRORS as READ_ERRORS,
        read_tensors as read_tensors,
        write_tensors as write_tensors,
    )
    from ..finding.common_parts import LEAST_SURE as LEAST_SURE
    from ..finding.texts import TextIndex as TextIndex, TextRow as TextRow, text_row as text_row
    from .ahead import ReadAgain as ReadAgain, ReadAhead as ReadAhead
    from .arena import Arena as Arena, Gather as Gather
    from .backend import Backend as Backend, Sink as Sink
    from .catalog import (
        CATALOG_FILE as CATALOG_FILE,
        Catalog as Catalog,
        SqliteCatalog as SqliteCatalog,
        erase as erase,
    )
    from .chunk_store import ChunkStore as ChunkStore, is_store as is_store
    from .codecs import (
        CODECS as CODECS,
        KV as KV,
        Frame as Frame,
        FrameError as FrameError,
        KVShape as KVShape,
        LayerKV as LayerKV,
        LayerShape as LayerShape,
        OtherVersionError as OtherVersionError,
        StoredKV as StoredKV,
        bytes_of as bytes_of,
        decode_frame as decode_frame,
        encode_frame as encode_frame,
        frame_bytes as frame_bytes,
        keeps as keeps,
        layer_of as layer_of,
        layer_shapes as layer_shapes,
        part_of as part_of,
        shape_of as shape_of,
        upload as upload,
    )
    from .disk import CAN_DROP_PAGE_CACHE as CAN_DROP_PAGE_CACHE, PAGE_CACHE as PAGE_CACHE, DiskBackend as DiskBackend
    from .entries import COLUMNS as COLUMNS, Entry as Entry, Total as Total, next_row as next_row
    from .eviction import EVERYONE as EVERYONE, LEARNED as LEARNED
    from .joined import COPIES_BESIDE as COPIES_BESIDE, Joined as Joined, join as join
    from .memory import MemoryBackend as MemoryBackend
    from .opening import (
        StoreKind as StoreKind,
        TenantsError as TenantsError,
        open_chunk_store as open_chunk_store,
        store_kind as store_kind,
    )
    from .reader import StoreReader as StoreReader
    from .reading_pool import each_in_pool as each_in_pool, later as later
    from .sources import Sources as Sources
    from .tenant import ReadBuffer as ReadBuffer, TenantStore as TenantStore
    from .tiered import StoreStats as StoreStats, TieredStore as TieredStore
    from .tiers import Tiers as Tiers, TierStats as TierStats
    from .view import CatalogView as CatalogView, SourcesView as SourcesView


__getattr__, __all__ = late_names(
    __name__,
    {
        "..base.database": "Database OutageWarning may_be_whole",
        "..base.keys": "FRAME_VERSION chunk_key is_key text_digest",
        "..base.sqlite_file": "FormatError set_aside",
        "..base.tensor_files": "READ_ERRORS read_tensors write_tensors",
        "..finding.common_parts": "LEAST_SURE",
        "..finding.texts": "TextIndex TextRow text_row",
        "ahead": "ReadAgain ReadAhead",
        "arena": "Arena Gather",
        "backend": "Backend Sink",
        "catalog": "CATALOG_FILE Catalog SqliteCatalog erase",
        "chunk_store": "ChunkStore is_store",
        "codecs": (
            "CODECS KV Frame FrameError KVShape LayerKV LayerShape OtherVersionError StoredKV bytes_of decode_frame "
            "encode_frame frame_bytes keeps layer_of layer_shapes part_of shape_of upload"
        ),
        "disk": "CAN_DROP_PAGE_CACHE PAGE_CACHE DiskBackend",
        "entries": "COLUMNS Entry Total next_row",
        "eviction": "EVERYONE LEARNED",
        "joined": "COPIES_BESIDE Joined join",
        "memory": "MemoryBackend",
        "opening": "StoreKind TenantsError open_chunk_store store_kind",
        "reader": "StoreReader",
        "reading_pool": "each_in_pool later",
        "sources": "Sources",
        "tenant": "ReadBuffer TenantStore",
        "tiered": "StoreStats TieredStore",
        "tiers": "Tiers TierStats",
        "view": "CatalogView SourcesView",
    },
)
