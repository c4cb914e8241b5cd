"""Care of a store folder: verify, repair, collect garbage, clear."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..base.database import may_be_whole
from ..base.errors import StoreError
from ..base.progress import progress_bar
from ..finding.common_parts import LEAST_SURE
from ..finding.texts import TextIndex
from .catalog import FILE_NAME, Catalog, Entry
from .chunk_store import ChunkStore
from .codecs import Frame, FrameError
from .disk import DiskBackend

__all__ = ["RepairReport", "VerifyReport", "clear", "collect_garbage", "open_store", "repair", "verify"]

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


def _explained(care: Callable[P, R]) -> Callable[P, R]:
    """Turn errors of the file system into StoreError."""

    @functools.wraps(care)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return care(*arguments, **options)
        except OSError as error:
            raise StoreError(f"the store cannot be changed: {error}. Check who may write to it.") from error

    return run


@dataclass(slots=True)
class VerifyReport:
    """What is wrong in a store; nothing was changed."""

    entries: int = 0
    bytes: int = 0
    """Bytes of all payloads on disk."""
    damaged: list[str] = field(default_factory=list)
    """Keys of payloads that do not match their checksums, key, tenant or entry."""
    missing: list[str] = field(default_factory=list)
    """Keys of entries without a payload."""
    unknown_files: list[str] = field(default_factory=list)
    """Payloads without an entry, temporary files of killed processes, and files of others, as paths in the store."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the catalog, its totals, the text index and the limit."""

    @property
    def is_clean(self) -> bool:
        return not (self.damaged or self.missing or self.unknown_files or self.problems)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class RepairReport:
    """What a repair did."""

    entries: int = 0
    """Entries afterwards."""
    deleted: int = 0
    """Damaged payloads deleted. Their chunks are computed again when they are needed."""
    forgotten: int = 0
    """Entries removed because they had no payload."""
    found_whole_only: int = 0
    """Texts that are found in prompts as a whole, but not in part, until they are precomputed again: payloads do not
    hold the text, and the catalog lost it."""
    recorded: int = 0
    """Payloads that got an entry again."""
    removed_files: list[str] = field(default_factory=list)
    """Files of killed processes that were removed."""
    moved_files: list[str] = field(default_factory=list)
    """Files that are not the store's, moved to its folder ``unknown``; and a catalog that could not be used."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(folder: Path) -> VerifyReport:
    """Read every payload and compare it with checksums and catalog. Changes nothing but what every process does when it
    opens the store: what killed processes left is completed or removed.

    Writers may go on: what they write meanwhile may be reported as unknown.

    Raises:
        StoreError: the folder is no store.
    """
    store = open_store(folder)
    report = VerifyReport()
    entries: dict[str, Entry] | None = None
    try:
        report.problems += [f"catalog: {line}" for line in store.catalog.database.check()]
        if senseless := store.catalog.senseless():
            report.problems.append(f"catalog: {senseless} rows that this package did not write")
        if altered := store.catalog.altered_sources():
            report.problems.append(f"catalog: {len(altered)} texts of sources were altered")
        entries = {entry.key: entry for entry in store.catalog.entries()}
    except StoreError as error:
        report.problems.append(f"catalog: {error}")
    report.entries = len(entries or ())
    unindexed = _verify_payloads(store, entries, report)
    if unindexed:
        report.problems.append(f"text index: {unindexed} texts of entries are missing from it")
    report.unknown_files += [str(path.relative_to(folder)) for path in _foreign_files(store)]
    report.unknown_files += [str(path.relative_to(folder)) for path in _left_behind(store)]
    if entries is not None:
        _verify_totals(store, report)
    store.close()
    return report


def _verify_payloads(store: ChunkStore, entries: dict[str, Entry] | None, report: VerifyReport) -> int:
    """Returns how many texts are missing from the text index.

    Args:
        entries: by key; None if the catalog cannot be read.
    """
    unindexed = 0
    present = set(store.tiers.list())
    with progress_bar("verifying", len(present), "chunk caches") as advance:
        for number, key in enumerate(sorted(present), 1):
            report.bytes += store.tiers.occupied(key)
            frame, entry = _whole(store, key), None if entries is None else entries.get(key)
            if entry is None and entries is not None:
                if not _is_announced(store, key):
                    report.unknown_files.append(_name_of(store, key))
            elif frame is None or (entry is not None and not _belongs(frame, entry, store)):
                report.damaged.append(key)
            elif entry is not None and frame.text is not None:
                unindexed += not TextIndex(store.catalog.database, entry.namespace).holds(frame.text)
            advance(number)
    for key in sorted(set(entries or ()) - present):
        if _is_announced(store, key):  # else it was evicted meanwhile
            report.missing.append(key)
    return unindexed


def _verify_totals(store: ChunkStore, report: VerifyReport) -> None:
    try:
        counted, total, limit = store.catalog.counted(), store.catalog.total(), store.catalog.limit
    except StoreError as error:
        report.problems.append(f"catalog: {error}")
        return
    if counted != total:
        report.problems.append(f"catalog: it counts {total.entries} entries and {total.bytes} bytes, not {counted}")
    if limit is not None and total.bytes > limit:
        report.problems.append(f"limit: {total.bytes} bytes are stored, the limit is {limit}")


@_explained
def repair(folder: Path) -> RepairReport:
    """Delete what is damaged, record what is whole, and make catalog and files agree. A catalog that cannot be used is
    moved aside and made anew from the payloads; its limits, sources and texts are kept as far as they can be read.

    No other process should use the store meanwhile.

    Raises:
        StoreError: the folder is no store, or may not be written.
    """
    report = RepairReport()
    _check_is_store(folder)
    _replace_damaged_catalog(folder, report)
    store = ChunkStore.open(folder)
    store.sweep()
    for path in _left_behind(store):
        if path.is_dir():
            report.moved_files.append(_move_aside(path, folder))
        else:
            path.unlink()
            report.removed_files.append(str(path.relative_to(folder)))
    for path in [*_foreign_files(store)]:
        report.moved_files.append(_move_aside(path, folder))
    store.catalog.drop_senseless()
    store.catalog.drop_sources(store.catalog.altered_sources())
    entries = {entry.key: entry for entry in store.catalog.entries()}
    present = set(store.tiers.list())
    with progress_bar("repairing", len(present), "chunk caches") as advance:
        for number, key in enumerate(sorted(present), 1):
            _repair_payload(store, folder, key, entries.get(key), report)
            advance(number)
    for key in set(entries) - present:
        report.forgotten += store.catalog.remove(entries[key].namespace, [key])
    for namespace in store.catalog.namespaces():
        texts = TextIndex(store.catalog.database, namespace)
        texts.mend(store.catalog.source_texts(namespace))
    report.found_whole_only = store.catalog.num_found_whole_only(2 * LEAST_SURE)
    store.catalog.count_again()
    store.catalog.set_complete()
    store.shrink()
    report.entries = store.catalog.total().entries
    store.close()
    return report


def _repair_payload(store: ChunkStore, folder: Path, key: str, entry: Entry | None, report: RepairReport) -> None:
    frame = _whole(store, key)
    if frame is None:
        if store.tiers.delete([key]):
            report.deleted += 1
        else:  # it is a folder
            report.moved_files.append(_move_aside(folder / _name_of(store, key), folder))
        if entry is not None:
            store.catalog.remove(entry.namespace, [key])
        return
    if entry is None or not _belongs(frame, entry, store):
        report.recorded += 1
        store.catalog.record(store.entry_of(frame))
    if frame.text is not None:
        TextIndex(store.catalog.database, frame.namespace).add_rows([frame.text])


@_explained
def collect_garbage(folder: Path) -> dict[str, int]:
    """Remove what nobody can use: what killed processes left, payloads without an entry, and texts that have neither KV
    nor a source. Evicts down to the limits, and gives free pages of the catalog back.

    Raises:
        StoreError: the folder is no store, or may not be written.
    """
    store = open_store(folder)
    found = {"writes": store.sweep(), "temporaries": 0, "payloads": 0}
    for path in _left_behind(store):
        if not path.is_dir():
            path.unlink()
            found["temporaries"] += 1
    for key in store.tiers.list():
        if not store.catalog.is_announced(key):
            found["payloads"] += store.tiers.delete([key])
    found["evicted"] = store.shrink()
    found["texts"] = store.catalog.drop_unused_texts()
    store.catalog.database.compact()
    store.close()
    return found


@_explained
def clear(folder: Path, namespace: str | None = None) -> int:
    """Delete all chunk caches, texts and sources of a tenant, or of all tenants; returns the number of chunk caches.
    The store's limit stays.

    Raises:
        StoreError: the folder is no store, or may not be written.
    """
    store = open_store(folder)
    known = store.catalog.namespaces() if namespace is None else [namespace]
    count = sum([store.drop_tenant(name) for name in known])
    if namespace is None:
        store.tiers.delete([*store.tiers.list()])  # payloads without an entry
    store.close()
    return count


def open_store(folder: Path) -> ChunkStore:
    """A store that is there already. Raises StoreError if the folder is none."""
    _check_is_store(folder)
    return ChunkStore.open(folder)


def _check_is_store(folder: Path) -> None:
    if not os.path.lexists(folder / FILE_NAME) and not (folder / "kv").is_dir():
        raise StoreError(
            f"{folder} is not a store: it has no catalog. Make one: cacheclip ingest PATH --store {folder}"
        )


def _replace_damaged_catalog(folder: Path, report: RepairReport) -> None:
    catalog, path = Catalog(folder), folder / FILE_NAME
    try:
        if not os.path.lexists(path) or (path.is_file() and not catalog.database.check()):
            return
    except StoreError as error:
        if may_be_whole(error) and path.is_file():
            raise
        logger.warning("the catalog is made anew: %s", error)
    finally:
        catalog.close()
    aside = folder / f"{FILE_NAME}.damaged"
    for ending in ("", "-wal", "-shm"):
        if os.path.lexists(f"{path}{ending}"):
            os.replace(f"{path}{ending}", f"{aside}{ending}")
    report.moved_files.append(aside.name)
    catalog.salvage(aside)
    catalog.close()


def _whole(store: ChunkStore, key: str) -> Frame | None:
    """The frame of a payload on disk if all of its checksums match."""
    if store.header(key) is None:  # before memory is taken for a file of any size
        return None
    try:
        data = store.tiers.last.get_many([key]).get(key)
        if data is None:
            return None
        frame = Frame.parse(data, key)
        frame.verify()
    except (OSError, FrameError, MemoryError):
        return None
    return frame


def _belongs(frame: Frame, entry: Entry, store: ChunkStore) -> bool:
    """Whether a payload is the one that its entry describes."""
    return store.entry_of(frame) == entry


def _is_announced(store: ChunkStore, key: str) -> bool:
    """Whether a living process is writing the key, or has recorded it meanwhile."""
    try:
        return store.catalog.is_announced(key)
    except StoreError:
        return False


def _name_of(store: ChunkStore, key: str) -> str:
    last = store.tiers.last
    return str(last.path_of(key).relative_to(last.folder.parent)) if isinstance(last, DiskBackend) else key


def _left_behind(store: ChunkStore) -> Iterator[Path]:
    """Temporary files whose writers do not live."""
    last = store.tiers.last
    if isinstance(last, DiskBackend):
        found = [*last.temporaries()]
        living = store.living_writers()  # after ``found``: a writer registers before it writes
        yield from (path for path in found if path.name.partition("-")[0] not in living)


def _foreign_files(store: ChunkStore) -> Iterator[Path]:
    """Files among the payloads that are no payloads."""
    last = store.tiers.last
    if not isinstance(last, DiskBackend) or not last.folder.is_dir():
        return
    for found, _, names in os.walk(last.folder):
        for name in names:
            path = Path(found) / name
            key = path.stem
            if not key.isalnum() or path != last.path_of(key):
                yield path


def _move_aside(path: Path, folder: Path) -> str:
    target = folder / "unknown" / path.name
    target.parent.mkdir(mode=0o700, exist_ok=True)
    while target.exists():
        target = target.with_name(f"{target.name}~")
    os.replace(path, target)
    return str(target.relative_to(folder))
