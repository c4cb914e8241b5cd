"""What a caller gives: a prompt, and the documents in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..runtime.base import Message

__all__ = ["Documents", "Prompt"]

Prompt = str | Sequence[Message]
Documents = Iterable[str] | Mapping[str, Iterable[tuple[str, str]]]
"""Chunk texts known to be in a prompt. A mapping also gives each text's ``(source, document)`` pairs, as in
:meth:`CacheClipEngine.precompute` (the document may be empty). Texts stored after an answer get these sources."""
