"""Where texts come from: the sources and documents of a catalog."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from ..base.database import Database
from ..base.errors import ConfigurationError
from ..base.keys import text_digest
from .entries import next_row
from .eviction import LEARNED, LEARNED_ENTRIES

SCHEMA = """
CREATE TABLE IF NOT EXISTS sources (
    namespace TEXT NOT NULL, source TEXT NOT NULL, document TEXT NOT NULL, digest BLOB NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (namespace, source, digest)
);
CREATE INDEX IF NOT EXISTS sources_by_document ON sources (namespace, document);
CREATE INDEX IF NOT EXISTS sources_by_text ON sources (namespace, digest);
"""
_SOURCE = "digest, CAST(text AS BLOB)"  # as bytes: SQLite refuses a query that finds text that is not UTF-8


def check_source(*names: str) -> None:
    """Raise ConfigurationError if one of these sources and documents is that of learned texts."""
    if LEARNED in names:
        raise ConfigurationError(
            f"the source {LEARNED!r} is that of texts that recurred in prompts, which are evicted first: name the "
            "source or document of these texts otherwise."
        )


class Sources:
    """Texts by source (a node, a record) and by document, of all tenants. A text may have several sources."""

    def __init__(self, database: Database) -> None:
        """``database``: has the table of ``SCHEMA``."""
        self._database = database

    def add(self, namespace: str, source: str, text: str, document: str = "") -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?)",
            (namespace, source, document, text_digest(text), text),
        )

    def texts(self, namespace: str, source: str | None = None) -> list[str]:
        rows = self._database.query(
            f"SELECT {_SOURCE} FROM sources WHERE namespace = ? AND source = ifnull(?, source) "
            "GROUP BY digest ORDER BY min(rowid)",
            (namespace, source),
        )
        return [text for _, text in _intact(rows)]

    def names(self, namespace: str) -> list[str]:
        sql = "SELECT DISTINCT CAST(source AS BLOB) FROM sources WHERE namespace = ? ORDER BY source"
        return [source.decode("utf-8", "replace") for (source,) in self._database.query(sql, (namespace,))]

    def holders(self, namespace: str, digest: bytes) -> list[tuple[str, str]]:
        sql = "SELECT source, document FROM sources WHERE namespace = ? AND digest = ?"
        return [(source, document) for source, document in self._database.query(sql, (namespace, digest))]

    def orphans(self, namespace: str, gone: Collection[str], keep: Collection[str] = ()) -> list[str]:
        gone = set(gone)
        texts: dict[bytes, str] = {}
        for name in sorted(gone):
            for digest, text in self._texts_of(namespace, name):
                holders = self.holders(namespace, digest)
                if text not in keep and all(not gone.isdisjoint(holder) for holder in holders):
                    texts[digest] = text
        return list(texts.values())

    def learned(self, namespace: str) -> dict[str, int]:
        rows = self._database.query(
            f"SELECT {_SOURCE}, sum(CAST(bytes AS INTEGER)) FROM {LEARNED_ENTRIES} "
            "GROUP BY digest ORDER BY max(last_use)",
            (namespace, LEARNED),
        )
        return {text: num_bytes for *row, num_bytes in rows for _, text in _intact([row])}

    def remove(self, namespace: str, gone: Iterable[str], *, texts: Iterable[str] | None = None) -> None:
        digests: list[Sequence[bytes]] = [()] if texts is None else [(text_digest(text),) for text in texts]
        of_text = "" if texts is None else " AND digest = ?"
        self._database.execute_many(
            (f"DELETE FROM sources WHERE namespace = ? AND {column} = ?{of_text}", (namespace, name, *digest))
            for name in gone
            for column in ("source", "document")
            for digest in digests
        )

    def altered(self) -> list[int]:
        """Rows of sources whose text does not have its digest."""
        altered, last = [], 0
        sql = f"SELECT rowid, {_SOURCE} FROM sources WHERE rowid > ? ORDER BY rowid LIMIT 1000"
        while rows := self._database.query(sql, (last,)):
            altered += [row for row, *source in rows if not [*_intact([source])]]
            last = next_row(last, rows[-1][0])
        return altered

    def drop(self, rows: Iterable[int]) -> None:
        """Remove these rows of sources."""
        self._database.execute_many(("DELETE FROM sources WHERE rowid = ?", (row,)) for row in rows)

    def _texts_of(self, namespace: str, name: str) -> list[tuple[bytes, str]]:
        """Digests and texts of a source or document."""
        rows = self._database.query(
            f"SELECT {_SOURCE} FROM sources WHERE namespace = ? AND source = ? "
            f"UNION SELECT {_SOURCE} FROM sources WHERE namespace = ? AND document = ?",
            (namespace, name) * 2,
        )
        return [*_intact(rows)]


def _intact(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[bytes, str]]:
    """Digests and texts of the sources whose text has its digest."""
    for digest, text in rows:
        decoded = bytes(text or b"").decode("utf-8", "replace")
        if text_digest(decoded) == digest:
            yield digest, decoded
