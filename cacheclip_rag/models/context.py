"""What is known of a model without loading it. Nothing here opens a connection."""

from __future__ import annotations

from .load import loader_of


def known_context(name: str) -> int | None:
    """Context of a model in tokens, from a catalogue or a file of the model. None if the model is not on this machine,
    or no file says. Raises OSError, ValueError: the file cannot be read."""
    return loader_of(name).context_tokens


def is_here(name: str) -> bool:
    """Whether a model's files are on this machine. False for runtimes that were registered."""
    return loader_of(name).is_here


def knows_tools(name: str) -> bool | None:
    """Whether the chat template of a model uses tools. None if that is not known without fetching it."""
    return loader_of(name).knows_tools
