"""Prompts as segments, and the layout of their tokens."""
