"""Ingestion of files: documents, passages, embeddings and chunk caches. Only changed documents are processed."""
