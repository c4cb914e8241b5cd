"""Ingestion of files: documents, passages, embeddings and chunk caches. Only changed documents are processed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.plugins import late_names

if TYPE_CHECKING:
    from .care import check_library as check_library, repair_library as repair_library
    from .documents import Reader as Reader, read_document as read_document
    from .embedding import Embedder as Embedder
    from .job import ingest as ingest, plan_ingestion as plan_ingestion
    from .library import Library as Library, LibrarySettings as LibrarySettings
    from .removal import remove_documents as remove_documents
    from .shared import Commit as Commit, Encode as Encode, encode_table as encode_table
    from .text import DocumentText as DocumentText


__getattr__, __all__ = late_names(
    __name__,
    {
        "care": "check_library repair_library",
        "documents": "Reader read_document",
        "embedding": "Embedder",
        "job": "ingest plan_ingestion",
        "library": "Library LibrarySettings",
        "removal": "remove_documents",
        "shared": "Commit Encode encode_table",
        "text": "DocumentText",
    },
)
