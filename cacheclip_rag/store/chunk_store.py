"""The chunk-cache store: KV by key, in tiers of backends, with a catalog.

A store folder::

    kv/ab/abcd….kv      payloads (see ``codecs``)
    tmp/                payloads that are being written
    writers/            one locked file per writing process (see ``process``)
    catalog.sqlite3     entries, limits, texts and sources (see ``catalog``)

A write reserves its bytes in the catalog before its payload is written, so that they count at once. The next process
to open the store completes or removes what a killed process left. A lock around whole writes was rejected: readers
and other writers would wait for the disk.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..base.database import ANSWER_WAIT_S, FormatError, is_busy, waiting_at_most
from ..base.errors import StoreError
from ..base.folder import is_file
from ..base.paths import expanded
from .backend import Backend
from .catalog import FILE_NAME, Catalog, Entry
from .codecs import Frame, FrameError, OtherVersionError
from .disk import DiskBackend
from .erasures import Erasures
from .memory import MemoryBackend, check_limit
from .process import Writer
from .tiers import Tiers, TierStats

logger = logging.getLogger(__name__)

_HEAD_BYTES = 1 << 16
"""Enough for the header of a frame with 1,500 layers."""
_MOST_HEADER_BYTES = 1 << 24
_SWEEP_S = 2.0
"""Longest sweep to open a store. The next process that opens it goes on."""
_WAIT_S = 30.0
"""Longest wait for other writers to complete, when their announced bytes fill the store."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Contents of a store, and counters since it was opened in this process."""

    entries: int
    """Stored chunk caches."""
    bytes: int
    """Bytes that they take: whole disk blocks, headers and incomplete writes included."""
    max_bytes: int | None
    """Limit of the store; None: no limit."""
    tenants: int
    """Namespaces that hold something."""
    tiers: tuple[TierStats, ...]
    """Fastest first."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tiers": [tier.to_dict() for tier in self.tiers]}


class ChunkStore:
    """A store for several tenants. Read and write through a :class:`TenantStore`. Safe to share between threads; a
    folder may be shared by processes.

    Args:
        catalog: entries, texts and sources.
        tiers: backends of the payloads, fastest first.
        max_bytes: limit of the last tier, recorded in the catalog for all processes; 0: no limit, and the recorded one
            is removed; None: the recorded limit.
        writer: this process, if a backend knows it already; default a new one in the catalog's folder.

    Raises:
        ConfigurationError: a limit below 0.
    """

    def __init__(
        self, catalog: Catalog, tiers: Tiers, max_bytes: int | None = None, writer: Writer | None = None
    ) -> None:
        self.catalog, self.tiers = catalog, tiers
        self._writer = writer or (Writer(catalog.folder) if catalog.folder is not None else None)
        self._given_limit = self._new_limit = check_limit(max_bytes)
        self._warned: set[str] = set()
        self._late: dict[int, Frame | None] = {}
        """Writes that have ended, but not in the catalog yet, by number; None: they left no payload."""
        self._has_looked = False
        """Whether this process compared the medium with the catalog."""
        self.erasures = Erasures(catalog, tiers)
        """What others erase."""
        catalog.database.on_replaced = self._replaced

    @classmethod
    def open(cls, folder: str | Path | None, max_bytes: int | None = None, memory_bytes: int = 0) -> ChunkStore:
        """A store in a folder, or in memory if ``folder`` is None. The folder is made at the first write.

        What killed processes left in the folder is completed or removed.

        Args:
            max_bytes: limit to record in the store; 0: remove the recorded limit; None: as recorded, or no limit.
            memory_bytes: size of a memory tier before the disk; 0: no memory tier.

        Raises:
            StoreError: the folder holds a store of an older format.
        """
        if folder is None:
            return cls(Catalog(), Tiers([MemoryBackend()]), max_bytes)
        folder = expanded(folder).absolute()
        _refuse_old_format(folder)
        memory = [MemoryBackend(memory_bytes)] if memory_bytes else []
        writer = Writer(folder)
        store = cls(Catalog(folder), Tiers([*memory, DiskBackend(folder, writer)]), max_bytes, writer)
        if os.path.lexists(folder / FILE_NAME) or os.path.lexists(folder / "kv"):
            with waiting_at_most(ANSWER_WAIT_S):  # the first question may be waiting for it
                store.sweep(_SWEEP_S)
                store._shrink_again()
        return store

    def on(self, backend: Backend) -> ChunkStore:
        """This store with one of its tiers alone: what is written does not reach the others."""
        self.apply_limit()
        alone = copy(self)
        alone.tiers = Tiers([backend])
        return alone

    codec: str | None = None
    """Codec that the store was made with, for engines that choose none."""

    def commit(self, namespace: str | None = None) -> int:
        """Let other machines find what a tenant, or any, stored and released here: nothing to do for a folder."""
        return 0

    wants: Callable[[str, str], bool] | None = None
    """Whether the KV of a tenant's text that an answer missed is worth storing; None: always."""

    # -- limits -------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        """Bytes that payloads may take on the medium, incomplete writes included; None: no limit.

        Above it, the tenant with the most bytes loses its least recently used entries.
        """
        self.apply_limit()
        return self.catalog.limit

    def set_limit(self, max_bytes: int | None) -> int:
        """Record the store's limit, for all processes; 0 or None removes it. Returns the number of entries evicted."""
        self._given_limit = check_limit(max_bytes)
        self.catalog.set_limit(max_bytes or None)
        self._new_limit = None  # last: another thread may be about to write
        return self.shrink()

    def set_quota(self, namespace: str, max_bytes: int | None) -> int:
        """Record a tenant's limit; 0 or None removes it. Returns the number of entries evicted."""
        self.catalog.set_quota(namespace, check_limit(max_bytes) or None)
        return self.shrink()

    def apply_limit(self) -> None:
        """Record the limit that this store was made with, once."""
        limit = self._new_limit
        if limit is not None:
            self.set_limit(limit)

    def shrink(self, most_s: float = math.inf) -> int:
        """Evict until all limits hold, or for ``most_s`` seconds; returns the number of entries."""
        count = self.catalog.shrink(self._evict, most_s)
        self.tiers.count_evictions(count)
        return count

    def _shrink_again(self) -> None:
        """Hold the limits if a process was killed before it had."""
        try:
            if self.catalog.is_above_limits:
                self.shrink(_SWEEP_S)
        except StoreError as error:
            logger.debug("the store's limits are not applied yet: %s", error)

    def _evict(self, keys: list[str]) -> None:
        try:
            self.tiers.delete(keys)
        except OSError as error:
            raise StoreError(f"could not evict a chunk cache: {error}. Check who may write to the store.") from error

    # -- writes -------------------------------------------------------------------------------------------------

    def write(self, namespace: str, key: str, data: bytearray) -> bool:
        """Write a payload and its entry; False if it does not fit the limits. See :meth:`TenantStore.put`."""
        size = self.tiers.round_up(len(data))
        try:
            self.complete()
            self.apply_limit()
            self._end_late()
            writer = self._writer.name if self._writer is not None else ""
            number = self._reserve(namespace, key, size, writer)
            if number is None:
                return False
            try:
                self.tiers.put(key, data)
            except BaseException:
                self._end(number, None)
                raise
        except OSError as error:
            raise StoreError(
                f"could not write a chunk cache of {len(data) / 1e6:.1f} MB: {error}. Free some space, set a smaller "
                "limit, or choose another folder; nothing stored before was changed."
            ) from error
        self._end(number, Frame.parse(data, key))
        return True

    def _end(self, number: int, frame: Frame | None) -> None:
        """Record a payload that was written, or give back the bytes of one that was not (None). What the catalog does
        not take now, the next write tells it again."""
        try:
            if frame is None:
                self.catalog.abandon(number)
            else:
                key = frame.key
                self.catalog.finish(number, lambda: self._measure_written(frame), lambda: self._evict([key]))
        except StoreError as error:
            self._late[number] = frame and replace(frame, data=frame.data[: frame.start])
            if frame is not None and not is_busy(error):
                raise
        else:
            self._late.pop(number, None)

    def _end_late(self) -> None:
        for number, frame in [*self._late.items()]:
            self._end(number, frame)

    def _measure_written(self, frame: Frame) -> Entry | None:
        """As :meth:`measure`, of a payload that was written just now."""
        try:
            return self.measure(frame.key)
        except FrameError:
            return None
        except (OSError, MemoryError):  # it cannot be read now
            size = self.tiers.round_up(frame.num_bytes)
            return Entry(frame.key, frame.namespace, frame.digest, size, frame.num_tokens, frame.codec, frame.text)

    def _reserve(self, namespace: str, key: str, size: int, writer: str) -> int | None:
        """Number of the announced write, or None if the payload can never fit."""
        limits = [limit for limit in (self.catalog.limit, self.catalog.quota(namespace)) if limit is not None]
        if limits and size > min(limits):
            return None
        until = time.monotonic() + _WAIT_S
        while True:
            number, evicted = self.catalog.reserve(namespace, key, size, writer, self._evict)
            self.tiers.count_evictions(evicted)
            if number is not None:
                return number
            if time.monotonic() > until:
                raise StoreError(
                    "no room for a chunk cache: other writers have announced all bytes up to the store's limit. Raise "
                    "the limit, or write with fewer processes."
                )
            self.sweep()  # they may be dead
            time.sleep(0.01)

    def measure(self, key: str) -> Entry | None:
        """The entry of a payload on the last tier, from its header; None if there is none. Raises what :meth:`header`
        does."""
        frame = self.header(key)
        return self.entry_of(frame) if frame is not None else None

    def entry_of(self, frame: Frame) -> Entry:
        """The entry of a payload on the last tier."""
        size = self.tiers.occupied(frame.key)
        return Entry(frame.key, frame.namespace, frame.digest, size, frame.num_tokens, frame.codec, frame.text)

    def header(self, key: str) -> Frame | None:
        """The header of a payload on the last tier; None if it is missing.

        Raises:
            FrameError: it is damaged or, as OtherVersionError, of another version.
            OSError: it cannot be read now, and may be intact.
            MemoryError: likewise.
        """
        found = self.tiers.head(key, _HEAD_BYTES)
        if found is not None and _HEAD_BYTES < (needed := Frame.header_bytes(found[0])) <= _MOST_HEADER_BYTES:
            found = self.tiers.head(key, needed)
        return Frame.parse(found[0], key, num_bytes=found[1]) if found is not None else None

    def sweep(self, most_s: float = math.inf) -> int:
        """Complete or remove what killed processes left, for ``most_s`` seconds at most; returns how many writes there
        were. Raises StoreError if the catalog is of another version; other errors are only logged."""
        count, swept, until = 0, set[str](), time.monotonic() + most_s
        if self._writer is None:
            return 0
        try:
            self.complete()
            for writer in self._writer.dead():
                count += self._settle_all({writer}, until)
                swept.add(writer)
                if time.monotonic() > until:
                    break
            last = self.tiers.last
            temporaries = {last.writer_of(name) for name in last.temporaries()} if isinstance(last, DiskBackend) else ()
            writing = {*self.catalog.writers(), *temporaries}
            unknown = writing - self.living_writers()  # after ``writing``: a writer registers before it writes
            unknown = {writer for writer in unknown if Writer.is_name(str(writer))}
            if unknown and time.monotonic() < until:
                count += self._settle_all(unknown, until)
            swept |= unknown
            if isinstance(last, DiskBackend):
                last.sweep(swept)
        except FormatError:
            raise
        except (OSError, MemoryError, StoreError) as error:
            logger.debug("what killed processes left could not be removed: %s", error)
        return count

    def complete(self) -> int:
        """Record the payloads that a new or empty catalog does not know, because the old one was deleted or cut off;
        returns how many."""
        if self._has_looked:
            return 0
        is_empty = not self.catalog.total().entries and next(iter(self.tiers.list()), None) is not None
        if self.catalog.is_complete and not is_empty:
            return 0
        self._new_limit = self._given_limit
        count = damaged = unreadable = 0
        try:
            for key in self.tiers.list():
                if self.catalog.is_announced(key):
                    continue  # another process is filling the new catalog too
                try:
                    entry = self.measure(key)
                except FrameError:
                    damaged += 1
                except (OSError, MemoryError):
                    unreadable += 1
                else:
                    if entry is not None:
                        self.catalog.record(entry)
                        count += 1
        except (OSError, MemoryError):
            unreadable += 1
        if count or damaged or unreadable:
            logger.warning(
                "the store's catalog was missing; %d chunk caches were found and recorded again, %d are damaged or of "
                "another version, %d cannot be read now; set limits anew",
                count,
                damaged,
                unreadable,
            )
        self._has_looked = True
        if not unreadable:
            self.catalog.set_complete()
        return count

    def _replaced(self) -> None:
        """Record the payloads again after the catalog was deleted under this store."""
        logger.warning("the store's catalog was deleted or replaced; limits, sources, and texts without KV are lost")
        self._has_looked = False
        self.erasures.doubt()
        try:
            self.complete()
        except (OSError, MemoryError, StoreError) as error:
            logger.warning("the store's catalog could not be made anew: %s", error)

    def _settle_all(self, writers: set[str], until: float = math.inf) -> int:
        return self.catalog.settle(writers, self._settle, self._evict, until)

    def living_writers(self) -> set[str]:
        """Processes that may be writing now, and those whose end nobody has noticed yet."""
        return self._writer.names() if self._writer is not None else set()

    def _settle(self, key: str) -> Entry | None:
        """The entry of a payload whose writer was killed. A damaged payload is removed. Raises OtherVersionError,
        OSError or MemoryError for what others may still read."""
        try:
            return self.measure(key)
        except OtherVersionError:
            raise
        except FrameError:
            self.tiers.delete([key])
            return None

    # -- all tenants --------------------------------------------------------------------------------------------

    def drop_tenant(self, namespace: str) -> int:
        """Delete every entry, text and source of a tenant, and its quota; returns the number of entries."""
        return self.catalog.drop(namespace, self._evict)

    def stats(self) -> StoreStats:
        """Sizes and counters."""
        total, tiers = self.catalog.total(), self.tiers.stats()
        tiers[-1].bytes = total.bytes
        limit = self.catalog.limit if self._new_limit is None else self._new_limit or None
        return StoreStats(total.entries, total.bytes, limit, len(self.catalog.tenants()), tuple(tiers))

    def warn_once(self, kind: str, message: str, *arguments: object) -> None:
        """Log a warning unless one of this kind was logged before by this store."""
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        logger.log(level, message, *arguments)

    def close(self) -> None:
        """Close handles; the store may be used again afterwards."""
        if not self.erasures.is_watched:  # nobody would drop them
            self.tiers.drop_old_copies(lambda keys: keys)
        self.tiers.close()
        self.catalog.close()


def is_store(folder: Path) -> bool:
    """Whether a folder holds a store. Raises StoreError if it holds one of an older format."""
    _refuse_old_format(folder)
    return is_file(folder / FILE_NAME)


def _refuse_old_format(folder: Path) -> None:
    chunks = () if (folder / "chunks").is_symlink() else folder.glob("chunks/*/*.safetensors")
    if (folder / "index.sqlite3").exists() or next(iter(chunks), None) is not None:
        raise StoreError(
            f"the store {folder} has an older format, which this version of cacheclip-rag does not read. Ingest the "
            "documents again into a new folder: cacheclip ingest PATH --store NEW_FOLDER. Then these files of the old "
            "one may be removed: chunks/, index.sqlite3*, sources.sqlite3*, library.sqlite3*, passages-*.faiss."
        )
