"""Decisions that need no tensor: the method, the reused chunks, and reasons against reuse."""
