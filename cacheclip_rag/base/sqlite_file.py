"""An SQLite file that others may have written to: how it is opened, what is refused in it, and what is saved of it."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .errors import StoreError
from .folder import is_file, open_folder, private_mode

LONGEST_S = 600.0
"""Longest time of one statement: a file that something else wrote may hold rows without end."""
_STEPS = 100_000
"""Steps of SQLite's machine between two looks at the clock: about a millisecond."""
_MOST_BYTES = 1 << 28
"""Of one value."""
_APPLICATION_ID = 0x43434B56
"""Marks SQLite files of this package: ``CCKV``."""
_LATER_VERSIONS = 100
"""A file with a version from here on is damaged."""


class FormatError(StoreError):
    """A file of this package, of another version."""


class SqliteFile:
    """Opens connections to one file. Safe to share between threads that take turns."""

    def __init__(self, path: Path | None, schema: str, version: int) -> None:
        """As of :class:`.database.Database`; None: in memory."""
        self.path, self._schema, self._version = path, schema, version
        self.read_only = False
        """Whether the file may only be read; known after the first connection."""
        self.until = 0.0
        """When, by :func:`time.monotonic`, the statement that runs is interrupted."""

    def connect(self) -> sqlite3.Connection:
        """A connection with the tables of the schema. Raises StoreError, or an error of SQLite's module."""
        if self.path is None:
            return self.in_memory()
        try:
            self._refuse_what_is_no_file(self.path)
            self.read_only = is_file(self.path) and not _may_write(self.path)
            if not self.read_only:
                with open_folder(self.path.parent, make=True) as folder:
                    os.close(folder.open(self.path.name, os.O_RDWR | os.O_CREAT, private_mode(folder.path) & 0o666))
        except OSError as error:
            raise StoreError(
                f"cannot use the store folder {self.path.parent}: {error}. Choose another one, or change who may "
                "write to it."
            ) from error
        if self.read_only:
            return self._connect_read_only(self.path)
        connection = self._connection_to(str(self.path))
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
        connection.set_progress_handler(lambda: time.monotonic() > self.until, _STEPS)
        connection.create_function("is_text", 1, _is_text, deterministic=True)
        return connection

    def in_memory(self) -> sqlite3.Connection:
        """The tables, empty."""
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
        with closing(self.in_memory()) as own:
            strange = _objects(connection) - _objects(own)
        if strange:
            kind, name, _ = min(strange)
            raise StoreError(
                f"{self.path} holds a {kind} {name!r} that this version of cacheclip-rag did not make. Run cacheclip "
                f"store repair --store {self.path.parent if self.path else 'FOLDER'}"
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
        application, version = _marks(connection)
        what = f"format {version}" if application == _APPLICATION_ID else "the format of another program or version"
        connection.close()
        kind = FormatError if application == _APPLICATION_ID and 0 < version < _LATER_VERSIONS else StoreError
        raise kind(
            f"{self.path} has {what}, but this version of cacheclip-rag reads format {self._version}. Ingest the "
            "documents again into a new folder: cacheclip ingest PATH --store NEW_FOLDER"
        )

    def rows_of_another(self, path: Path, sql: str, table: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a query of a damaged file with these tables, until the first damaged page. Rows with text that is not
        UTF-8 are left out, and all if the table is not made as ours."""
        self.until = time.monotonic() + LONGEST_S
        with suppress(StoreError, sqlite3.Error, UnicodeError, MemoryError), closing(self.in_memory()) as own:
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


def set_aside(folder: Path, name: str) -> str:
    """Move a damaged database out of the way, with what belongs to it; returns its new name. What an earlier call moved
    is removed. Raises StoreError, and moves nothing, if its bytes cannot be read: SQLite says the same of a failing
    disk as of damage."""
    with open_folder(folder) as root:
        try:
            for ending in _FILES:
                status = root.status(f"{name}{ending}")
                if status is not None and stat.S_ISREG(status.st_mode):
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
            status = root.status(f"{name}{ending}")
            if ending and status is not None and not stat.S_ISREG(status.st_mode):
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
    objects = {(str(kind), str(name), " ".join(str(sql).split())) for kind, name, sql in rows}
    return {each for each in objects if not each[2].startswith(("CREATE TABLE sqlite_stat", "CREATE TABLE sqlite_seq"))}


def _marks(connection: sqlite3.Connection) -> tuple[int, int]:
    (application,), (version,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    return int(application), int(version)


def _may_write(path: Path) -> bool:
    """Whether file and folder may be written, by permissions and by mount."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
