"""A small SQLite file shared by threads and processes: short statements, WAL, errors of this package."""

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
_SCHEMA_VERSION = 3
"""Increase this number when a table changes. Files of other versions are refused."""


class Database:
    """One connection per process, opened at first use (also in a forked worker). A lock protects statements."""

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

    def execute_at_once(self, sql: str, arguments: Sequence[Any] = ()) -> int:
        """Run one statement, or raise StoreError at once if another process is writing; returns the number of rows
        changed."""
        with self._lock:
            try:
                connection = self._open()
                connection.execute("PRAGMA busy_timeout = 0")
                try:
                    with connection:
                        return connection.execute(sql, arguments).rowcount
                finally:
                    connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
            except sqlite3.Error as error:
                raise self._explain(error) from error

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
        connection.execute("PRAGMA synchronous=NORMAL")  # no fsync per row: payloads are checked when they are read
        self._check_version(connection)
        connection.executescript(self._schema)
        self._connection, self._owner_pid = connection, os.getpid()
        return connection

    def _check_version(self, connection: sqlite3.Connection) -> None:
        if _version(connection) == _SCHEMA_VERSION:
            return
        connection.execute("BEGIN IMMEDIATE")  # another process may be creating the tables now
        with connection:
            found = _version(connection)
            if found == _SCHEMA_VERSION:
                return
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                return
        connection.close()
        raise StoreError(
            f"the index {self._path} has format {found}, but this version of cacheclip-rag reads {_SCHEMA_VERSION}. "
            "Ingest the documents into another folder, or use the version that wrote the index."
        )

    def _explain(self, error: sqlite3.Error) -> StoreError:
        return StoreError(
            f"the index {self._path} cannot be used: {error}. If the disk is full, free some space; if the file is "
            "damaged, move it away: stored chunk caches stay usable, and running ingest again restores the documents."
        )


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
