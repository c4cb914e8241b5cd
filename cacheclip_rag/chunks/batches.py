"""Texts in batches that are encoded together. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_CHARACTERS = 2400
"""Characters of a batch: about the tokens of one forward pass. A longer text is a batch of its own."""
_TEXTS = 32


def in_batches(items: Iterable[T], text_of: Callable[[T], str], *, characters: int | None = None) -> Iterator[list[T]]:
    """Divide items, in order, into batches of short texts: of at most ``characters`` characters, or of the default
    number and at most 32 texts. Takes no more items than the next batch needs, and one."""
    most = characters or _CHARACTERS
    batch: list[T] = []
    size = 0
    for item in items:
        length = len(text_of(item))
        if batch and (size + length > most or (characters is None and len(batch) == _TEXTS)):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += length
    if batch:
        yield batch
