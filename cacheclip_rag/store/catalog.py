"""The store's catalog: one SQLite file with entries, texts and sources.

An entry records a payload's size, last use and text, so that deleting a text needs no model. The table of texts belongs
to :mod:`.texts`, which finds them in prompts. Sources record where texts come from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from .database import Database
from .keys import text_digest
from .texts import SCHEMA as _TEXTS

__all__ = ["FILE_NAME", "Catalog", "Entry"]

FILE_NAME = "catalog.sqlite3"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, namespace TEXT NOT NULL, digest BLOB, bytes INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    codec TEXT NOT NULL, last_use INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (last_use);
CREATE INDEX IF NOT EXISTS entries_by_text ON entries (namespace, digest);
CREATE TABLE IF NOT EXISTS sources (
    namespace TEXT NOT NULL, source TEXT NOT NULL, document TEXT NOT NULL, digest BLOB NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (namespace, source, digest)
);
CREATE INDEX IF NOT EXISTS sources_by_document ON sources (namespace, document);
CREATE INDEX IF NOT EXISTS sources_by_text ON sources (namespace, digest);
"""
# Uses are numbered, because timestamps would be wrong after a clock is set back.
_NEXT_USE = "(SELECT ifnull(max(last_use), 0) + 1 FROM entries)"
_WRITE_ENTRY = f"INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, {_NEXT_USE})"
_USE_ENTRY = f"UPDATE entries SET last_use = {_NEXT_USE} WHERE key = ? AND bytes = ? AND codec = ?"


@dataclass(frozen=True, slots=True)
class Entry:
    """One payload of the store."""

    key: str
    namespace: str
    text: bytes | None
    """Digest of the entry's text; None if it has no text (the shared prefix)."""
    num_bytes: int
    num_tokens: int
    codec: str


class Catalog:
    """Entries, texts and sources of a store folder, shared by processes. Without a folder: of this process only.

    All methods raise StoreError if the file cannot be used.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.database = Database(folder / FILE_NAME if folder else None, _SCHEMA + _TEXTS)
        """The catalog's tables; :class:`~cacheclip_rag.store.texts.TextIndex` uses the one of texts."""

    def close(self) -> None:
        """Close the file; the catalog may be used again afterwards."""
        self.database.close()

    # -- entries ------------------------------------------------------------------------------------------------

    def record(self, entry: Entry) -> None:
        """Record an entry after its payload was written, as the most recently used."""
        self.database.execute(_WRITE_ENTRY, astuple(entry))

    def use(self, entry: Entry) -> None:
        """Mark an entry as the most recently used. A missing or different entry is written again. Raises StoreError
        without waiting if another process is writing."""
        if not self.database.execute_at_once(_USE_ENTRY, (entry.key, entry.num_bytes, entry.codec)):
            self.database.execute_at_once(_WRITE_ENTRY, astuple(entry))

    def remove(self, keys: Iterable[str]) -> int:
        """Remove entries; returns how many existed."""
        return self.database.execute_many(("DELETE FROM entries WHERE key = ?", (key,)) for key in keys)

    def holds(self, key: str) -> bool:
        """Whether ``key`` has an entry."""
        return bool(self.database.query("SELECT 1 FROM entries WHERE key = ?", (key,)))

    def keys(self) -> list[str]:
        """All keys, least recently used first."""
        return [key for (key,) in self.database.query("SELECT key FROM entries ORDER BY last_use, key")]

    def keys_of(self, namespace: str, digest: bytes) -> list[str]:
        """Keys of all entries of one text, for every model and chunk context."""
        sql = "SELECT key FROM entries WHERE namespace = ? AND digest = ?"
        return [key for (key,) in self.database.query(sql, (namespace, digest))]

    def least_recently_used(self, count: int, *, keep: str) -> list[tuple[str, int]]:
        """Keys and bytes of the next ``count`` entries to evict, without ``keep``."""
        sql = "SELECT key, bytes FROM entries WHERE key != ? ORDER BY last_use, key LIMIT ?"
        return self.database.query(sql, (keep, count))

    def totals(self) -> tuple[int, int]:
        """Number of entries, and the sum of their bytes."""
        ((count, size),) = self.database.query("SELECT COUNT(*), ifnull(SUM(bytes), 0) FROM entries")
        return count, size

    # -- sources ------------------------------------------------------------------------------------------------

    def add_source(self, namespace: str, source: str, text: str, document: str = "") -> None:
        """Record that a text comes from ``source``, which is part of ``document``. Other sources of the text stay."""
        self.database.execute(
            "INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?)",
            (namespace, source, document, text_digest(text), text),
        )

    def source_texts(self, namespace: str, source: str | None = None) -> list[str]:
        """Texts that have a source, each once; with ``source``, only the texts of that source."""
        rows = self.database.query(
            "SELECT text FROM sources WHERE namespace = ? AND source = ifnull(?, source) "
            "GROUP BY digest ORDER BY min(rowid)",
            (namespace, source),
        )
        return [text for (text,) in rows]

    def orphans(self, namespace: str, gone: Collection[str], keep: Collection[str] = ()) -> list[str]:
        """Texts that would have no source without the sources and documents ``gone``, except the texts in ``keep``."""
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

    def remove_sources(self, namespace: str, gone: Iterable[str], *, texts: Iterable[str] | None = None) -> None:
        """Remove sources and documents; with ``texts``, only from these texts."""
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
        return self.database.query(
            "SELECT digest, text FROM sources WHERE namespace = ? AND source = ? "
            "UNION SELECT digest, text FROM sources WHERE namespace = ? AND document = ?",
            (namespace, name) * 2,
        )
