"""Ingestion: files to documents to passages, their embeddings and their chunk caches, only what changed."""
