"""Where chunk texts come from, so that the caches of a record or a document can be released with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from .database import Database
from .texts import text_digest

__all__ = ["SourceIndex"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sources (
    namespace TEXT NOT NULL, source TEXT NOT NULL, document TEXT NOT NULL, digest BLOB NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (namespace, source, digest)
);
CREATE INDEX IF NOT EXISTS sources_by_document ON sources (namespace, document);
CREATE INDEX IF NOT EXISTS sources_by_text ON sources (namespace, digest);
"""


class SourceIndex:
    """Texts by source (a node, a record), of one namespace, shared by processes through the store folder (None: in this
    process only).

    A source may be a part of a document, and goes with it. A text may come from several sources; it is orphaned when
    the last of them is gone.
    """

    def __init__(self, folder: Path | None = None, namespace: str = "default") -> None:
        self._database = Database(folder / "sources.sqlite3" if folder else None, _SCHEMA)
        self._namespace = namespace

    def add(self, source: str, text: str, document: str = "") -> None:
        """Remember that a text comes from ``source`` (too)."""
        self._database.execute(
            "INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?)",
            (self._namespace, source, document, text_digest(text), text),
        )

    def texts(self, source: str | None = None) -> list[str]:
        """Every text, once; those of one source alone, if it is given."""
        rows = self._database.query(
            "SELECT text FROM sources WHERE namespace = ? AND source = ifnull(?, source) "
            "GROUP BY digest ORDER BY min(rowid)",
            (self._namespace, source),
        )
        return [text for (text,) in rows]

    def orphans(self, gone: Collection[str], keep: Collection[str] = ()) -> list[str]:
        """Texts that no source would hold any more if these sources and documents were forgotten, but for
        those to ``keep``."""
        gone = set(gone)
        found: dict[bytes, str] = {}
        for name in sorted(gone):
            rows = self._database.query(
                "SELECT digest, text FROM sources WHERE namespace = ? AND source = ? "
                "UNION SELECT digest, text FROM sources WHERE namespace = ? AND document = ?",
                (self._namespace, name) * 2,
            )
            for digest, text in rows:
                holders = self._database.query(
                    "SELECT source, document FROM sources WHERE namespace = ? AND digest = ?", (self._namespace, digest)
                )
                if text not in keep and all(not gone.isdisjoint(holder) for holder in holders):
                    found[digest] = text
        return list(found.values())

    def remove(self, gone: Iterable[str], *, texts: Iterable[str] | None = None) -> None:
        """Forget these sources and documents; of these texts alone, if any are given."""
        digests = None if texts is None else [text_digest(text) for text in texts]
        of_text = "" if digests is None else " AND digest = ?"
        self._database.execute_many(
            (f"DELETE FROM sources WHERE namespace = ? AND {column} = ?{of_text}", (self._namespace, name, *digest))
            for name in gone
            for column in ("source", "document")
            for digest in ([()] if digests is None else [(each,) for each in digests])
        )

    def close(self) -> None:
        self._database.close()
