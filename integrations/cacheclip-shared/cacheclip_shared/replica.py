"""This machine's catalog of a shared store, in SQLite. It may be deleted at any time, and is made anew.

Keys that it does not know are looked for in object storage, because a payload is there before its row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from cacheclip_rag.store import (
    Database,
    Entry,
    Frame,
    FrameError,
    SqliteCatalog,
    TextIndex,
    Total,
    each_in_pool,
    erase,
    is_key,
)

from .changes import Changes, SharedIndex, SharedSources
from .copies import FILE_NAME, RECORD, ROWS_OF_TEXT, TableCopy
from .objects import ObjectBackend, ObjectFound
from .place import object_name
from .table import SharedText

logger = logging.getLogger(__name__)

_MISSING_S = 5.0
"""For which a key that is not in object storage is not looked for again."""
_HEAD_BYTES = 1 << 14
_OWN = """
CREATE TABLE IF NOT EXISTS payloads (
    key TEXT NOT NULL, codec TEXT NOT NULL, namespace TEXT NOT NULL, digest BLOB, bytes INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, written REAL NOT NULL, last_use INTEGER NOT NULL, PRIMARY KEY (key, codec)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS payloads_by_text ON payloads (namespace, digest);
CREATE INDEX IF NOT EXISTS payloads_by_use ON payloads (last_use);
CREATE TABLE IF NOT EXISTS files (id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS rows (
    file INTEGER NOT NULL, digest BLOB NOT NULL, source TEXT NOT NULL, document TEXT NOT NULL,
    PRIMARY KEY (file, digest, source, document)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rows_by_text ON rows (digest);
"""
_PAYLOAD = "key, namespace, digest, bytes, num_tokens, codec"


class SharedCatalog(SqliteCatalog):
    """Of the tenants that this process serves. What it adds and removes waits for the store's commit."""

    entry_table = "payloads"

    def __init__(self, objects: ObjectBackend) -> None:
        super().__init__(objects.place.replica / FILE_NAME, _OWN)
        self.objects, self.changes = objects, Changes()
        self.sources = SharedSources(self.database, self.changes)
        self.tables = TableCopy(objects.place, self.database, self, self.changes)
        self._missing: dict[str, float] = {}

    def text_index(self, namespace: str) -> TextIndex:
        self.tables.serve(namespace)
        return SharedIndex(self.database, namespace, self.changes)

    on_forgotten: Callable[[str, Sequence[str]], object] = staticmethod(lambda namespace, keys: None)
    """Called with a tenant and keys whose copies are to be dropped."""

    def entries_of(self, namespace: str, keys: Sequence[str]) -> dict[str, Entry]:
        known = self._recorded(namespace, keys)
        now = time.monotonic()
        unknown = [
            key
            for key in dict.fromkeys(keys)
            if key not in known and now - self._missing.get(key, -_MISSING_S) >= _MISSING_S
        ]
        if unknown and self._look_for(namespace, unknown):
            known = self._recorded(namespace, keys)
        found = {}
        for key, entries in known.items():
            codec = self.objects.choose(entries)
            found[key] = entries[codec]
            self.objects.use(key, object_name(namespace, key, codec))
        return found

    def _recorded(self, namespace: str, keys: Sequence[str]) -> dict[str, dict[str, Entry]]:
        """Entries by key and codec."""
        found: dict[str, dict[str, Entry]] = {}
        for start in range(0, len(keys), 500):
            some = keys[start : start + 500]
            sql = f"SELECT {_PAYLOAD} FROM payloads WHERE key IN ({', '.join('?' * len(some))}) AND +namespace = ?"
            for row in self.database.query(sql, (*some, namespace)):
                found.setdefault(row[0], {})[row[5]] = Entry(*row)
        return found

    def _look_for(self, namespace: str, keys: list[str]) -> bool:
        """Record what object storage has of keys; False if it has nothing, or does not answer."""
        try:
            located = self.objects.locate(namespace, keys)
            objects = [(key, each) for key, of_key in located.items() for each in of_key]
            frames = each_in_pool(lambda pair: _header(self.objects, *pair), objects) if objects else []
        except OSError as error:
            logger.debug("keys are not looked for: %s", error)
            return False
        self._missing |= dict.fromkeys({*keys} - {*located}, time.monotonic())
        if len(self._missing) > 1 << 16:
            self._missing.clear()
        own = [
            (frame, each)
            for frame, (_, each) in zip(frames, objects, strict=True)
            if frame and frame.namespace == namespace
        ]
        if own:
            _record(
                self.database, [(Entry.of(frame, frame.num_bytes), each.modified.timestamp()) for frame, each in own]
            )
        return bool(own)

    def record(self, entry: Entry) -> None:
        """Record a payload that was written just now."""
        self._missing.pop(entry.key, None)
        _record(self.database, [(entry, time.time())])

    def keys(self, namespace: str) -> list[str]:
        rows = self.database.query(
            "SELECT key FROM payloads WHERE namespace = ? GROUP BY key ORDER BY max(last_use)", (namespace,)
        )
        return [key for (key,) in rows if is_key(key)]

    def use(self, keys: Sequence[str]) -> None:
        """Nothing is evicted by use here."""

    def remove(
        self,
        namespace: str,
        keys: Sequence[str],
        delete: Callable[[Sequence[str]], int] | None = None,
        *,
        erases: bool = True,
    ) -> int:
        """Forget entries on this machine. Their payloads stay: servers never delete."""
        with self.database.transaction() as run:
            count = sum(
                [
                    run("DELETE FROM payloads WHERE key = ? AND namespace = ?", (key, namespace)).rowcount > 0
                    for key in keys
                ]
            )
            if count and erases:
                erase(run, namespace)
        self._missing |= dict.fromkeys(keys, time.monotonic())
        self.on_forgotten(namespace, keys)
        return count

    def correct(self, key: str, measure: Callable[[str], Entry | None]) -> None:
        """An object that is gone is forgotten, and looked for again later."""
        rows = self.database.query("SELECT DISTINCT namespace FROM payloads WHERE key = ?", (key,))
        for (namespace,) in rows:
            self.remove(namespace, [key])

    def total(self, namespace: str | None = None) -> Total:
        where, names = ("", ()) if namespace is None else (" WHERE namespace = ?", (namespace,))
        return Total(*self.database.query(f"SELECT COUNT(*), ifnull(SUM(bytes), 0) FROM payloads{where}", names)[0])

    def tenants(self) -> dict[str, Total]:
        rows = self.database.query("SELECT namespace, COUNT(*), SUM(bytes) FROM payloads GROUP BY namespace")
        return {namespace: Total(entries, size) for namespace, entries, size in rows}

    def with_kv(self, namespace: str, texts: Iterable[SharedText]) -> list[SharedText]:
        """Texts with what is stored of them."""
        sql = "SELECT key, codec, bytes, num_tokens FROM payloads WHERE namespace = ? AND digest = ?"

        def kv_of(text: SharedText) -> tuple[tuple[str, str, int, int], ...]:
            found = self.database.query(sql, (namespace, bytes.fromhex(text.digest)))
            return tuple((key, codec, size, tokens) for key, codec, size, tokens in found)

        return [replace(each, kv=kv_of(each)) for each in texts]

    def old_payloads(self, namespace: str, digests: Iterable[str], before: float) -> list[tuple[str, str, bool]]:
        """Key and codec of payloads of texts that nobody here wrote or saw since ``before``, and whether a row names
        the text."""
        sql = "SELECT key, codec FROM payloads WHERE namespace = ? AND digest = ? AND written < ?"
        found = []
        for digest in map(bytes.fromhex, digests):
            if rows := self.database.query(sql, (namespace, digest, before)):
                is_named = bool(self.database.query(ROWS_OF_TEXT, (namespace, digest)))
                found += [(key, codec, is_named) for key, codec in rows]
        return found

    def seen(self, key: str, codec: str) -> None:
        """A payload is in storage now."""
        sql = "UPDATE payloads SET written = ? WHERE key = ? AND codec = ?"
        self.database.execute(sql, (time.time(), key, codec))


def _record(database: Database, entries: Iterable[tuple[Entry, float]]) -> None:
    """Record payloads, and when they were written."""
    database.execute_many(
        (RECORD, (each.key, each.codec, each.namespace, each.digest, each.num_bytes, each.num_tokens, written))
        for each, written in entries
    )


def _header(objects: ObjectBackend, key: str, found: ObjectFound) -> Frame | None:
    """The header of an object; None if it is gone or damaged."""
    objects.use(key, found.name)
    try:
        head = objects.head(key, _HEAD_BYTES)
        if head is not None and Frame.header_bytes(head[0]) > _HEAD_BYTES:
            head = objects.head(key, Frame.header_bytes(head[0]))
        return Frame.parse(head[0], key, num_bytes=head[1]) if head is not None else None
    except FrameError:
        return None
