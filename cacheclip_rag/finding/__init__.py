"""Stored texts, and parts of them, found in prompts. Knows no model."""
