"""Ingestion of files: documents, passages, embeddings and chunk caches. Only changed documents are processed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.plugins import late_names

if TYPE_CHECKING:
    from .care import check_library, repair_library
    from .documents import Reader, read_document
    from .embedding import Embedder
    from .job import ingest, plan_ingestion
    from .library import Library, LibrarySettings
    from .removal import remove_documents
    from .shared import Commit, Encode, encode_table
    from .text import DocumentText

__all__ = [
    "Commit",
    "DocumentText",
    "Embedder",
    "Encode",
    "Library",
    "LibrarySettings",
    "Reader",
    "check_library",
    "encode_table",
    "ingest",
    "plan_ingestion",
    "read_document",
    "remove_documents",
    "repair_library",
]

__getattr__ = late_names(
    __name__,
    {
        "Commit": "shared",
        "DocumentText": "text",
        "Embedder": "embedding",
        "Encode": "shared",
        "Library": "library",
        "LibrarySettings": "library",
        "Reader": "documents",
        "check_library": "care",
        "encode_table": "shared",
        "ingest": "job",
        "plan_ingestion": "job",
        "read_document": "documents",
        "remove_documents": "removal",
        "repair_library": "care",
    },
)
