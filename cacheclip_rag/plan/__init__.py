"""Decisions that need no tensor: what is reused, by which method, and why not."""
