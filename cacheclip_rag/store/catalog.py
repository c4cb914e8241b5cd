"""The store's catalog: one SQLite file with entries, limits, texts and sources.

An entry records a payload's size, last use and text, so that deleting a text needs no model. A write is announced
before its payload is written: its bytes count at once, and what a killed process leaves can be found. Totals per tenant
are kept by triggers, so that no statement reads all entries.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from ..base.closing import Closing
from ..base.database import Database, waiting_at_most
from ..base.keys import is_key, text_digest
from ..finding.texts import SCHEMA as TEXTS_SCHEMA, TextIndex
from .announcements import Announcements
from .entries import COLUMNS, Entry, Total, correct, record, take_uses
from .eviction import BATCH, EVERYONE, PROMPTS, Run
from .limits import StoreLimits
from .sources import SCHEMA as SOURCES_SCHEMA, Sources

CATALOG_FILE = "catalog.sqlite3"
VERSION = 4
"""Increase this number when a table changes."""

SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, namespace TEXT NOT NULL, digest BLOB, bytes INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    codec TEXT NOT NULL, last_use INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (namespace, last_use, key, bytes);
CREATE INDEX IF NOT EXISTS entries_by_text ON entries (namespace, digest);
CREATE TABLE IF NOT EXISTS writes (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, namespace TEXT NOT NULL, bytes INTEGER NOT NULL,
    writer TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS totals (namespace TEXT PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL)
WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS totals_by_bytes ON totals (bytes);
CREATE TABLE IF NOT EXISTS quotas (namespace TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS entry_added AFTER INSERT ON entries BEGIN
    INSERT INTO totals VALUES (NEW.namespace, 1, NEW.bytes), ('{EVERYONE}', 1, NEW.bytes)
    ON CONFLICT DO UPDATE SET entries = entries + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER IF NOT EXISTS entry_removed AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - OLD.bytes
    WHERE namespace IN (OLD.namespace, '{EVERYONE}');
    DELETE FROM totals WHERE namespace = OLD.namespace AND entries = 0 AND bytes = 0;
END;
CREATE TRIGGER IF NOT EXISTS write_begun AFTER INSERT ON writes BEGIN
    INSERT INTO totals VALUES (NEW.namespace, 0, NEW.bytes), ('{EVERYONE}', 0, NEW.bytes)
    ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER IF NOT EXISTS write_ended AFTER DELETE ON writes BEGIN
    UPDATE totals SET bytes = bytes - OLD.bytes WHERE namespace IN (OLD.namespace, '{EVERYONE}');
    DELETE FROM totals WHERE namespace = OLD.namespace AND entries = 0 AND bytes = 0;
END;
{SOURCES_SCHEMA}"""
_TOTAL = "CAST(entries AS INTEGER), CAST(bytes AS INTEGER)"

_MOST_ARGUMENTS = 500
"""Most keys of one query; SQLite's own limit is 999 or more."""
_ERASE = "INSERT INTO meta VALUES (?, random() >> 1) ON CONFLICT DO UPDATE SET value = ifnull(value, 0) + 1"
"""From a random number on: that of a catalog which was made anew is another one."""


class SqliteCatalog(Closing, ABC):
    """What every catalog in an SQLite file does alike. Where its entries are is a subclass's matter, which gives the
    other calls of :class:`~.view.CatalogView`."""

    entry_table: ClassVar[str]
    """Where each entry has its key, namespace and digest of its text."""

    def __init__(self, path: Path | None, own_schema: str = "") -> None:
        """
        Args:
            path: of the file; None: in memory.
            own_schema: statements that make the tables of a subclass.
        """
        self.database = Database(path, SCHEMA + TEXTS_SCHEMA + own_schema, VERSION)
        self.sources = Sources(self.database)

    @abstractmethod
    def entries_of(self, namespace: str, keys: Sequence[str]) -> dict[str, Entry]:
        """As :meth:`.view.CatalogView.entries_of`."""

    def close(self) -> None:
        self.database.close()

    def check_writable(self) -> None:
        """Raise StoreError if nothing can be written now: another process uses the catalog, or it may only be read."""
        with self.database.transaction():
            pass

    def text_index(self, namespace: str) -> TextIndex:
        """Finds a tenant's texts in prompts."""
        return TextIndex(self.database, namespace)

    def keys_of(self, namespace: str, digest: bytes) -> list[str]:
        """Keys of all entries of one text, for every model and chunk context."""
        sql = f"SELECT DISTINCT key FROM {self.entry_table} WHERE namespace = ? AND digest = ?"
        return [key for (key,) in self.database.query(sql, (namespace, digest)) if is_key(key)]

    def has_texts(self, namespace: str) -> bool:
        """Whether a tenant has an entry of any text."""
        sql = f"SELECT 1 FROM {self.entry_table} WHERE namespace = ? AND digest > ? LIMIT 1"
        return bool(self.database.query(sql, (namespace, PROMPTS)))

    def erasures(self, namespace: str) -> int | None:
        """A number that changes when something of a tenant is erased; 0: nothing was; None: there is no catalog."""
        if not self.database.exists:
            return None
        sql = "SELECT CAST(value AS INTEGER) FROM meta WHERE name = ?"
        rows = self.database.query(sql, (_erasures_of(namespace),))
        return rows[0][0] if rows else 0

    def note_erasure(self, namespace: str) -> None:
        """Let all processes of the store drop what they hold of a tenant (:mod:`.erasures`)."""
        with self.database.transaction() as run:
            erase(run, namespace)

    def unknown_of(self, keys: Sequence[str]) -> list[str]:
        """The keys that have no entry of anyone."""
        if not self.database.exists:
            return [*keys]
        sql = f"SELECT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM {self.entry_table} WHERE key = value)"
        return [key for (key,) in self.database.query(sql, (json.dumps(keys),))]


class Catalog(SqliteCatalog):
    """Entries, texts and sources of a store folder, shared by processes. Without a folder: of this process only."""

    entry_table = "entries"

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder / CATALOG_FILE if folder is not None else None)
        self.folder = folder
        self.limits = StoreLimits(self.database)
        self.announcements = Announcements(self.database)

    def entries_of(self, namespace: str, keys: Sequence[str]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for start in range(0, len(keys), _MOST_ARGUMENTS):
            some = keys[start : start + _MOST_ARGUMENTS]
            marks = ", ".join("?" * len(some))
            sql = f"SELECT {COLUMNS} FROM entries WHERE key IN ({marks}) AND +namespace = ?"
            entries |= {row[0]: Entry(*row) for row in self.database.query(sql, (*some, namespace))}
        return entries

    def keys(self, namespace: str) -> list[str]:
        """A tenant's keys, least recently used first."""
        sql = "SELECT key FROM entries WHERE namespace = ? ORDER BY last_use, key"
        return [key for (key,) in self.database.query(sql, (namespace,)) if is_key(key)]

    def record(self, entry: Entry) -> None:
        """Record an entry, as the most recently used."""
        with self.database.transaction() as run:
            record(run, entry)

    def use(self, keys: Sequence[str]) -> None:
        """Number these uses, in order."""
        with self.database.transaction() as run:
            first = take_uses(run, len(keys))
            for number, key in enumerate(keys):
                run("UPDATE entries SET last_use = ? WHERE key = ?", (first + number, key))

    def remove(
        self,
        namespace: str,
        keys: Sequence[str],
        delete: Callable[[Sequence[str]], int] | None = None,
        *,
        erases: bool = True,
    ) -> int:
        """Remove a tenant's entries; returns how many existed. ``delete`` deletes their payloads, and is called inside
        the transaction, so that no entry is lost whose payload another process writes meanwhile. ``erases``: KV that
        processes hold of the tenant goes, too."""
        with self.database.transaction() as run:
            deleted = delete(keys) if delete is not None else 0
            sql = "DELETE FROM entries WHERE key = ? AND namespace = ?"
            removed = sum([run(sql, (key, namespace)).rowcount for key in keys])
            if removed and erases:
                erase(run, namespace)
            return max(deleted, removed)

    def correct(self, key: str, measure: Callable[[str], Entry | None]) -> None:
        """Record what the medium holds under a key, as ``measure`` says; whatever it raises, the entry stays. Raises
        StoreError without waiting if another process is writing."""
        with waiting_at_most(0), self.database.transaction() as run:
            correct(run, key, measure)

    def total(self, namespace: str | None = None) -> Total:
        """What a tenant holds; None: what the store holds."""
        sql = f"SELECT {_TOTAL} FROM totals WHERE namespace = ?"
        rows = self.database.query(sql, (EVERYONE if namespace is None else namespace,))
        return Total(*rows[0]) if rows else Total(0, 0)

    def tenants(self) -> dict[str, Total]:
        rows = self.database.query(f"SELECT namespace, {_TOTAL} FROM totals WHERE namespace != ?", (EVERYONE,))
        return {namespace: Total(entries, size) for namespace, entries, size in rows}

    @property
    def is_complete(self) -> bool:
        """Whether every payload was compared with the catalog since the catalog was made."""
        return bool(self.database.query("SELECT 1 FROM meta WHERE name = 'complete'"))

    def set_complete(self) -> None:
        self.database.execute("INSERT OR REPLACE INTO meta VALUES ('complete', 1)")

    def drop(self, namespace: str, evict: Callable[[list[str]], None]) -> int:
        """Remove everything that the catalog knows of a tenant; returns the number of entries."""
        self.announcements.drop(namespace)
        count = 0
        sql = "SELECT key FROM entries WHERE namespace = ? LIMIT ?"
        while True:
            with self.database.transaction() as run:  # in batches, because others wait
                keys = [key for (key,) in run(sql, (namespace, BATCH)).fetchall()]
                evict([key for key in keys if is_key(key)])
                for key in keys:
                    run("DELETE FROM entries WHERE key = ?", (key,))
                count += len(keys)
                if len(keys) < BATCH:  # with the last entries: none may be without its text
                    for table in ("texts", "contents", "sources", "quotas"):
                        run(f"DELETE FROM {table} WHERE namespace = ?", (namespace,))
                    erase(run, namespace)
                    return count


def erase(run: Run, namespace: str) -> None:
    """Change a tenant's number of erasures, in the transaction that erases something."""
    run(_ERASE, (_erasures_of(namespace),))


def _erasures_of(namespace: str) -> str:
    """The name of a tenant's number of erasures. It outlives the tenant, and does not tell who that was."""
    return f"erased {text_digest(namespace).hex()}"
