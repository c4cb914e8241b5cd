"""Chunks: chunk contexts, chunk caches of a model, and the library of texts and sources."""
