"""Chunks and their caches: what a chunk is computed behind, where its KV is kept, exact starts of prompts."""
