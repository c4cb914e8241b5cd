"""Care of a store folder: verify, repair, collect garbage, clear."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from cacheclip_rag import StoreError
from cacheclip_rag.plugins import is_file, open_folder, progress_bar
from cacheclip_rag.store import (
    CATALOG_FILE,
    LEARNED,
    LEAST_SURE,
    Catalog,
    ChunkStore,
    DiskBackend,
    Entry,
    Frame,
    FrameError,
    OtherVersionError,
    TenantStore,
    TextIndex,
    is_key,
    may_be_whole,
    set_aside,
)

from .catalog import CatalogCare
from .reports import RepairReport, VerifyReport

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def _explained(care: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(care)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return care(*arguments, **options)
        except (OSError, MemoryError) as error:
            raise StoreError(f"the store cannot be used: {error!r}. Check the disk, and who may use it.") from error

    return run


@_explained
def verify(folder: Path) -> VerifyReport:
    """Read every payload and compare it with checksums and catalog. Changes nothing but what every process does when it
    opens the store: what killed processes left is completed or removed.

    Others may go on writing: what looks wrong is looked at again while nobody writes to the catalog.

    Raises:
        StoreError: the folder is no store.
    """
    store = open_store(folder)
    report = VerifyReport()
    entries: dict[str, Entry] | None = None
    try:
        report.problems += [f"catalog: {line}" for line in store.catalog.database.check()]
        if senseless := _rows(store).senseless():
            report.problems.append(f"catalog: {senseless} rows that this package did not write")
        if altered := store.catalog.sources.altered():
            report.problems.append(f"catalog: {len(altered)} texts of sources were altered")
        entries = {entry.key: entry for entry in _rows(store).entries() if is_key(entry.key)}
    except StoreError as error:
        report.problems.append(f"catalog: {error}")
    report.entries = len(entries or ())
    _verify_payloads(store, entries, report)
    report.unknown_files += ["/".join(names) for names in _disk(store).foreign()]
    try:
        report.unknown_files += [f"tmp/{name}" for name in _left_behind(store)]
    except OSError as error:
        report.problems.append(f"temporary files: nobody can tell whose they are: {error}")
    if entries is not None:
        _verify_totals(store, report)
    store.close()
    return report


def _verify_payloads(store: ChunkStore, entries: dict[str, Entry] | None, report: VerifyReport) -> None:
    """``entries``: by key; None if the catalog cannot be read."""
    present, failed = _listed(store)
    if failed is not None:
        report.problems.append(f"payloads: not all of them can be listed: {failed}")
    unindexed = 0
    keys = sorted({*present, *(entries or ())})
    with progress_bar("verifying", len(keys), "chunk caches") as advance:
        for number, key in enumerate(keys, 1):
            payload = _look(store, key)
            report.bytes += payload.occupied
            wrong = _complaint(store, key, payload, None if entries is None else entries.get(key), entries is not None)
            if wrong is not None and entries is not None:
                wrong = _complaint_again(store, key)
            if wrong == "unindexed":
                unindexed += 1
            elif wrong is not None:
                getattr(report, wrong).append(_name_of(store, key) if wrong == "unknown_files" else key)
            advance(number)
    if unindexed:
        report.problems.append(f"text index: {unindexed} texts of entries are missing from it")


def _complaint(store: ChunkStore, key: str, payload: _Found, entry: Entry | None, is_known: bool) -> str | None:
    """What is wrong with a key, as the field of :class:`VerifyReport` for it. ``is_known``: the catalog could be
    asked."""
    if payload.outcome in ("unreadable", "other_versions"):
        return payload.outcome
    if entry is None and is_known:
        return None if payload.outcome == "missing" else "unknown_files"
    if payload.frame is None:
        return payload.outcome
    if entry is None:
        return None
    if store.entry_of(payload.frame) != entry:
        return "damaged"
    text = payload.frame.text
    holds = text is None or TextIndex(store.catalog.database, entry.namespace).holds(text)
    return None if holds else "unindexed"


def _complaint_again(store: ChunkStore, key: str) -> str | None:
    """What is wrong with a key while no process changes the catalog. One that is being written is not judged."""
    try:
        with _at_rest(store):
            payload = _look(store, key)
            if store.catalog.announcements.is_being_written(key) and payload.outcome != "unreadable":
                return None
            return _complaint(store, key, payload, _rows(store).entry_of_anyone(key), True)
    except StoreError:
        return None


@contextmanager
def _at_rest(store: ChunkStore) -> Iterator[None]:
    """No other process changes the catalog meanwhile, if it may be written at all."""
    if store.catalog.database.file.read_only:
        yield
        return
    with store.catalog.database.transaction():
        yield


def _verify_totals(store: ChunkStore, report: VerifyReport) -> None:
    try:
        with _at_rest(store):
            counted, tenants = _rows(store).counted(), store.catalog.tenants()
            total, limit = store.catalog.total(), store.catalog.limits.of_store
    except StoreError as error:
        report.problems.append(f"catalog: {error}")
        return
    entries, size = (sum(getattr(each, name) for each in counted.values()) for name in ("entries", "bytes"))
    if (entries, size) != (total.entries, total.bytes):
        report.problems.append(
            f"catalog: it counts {total.entries} entries and {total.bytes} bytes, not {entries} and {size}"
        )
    elif wrong := {*counted.items()} ^ {*tenants.items()}:
        report.problems.append(f"catalog: what it counts is wrong for {len({name for name, _ in wrong})} tenants")
    if limit is not None and total.bytes > limit:
        report.problems.append(f"limit: {total.bytes} bytes are stored, the limit is {limit}")


@_explained
def repair(folder: Path) -> RepairReport:
    """Delete what is damaged, record what is whole, and make catalog and files agree. What cannot be read stays, and is
    reported. A catalog that cannot be used is moved aside and made anew from the payloads; its limits, sources and
    texts are kept as far as they can be read.

    No other process should use the store meanwhile.

    Raises:
        StoreError: the folder is no store, or may not be written.
    """
    report = RepairReport()
    _check_is_store(folder)
    _replace_damaged_catalog(folder, report)
    for names in [*DiskBackend(folder).foreign()]:
        report.moved_files.append(_move_aside(names, folder))
    store = ChunkStore.open(folder)
    store.sweep()
    disk = _disk(store)
    for name in _left_behind(store):
        if disk.writer_of(name) is not None and disk.remove_temporaries([name]):
            report.removed_files.append(f"tmp/{name}")
        else:
            report.moved_files.append(_move_aside(("tmp", name), folder))
    _rows(store).drop_senseless()
    store.catalog.sources.drop(store.catalog.sources.altered())
    entries = {entry.key: entry for entry in _rows(store).entries()}
    present, failed = _listed(store)
    keys = sorted({*present, *entries})
    with progress_bar("repairing", len(keys), "chunk caches") as advance:
        for number, key in enumerate(keys, 1):
            _repair_payload(store, folder, key, entries.get(key), report)
            advance(number)
    for namespace in _rows(store).namespaces_of_texts():
        texts = TextIndex(store.catalog.database, namespace)
        texts.mend(store.catalog.sources.texts(namespace))
    report.found_whole_only = _rows(store).num_found_whole_only(2 * LEAST_SURE)
    _rows(store).count_again()
    store.catalog.set_complete()
    store.shrink()
    report.entries = store.catalog.total().entries
    store.close()
    if failed is not None:
        raise failed
    return report


def _repair_payload(store: ChunkStore, folder: Path, key: str, entry: Entry | None, report: RepairReport) -> None:
    payload = _look(store, key)
    if payload.outcome in ("unreadable", "other_versions"):
        getattr(report, payload.outcome).append(key)
        return
    if payload.frame is None:
        if payload.outcome == "missing":
            report.forgotten += entry is not None
        elif store.tiers.delete([key]):
            report.deleted += 1
        else:  # it is a folder
            report.moved_files.append(_move_aside(("kv", key[:2], f"{key}.kv"), folder))
        if entry is not None:
            store.catalog.remove(entry.namespace, [key])
        return
    if store.entry_of(payload.frame) != entry:
        report.recorded += 1
        store.catalog.record(store.entry_of(payload.frame))
    if payload.frame.text is not None:
        TextIndex(store.catalog.database, payload.frame.namespace).add_rows([payload.frame.text])


@_explained
def collect_garbage(folder: Path) -> dict[str, int]:
    """Remove what nobody can use: what killed processes left, payloads without an entry, and texts that have neither KV
    nor a source. Evicts down to the limits, and gives free pages of the catalog back. What cannot be read now, and
    payloads of another version, stay.

    Raises:
        StoreError: the folder is no store, or may not be written.
    """
    store = open_store(folder)
    removed, disk = {"writes": store.sweep(), "temporaries": 0, "payloads": 0}, _disk(store)
    left = [name for name in _left_behind(store) if disk.writer_of(name) is not None]
    removed["temporaries"] = disk.remove_temporaries(left)
    present, failed = _listed(store)
    for key in present if store.catalog.is_complete else ():  # else it does not know all payloads
        if store.catalog.announcements.is_announced(key):
            continue
        with store.catalog.database.transaction():  # so that nobody writes it meanwhile
            if not store.catalog.announcements.is_announced(key) and _is_garbage(store, key):
                removed["payloads"] += store.tiers.delete([key])
    removed["evicted"] = store.shrink()
    removed["texts"] = _rows(store).drop_unused_texts()
    store.catalog.database.compact()
    store.close()
    if failed is not None:
        raise failed
    return removed


def _is_garbage(store: ChunkStore, key: str) -> bool:
    """Whether a payload without an entry can be read, by this version, or is damaged."""
    try:
        store.header(key)
    except (OSError, MemoryError, OtherVersionError):
        return False
    except FrameError:
        pass
    return True


@_explained
def clear(folder: Path, namespace: str | None = None, source: str | None = None) -> int:
    """Delete all chunk caches, texts and sources of a tenant, or of all tenants; returns the number of chunk caches.
    With ``source``, only of texts that have no other source; returns their number. The store's limit stays.

    Raises:
        StoreError: the folder is no store, or may not be written.
    """
    store = open_store(folder)
    if source is not None:
        tenants = {*_rows(store).namespaces(), *_rows(store).namespaces_of_texts()}
        tenants &= {namespace} if namespace is not None else tenants
        with closing(store):
            named = sorted({name for tenant in tenants for name in store.catalog.sources.names(tenant)})
            if source not in (LEARNED, *named):
                raise StoreError(f"expected {LEARNED!r} or a source of stored texts, got {source!r}, of which none is.")
            return sum(_clear_source(store, tenant, source) for tenant in tenants)
    if namespace is not None:
        count = store.drop_tenant(namespace)
        store.close()
        return count
    count = sum([store.drop_tenant(name) for name in _rows(store).namespaces()])
    _rows(store).drop_texts()
    present, failed = _listed(store)
    store.tiers.delete(present)  # payloads without an entry
    store.close()
    if failed is not None:
        raise failed
    return count


def count_learned(store: ChunkStore) -> int:
    """How many learned texts the tenants of a store have, with or without KV."""
    return sum(len(store.catalog.sources.texts(name, LEARNED)) for name in _rows(store).namespaces_of_texts())


def _clear_source(store: ChunkStore, namespace: str, source: str) -> int:
    tenant, sources = TenantStore(store, namespace), store.catalog.sources
    texts = sources.orphans(namespace, [source])
    try:
        tenant.release(texts)
        tenant.index.remove(texts)
        sources.remove(namespace, [source])
    finally:
        if texts:
            tenant.note_erasure()
    return len(texts)


def open_store(folder: Path) -> ChunkStore:
    """A store that is there already. Raises StoreError if the folder is none."""
    _check_is_store(folder)
    return ChunkStore.open(folder)


def _rows(store: ChunkStore) -> CatalogCare:
    return CatalogCare(store.catalog.database)


def _check_is_store(folder: Path) -> None:
    if not os.path.lexists(folder / CATALOG_FILE) and not (folder / "kv").is_dir():
        raise StoreError(
            f"{folder} is not a store: it has no catalog. Make one: cacheclip ingest PATH --store {folder}"
        )


def _replace_damaged_catalog(folder: Path, report: RepairReport) -> None:
    catalog, path = Catalog(folder), folder / CATALOG_FILE
    try:
        if not os.path.lexists(path) or (is_file(path) and not catalog.database.check()):
            return
    except StoreError as error:
        if may_be_whole(error):
            raise
        logger.warning("the catalog is made anew: %s", error)
    finally:
        catalog.close()
    aside = set_aside(folder, CATALOG_FILE)
    report.moved_files.append(aside)
    CatalogCare(catalog.database).salvage(folder / aside)
    catalog.close()


@dataclass(frozen=True, slots=True)
class _Found:
    """What reading a payload as a whole came to."""

    outcome: str
    """``whole``, or a field of :class:`VerifyReport`: ``missing``, ``damaged``, ``unreadable``, ``other_versions``."""
    frame: Frame | None = None
    """If it is whole."""
    occupied: int = 0
    """Bytes on the medium."""


def _look(store: ChunkStore, key: str) -> _Found:
    """Read a payload on the last tier and compare it with all of its checksums."""
    try:
        size = store.tiers.occupied(key)
        try:
            if store.header(key) is None:  # before memory is taken for a file of any size
                return _Found("missing")
            data = store.tiers.last.get_many([key]).get(key)
            if data is None:
                return _Found("missing")
            frame = Frame.parse(data, key)
            frame.verify()
        except OtherVersionError:
            return _Found("other_versions", occupied=size)
        except FrameError:
            return _Found("damaged", occupied=size)
        return _Found("whole", frame, size)
    except (OSError, MemoryError):
        return _Found("unreadable")


def _listed(store: ChunkStore) -> tuple[list[str], OSError | None]:
    """Keys of the payloads that are listed, and why others may be missing."""
    keys: list[str] = []
    try:
        for key in store.tiers.list():
            keys.append(key)
    except OSError as error:
        return keys, error
    return keys, None


def _name_of(store: ChunkStore, key: str) -> str:
    disk = _disk(store)
    return str(disk.path_of(key).relative_to(disk.folder.parent))


def _left_behind(store: ChunkStore) -> list[str]:
    """Names among the temporary files whose writers do not live."""
    disk = _disk(store)
    names = disk.temporaries()
    living = store.writes.living()  # after ``names``: a writer registers before it writes
    return [name for name in names if disk.writer_of(name) not in living]


def _disk(store: ChunkStore) -> DiskBackend:
    disk = store.tiers.last
    assert isinstance(disk, DiskBackend), "a store in a folder is on disk"
    return disk


def _move_aside(names: Sequence[str], folder: Path) -> str:
    """Move what is not the store's, by names from the store's folder on, to its folder ``unknown``."""
    with open_folder(folder) as root:
        where = "unknown"
        while root.status(where) is not None and not root.is_folder(where):
            where += "~"
        with root.folder(where, 0o700) as target, open_folder(folder, *names[:-1]) as source:
            name = names[-1]
            while target.status(name) is not None:
                name += "~"
            source.replace(names[-1], target, name)
    return f"{where}/{name}"
