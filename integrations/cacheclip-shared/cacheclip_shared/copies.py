"""This machine's copy of what the tables of the tenants say."""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from cacheclip_rag import StoreError
from cacheclip_rag.store import CatalogView, Database, FormatError, TextIndex, erase, may_be_whole

from .changes import Changes
from .place import SharedPlace, failing_as
from .table import DamagedFileError, SharedText, TableError, TextTable, is_whole

logger = logging.getLogger(__name__)

FILE_NAME = "replica.sqlite3"
RECORD = (
    "INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?, ifnull((SELECT max(last_use) FROM payloads), 0) + 1)"
)
"""Records a payload: key, codec, namespace, digest of its text, bytes, tokens, and when it was written."""
ROWS_OF_TEXT = "SELECT source, document FROM rows JOIN files ON id = file WHERE namespace = ? AND digest = ?"


class TableCopy:
    """Rows of the tenants that this process serves, and the files that they come from."""

    def __init__(self, place: SharedPlace, database: Database, catalog: CatalogView, changes: Changes) -> None:
        """
        Args:
            database: of ``catalog``, which has the tables of files and rows.
            changes: of this process, which texts that others removed leave.
        """
        self._place, self._database, self._catalog, self._changes = place, database, catalog, changes
        self._tables: dict[str, TextTable] = {}
        self._serving = threading.Lock()
        self._polling = threading.Lock()
        self._failing: set[str] = set()
        """Tenants, and files of tables, that could not be read when they were last looked at."""

    def serve(self, namespace: str) -> None:
        """Take this tenant's rows from now on."""
        with self._serving:
            is_new = namespace not in self._tables
            self._tables.setdefault(namespace, TextTable(self._place, namespace))
        if is_new:
            self.on_tenant()

    on_tenant: Callable[[], object] = staticmethod(lambda: None)
    """Called when this process serves a tenant that it did not serve before."""

    def table(self, namespace: str) -> TextTable:
        return self._tables[namespace]

    def poll(self) -> tuple[int, int]:
        """Take what others committed for the tenants that are served here: rows added and removed. A tenant for which
        that fails is named in a warning, and holds up no other one."""
        added = removed = 0
        with self._polling:
            for namespace in [*self._tables]:
                try:
                    with failing_as("rows of its table cannot be taken", kind=TableError):
                        more, less = self._poll(namespace)
                except StoreError as error:
                    if not self._thrown_away(error):
                        message = f"new texts of tenant {namespace!r} in the shared store are not seen: {error}"
                        self._warn(namespace, message)
                    continue
                self._failing.discard(namespace)
                added, removed = added + more, removed + less
        return added, removed

    def _warn(self, what: str, message: str) -> None:
        """Once until it works again."""
        if what not in self._failing:
            logger.warning("%s", message)
        self._failing.add(what)

    def _thrown_away(self, error: StoreError) -> bool:
        """Whether the copy was damaged, or of another version of the package. The next poll makes it anew."""
        path = self._place.replica / FILE_NAME
        if isinstance(error, TableError) or str(path) not in str(error):  # a table may say anything
            return False
        if may_be_whole(error) and not isinstance(error, FormatError):
            return False
        logger.warning("the copy of the shared store's catalog on this machine is made anew: %s", error.__cause__)
        self._database.close()
        with suppress(OSError):
            for each in path.parent.glob(f"{FILE_NAME}*"):
                each.unlink(missing_ok=True)
        return True

    def _poll(self, namespace: str) -> tuple[int, int]:
        table = self._tables[namespace]
        files = set(table.files())
        known = dict(self._database.query("SELECT name, id FROM files WHERE namespace = ?", (namespace,)))
        added, gone = 0, set[str]()
        for name in files - {*known}:
            try:
                count = self._take(namespace, table, name)
            except DamagedFileError as error:  # it holds up no other one
                self._warn(name, str(error))
                continue
            if count is None:
                gone.add(name)
            else:
                self._failing.discard(name)
                added += count
        for name in gone.intersection(table.files() if gone else ()):  # no later commit has replaced them
            self._warn(name, str(table.lost(name)))
        return added, self._forget_files(namespace, [known[name] for name in {*known} - files])

    def after_commit(self, namespace: str, texts: Iterable[SharedText]) -> None:
        """After a commit of these texts: see what became of them."""
        with self._polling:
            self._poll(namespace)
        digests = {bytes.fromhex(each.digest) for each in texts}
        gone = {each for each in digests if not self._database.query(ROWS_OF_TEXT, (namespace, each))}
        sql = "DELETE FROM sources WHERE namespace = ? AND digest = ?"
        self._database.execute_many((sql, (namespace, each)) for each in gone)
        self._forget_texts(namespace, gone)

    def _take(self, namespace: str, table: TextTable, name: str) -> int | None:
        """Record a file's rows; returns how many no other file has, or None if it is gone. Parts of texts are found
        too."""
        found, count = table.read(name), 0
        if found is None:
            return None
        rows = [row for row in found.to_pylist() if row["namespace"] == namespace and is_whole(row)]
        if left_out := found.num_rows - len(rows):
            logger.warning("%d rows of %s are not what a commit writes, and are left out", left_out, name)
        TextIndex(self._database, namespace).add(dict.fromkeys(row["text"] for row in rows))
        with self._database.transaction() as run:
            file = run("INSERT OR REPLACE INTO files (namespace, name) VALUES (?, ?)", (namespace, name)).lastrowid
            for row in rows:
                digest = bytes.fromhex(row["digest"])
                others = run(ROWS_OF_TEXT, (namespace, digest)).fetchall()
                count += (row["source"], row["document"]) not in others
                run("INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?)", (file, digest, row["source"], row["document"]))
                for each in row["kv"] or ():
                    payload = (each["key"], each["codec"], namespace, digest, each["bytes"], each["tokens"], 0.0)
                    run(RECORD, payload)
                if row["source"]:
                    origin = (namespace, row["source"], row["document"], digest, row["text"])
                    run("INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?)", origin)
        return count

    def _forget_files(self, namespace: str, files: Sequence[int]) -> int:
        """Forget the rows of files that are gone, unless another file has them."""
        count = 0
        for file in files:
            with self._database.transaction() as run:
                rows = run("SELECT digest, source, document FROM rows WHERE file = ?", (file,)).fetchall()
                run("DELETE FROM rows WHERE file = ?", (file,))
                run("DELETE FROM files WHERE id = ?", (file,))
                gone = []
                for digest, source, document in rows:
                    of_text = run(ROWS_OF_TEXT, (namespace, digest)).fetchall()
                    if (source, document) not in of_text:
                        count += 1
                        run(
                            "DELETE FROM sources WHERE namespace = ? AND source = ? AND digest = ?",
                            (namespace, source, digest),
                        )
                    if not of_text:
                        gone.append(digest)
            self._forget_texts(namespace, gone)
        return count

    def _forget_texts(self, namespace: str, digests: Iterable[bytes]) -> None:
        """Forget texts that have no row any more, and their payloads; also those that an answer added here."""
        gone = set(digests)
        self._changes.forget(namespace, gone)
        sql = "SELECT text FROM contents WHERE namespace = ? AND digest = ?"
        found = [row for digest in gone for row in self._database.query(sql, (namespace, digest))]
        texts = [zlib.decompress(text).decode("utf-8", "surrogatepass") for (text,) in found]
        TextIndex(self._database, namespace).remove(texts)
        keys = [key for digest in gone for key in self._catalog.keys_of(namespace, digest)]
        with self._database.transaction() as run:
            for digest in gone:
                run("DELETE FROM texts WHERE namespace = ? AND digest = ?", (namespace, digest))
            if gone:
                erase(run, namespace)
        self._catalog.remove(namespace, keys)

    def lacks_kv(self, namespace: str, digest: bytes) -> bool:
        """Whether a text has a row that names no KV."""
        return bool(self._database.query(ROWS_OF_TEXT, (namespace, digest))) and not self._catalog.keys_of(
            namespace, digest
        )
