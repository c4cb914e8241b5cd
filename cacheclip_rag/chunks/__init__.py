"""Chunks: chunk contexts, chunk caches of a model, the library of texts and sources, and the prefix cache."""
