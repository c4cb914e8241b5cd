"""The store's catalog: one SQLite file with entries, limits, texts and sources.

An entry records a payload's size, last use and text, so that deleting a text needs no model. A write is announced
before its payload is written: its bytes count at once, and what a killed process leaves can be found. Totals per tenant
are kept by triggers, so that no statement reads all entries.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..base.database import Database, waiting_at_most
from ..base.errors import StoreError
from ..base.folder import is_file
from ..base.keys import is_key, text_digest
from ..finding.texts import SCHEMA as TEXTS_SCHEMA
from ..finding.texts import WRITE as WRITE_TEXT
from ..finding.texts import TextIndex, TextRow
from .codecs import FrameError
from .eviction import BATCH, EVERYONE, Run, make_room

FILE_NAME = "catalog.sqlite3"
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
CREATE TABLE IF NOT EXISTS sources (
    namespace TEXT NOT NULL, source TEXT NOT NULL, document TEXT NOT NULL, digest BLOB NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (namespace, source, digest)
);
CREATE INDEX IF NOT EXISTS sources_by_document ON sources (namespace, document);
CREATE INDEX IF NOT EXISTS sources_by_text ON sources (namespace, digest);
"""
_ENTRY = "key, namespace, digest, CAST(bytes AS INTEGER), num_tokens, codec"
_SOURCE = "digest, CAST(text AS BLOB)"  # as bytes: SQLite refuses a query that finds text that is not UTF-8
_TOTAL = "CAST(entries AS INTEGER), CAST(bytes AS INTEGER)"

_COUNTED = "FROM (SELECT namespace, 1 AS n, bytes FROM entries UNION ALL SELECT namespace, 0, bytes FROM writes)"
_ABOVE_QUOTA = (
    "SELECT namespace FROM quotas JOIN totals USING (namespace) "
    "WHERE typeof(quotas.bytes) = 'integer' AND totals.bytes > quotas.bytes"
)

_MOST_ARGUMENTS = 500
"""Most keys of one query; SQLite's own limit is 999 or more."""
ERASE = "INSERT INTO meta VALUES (?, random() >> 1) ON CONFLICT DO UPDATE SET value = ifnull(value, 0) + 1"
"""From a random number on: that of a catalog which was made anew is another one."""
_DROPPED = "-"
"""Before the key of a write whose tenant was dropped while it went on."""

_NO_NAME = "typeof({0}) != 'text' OR NOT is_text(CAST({0} AS BLOB))"
_NO_NAMESPACE = f"namespace = '' OR {_NO_NAME.format('namespace')}"
_SENSELESS = {
    "entries": f"{_NO_NAMESPACE} OR {_NO_NAME.format('codec')} OR typeof(key) != 'text' OR length(key) != 64 "
    "OR key GLOB '*[^0-9a-f]*' OR typeof(ifnull(digest, x'')) != 'blob' OR typeof(bytes) != 'integer' OR bytes < 0 "
    "OR typeof(num_tokens) != 'integer' OR typeof(last_use) != 'integer'",
    "texts": f"{_NO_NAMESPACE} OR typeof(digest) != 'blob' OR "
    + " OR ".join(f"typeof({name}) != 'integer'" for name in TextRow._fields[1:]),
    "contents": f"{_NO_NAMESPACE} OR typeof(digest) != 'blob' OR typeof(text) != 'blob'",
    "anchors": "typeof(anchor) != 'integer' OR typeof(content) != 'integer' OR typeof(place) != 'integer'",
    "sources": f"{_NO_NAMESPACE} OR {_NO_NAME.format('source')} OR {_NO_NAME.format('document')}",
    "writes": f"{_NO_NAMESPACE} OR {_NO_NAME.format('key')} OR {_NO_NAME.format('writer')} "
    "OR typeof(bytes) != 'integer' OR bytes < 0 OR length(writer) NOT IN (0, 32) OR writer GLOB '*[^0-9a-f]*'",
    "quotas": f"{_NO_NAMESPACE} OR typeof(bytes) != 'integer' OR bytes < 0",
    "meta": f"{_NO_NAME.format('name')} OR typeof(value) != 'integer'",
}
"""Per table, which rows were changed by something else: SQLite lets any value into any column, and a flipped bit makes
what is no UTF-8 of a name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One payload of the store."""

    key: str
    namespace: str
    digest: bytes | None
    """Digest of the entry's text; None if it has no text (the shared prefix)."""
    num_bytes: int
    """Bytes on the medium, in whole disk blocks."""
    num_tokens: int
    codec: str
    text: TextRow | None = field(default=None, compare=False)
    """The text's row in the text index, which is written with the entry. None if there is none, or in an entry that was
    read from the catalog."""


@dataclass(frozen=True, slots=True)
class Total:
    """What a tenant, or the whole store, holds."""

    entries: int
    bytes: int
    """Bytes on the medium, including writes that are not complete."""


class Catalog:
    """Entries, texts and sources of a store folder, shared by processes. Without a folder: of this process only.

    All methods raise StoreError if the file cannot be used.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        path = folder / FILE_NAME if folder else None
        self.database = Database(path, SCHEMA + TEXTS_SCHEMA, VERSION)

    def close(self) -> None:
        self.database.close()

    def text_index(self, namespace: str) -> TextIndex:
        """Finds a tenant's texts in prompts."""
        return TextIndex(self.database, namespace)

    # -- entries ------------------------------------------------------------------------------------------------

    def entry(self, namespace: str, key: str) -> Entry | None:
        """The entry of a key, if the tenant has it. A key of another tenant is not distinguishable from none."""
        return self.entries_of(namespace, [key]).get(key)

    def entries_of(self, namespace: str, keys: Sequence[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for start in range(0, len(keys), _MOST_ARGUMENTS):
            some = keys[start : start + _MOST_ARGUMENTS]
            marks = ", ".join("?" * len(some))
            sql = f"SELECT {_ENTRY} FROM entries WHERE key IN ({marks}) AND +namespace = ?"
            found |= {row[0]: Entry(*row) for row in self.database.query(sql, (*some, namespace))}
        return found

    def entry_of_anyone(self, key: str) -> Entry | None:
        """The entry of a key, whoever's it is."""
        rows = self.database.query(f"SELECT {_ENTRY} FROM entries WHERE key = ?", (key,))
        return Entry(*rows[0]) if rows else None

    def entries(self) -> Iterator[Entry]:
        last = ""
        sql = f"SELECT {_ENTRY} FROM entries WHERE key > ? AND typeof(key) = 'text' ORDER BY key LIMIT 1000"
        while rows := self.database.query(sql, (last,)):
            yield from (Entry(*row) for row in rows)
            last = _next(last, rows[-1][0])

    def keys(self, namespace: str) -> list[str]:
        """A tenant's keys, least recently used first."""
        sql = "SELECT key FROM entries WHERE namespace = ? ORDER BY last_use, key"
        return [key for (key,) in self.database.query(sql, (namespace,)) if is_key(key)]

    def keys_of(self, namespace: str, digest: bytes) -> list[str]:
        """Keys of all entries of one text, for every model and chunk context."""
        sql = "SELECT key FROM entries WHERE namespace = ? AND digest = ?"
        return [key for (key,) in self.database.query(sql, (namespace, digest)) if is_key(key)]

    def has_texts(self, namespace: str) -> bool:
        """Whether a tenant has an entry of any text."""
        return bool(
            self.database.query("SELECT 1 FROM entries WHERE namespace = ? AND digest >= x'' LIMIT 1", (namespace,))
        )

    def record(self, entry: Entry) -> None:
        """Record an entry, as the most recently used."""
        with self.database.transaction() as run:
            _record(run, entry)

    def use(self, keys: Sequence[str]) -> None:
        """Number these uses, in order."""
        with self.database.transaction() as run:
            first = _take_uses(run, len(keys))
            for number, key in enumerate(keys):
                run("UPDATE entries SET last_use = ? WHERE key = ?", (first + number, key))

    def remove(self, namespace: str, keys: Sequence[str], delete: Callable[[Sequence[str]], int] | None = None) -> int:
        """Remove a tenant's entries; returns how many existed. ``delete`` deletes their payloads, and is called inside
        the transaction, so that no entry is lost whose payload another process writes meanwhile."""
        with self.database.transaction() as run:
            deleted = delete(keys) if delete is not None else 0
            sql = "DELETE FROM entries WHERE key = ? AND namespace = ?"
            removed = sum([run(sql, (key, namespace)).rowcount for key in keys])
            if removed:
                run(ERASE, (erasures_of(namespace),))
            return max(deleted, removed)

    def correct(self, key: str, measure: Callable[[str], Entry | None]) -> None:
        """Record what the medium holds under a key, as ``measure`` says; whatever it raises, the entry stays. Raises
        StoreError without waiting if another process is writing."""
        with waiting_at_most(0), self.database.transaction() as run:
            _correct(run, key, measure)

    @property
    def is_complete(self) -> bool:
        """Whether every payload was compared with the catalog since the catalog was made."""
        return bool(self.database.query("SELECT 1 FROM meta WHERE name = 'complete'"))

    def set_complete(self) -> None:
        self.database.execute("INSERT OR REPLACE INTO meta VALUES ('complete', 1)")

    # -- limits and writes --------------------------------------------------------------------------------------

    def total(self, namespace: str | None = None) -> Total:
        """What a tenant holds; None: what the store holds."""
        sql = f"SELECT {_TOTAL} FROM totals WHERE namespace = ?"
        rows = self.database.query(sql, (EVERYONE if namespace is None else namespace,))
        return Total(*rows[0]) if rows else Total(0, 0)

    def tenants(self) -> dict[str, Total]:
        rows = self.database.query(f"SELECT namespace, {_TOTAL} FROM totals WHERE namespace != ?", (EVERYONE,))
        return {namespace: Total(entries, size) for namespace, entries, size in rows}

    @property
    def limit(self) -> int | None:
        """Limit of the store in bytes; None: no limit."""
        rows = self.database.query("SELECT value FROM meta WHERE name = 'max_bytes' AND typeof(value) = 'integer'")
        return rows[0][0] if rows else None

    def set_limit(self, max_bytes: int | None) -> None:
        """Record the store's limit for all processes; None removes it."""
        with self.database.transaction() as run:
            run("DELETE FROM meta WHERE name = 'max_bytes'")
            if max_bytes is not None:
                run("INSERT INTO meta VALUES ('max_bytes', ?)", (max_bytes,))

    def quota(self, namespace: str) -> int | None:
        """A tenant's limit in bytes; None: only the store's limit."""
        sql = "SELECT bytes FROM quotas WHERE namespace = ? AND typeof(bytes) = 'integer'"
        rows = self.database.query(sql, (namespace,))
        return rows[0][0] if rows else None

    def set_quota(self, namespace: str, max_bytes: int | None) -> None:
        """Record a tenant's limit; None removes it."""
        with self.database.transaction() as run:
            run("DELETE FROM quotas WHERE namespace = ?", (namespace,))
            if max_bytes is not None:
                run("INSERT INTO quotas VALUES (?, ?)", (namespace, max_bytes))

    def reserve(
        self, namespace: str, key: str, num_bytes: int, writer: str, evict: Callable[[list[str]], None]
    ) -> tuple[int | None, int]:
        """Make room for a payload and announce its write: the number of the write, or None if there is no room, and the
        number of entries evicted. ``evict`` is called inside the transaction, so that their room cannot be taken twice.

        A tenant above its quota loses its own least recently used entries. Above the store's limit, the tenant with the
        most bytes loses its least recently used ones, so that one tenant's flood evicts none of the others. The write
        must end with :meth:`finish` or :meth:`abandon`."""
        with self.database.transaction() as run:
            found = run("SELECT namespace FROM entries WHERE key = ?", (key,)).fetchone()
            if found is not None and found[0] != namespace:
                raise StoreError(f"the key {key[:12]}… belongs to another tenant. Make keys with chunk_key.")
            fits, evicted = make_room(run, namespace, key, num_bytes, evict)
            if not fits and run("SELECT 1 FROM writes").fetchone() is None:
                raise StoreError(
                    "no room for a chunk cache, though nothing else is being written: the catalog contradicts itself. "
                    "Run cacheclip store repair."
                )
            if not fits:
                return None, evicted
            sql = "INSERT INTO writes (key, namespace, bytes, writer) VALUES (?, ?, ?, ?)"
            return run(sql, (key, namespace, num_bytes, writer)).lastrowid, evicted

    @property
    def is_above_limits(self) -> bool:
        """Whether the store or a tenant holds more than it may."""
        total, limit = self.total(), self.limit
        return (limit is not None and total.bytes > limit) or bool(self.database.query(f"{_ABOVE_QUOTA} LIMIT 1"))

    def shrink(self, evict: Callable[[list[str]], None], most_s: float = math.inf) -> int:
        """Evict until all limits hold, for instance after a limit was lowered, or for ``most_s`` seconds; returns the
        number of entries."""
        until = time.monotonic() + most_s
        count = 0
        largest = "SELECT namespace FROM totals WHERE namespace != ? ORDER BY bytes DESC LIMIT 1"
        above = [*self.database.query(_ABOVE_QUOTA), *self.database.query(largest, (EVERYONE,))]
        for (namespace,) in above:
            fits = False
            while not fits and time.monotonic() < until:
                with self.database.transaction() as run:  # in batches, because others wait
                    fits, evicted = make_room(run, namespace, "", 0, evict, most=BATCH)
                count += evicted
                if not evicted:
                    break
        return count

    def finish(self, number: int, measure: Callable[[], Entry | None], discard: Callable[[], None]) -> None:
        """End a write whose payload is complete. ``measure`` looks at the medium: another process may have replaced or
        deleted the payload meanwhile. If the tenant was dropped meanwhile, ``discard`` deletes it instead."""
        with self.database.transaction() as run:
            found = run("SELECT key FROM writes WHERE id = ?", (number,)).fetchone()
            dropped = str(found[0] if found is not None else "").removeprefix(_DROPPED)
            # who wrote the key after the tenant was dropped keeps it
            again = run("SELECT 1 FROM entries WHERE key = ?", (dropped,)).fetchone() is not None
            if found is not None and not is_key(found[0]) and not again:
                discard()
            elif (entry := measure()) is not None:
                _record(run, entry)
            run("DELETE FROM writes WHERE id = ?", (number,))  # its bytes count until now

    def abandon(self, number: int) -> None:
        """End a write that left no payload."""
        self.database.execute("DELETE FROM writes WHERE id = ?", (number,))

    def writers(self) -> list[str]:
        """Processes with writes that are not complete."""
        return [writer for (writer,) in self.database.query("SELECT DISTINCT writer FROM writes")]

    def settle(
        self,
        writers: Collection[str],
        measure: Callable[[str], Entry | None],
        evict: Callable[[list[str]], None],
        until: float = math.inf,
    ) -> int:
        """End the writes of killed processes, until ``until`` by :func:`time.monotonic`; returns how many there were. A
        write for which ``measure`` raises OSError, MemoryError or FrameError stays announced."""
        count, last = 0, -1
        sql = "SELECT id, key, writer FROM writes WHERE id > ? ORDER BY id LIMIT ?"
        while rows := self.database.query(sql, (last, 4 * BATCH)):
            last = _next(last, rows[-1][0])
            ended = [(number, key) for number, key, writer in rows if writer in writers]
            for first in range(0, len(ended), BATCH):
                if time.monotonic() > until:
                    return count
                with self.database.transaction() as run:
                    for number, key in ended[first : first + BATCH]:
                        count += _settle(run, number, key, measure, evict)
        return count

    def drop(self, namespace: str, evict: Callable[[list[str]], None]) -> int:
        """Remove everything that the catalog knows of a tenant; returns the number of entries."""
        # writes that are going on count until their payloads are deleted
        mark = "UPDATE writes SET key = ? || key WHERE namespace = ? AND substr(key, 1, 1) != ?"
        self.database.execute(mark, (_DROPPED, namespace, _DROPPED))
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
                    run(ERASE, (erasures_of(namespace),))
                    return count

    # -- erasures -----------------------------------------------------------------------------------------------

    def erasures(self, namespace: str) -> int | None:
        """A number that changes when something of a tenant is erased; 0: nothing was; None: there is no catalog."""
        if not self.database.exists:
            return None
        sql = "SELECT CAST(value AS INTEGER) FROM meta WHERE name = ?"
        rows = self.database.query(sql, (erasures_of(namespace),))
        return rows[0][0] if rows else 0

    def note_erasure(self, namespace: str) -> None:
        """Let all processes of the store drop what they hold of a tenant (:mod:`.erasures`)."""
        self.database.execute(ERASE, (erasures_of(namespace),))

    def unknown_of(self, keys: Sequence[str]) -> list[str]:
        """The keys that have no entry of anyone."""
        if not self.database.exists:
            return [*keys]
        sql = f"SELECT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM {self.entry_table} WHERE key = value)"
        return [key for (key,) in self.database.query(sql, (json.dumps(keys),))]

    entry_table = "entries"
    """Where each entry has its key."""

    # -- care ---------------------------------------------------------------------------------------------------

    def namespaces(self) -> list[str]:
        """Every tenant that has an entry, or is writing one."""
        sql = "SELECT DISTINCT namespace FROM entries UNION SELECT DISTINCT namespace FROM writes"
        return [namespace for (namespace,) in self.database.query(sql)]

    def namespaces_of_texts(self) -> list[str]:
        sql = "SELECT DISTINCT namespace FROM contents UNION SELECT DISTINCT namespace FROM sources"
        return [namespace for (namespace,) in self.database.query(sql)]

    def drop_texts(self) -> None:
        """Remove all tenants' texts, sources and quotas."""
        tables = ("texts", "contents", "anchors", "sources", "quotas")
        self.database.execute_many((f"DELETE FROM {table}", ()) for table in tables)

    def is_being_written(self, key: str) -> bool:
        """Whether a process has announced to write a key, be it for a tenant that was dropped meanwhile."""
        return bool(self.database.query("SELECT 1 FROM writes WHERE key IN (?, ?)", (key, _DROPPED + key)))

    def is_announced(self, key: str) -> bool:
        """Whether a process has announced to write a key, or has recorded it."""
        sql = "SELECT 1 FROM writes WHERE key IN (?, ?) UNION ALL SELECT 1 FROM entries WHERE key = ?"
        return bool(self.database.query(sql, (key, _DROPPED + key, key)))

    def senseless(self) -> int:
        """Number of rows that no version of this package wrote."""
        sql = "SELECT COUNT(*) FROM {} WHERE {}"
        found = [self.database.query(sql.format(*each))[0][0] for each in _SENSELESS.items()]
        return sum(found)

    def drop_senseless(self) -> int:
        """Remove rows that no version of this package wrote; returns how many."""
        return self.database.execute_many((f"DELETE FROM {table} WHERE {no}", ()) for table, no in _SENSELESS.items())

    def counted(self) -> dict[str, Total]:
        rows = self.database.query(f"SELECT namespace, SUM(n), SUM(bytes) {_COUNTED} GROUP BY namespace")
        return {namespace: Total(entries, size) for namespace, entries, size in rows}

    def num_found_whole_only(self, least: int) -> int:
        """Number of texts from ``least`` characters on that are found in prompts as a whole, but not in part: the
        catalog does not have the text itself."""
        sql = (
            "SELECT COUNT(*) FROM texts WHERE length >= ? AND NOT EXISTS (SELECT 1 FROM contents WHERE "
            "contents.namespace = texts.namespace AND contents.digest = texts.digest)"
        )
        return int(self.database.query(sql, (least,))[0][0])

    def drop_unused_texts(self) -> int:
        """Remove texts that have neither an entry nor a source from the text index; returns how many."""
        unused = (
            "DELETE FROM {0} WHERE NOT EXISTS "
            "(SELECT 1 FROM entries WHERE entries.namespace = {0}.namespace AND entries.digest = {0}.digest) "
            "AND NOT EXISTS "
            "(SELECT 1 FROM sources WHERE sources.namespace = {0}.namespace AND sources.digest = {0}.digest)"
        )
        self.database.execute(unused.format("contents"))
        self.database.execute("DELETE FROM anchors WHERE content NOT IN (SELECT id FROM contents)")
        return self.database.execute(unused.format("texts"))

    def count_again(self) -> None:
        with self.database.transaction() as run:
            run("DELETE FROM totals")
            run(f"INSERT INTO totals SELECT namespace, SUM(n), SUM(bytes) {_COUNTED} GROUP BY namespace")
            run("INSERT INTO totals SELECT ?, SUM(entries), SUM(bytes) FROM totals HAVING COUNT(*) > 0", (EVERYONE,))

    def salvage(self, path: Path) -> None:
        """Copy limits, quotas, texts and sources from the file of a damaged catalog, as far as they can be read."""
        copied = {"meta": "WHERE name = 'max_bytes'", "quotas": "", "sources": ""}
        copied |= dict.fromkeys(("texts", "contents", "anchors"), "")
        if not is_file(path):
            return
        for table, condition in copied.items():
            rows = self.database.rows_of_another(path, f"SELECT * FROM {table} {condition}", table)
            while batch := [*islice(rows, BATCH)]:
                with suppress(StoreError), self.database.transaction() as run:
                    for row in batch:
                        with suppress(sqlite3.Error):  # a row may be damaged too
                            run(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    # -- sources ------------------------------------------------------------------------------------------------

    def add_source(self, namespace: str, source: str, text: str, document: str = "") -> None:
        self.database.execute(
            "INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?)",
            (namespace, source, document, text_digest(text), text),
        )

    def source_texts(self, namespace: str, source: str | None = None) -> list[str]:
        rows = self.database.query(
            f"SELECT {_SOURCE} FROM sources WHERE namespace = ? AND source = ifnull(?, source) "
            "GROUP BY digest ORDER BY min(rowid)",
            (namespace, source),
        )
        return [text for _, text in _intact(rows)]

    def orphans(self, namespace: str, gone: Collection[str], keep: Collection[str] = ()) -> list[str]:
        gone = set(gone)
        found: dict[bytes, str] = {}
        for name in sorted(gone):
            for digest, text in self._texts_of(namespace, name):
                holders = self.database.query(
                    "SELECT source, document FROM sources WHERE namespace = ? AND digest = ?", (namespace, digest)
                )
                if text not in keep and all(not gone.isdisjoint(holder) for holder in holders):
                    found[digest] = text
        return list(found.values())

    def sources(self, namespace: str) -> list[str]:
        sql = "SELECT DISTINCT CAST(source AS BLOB) FROM sources WHERE namespace = ? ORDER BY source"
        return [source.decode("utf-8", "replace") for (source,) in self.database.query(sql, (namespace,))]

    def remove_sources(self, namespace: str, gone: Iterable[str], *, texts: Iterable[str] | None = None) -> None:
        digests: list[Sequence[bytes]] = [()] if texts is None else [(text_digest(text),) for text in texts]
        of_text = "" if texts is None else " AND digest = ?"
        self.database.execute_many(
            (f"DELETE FROM sources WHERE namespace = ? AND {column} = ?{of_text}", (namespace, name, *digest))
            for name in gone
            for column in ("source", "document")
            for digest in digests
        )

    def _texts_of(self, namespace: str, name: str) -> list[tuple[bytes, str]]:
        """Digests and texts of a source or document."""
        rows = self.database.query(
            f"SELECT {_SOURCE} FROM sources WHERE namespace = ? AND source = ? "
            f"UNION SELECT {_SOURCE} FROM sources WHERE namespace = ? AND document = ?",
            (namespace, name) * 2,
        )
        return [*_intact(rows)]

    def altered_sources(self) -> list[int]:
        """Rows of sources whose text does not have its digest."""
        found, last = [], 0
        sql = f"SELECT rowid, {_SOURCE} FROM sources WHERE rowid > ? ORDER BY rowid LIMIT 1000"
        while rows := self.database.query(sql, (last,)):
            found += [row for row, *source in rows if not [*_intact([source])]]
            last = _next(last, rows[-1][0])
        return found

    def drop_sources(self, rows: Iterable[int]) -> None:
        """Remove these rows of sources."""
        self.database.execute_many(("DELETE FROM sources WHERE rowid = ?", (row,)) for row in rows)


def erasures_of(namespace: str) -> str:
    """The name of a tenant's number of erasures. It outlives the tenant, and does not tell who that was."""
    return f"erased {text_digest(namespace).hex()}"


def _take_uses(run: Run, count: int) -> int:
    """The first of ``count`` numbers for uses. Uses are numbered, because a clock may be set back."""
    sql = (
        "INSERT INTO meta VALUES ('uses', ?) ON CONFLICT DO UPDATE SET value = ifnull(value, 0) + excluded.value "
        "RETURNING CAST(value AS INTEGER)"
    )
    ((last,),) = run(sql, (count,)).fetchall()
    return int(last) - count + 1


def _settle(
    run: Run, number: int, key: Any, measure: Callable[[str], Entry | None], evict: Callable[[list[str]], None]
) -> bool:
    """End a write of a killed process; False if it stays announced."""
    dropped = str(key).removeprefix(_DROPPED)
    if run("SELECT 1 FROM writes WHERE id = ?", (number,)).fetchone() is None:
        return False  # another process ended it
    try:
        if is_key(key):
            _correct(run, key, measure)
        elif is_key(dropped) and not run("SELECT 1 FROM entries WHERE key = ?", (dropped,)).fetchone():
            evict([dropped])
    except (OSError, MemoryError, FrameError):
        return False
    return bool(run("DELETE FROM writes WHERE id = ?", (number,)).rowcount)


def _correct(run: Run, key: str, measure: Callable[[str], Entry | None]) -> None:
    entry = measure(key)
    run("DELETE FROM entries WHERE key = ?", (key,))
    if entry is not None:
        _record(run, entry)


def _record(run: Run, entry: Entry) -> None:
    run("DELETE FROM entries WHERE key = ?", (entry.key,))  # not REPLACE, which fires no triggers
    values = (entry.key, entry.namespace, entry.digest, entry.num_bytes, entry.num_tokens, entry.codec)
    run("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, _take_uses(run, 1)))
    if entry.text is not None:
        run(WRITE_TEXT, (entry.namespace, *entry.text))


def _next(last: Any, found: Any) -> Any:
    """The last row read. Raises StoreError unless it comes after the one before: asking on would never end."""
    if found <= last:
        raise StoreError("the catalog is damaged: its rows are out of order. Run cacheclip store repair.")
    return found


def _intact(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[bytes, str]]:
    """Digests and texts of the sources whose text has its digest."""
    for digest, text in rows:
        decoded = bytes(text or b"").decode("utf-8", "replace")
        if text_digest(decoded) == digest:
            yield digest, decoded
