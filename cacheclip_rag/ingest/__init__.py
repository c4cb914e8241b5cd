"""Ingestion of files: documents, passages, embeddings and chunk caches. Only changed documents are processed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .embedding import Embedder
    from .job import ingest, plan_ingestion
    from .library import Library, LibrarySettings

__all__ = ["Embedder", "Library", "LibrarySettings", "ingest", "plan_ingestion"]

__getattr__ = late_names(
    __name__,
    {
        "Embedder": "embedding",
        "Library": "library",
        "LibrarySettings": "library",
        "ingest": "job",
        "plan_ingestion": "job",
    },
)
