"""What care of a store folder asks and mends in its catalog."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from cacheclip_rag import StoreError
from cacheclip_rag.plugins import is_file
from cacheclip_rag.store import COLUMNS, EVERYONE, Database, Entry, TextRow, Total, next_row

_COUNTED = "FROM (SELECT namespace, 1 AS n, bytes FROM entries UNION ALL SELECT namespace, 0, bytes FROM writes)"
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


class CatalogCare:
    """Rows of all tenants: whether they make sense, and agree."""

    def __init__(self, database: Database) -> None:
        """``database``: of a :class:`~cacheclip_rag.store.Catalog`."""
        self._database = database

    def entries(self) -> Iterator[Entry]:
        last = ""
        sql = f"SELECT {COLUMNS} FROM entries WHERE key > ? AND typeof(key) = 'text' ORDER BY key LIMIT 1000"
        while rows := self._database.query(sql, (last,)):
            yield from (Entry(*row) for row in rows)
            last = next_row(last, rows[-1][0])

    def entry_of_anyone(self, key: str) -> Entry | None:
        """The entry of a key, whoever's it is."""
        rows = self._database.query(f"SELECT {COLUMNS} FROM entries WHERE key = ?", (key,))
        return Entry(*rows[0]) if rows else None

    def namespaces(self) -> list[str]:
        """Every tenant that has an entry, or is writing one."""
        sql = "SELECT DISTINCT namespace FROM entries UNION SELECT DISTINCT namespace FROM writes"
        return [namespace for (namespace,) in self._database.query(sql)]

    def namespaces_of_texts(self) -> list[str]:
        sql = "SELECT DISTINCT namespace FROM contents UNION SELECT DISTINCT namespace FROM sources"
        return [namespace for (namespace,) in self._database.query(sql)]

    def drop_texts(self) -> None:
        """Remove all tenants' texts, sources and quotas."""
        tables = ("texts", "contents", "anchors", "sources", "quotas")
        self._database.execute_many((f"DELETE FROM {table}", ()) for table in tables)

    def senseless(self) -> int:
        """Number of rows that no version of this package wrote."""
        sql = "SELECT COUNT(*) FROM {} WHERE {}"
        counts = [self._database.query(sql.format(*each))[0][0] for each in _SENSELESS.items()]
        return sum(counts)

    def drop_senseless(self) -> int:
        """Remove rows that no version of this package wrote; returns how many."""
        return self._database.execute_many((f"DELETE FROM {table} WHERE {no}", ()) for table, no in _SENSELESS.items())

    def counted(self) -> dict[str, Total]:
        rows = self._database.query(f"SELECT namespace, SUM(n), SUM(bytes) {_COUNTED} GROUP BY namespace")
        return {namespace: Total(entries, size) for namespace, entries, size in rows}

    def count_again(self) -> None:
        with self._database.transaction() as run:
            run("DELETE FROM totals")
            run(f"INSERT INTO totals SELECT namespace, SUM(n), SUM(bytes) {_COUNTED} GROUP BY namespace")
            run("INSERT INTO totals SELECT ?, SUM(entries), SUM(bytes) FROM totals HAVING COUNT(*) > 0", (EVERYONE,))

    def num_found_whole_only(self, least: int) -> int:
        """Number of texts from ``least`` characters on that are found in prompts as a whole, but not in part: the
        catalog does not have the text itself."""
        sql = (
            "SELECT COUNT(*) FROM texts WHERE length >= ? AND NOT EXISTS (SELECT 1 FROM contents WHERE "
            "contents.namespace = texts.namespace AND contents.digest = texts.digest)"
        )
        return int(self._database.query(sql, (least,))[0][0])

    def drop_unused_texts(self) -> int:
        """Remove texts that have neither an entry nor a source from the text index; returns how many."""
        unused = (
            "DELETE FROM {0} WHERE NOT EXISTS "
            "(SELECT 1 FROM entries WHERE entries.namespace = {0}.namespace AND entries.digest = {0}.digest) "
            "AND NOT EXISTS "
            "(SELECT 1 FROM sources WHERE sources.namespace = {0}.namespace AND sources.digest = {0}.digest)"
        )
        self._database.execute(unused.format("contents"))
        self._database.execute("DELETE FROM anchors WHERE content NOT IN (SELECT id FROM contents)")
        return self._database.execute(unused.format("texts"))

    def salvage(self, path: Path) -> None:
        """Copy limits, quotas, texts and sources from the file of a damaged catalog, as far as they can be read."""
        copied = {"meta": "WHERE name = 'max_bytes'", "quotas": "", "sources": ""}
        copied |= dict.fromkeys(("texts", "contents", "anchors"), "")
        if not is_file(path):
            return
        for table, condition in copied.items():
            rows = self._database.file.rows_of_another(path, f"SELECT * FROM {table} {condition}", table)
            while batch := [*islice(rows, 256)]:
                with suppress(StoreError), self._database.transaction() as run:
                    for row in batch:
                        with suppress(sqlite3.Error):  # a row may be damaged too
                            run(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row)
