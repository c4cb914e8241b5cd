"""A small SQLite file shared by threads and processes: short statements, WAL, errors of this package."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .closing import Closing
from .errors import CacheClipError, ConfigurationError, StoreError
from .folder import is_file, open_folder, private_mode

_BUSY_TIMEOUT_S = 30.0
"""Longest wait for other processes, unless :func:`waiting_at_most` says less."""
ANSWER_WAIT_S = 0.2
"""Longest wait of an answer for other processes: to load, to plan, and at its end."""
_PAUSE_S = 0.005
_LONGEST_S = 600.0
"""Longest time of one statement: a file that something else wrote may hold rows without end."""
_HURRIED_S = 1.0
"""Longest time of one statement where nobody may wait."""
_STEPS = 100_000
"""Steps of SQLite's machine between two looks at the clock: about a millisecond."""
_MOST_BYTES = 1 << 28
"""Of one value."""
_APPLICATION_ID = 0x43434B56
"""Marks SQLite files of this package: ``CCKV``."""
_LATER_VERSIONS = 100
"""A file with a version from here on is damaged."""
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


def set_aside(folder: Path, name: str) -> str:
    """Move a damaged database out of the way, with what belongs to it; returns its new name. What an earlier call moved
    is removed. Raises StoreError, and moves nothing, if its bytes cannot be read: SQLite says the same of a failing
    disk as of damage."""
    with open_folder(folder) as root:
        try:
            for ending in _FILES:
                found = root.status(f"{name}{ending}")
                if found is not None and stat.S_ISREG(found.st_mode):
                    _read_through(root.open(f"{name}{ending}", os.O_RDONLY))
            if _names_another(folder / f"{name}-journal"):
                root.unlink(f"{name}-journal")
        except (OSError, MemoryError) as error:
            raise StoreError(
                f"{folder / name} cannot be read ({error}), so it may be whole. Nothing was moved. Mend the disk, or "
                "change who may read it, and repair again."
            ) from error
        aside = f"{name}.damaged"
        while any(root.is_folder(f"{aside}{ending}") for ending in _FILES):
            aside += "~"
        for ending in _FILES:
            root.unlink(f"{aside}{ending}")
            found = root.status(f"{name}{ending}")
            if ending and found is not None and not stat.S_ISREG(found.st_mode):
                root.unlink(f"{name}{ending}")  # SQLite would wait for a pipe's writer
            if root.status(f"{name}{ending}") is not None:
                root.replace(f"{name}{ending}", root, f"{aside}{ending}")
    return aside


def _read_through(descriptor: int) -> None:
    """Read a file to its end, and close it."""
    try:
        while os.read(descriptor, 1 << 20):
            pass
    finally:
        os.close(descriptor)


def _names_another(journal: Path) -> bool:
    """Whether a rollback journal ends with the name of a journal of several databases, as none of ours does: SQLite
    deletes the file of that name, wherever it is. Source: https://www.sqlite.org/fileformat2.html, section 3."""
    if not is_file(journal):
        return False
    with journal.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - len(_JOURNAL)))
        return file.read() == _JOURNAL


_JOURNAL = bytes.fromhex("d9d505f920a163d7")
_FILES = ("", "-wal", "-shm", "-journal")
"""Endings of the files of a database."""


class FormatError(StoreError):
    """A file of this package, of another version."""


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
        self._path = None if path is None else path.absolute()
        self._schema = schema
        self._version = version
        self._connection: sqlite3.Connection | None = None
        self._owner_pid = 0
        self._identity: tuple[int, int] | None = None
        self.lock = threading.RLock()
        """No other thread of this process changes anything while it is held."""
        self._until = 0.0
        """When the statement that runs is interrupted."""
        self.read_only = False
        """Whether the file may only be read; known after the first statement."""
        self.on_replaced: Callable[[], object] | None = None
        """Called when the file was found deleted or replaced, and a new one is open."""

    @property
    def exists(self) -> bool:
        """False if there is no file, which a statement would make anew if one was open before."""
        return self._path is None or os.path.lexists(self._path)

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        began = time.monotonic()
        while True:
            with self.lock:
                self._until = time.monotonic() + (_LONGEST_S if _patience.get() is None else _HURRIED_S)
                try:
                    if self._connection is None and self._path is not None and not os.path.lexists(self._path):
                        with closing(self._in_memory()) as empty:  # reading makes no file
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
                self._until = time.monotonic() + (_LONGEST_S if _patience.get() is None else _HURRIED_S)
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
                    if self.read_only:  # SQLite would let the block run up to its first statement that writes
                        raise StoreError(f"{self._path} may only be read here. Change who may write to the store.")
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

    def rows_of_another(self, path: Path, sql: str, table: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a query of a damaged file with these tables, until the first damaged page. Rows with text that is not
        UTF-8 are left out, and all if the table is not made as ours."""
        self._until = time.monotonic() + _LONGEST_S
        with suppress(StoreError, sqlite3.Error, UnicodeError, MemoryError), closing(self._in_memory()) as own:
            self._refuse_what_is_no_file(path)
            known = _objects(own)
            with closing(self._connection_to(f"file:{quote(os.fsencode(path))}?mode=ro", uri=True)) as damaged:
                statement = damaged.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
                if statement is None or ("table", table, " ".join(str(statement[0]).split())) not in known:
                    return
                damaged.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
                for row in damaged.execute(sql):
                    if all(_is_utf8(value) for value in row):
                        yield row

    def compact(self) -> None:
        """Rewrite the file without free pages, and empty the WAL."""
        self.query("VACUUM")
        self.query("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self.lock:
            if self._path is not None:
                self._disconnect()

    def _disconnect(self) -> None:
        """Drop the connection. A connection of the parent process is only forgotten: closing it would drop its
        locks."""
        if self._connection is not None and self._owner_pid == os.getpid():
            self._connection.close()
        self._connection = None

    def _open(self) -> sqlite3.Connection:
        is_open = self._connection is not None and self._owner_pid == os.getpid()
        if self._connection is None or not is_open or _identity(self._path) != self._identity:
            self._disconnect()
            self._connection, self._owner_pid = self._connect(), os.getpid()
            self._identity = _identity(self._path)
            if is_open and self.on_replaced is not None:
                self.on_replaced()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        if self._path is None:
            return self._in_memory()
        try:
            self._refuse_what_is_no_file(self._path)
            self.read_only = is_file(self._path) and not _may_write(self._path)
            if not self.read_only:
                with open_folder(self._path.parent, make=True) as folder:
                    os.close(folder.open(self._path.name, os.O_RDWR | os.O_CREAT, private_mode(folder.path) & 0o666))
        except OSError as error:
            raise StoreError(
                f"cannot use the store folder {self._path.parent}: {error}. Choose another one, or change who may "
                "write to it."
            ) from error
        if self.read_only:
            return self._connect_read_only(self._path)
        connection = self._connection_to(str(self._path))
        try:
            # no fsync per row: payloads are checked when they are read
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA secure_delete=ON")  # released texts do not stay in free pages
            self._check_version(connection)
            self._check_schema(connection)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(self._schema)
        except BaseException:
            connection.close()
            raise
        return connection

    @staticmethod
    def _refuse_what_is_no_file(path: Path) -> None:
        """SQLite would follow a link out of the folder, or wait for a pipe's writer."""
        for each in (path.with_name(path.name + ending) for ending in _FILES):
            if os.path.lexists(each) and not is_file(each):
                raise StoreError(
                    f"expected a file, got a link or something else: {each}. Remove it, or run cacheclip store repair "
                    f"--store {path.parent}"
                )
        if _names_another(journal := path.with_name(f"{path.name}-journal")):
            raise StoreError(
                f"expected a journal of {path.name} alone, got one of several databases: {journal}. Run cacheclip "
                f"store repair --store {path.parent}"
            )

    def _connection_to(self, name: str, *, uri: bool = False) -> sqlite3.Connection:
        """A connection to a file that something else may have written to."""
        connection = sqlite3.connect(name, timeout=0, isolation_level=None, check_same_thread=False, uri=uri)
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.text_factory = _TEXT
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
        connection.set_progress_handler(lambda: time.monotonic() > self._until, _STEPS)
        connection.create_function("is_text", 1, _is_text, deterministic=True)
        return connection

    def _in_memory(self) -> sqlite3.Connection:
        connection = self._connection_to(":memory:")
        connection.executescript(self._schema)
        return connection

    def _connect_read_only(self, path: Path) -> sqlite3.Connection:
        address = f"file:{quote(os.fsencode(path))}?mode=ro"
        try:
            connection = self._connection_to(address, uri=True)
            self._check_version(connection)
        except sqlite3.Error:  # the WAL's shared memory cannot be made; what was checkpointed can be read
            connection = self._connection_to(f"{address}&immutable=1", uri=True)
            self._check_version(connection)
        self._check_schema(connection)
        return connection

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """Refuse what this package did not make: a trigger or view would do its work in every statement of ours."""
        with closing(self._in_memory()) as own:
            strange = _objects(connection) - _objects(own)
        if strange:
            kind, name, _ = min(strange)
            raise StoreError(
                f"{self._path} holds a {kind} {name!r} that this version of cacheclip-rag did not make. Run cacheclip "
                f"store repair --store {self._path.parent if self._path else 'FOLDER'}"
            )

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


_TEXT = partial(str, encoding="utf-8", errors="replace")
"""By default, SQLite's module refuses all rows of a query if one of them holds text that is not UTF-8."""


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, bytes) and value.decode() is not None
    except UnicodeDecodeError:
        return False


def _is_utf8(value: object) -> bool:
    """Whether a value is no text with half a character."""
    return not isinstance(value, str) or not any("\ud800" <= character <= "\udfff" for character in value)


def _objects(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Kind, name and statement of each table, index, trigger and view, without SQLite's own."""
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    found = {(str(kind), str(name), " ".join(str(sql).split())) for kind, name, sql in rows}
    return {each for each in found if not each[2].startswith(("CREATE TABLE sqlite_stat", "CREATE TABLE sqlite_seq"))}


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


def _marks(connection: sqlite3.Connection) -> tuple[int, int]:
    (application,), (version,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    return int(application), int(version)


def _identity(path: Path | None) -> tuple[int, int] | None:
    if path is None:
        return None
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _may_write(path: Path) -> bool:
    """Whether file and folder may be written, by permissions and by mount."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
