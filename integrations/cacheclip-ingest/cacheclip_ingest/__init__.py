"""Ingestion of files: documents, passages, embeddings and chunk caches. Only changed documents are processed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.plugins import late_names

if TYPE_CHECKING:
    from .embedding import Embedder
    from .job import ingest, plan_ingestion
    from .library import Library, LibrarySettings
    from .shared import Commit, Encode, encode_table

__all__ = ["Commit", "Embedder", "Encode", "Library", "LibrarySettings", "encode_table", "ingest", "plan_ingestion"]

__getattr__ = late_names(
    __name__,
    {
        "Commit": "shared",
        "Embedder": "embedding",
        "Encode": "shared",
        "Library": "library",
        "LibrarySettings": "library",
        "encode_table": "shared",
        "ingest": "job",
        "plan_ingestion": "job",
    },
)
