"""Chunks: chunk contexts, chunk caches of a model, texts and their sources."""
