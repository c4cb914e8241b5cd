"""One tenant's texts in a shared store: a Delta table, which Spark, Ray, DuckDB and others read too.

A commit adds and removes rows at once, so that readers see a document's old version or its new one. Two commits at a
time cost retries: let one process commit (:class:`cacheclip_ingest.Commit`), many encode.
"""

from __future__ import annotations

import io
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from cacheclip_rag import StoreError
from cacheclip_rag.store import CODECS, is_key, text_digest, text_row

from .place import SharedPlace, failing_as, need, said, tenant_folder

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_TRIES = 6
"""Of reading all files, while commits replace some; and of a commit that fails though nobody else committed."""
_CONFLICTS_S = 30.0
"""For which a commit is tried again that others come before."""
_PLACES = ("reach", "anchor", "start", "length", "ending", "whole")
"""Columns of a text's row in the text index."""
_IDENTITY = ["digest", "source", "document", "version"]
_CONFIGURATION = {
    "delta.dataSkippingStatsColumns": "document",  # beginnings of texts would stand in the log
    "delta.logRetentionDuration": "interval 1 days",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}
_DIGEST = re.compile("[0-9a-f]{32}")
_DATA_FILE = re.compile(r"(?:[A-Za-z0-9=-][\w.=-]*/)*[A-Za-z0-9=-][\w.=-]*\.parquet", re.ASCII)
"""Names of files in the table's folder, and of none elsewhere."""
_MOST_BYTES = 1 << 40
"""Of a payload."""
Result = TypeVar("Result")


class TableError(StoreError):
    """A tenant's table cannot be used now, or holds what no commit writes."""


class DamagedFileError(TableError):
    """A file of the table is not what a commit wrote."""


@dataclass(frozen=True, slots=True)
class SharedText:
    """A text of a source, and its KV."""

    text: str
    source: str = ""
    document: str = ""
    version: str = ""
    """Of the document: what its text and the settings of its KV are told by."""
    kv: tuple[tuple[str, str, int, int], ...] = ()
    """Key, codec, bytes and tokens of each payload."""

    @property
    def digest(self) -> str:
        return text_digest(self.text).hex()


@dataclass(slots=True)
class Removal:
    """What a commit removes."""

    digests: set[str] = field(default_factory=set)
    """Texts, with all of their rows."""
    names: set[str] = field(default_factory=set)
    """Sources and documents."""
    payloads: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    """Keys and codecs that are gone, by digest of their text."""

    def __bool__(self) -> bool:
        return bool(self.digests or self.names or self.payloads)

    def covers(self, text: SharedText) -> bool:
        """Whether a row of this text is removed."""
        return text.digest in self.digests or not self.names.isdisjoint((text.source, text.document))


def schema() -> pa.Schema:
    pa = need("pyarrow")
    payload = pa.struct([("key", pa.string()), ("codec", pa.string()), ("bytes", pa.int64()), ("tokens", pa.int64())])
    names = ("namespace", "digest", "text", "source", "document", "version")
    places = [(name, pa.int64()) for name in _PLACES]
    at = ("at", pa.timestamp("us", tz="UTC"))
    return pa.schema([*((name, pa.string()) for name in names), *places, ("kv", pa.list_(payload)), at])


def rows_of(namespace: str, texts: Iterable[SharedText]) -> pa.Table:
    """Rows of the table."""
    pa, now = need("pyarrow"), datetime.now(UTC)
    rows = []
    for each in texts:
        place = text_row(each.text)
        rows.append(
            {
                **{"namespace": namespace, "digest": each.digest, "text": each.text, "source": each.source},
                **{"document": each.document, "version": each.version, "at": now},
                **{name: getattr(place, name) if place is not None else None for name in _PLACES},
                "kv": [dict(zip(("key", "codec", "bytes", "tokens"), payload, strict=True)) for payload in each.kv],
            }
        )
    return pa.Table.from_pylist(rows, schema=schema())


def is_whole(row: dict[str, Any]) -> bool:
    """Whether a row is what :func:`rows_of` writes: its digest is its text's, and names of payloads are names."""
    names = all(isinstance(row[name], str) for name in ("digest", "text", "source", "document", "version"))
    places = {type(row[name]) for name in _PLACES} in ({int}, {type(None)})
    payloads = all(is_payload(each) for each in row["kv"] or ())
    return names and places and payloads and row["digest"] == text_digest(row["text"]).hex()


def is_digest(value: str | None) -> bool:
    """Whether a text can have this digest."""
    return _DIGEST.fullmatch(value or "") is not None


def is_payload(kv: Any) -> bool:
    """Whether a row's entry names a payload."""
    sizes = [kv[name] for name in ("bytes", "tokens")] if kv is not None else [None]
    whole = all(isinstance(size, int) and 0 <= size < _MOST_BYTES for size in sizes)
    return whole and is_key(kv["key"]) and kv["codec"] in CODECS


class TextTable:
    """Safe to share between threads that read; one thread commits."""

    def __init__(self, place: SharedPlace, namespace: str = "", folder: str | None = None) -> None:
        """``folder``: of the tenant, where its name is not known."""
        self._place = place
        self.folder = f"{folder or tenant_folder(namespace)}/catalog"
        self.address = place.address(*self.folder.split("/"))
        self._table: Any = None
        self._version = -1
        self._index: dict[str, list[dict[str, Any]]] = {}

    @cached_property
    def _delta(self) -> Any:
        return need("deltalake")

    def _open(self) -> Any:
        """The table in its newest version; None if nothing was committed yet. Raises StoreError if its log is lost."""
        self._place.check_files(f"{self.folder}/_delta_log")
        if self._table is not None:
            self._table.update_incremental()
        else:
            self._table = self._load()
        if self._table is None and self._has_rows():
            self._table = self._load()
            if self._table is None:
                raise TableError(
                    f"{self.folder} in {self._place.url} has files of rows, and no log. Restore its folder _delta_log, "
                    "or delete the folder and ingest the tenant's documents again."
                )
        self._version = self._table.version() if self._table is not None else -1
        return self._table

    def _load(self) -> Any:
        try:
            return self._delta.DeltaTable(self.address, storage_options=self._place.delta_options)
        except (need("deltalake.exceptions").TableNotFoundError, FileNotFoundError):
            return None

    def _has_rows(self) -> bool:
        """Whether there are files of rows. They are written after the log: another process may have begun it just now,
        or it is lost."""
        pages = need("obstore").list(self._place.patient, self.folder)
        return any(each["path"].endswith(".parquet") for page in pages for each in page)

    def files(self) -> tuple[str, ...]:
        """Names of the files that hold the rows now. Raises StoreError if storage does not answer, or if one is no file
        of the table."""
        return self._tried(self._files)

    def _files(self) -> tuple[str, ...]:
        table = self._open()
        if table is None:
            return ()
        paths = need("pyarrow").table(table.get_add_actions(flatten=True))["path"].to_pylist()
        for path in paths:
            if not _DATA_FILE.fullmatch(path):  # it may be another tenant's, and a commit would read it
                raise TableError(
                    f"the log of {self.folder} in {self._place.url} names {path[:200]!r}, expected a file in this "
                    f"folder. Run: cacheclip store verify --store {self._place.url}; if that says the same, delete the "
                    "folder and ingest the tenant's documents again"
                )
        return tuple(f"{self.folder}/{path}" for path in paths)

    def read(self, file: str, columns: Sequence[str] | None = None) -> pa.Table | None:
        """Rows of a file; None if it is gone, because a later commit replaced it. Raises StoreError, as
        DamagedFileError if it is damaged or of another table."""

        def run() -> pa.Table | None:
            try:
                self._place.check_files(file)
                data = need("obstore").get(self._place.patient, file).bytes()
            except FileNotFoundError:
                return None
            try:
                return _rows_in(bytes(data), columns or schema().names)
            except MemoryError:
                raise
            except Exception as error:  # OSError too: the bytes are at hand
                url = self._place.url
                raise DamagedFileError(
                    f"{file} in {url} is damaged: {said(error)}. Run: cacheclip store verify --store {url}"
                ) from error

        return self._tried(run)

    def rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows. Raises what :meth:`read` does, also if a file is lost."""
        empty, lost = schema().empty_table(), ""
        for _ in range(_TRIES):
            tables = {file: self.read(file, columns) for file in self.files()}
            lost = next((file for file, table in tables.items() if table is None), "")
            if not lost:
                found = [table for table in tables.values() if table is not None]
                return need("pyarrow").concat_tables([empty.select(columns) if columns else empty, *found])
        raise self.lost(lost)

    def lost(self, file: str) -> DamagedFileError:
        """Of a file that the log goes on naming."""
        url = self._place.url
        return DamagedFileError(f"{file} in {url} is missing. Run: cacheclip store verify --store {url}")

    def _indexed(self) -> dict[str, list[dict[str, Any]]]:
        """What tells the rows of each file apart. A file is read once."""
        known, self._index = self._index, {}
        for file in self.files():
            if file in known:
                self._index[file] = known[file]
                continue
            try:
                table = self.read(file, _IDENTITY)
            except DamagedFileError as error:  # it holds up no commit
                logger.warning("%s", error)
                table = schema().empty_table()
            if table is not None:
                self._index[file] = [row for row in table.to_pylist() if is_digest(row["digest"])]
        return self._index

    def commit(self, rows: pa.Table, removed: Removal | None = None) -> int:
        """Add rows and remove others, in one commit; returns how many rows are new.

        Rows of a text, source and document that are there already are added again only if they have other KV: that of
        both is kept. A document whose version changed loses its other rows.

        Raises:
            StoreError: storage does not answer, or others go on committing.
        """
        removed = removed or Removal()
        return self._in_turn(lambda: self._commit(rows, removed))

    def _commit(self, rows: pa.Table, removed: Removal) -> int:
        new = rows.to_pylist()
        versions = {row["document"]: row["version"] for row in new if row["version"]}
        index, digests = self._indexed(), {row["digest"] for row in new} | {*removed.payloads}
        digests |= {row["digest"] for rows in index.values() for row in rows if _is_removed(row, versions, removed)}
        files = [file for file, rows in index.items() if not digests.isdisjoint(row["digest"] for row in rows)]
        found = [table for file in files if (table := self.read(file)) is not None]
        before = [row for table in found for row in table.to_pylist() if row["digest"] in digests]
        kept = {_identity(row): row for row in before if not _is_removed(row, versions, removed)}
        payloads: dict[str, dict[tuple[str, str], Any]] = {}
        for row in (*(row for row in before if row["digest"] not in removed.digests), *new):
            named = {(each["key"], each["codec"]): each for each in row["kv"] or () if is_payload(each)}
            gone = removed.payloads.get(row["digest"], set())
            payloads.setdefault(row["digest"], {}).update({name: named[name] for name in {*named} - gone})
        with_row, count = {row["digest"] for row in kept.values()}, 0
        for row in new:
            is_known = row["digest"] in with_row and not row["source"] and not row["document"]
            if _identity(row) not in kept and not is_known:
                kept[_identity(row)], count = row, count + 1
        for name, row in kept.items():
            if len(row["kv"] or ()) != len(payloads[row["digest"]]):
                kept[name] = {**row, "kv": [*payloads[row["digest"]].values()]}
        after = [*kept.values()]
        if {id(row) for row in before} == {id(row) for row in after}:
            return 0
        table = need("pyarrow").Table.from_pylist(after, schema=schema())
        if self._table is None:
            options = {"storage_options": self._place.delta_options, "configuration": _CONFIGURATION}
            self._table = self._delta.DeltaTable.create(self.address, schema(), mode="ignore", **options)
            return self._commit(rows, removed)  # another one may have made it
        mode = {"mode": "overwrite", "predicate": _predicate(before, after)} if before else {"mode": "append"}
        # nothing is added behind a commit that was not seen: it may have added the same
        once = self._delta.CommitProperties(max_commit_retries=0)
        self._delta.write_deltalake(self._table, table, commit_properties=once, **mode)
        return count

    def _in_turn(self, run: Callable[[], Result]) -> Result:
        """Run what commits, again while others come before it: the table has another version then."""
        until, pause_s, tries = time.monotonic() + _CONFLICTS_S, 0.1, 0
        while True:
            before = self._version
            try:
                return self._tried(run)
            except StoreError as error:
                tries = tries + 1 if self._version == before else 0
                if type(error.__cause__).__name__ != "CommitFailedError" or tries > _TRIES or time.monotonic() > until:
                    raise
                time.sleep(random.uniform(0.0, pause_s))
                pause_s = min(2 * pause_s, 2.0)

    def _tried(self, run: Callable[[], Result]) -> Result:
        what = f"the texts of the shared store {self._place.url} cannot be read or changed now"
        advice = f" Check that the storage answers, who may write to it, and whether {self.folder} is a table of ours."
        try:
            with failing_as(what, advice, TableError):
                return run()
        except DamagedFileError:
            raise
        except TableError:
            self._table = None  # the next one opens it anew: it may be mended by then
            raise


def _rows_in(data: bytes, columns: Sequence[str]) -> pa.Table:
    """Rows of a file of ours, whose values Python can hold. Raises anything else for another one."""
    fields = [schema().field(name) for name in columns]
    found = need("pyarrow.parquet").read_table(io.BytesIO(data)).select(columns).cast(need("pyarrow").schema(fields))
    found.validate(full=True)
    if "at" in columns:
        need("pyarrow.compute").min_max(found["at"]).as_py()
    return found


def _identity(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["digest"], row["source"], row["document"]


def _is_removed(row: dict[str, Any], versions: dict[str, str], removed: Removal) -> bool:
    replaced = versions.get(row["document"], row["version"]) != row["version"]
    return (
        replaced or row["digest"] in removed.digests or not removed.names.isdisjoint((row["source"], row["document"]))
    )


def _predicate(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    """Rows that a commit replaces: those of these texts, of which all are at hand."""
    digests = sorted({row["digest"] for row in (*before, *after)})
    return f"digest IN ({', '.join(map(repr, digests))})"
