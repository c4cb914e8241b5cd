"""This machine's copy of a shared store's catalog, in SQLite. It may be deleted at any time, and is made anew.

Keys that it does not know are looked for in object storage, because a payload is there before its row.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ...base.database import Database, FormatError, may_be_whole
from ...base.errors import ConfigurationError, StoreError
from ...base.keys import is_key, text_digest
from ...finding.texts import SCHEMA as TEXTS_SCHEMA
from ...finding.texts import WRITE as WRITE_TEXT
from ...finding.texts import TextIndex
from ..catalog import ERASE, SCHEMA, VERSION, Catalog, Entry, Total, erasures_of
from ..codecs import Frame, FrameError
from ..reading_pool import each_in_pool
from .objects import ObjectBackend, ObjectFound
from .place import failing_as, object_name
from .table import DamagedFileError, Removal, SharedText, TableError, TextTable, is_whole, place_of

logger = logging.getLogger(__name__)

FILE_NAME = "replica.sqlite3"
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
_ROWS_OF_TEXT = "SELECT source, document FROM rows JOIN files ON id = file WHERE namespace = ? AND digest = ?"
_PAYLOAD = "key, namespace, digest, bytes, num_tokens, codec"
_RECORD = (
    "INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?, ifnull((SELECT max(last_use) FROM payloads), 0) + 1)"
)


class SharedCatalog(Catalog):
    """Of the tenants that this process serves. What it adds and removes waits for the store's commit."""

    def __init__(self, objects: ObjectBackend) -> None:
        super().__init__()
        self.objects, self.folder = objects, None
        self.database = Database(objects.place.replica / FILE_NAME, SCHEMA + TEXTS_SCHEMA + _OWN, VERSION)
        self._missing: dict[str, float] = {}
        self._tables: dict[str, TextTable] = {}
        self._added: dict[str, dict[tuple[str, str, str], SharedText]] = {}
        self._removed: dict[str, Removal] = {}
        self._lock = threading.RLock()
        self._polling = threading.Lock()
        self._failing: set[str] = set()
        """Tenants, and files of tables, that could not be read when they were last looked at."""

    entry_table = "payloads"

    # -- tenants --------------------------------------------------------------------------------------------------

    def text_index(self, namespace: str) -> TextIndex:
        with self._lock:
            is_new = namespace not in self._tables
            self._tables.setdefault(namespace, TextTable(self.objects.place, namespace))
        if is_new:
            self.on_tenant()
        return _SharedIndex(self, namespace)

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
        path = self.objects.place.replica / FILE_NAME
        if isinstance(error, TableError) or str(path) not in str(error):  # a table may say anything
            return False
        if may_be_whole(error) and not isinstance(error, FormatError):
            return False
        logger.warning("the copy of the shared store's catalog on this machine is made anew: %s", error.__cause__)
        self.database.close()
        with suppress(OSError):
            for each in path.parent.glob(f"{FILE_NAME}*"):
                each.unlink(missing_ok=True)
        return True

    def _poll(self, namespace: str) -> tuple[int, int]:
        table = self._tables[namespace]
        files = set(table.files())
        known = dict(self.database.query("SELECT name, id FROM files WHERE namespace = ?", (namespace,)))
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
        gone = {each for each in digests if not self.database.query(_ROWS_OF_TEXT, (namespace, each))}
        sql = "DELETE FROM sources WHERE namespace = ? AND digest = ?"
        self.database.execute_many((sql, (namespace, each)) for each in gone)
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
        TextIndex(self.database, namespace).add(dict.fromkeys(row["text"] for row in rows))
        with self.database.transaction() as run:
            file = run("INSERT OR REPLACE INTO files (namespace, name) VALUES (?, ?)", (namespace, name)).lastrowid
            for row in rows:
                digest = bytes.fromhex(row["digest"])
                others = run(_ROWS_OF_TEXT, (namespace, digest)).fetchall()
                count += (row["source"], row["document"]) not in others
                run("INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?)", (file, digest, row["source"], row["document"]))
                for each in row["kv"] or ():
                    payload = (each["key"], each["codec"], namespace, digest, each["bytes"], each["tokens"], 0.0)
                    run(_RECORD, payload)
                if row["source"]:
                    origin = (namespace, row["source"], row["document"], digest, row["text"])
                    run("INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?)", origin)
                if (place := place_of(row)) is not None:
                    run(WRITE_TEXT, (namespace, *place))
        return count

    def _forget_files(self, namespace: str, files: Sequence[int]) -> int:
        """Forget the rows of files that are gone, unless another file has them."""
        count = 0
        for file in files:
            with self.database.transaction() as run:
                rows = run("SELECT digest, source, document FROM rows WHERE file = ?", (file,)).fetchall()
                run("DELETE FROM rows WHERE file = ?", (file,))
                run("DELETE FROM files WHERE id = ?", (file,))
                gone = []
                for digest, source, document in rows:
                    of_text = run(_ROWS_OF_TEXT, (namespace, digest)).fetchall()
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
        with self._lock:
            waiting = self._added.get(namespace, {})
            for digest in gone:
                waiting.pop((digest.hex(), "", ""), None)
        sql = "SELECT text FROM contents WHERE namespace = ? AND digest = ?"
        found = [row for digest in gone for row in self.database.query(sql, (namespace, digest))]
        texts = [zlib.decompress(text).decode("utf-8", "surrogatepass") for (text,) in found]
        TextIndex(self.database, namespace).remove(texts)
        keys = [key for digest in gone for key in self.keys_of(namespace, digest)]
        with self.database.transaction() as run:
            for digest in gone:
                run("DELETE FROM texts WHERE namespace = ? AND digest = ?", (namespace, digest))
            if gone:
                run(ERASE, (erasures_of(namespace),))
        self.remove(namespace, keys)

    on_forgotten: Callable[[str, Sequence[str]], object] = staticmethod(lambda namespace, keys: None)
    """Called with a tenant and keys whose copies are to be dropped."""

    # -- what waits for a commit ----------------------------------------------------------------------------------

    def note(self, namespace: str, text: str, source: str = "", document: str = "", version: str = "") -> None:
        """A text that was added here."""
        each = SharedText(text, source, document, version)
        with self._lock:
            self._added.setdefault(namespace, {})[each.digest, source, document] = each

    def note_removed(self, namespace: str, texts: Iterable[str] = (), names: Iterable[str] = ()) -> None:
        """Texts, sources and documents that were removed here."""
        removal = Removal({text_digest(text).hex() for text in texts}, set(names))
        with self._lock:
            waiting = self._added.get(namespace, {})
            for key, each in [*waiting.items()]:
                if removal.covers(each):
                    del waiting[key]
            known = self._removed.setdefault(namespace, Removal())
            known.digests |= removal.digests
            known.names |= removal.names

    def waiting(self, namespace: str) -> list[SharedText]:
        """Take the texts that wait for a commit. A text with a source needs no row without one."""
        with self._lock:
            texts = [*self._added.pop(namespace, {}).values()]
        with_source = {each.digest for each in texts if each.source or each.document}
        return [each for each in texts if each.source or each.document or each.digest not in with_source]

    def with_kv(self, namespace: str, texts: Iterable[SharedText]) -> list[SharedText]:
        """Texts with what is stored of them."""
        return [replace(each, kv=self._kv_of(namespace, each)) for each in texts]

    def _kv_of(self, namespace: str, text: SharedText) -> tuple[tuple[str, str, int, int], ...]:
        sql = "SELECT key, codec, bytes, num_tokens, written FROM payloads WHERE namespace = ? AND digest = ?"
        found = self.database.query(sql, (namespace, bytes.fromhex(text.digest)))
        return tuple((key, codec, size, tokens) for key, codec, size, tokens, _ in found)

    def old_payloads(self, namespace: str, digests: Iterable[str], before: float) -> list[tuple[str, str, bool]]:
        """Key and codec of payloads of texts that nobody here wrote or saw since ``before``, and whether a row names
        the text."""
        sql = "SELECT key, codec FROM payloads WHERE namespace = ? AND digest = ? AND written < ?"
        found = []
        for digest in map(bytes.fromhex, digests):
            if rows := self.database.query(sql, (namespace, digest, before)):
                is_named = bool(self.database.query(_ROWS_OF_TEXT, (namespace, digest)))
                found += [(key, codec, is_named) for key, codec in rows]
        return found

    def seen(self, key: str, codec: str) -> None:
        """A payload is in storage now."""
        sql = "UPDATE payloads SET written = ? WHERE key = ? AND codec = ?"
        self.database.execute(sql, (time.time(), key, codec))

    def take_removed(self, namespace: str) -> Removal:
        with self._lock:
            return self._removed.pop(namespace, Removal())

    def put_back(self, namespace: str, texts: Iterable[SharedText], removed: Removal) -> None:
        """What could not be committed waits again, but for what was removed here meanwhile."""
        with self._lock:
            since = self._removed.setdefault(namespace, Removal())
            waiting = self._added.setdefault(namespace, {})
            for each in texts:
                if not since.covers(each):
                    waiting.setdefault((each.digest, each.source, each.document), each)
            since.digests |= removed.digests
            since.names |= removed.names

    def namespaces_waiting(self) -> list[str]:
        with self._lock:
            return [name for name in {*self._added, *self._removed} if self._added.get(name) or self._removed.get(name)]

    # -- payloads, as the catalog of a folder ---------------------------------------------------------------------

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
            frames = each_in_pool(lambda pair: self._header(*pair), objects) if objects else []
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
            self._write([(entry_of_frame(frame), each.modified.timestamp()) for frame, each in own])
        return bool(own)

    def _header(self, key: str, found: ObjectFound) -> Frame | None:
        self.objects.use(key, found.name)
        try:
            head = self.objects.head(key, _HEAD_BYTES)
            if head is not None and Frame.header_bytes(head[0]) > _HEAD_BYTES:
                head = self.objects.head(key, Frame.header_bytes(head[0]))
            return Frame.parse(head[0], key, num_bytes=head[1]) if head is not None else None
        except FrameError:
            return None

    def _write(self, entries: Iterable[tuple[Entry, float]]) -> None:
        with self.database.transaction() as run:
            for each, written in entries:
                run(
                    _RECORD,
                    (each.key, each.codec, each.namespace, each.digest, each.num_bytes, each.num_tokens, written),
                )

    def record(self, entry: Entry) -> None:
        self._missing.pop(entry.key, None)
        self._write([(entry, time.time())])

    def remove(self, namespace: str, keys: Sequence[str], delete: Callable[[Sequence[str]], int] | None = None) -> int:
        """Forget entries on this machine. Their payloads stay: servers never delete."""
        with self.database.transaction() as run:
            count = sum(
                [
                    run("DELETE FROM payloads WHERE key = ? AND namespace = ?", (key, namespace)).rowcount > 0
                    for key in keys
                ]
            )
            if count:
                run(ERASE, (erasures_of(namespace),))
        self._missing |= dict.fromkeys(keys, time.monotonic())
        self.on_forgotten(namespace, keys)
        return count

    def correct(self, key: str, measure: Callable[[str], Entry | None]) -> None:
        """An object that is gone is forgotten, and looked for again later."""
        rows = self.database.query("SELECT DISTINCT namespace FROM payloads WHERE key = ?", (key,))
        for (namespace,) in rows:
            self.remove(namespace, [key])

    def entry_of_anyone(self, key: str) -> Entry | None:
        rows = self.database.query(f"SELECT {_PAYLOAD} FROM payloads WHERE key = ?", (key,))
        return Entry(*rows[0]) if rows else None

    def entries(self) -> Iterator[Entry]:
        yield from (Entry(*row) for row in self.database.query(f"SELECT {_PAYLOAD} FROM payloads ORDER BY key"))

    def keys(self, namespace: str) -> list[str]:
        rows = self.database.query(
            "SELECT key FROM payloads WHERE namespace = ? GROUP BY key ORDER BY max(last_use)", (namespace,)
        )
        return [key for (key,) in rows if is_key(key)]

    def keys_of(self, namespace: str, digest: bytes) -> list[str]:
        sql = "SELECT DISTINCT key FROM payloads WHERE namespace = ? AND digest = ?"
        return [key for (key,) in self.database.query(sql, (namespace, digest))]

    def lacks_kv(self, namespace: str, digest: bytes) -> bool:
        """Whether a text has a row that names no KV."""
        return bool(self.database.query(_ROWS_OF_TEXT, (namespace, digest))) and not self.keys_of(namespace, digest)

    def has_texts(self, namespace: str) -> bool:
        return bool(
            self.database.query("SELECT 1 FROM payloads WHERE namespace = ? AND digest >= x'' LIMIT 1", (namespace,))
        )

    def use(self, keys: Sequence[str]) -> None:
        """Nothing is evicted by use here."""

    @property
    def is_complete(self) -> bool:
        return True

    def total(self, namespace: str | None = None) -> Total:
        where, given = ("", ()) if namespace is None else (" WHERE namespace = ?", (namespace,))
        return Total(*self.database.query(f"SELECT COUNT(*), ifnull(SUM(bytes), 0) FROM payloads{where}", given)[0])

    def tenants(self) -> dict[str, Total]:
        rows = self.database.query("SELECT namespace, COUNT(*), SUM(bytes) FROM payloads GROUP BY namespace")
        return {namespace: Total(entries, size) for namespace, entries, size in rows}

    def namespaces(self) -> list[str]:
        return [*self.tenants()]

    def set_limit(self, max_bytes: int | None) -> None:
        raise ConfigurationError(
            "a shared store has no limit of its own. Remove documents, then run cacheclip store gc."
        )

    # -- sources --------------------------------------------------------------------------------------------------

    def add_source(self, namespace: str, source: str, text: str, document: str = "") -> None:
        super().add_source(namespace, source, text, document)
        self.note(namespace, text, source, document)

    def remove_sources(self, namespace: str, gone: Iterable[str], *, texts: Iterable[str] | None = None) -> None:
        names = [*gone]
        super().remove_sources(namespace, names, texts=texts)
        if texts is None:
            self.note_removed(namespace, names=names)


class _SharedIndex(TextIndex):
    """Notes what is added and removed on this machine."""

    def __init__(self, catalog: SharedCatalog, namespace: str) -> None:
        super().__init__(catalog.database, namespace)
        self._catalog = catalog

    def add(self, texts: Iterable[str]) -> None:
        texts = [*texts]
        super().add(texts)
        for text in texts:
            self._catalog.note(self._namespace, text)

    def remove(self, texts: Iterable[str]) -> None:
        texts = [*texts]
        super().remove(texts)
        self._catalog.note_removed(self._namespace, texts)


def entry_of_frame(frame: Frame) -> Entry:
    return Entry(frame.key, frame.namespace, frame.digest, frame.num_bytes, frame.num_tokens, frame.codec, frame.text)
