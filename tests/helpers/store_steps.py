"""Fails one step of an operation on a store: every write of the catalog, of a payload and of a copy in memory is a
step."""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest

from cacheclip_rag.base.folder import Folder
from cacheclip_rag.store import disk
from cacheclip_rag.store.memory import MemoryBackend

CHANGES = ("INSERT", "UPDATE", "DELETE", "COMMIT", "VACUUM")


def step_numbers() -> Iterator[int]:
    """Which step fails: two of five in turn, and every one with ``CACHECLIP_TEST_ALL=1``."""
    return (number for number in count() if "CACHECLIP_TEST_ALL" in os.environ or number % 5 in (0, 2))


class Steps:
    """Counts steps, and fails the one with a number, or all from it on."""

    def __init__(self, number: int, *, for_good: bool = False) -> None:
        self.number, self.for_good = number, for_good
        self.taken: list[str] = []

    @property
    def has_failed(self) -> bool:
        return len(self.taken) > self.number

    @property
    def failed(self) -> str:
        return self.taken[self.number]

    def take(self, name: str, error: Callable[[], BaseException]) -> None:
        self.taken.append(name)
        count = len(self.taken) - 1
        if count == self.number or (self.for_good and count > self.number):
            raise error()


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_catalog() -> sqlite3.Error:
    found = sqlite3.OperationalError("database or disk is full")
    found.sqlite_errorcode = sqlite3.SQLITE_FULL
    return found


class _Counted(sqlite3.Connection):
    steps: Steps | None = None
    changes = CHANGES

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if _Counted.steps is not None and sql.startswith(_Counted.changes):
            _Counted.steps.take(" ".join(sql.split()[:3]), full_catalog)
        return super().execute(sql, *arguments)


@contextmanager
def counted_catalogs() -> Iterator[None]:
    """Catalogs that are opened in this block have steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=_Counted))
        yield


@contextmanager
def failing(steps: Steps, changes: tuple[str, ...] = CHANGES) -> Iterator[None]:
    """In this block, steps of a store in a folder are counted, and fail; of a catalog, statements that begin so."""
    unlink, replace, write, copy = Folder.unlink, Folder.replace, disk._write_all, MemoryBackend.put

    def unlinking(folder: Folder, name: str) -> bool:
        steps.take("remove a file", full_disk)
        return unlink(folder, name)

    def replacing(folder: Folder, *names: Any) -> None:
        steps.take("rename a file", full_disk)
        replace(folder, *names)

    def writing(file: int, data: memoryview) -> None:
        write(file, data[: data.nbytes // 2])
        steps.take("write a payload", full_disk)
        write(file, data[data.nbytes // 2 :])

    def copying(memory: MemoryBackend, key: str, data: Any) -> None:
        steps.take("copy into memory", MemoryError)
        copy(memory, key, data)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, new in (
            (Folder, "unlink", unlinking),
            (Folder, "replace", replacing),
            (disk, "_write_all", writing),
            (MemoryBackend, "put", copying),
            (_Counted, "steps", steps),
            (_Counted, "changes", changes),
        ):
            patch.setattr(owner, name, new)
        yield
