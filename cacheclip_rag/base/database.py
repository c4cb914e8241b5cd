"""A small SQLite file shared by threads and processes: short statements, WAL, errors of this package."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .closing import Closing
from .errors import CacheClipError, ConfigurationError, StoreError
from .sqlite_file import LONGEST_S, FormatError, SqliteFile

_BUSY_TIMEOUT_S = 30.0
"""Longest wait for other processes, unless :func:`waiting_at_most` says less."""
ANSWER_WAIT_S = 0.2
"""Longest wait of an answer for other processes: to load, to plan, and at its end."""
_PAUSE_S = 0.005
_HURRIED_S = 1.0
"""Longest time of one statement where nobody may wait."""
_ERRORS = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)
"""Errors of the module for names that are no text, damaged files, and numbers that are no 64-bit integers."""
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_PASSING = (
    *_BUSY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_INTERRUPT,
)
"""What SQLite says of files that may be whole."""


def may_be_whole(error: StoreError) -> bool:
    """Whether a file could not be used for another reason than damage: it is of another version or locked, the disk is
    full or failing, or there is no memory or file handle for it."""
    cause = error.__cause__
    return isinstance(error, FormatError) or isinstance(cause, OSError | MemoryError) or _code(cause) in _PASSING


def is_busy(error: BaseException) -> bool:
    """Whether a file could not be used because another process is using it."""
    return _code(error.__cause__ if isinstance(error, StoreError) else error) in _BUSY


class OutageWarning:
    """Warns at the first failure, and again at the first one after something worked."""

    def __init__(self, logger: logging.Logger, message: str) -> None:
        """``message``: what does not work meanwhile, with one ``%s`` for the error."""
        self._logger, self._message = logger, message
        self._given = False

    def failed(self, error: Exception) -> None:
        if not self._given:
            self._logger.warning(self._message, error)
        self._given = True

    def worked(self) -> None:
        self._given = False


_patience: ContextVar[list[float] | None] = ContextVar("patience", default=None)
"""One number: seconds for which statements may still wait for other processes."""


@contextmanager
def waiting_at_most(seconds: float) -> Iterator[None]:
    """In this block, statements wait ``seconds`` in all for other processes, and raise StoreError where they would wait
    longer: an answer waits for nobody's bookkeeping. A block around it that leaves less counts."""
    around = _patience.get()
    token = _patience.set([seconds] if around is None or seconds < around[0] else around)
    try:
        yield
    finally:
        _patience.reset(token)


class Database(Closing):
    """One connection per process, opened at first use (also in a forked worker). A lock protects statements.

    A file that may not be written is opened for reading. A file that was deleted or replaced is opened again.
    """

    def __init__(self, path: Path | None, schema: str, version: int) -> None:
        """``path`` None keeps the tables in memory. Files of another schema ``version``, and of other programs, are
        refused."""
        self.file = SqliteFile(None if path is None else path.absolute(), schema, version)
        """Where its connections come from."""
        self._connection: sqlite3.Connection | None = None
        self._owner_pid = 0
        self._identity: tuple[int, int] | None = None
        self.lock = threading.RLock()
        """No other thread of this process changes anything while it is held."""
        self.on_replaced: Callable[[], object] | None = None
        """Called when the file was found deleted or replaced, and a new one is open."""

    @property
    def exists(self) -> bool:
        """False if there is no file, which a statement would make anew if one was open before."""
        return self.file.path is None or os.path.lexists(self.file.path)

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        began = time.monotonic()
        while True:
            with self.lock:
                self.file.until = time.monotonic() + (LONGEST_S if _patience.get() is None else _HURRIED_S)
                try:
                    if self._connection is None and not self.exists:
                        with closing(self.file.in_memory()) as empty:  # reading makes no file
                            return empty.execute(sql, arguments).fetchall()
                    return self._open().execute(sql, arguments).fetchall()
                except _ERRORS as error:
                    if not _may_wait(error, began):
                        raise self._explain(error) from error
            time.sleep(_PAUSE_S)

    def execute(self, sql: str, arguments: Sequence[Any] = ()) -> int:
        """Run one statement in its own transaction; returns the number of rows changed."""
        return self.execute_many([(sql, arguments)])

    def execute_many(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> int:
        """Run statements in one transaction, all or none; returns the number of rows changed."""
        with self.transaction() as run:
            return sum(max(0, run(sql, arguments).rowcount) for sql, arguments in statements)

    @contextmanager
    def transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """A transaction that no other process writes in; yields ``run(sql, arguments)``. Undone if the block raises."""
        with self._begun() as connection:
            try:
                self.file.until = time.monotonic() + (LONGEST_S if _patience.get() is None else _HURRIED_S)
                try:
                    yield connection.execute
                    self._commit(connection)
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except _ERRORS as error:
                raise self._explain(error) from error

    @contextmanager
    def _begun(self) -> Iterator[sqlite3.Connection]:
        """The connection in a transaction. Other threads may read while this one waits for it."""
        began = time.monotonic()
        while True:
            with self.lock:
                try:
                    connection = self._open()
                    if self.file.read_only:  # SQLite would let the block run up to its first statement that writes
                        raise StoreError(f"{self.file.path} may only be read here. Change who may write to the store.")
                    connection.execute("BEGIN IMMEDIATE")
                except _ERRORS as error:
                    if not _may_wait(error, began):
                        raise self._explain(error) from error
                else:
                    yield connection
                    return
            time.sleep(_PAUSE_S)

    def _commit(self, connection: sqlite3.Connection) -> None:
        """Without a write-ahead log (a network disk), readers must end first."""
        began = time.monotonic()
        while True:
            try:
                connection.execute("COMMIT")
                return
            except sqlite3.Error as error:
                if not _may_wait(error, began):
                    raise
            time.sleep(_PAUSE_S)

    def check(self) -> list[str]:
        """Damage that SQLite finds in the file; empty if it is whole. Raises StoreError if the file cannot be read."""
        return [str(line) for (line,) in self.query("PRAGMA integrity_check(20)") if line != "ok"]

    def compact(self) -> None:
        """Rewrite the file without free pages, and empty the WAL."""
        self.query("VACUUM")
        self.query("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self.lock:
            if self.file.path is not None:
                self._disconnect()

    def _disconnect(self) -> None:
        """Drop the connection. A connection of the parent process is only forgotten: closing it would drop its
        locks."""
        if self._connection is not None and self._owner_pid == os.getpid():
            self._connection.close()
        self._connection = None

    def _open(self) -> sqlite3.Connection:
        is_open = self._connection is not None and self._owner_pid == os.getpid()
        if self._connection is None or not is_open or _identity(self.file.path) != self._identity:
            self._disconnect()
            self._connection, self._owner_pid = self.file.connect(), os.getpid()
            self._identity = _identity(self.file.path)
            if is_open and self.on_replaced is not None:
                self.on_replaced()
        return self._connection

    def _explain(self, error: Exception) -> CacheClipError:
        if isinstance(error, UnicodeEncodeError):
            return ConfigurationError(
                f"a name or text holds half a character ({error.object[error.start]!r}), which cannot be written as "
                "UTF-8. Read its source with errors='replace', or remove it."
            )
        path = self.file.path
        return StoreError(
            f"{path} cannot be used: {error}. If the disk is full, free some space; if the file is damaged, run "
            f"cacheclip store repair --store {path.parent if path else 'FOLDER'}"
        )


def _code(error: BaseException | None) -> int | None:
    """SQLite's number of an error, without details."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _may_wait(error: BaseException, began: float) -> bool:
    """Whether another process has the file, and there is time to wait for it."""
    if not is_busy(error):
        return False
    patience = _patience.get()
    if patience is None:
        return time.monotonic() - began < _BUSY_TIMEOUT_S
    patience[0] -= _PAUSE_S
    return patience[0] >= 0


def _identity(path: Path | None) -> tuple[int, int] | None:
    if path is None:
        return None
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
