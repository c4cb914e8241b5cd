"""A small SQLite file shared by threads and processes: short statements, WAL, errors in our own words."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import StoreError

__all__ = ["Database"]

_BUSY_TIMEOUT_S = 30.0


class Database:
    """One connection a process, opened at first use (a forked worker opens its own), statements under a lock."""

    def __init__(self, path: Path | None, schema: str) -> None:
        """``path`` None keeps the tables in memory."""
        self._path = path
        self._schema = schema
        self._connection: sqlite3.Connection | None = None
        self._owner_pid = 0
        self._lock = threading.RLock()

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a SELECT."""
        with self._lock:
            try:
                return self._open().execute(sql, arguments).fetchall()
            except sqlite3.Error as error:
                raise self._explain(error) from error

    def execute(self, sql: str, arguments: Sequence[Any] = ()) -> int:
        """Run one statement in its own transaction; returns the number of rows changed."""
        return self.execute_many([(sql, arguments)])

    def execute_many(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> int:
        """Run statements in one transaction, all or none; returns the number of rows changed."""
        with self._lock:
            try:
                connection = self._open()
                with connection:
                    return sum(max(0, connection.execute(sql, arguments).rowcount) for sql, arguments in statements)
            except sqlite3.Error as error:
                raise self._explain(error) from error

    def close(self) -> None:
        with self._lock:
            if self._connection is not None and self._owner_pid == os.getpid() and self._path is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._owner_pid == os.getpid():
            return self._connection
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"cannot create the store folder {self._path.parent}: {error}. Choose another one."
                ) from error
        connection = sqlite3.connect(self._path or ":memory:", timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")  # payloads are re-checked on reading: no fsync per row
        connection.executescript(self._schema)
        self._connection, self._owner_pid = connection, os.getpid()
        return connection

    def _explain(self, error: sqlite3.Error) -> StoreError:
        return StoreError(
            f"the index {self._path} cannot be used: {error}. If the disk is full, free some space; if the file is "
            "damaged, move it away: chunk caches are found again by name, documents by running ingest again."
        )
