"""Weights that another program loads from a model's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..models.fingerprint import file_states
from ..models.load import check_unchanged, resolve


@contextmanager
def model_files(name: str) -> Iterator[tuple[object, ...]]:
    """A block in which another program loads a model: gives the states of its files, which
    :attr:`~cacheclip_rag.planning.PlanningRuntime.files` must equal.

    Raises:
        ModelError: at the end of the block, if they have changed meanwhile.
    """
    folder = resolve(name)
    files = file_states(folder)
    yield files
    check_unchanged(file_states(folder), files, name, folder)
