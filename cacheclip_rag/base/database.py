"""A small SQLite file shared by threads and processes: short statements, WAL, errors of this package."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .errors import CacheClipError, ConfigurationError, StoreError
from .paths import make_private_folder, private_mode

__all__ = ["Database", "FormatError", "may_be_whole"]

_BUSY_TIMEOUT_S = 30.0
_APPLICATION_ID = 0x43434B56
"""Marks SQLite files of this package: ``CCKV``."""
_LATER_VERSIONS = 100
"""A file with a version from here on is damaged."""
_ERRORS = (sqlite3.Error, UnicodeError, OverflowError)
"""Errors of the module for names that are no text, damaged files, and numbers that are no 64-bit integers."""


class FormatError(StoreError):
    """A file of this package, of another version."""


def may_be_whole(error: StoreError) -> bool:
    """Whether a file could not be used for another reason than damage: it is of another version or locked, or the disk
    is full or failing."""
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    others = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL)
    passing = code is not None and code & 0xFF in (*others, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
    return passing or isinstance(error, FormatError)


class Database:
    """One connection per process, opened at first use (also in a forked worker). A lock protects statements.

    A file that may not be written is opened for reading. A file that was deleted or replaced is opened again.
    """

    def __init__(self, path: Path | None, schema: str, version: int) -> None:
        """``path`` None keeps the tables in memory.

        Args:
            version: of the schema. Files of other versions, and databases of other programs, are refused.
        """
        self._path = path
        self._schema = schema
        self._version = version
        self._connection: sqlite3.Connection | None = None
        self._owner_pid = 0
        self._identity: tuple[int, int] | None = None
        self._lock = threading.RLock()
        self.read_only = False
        """Whether the file may only be read; known after the first statement."""
        self.on_replaced: Callable[[], object] | None = None
        """Called when the file was found deleted or replaced, and a new one is open."""

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a SELECT."""
        with self._lock:
            try:
                if self._connection is None and self._path is not None and not os.path.lexists(self._path):
                    with closing(self._in_memory()) as empty:  # reading makes no file
                        return empty.execute(sql, arguments).fetchall()
                return self._open().execute(sql, arguments).fetchall()
            except _ERRORS as error:
                raise self._explain(error) from error

    def execute(self, sql: str, arguments: Sequence[Any] = ()) -> int:
        """Run one statement in its own transaction; returns the number of rows changed."""
        return self.execute_many([(sql, arguments)])

    def execute_many(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> int:
        """Run statements in one transaction, all or none; returns the number of rows changed."""
        with self.transaction() as run:
            return sum(max(0, run(sql, arguments).rowcount) for sql, arguments in statements)

    @contextmanager
    def transaction(self, *, wait: bool = True) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """A transaction that no other process writes in; yields ``run(sql, arguments)``. Undone if the block raises.

        Args:
            wait: False raises StoreError at once if another process is writing.
        """
        with self._lock:
            try:
                connection = self._open()
                if self.read_only:  # SQLite would let the block run up to its first statement that writes
                    raise StoreError(f"{self._path} may only be read here. Change who may write to the store.")
                if not wait:
                    connection.execute("PRAGMA busy_timeout = 0")
                try:
                    connection.execute("BEGIN IMMEDIATE")
                finally:
                    if not wait:
                        connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
                try:
                    yield connection.execute
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except _ERRORS as error:
                raise self._explain(error) from error

    def check(self) -> list[str]:
        """Damage that SQLite finds in the file; empty if it is whole. Raises StoreError if the file cannot be read."""
        return [str(line) for (line,) in self.query("PRAGMA integrity_check(20)") if line != "ok"]

    def compact(self) -> None:
        """Rewrite the file without free pages, and empty the WAL."""
        self.query("VACUUM")
        self.query("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._lock:
            if self._path is not None:
                self._disconnect()

    def _disconnect(self) -> None:
        """Drop the connection. A connection of the parent process is only forgotten: closing it would drop its
        locks."""
        if self._connection is not None and self._owner_pid == os.getpid():
            self._connection.close()
        self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._owner_pid == os.getpid():
            if self._path is None or _identity(self._path) == self._identity:
                return self._connection
            self._disconnect()
            self._connect_again()
            if self.on_replaced is not None:
                self.on_replaced()
        if self._connection is None or self._owner_pid != os.getpid():
            self._connect_again()
        assert self._connection is not None
        return self._connection

    def _connect_again(self) -> None:
        self._connection, self._owner_pid = self._connect(), os.getpid()
        self._identity = _identity(self._path) if self._path is not None else None

    def _connect(self) -> sqlite3.Connection:
        if self._path is None:
            return self._in_memory()
        self.read_only = self._path.exists() and not _may_write(self._path)
        if self.read_only:
            return self._connect_read_only(self._path)
        try:
            make_private_folder(self._path.parent)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, private_mode(self._path.parent) & 0o666))
        except OSError as error:
            raise StoreError(
                f"cannot use the store folder {self._path.parent}: {error}. Choose another one, or change who may "
                "write to it."
            ) from error
        connection = _connection(str(self._path))
        try:
            # no fsync per row: payloads are checked when they are read
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA secure_delete=ON")  # released texts do not stay in free pages
            self._check_version(connection)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(self._schema)
        except BaseException:
            connection.close()
            raise
        return connection

    def _in_memory(self) -> sqlite3.Connection:
        connection = _connection(":memory:")
        connection.executescript(self._schema)
        return connection

    def _connect_read_only(self, path: Path) -> sqlite3.Connection:
        address = f"file:{quote(os.fsencode(path))}?mode=ro"
        try:
            connection = _connection(address, uri=True)
            self._check_version(connection)
        except sqlite3.Error:  # the WAL's shared memory cannot be made; what was checkpointed can be read
            connection = _connection(f"{address}&immutable=1", uri=True)
            self._check_version(connection)
        return connection

    def _check_version(self, connection: sqlite3.Connection) -> None:
        if _marks(connection) == (_APPLICATION_ID, self._version):
            return
        if not self.read_only:
            connection.execute("BEGIN IMMEDIATE")  # another process may be creating the tables now
            try:
                if _marks(connection) == (_APPLICATION_ID, self._version):
                    return
                if connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version = {self._version}")
                    return
            finally:
                connection.execute("COMMIT")
        application, found = _marks(connection)
        what = f"format {found}" if application == _APPLICATION_ID else "the format of another program or version"
        connection.close()
        kind = FormatError if application == _APPLICATION_ID and 0 < found < _LATER_VERSIONS else StoreError
        raise kind(
            f"{self._path} has {what}, but this version of cacheclip-rag reads format {self._version}. Ingest the "
            "documents again into a new folder: cacheclip ingest PATH --store NEW_FOLDER"
        )

    def _explain(self, error: Exception) -> CacheClipError:
        if isinstance(error, UnicodeEncodeError):
            return ConfigurationError(
                f"a name or text holds half a character ({error.object[error.start]!r}), which cannot be written as "
                "UTF-8. Read its source with errors='replace', or remove it."
            )
        return StoreError(
            f"{self._path} cannot be used: {error}. If the disk is full, free some space; if the file is damaged, run "
            f"cacheclip store repair --store {self._path.parent if self._path else 'FOLDER'}"
        )


def _connection(name: str, *, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(name, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=uri)


def _marks(connection: sqlite3.Connection) -> tuple[int, int]:
    """Application id and version of a file."""
    (application,), (version,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    return int(application), int(version)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _may_write(path: Path) -> bool:
    """Whether file and folder may be written, by permissions and by mount."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
