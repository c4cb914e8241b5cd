"""The chunk-cache store in a folder, or in memory.

A store folder::

    kv/ab/abcd….kv      payloads (see ``codecs``)
    tmp/                payloads that are being written
    writers/            one locked file per writing process (see ``process``)
    catalog.sqlite3     entries, limits, texts and sources (see ``catalog``)

A write reserves its bytes in the catalog before its payload is written, so that they count at once. The next process
to open the store completes or removes what a killed process left (see ``writes``).
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from pathlib import Path

from ..base.database import ANSWER_WAIT_S, waiting_at_most
from ..base.errors import StoreError
from ..base.folder import is_file
from ..base.paths import expanded
from ..base.sqlite_file import FormatError
from .backend import Backend
from .catalog import CATALOG_FILE, Catalog
from .codecs import Frame, FrameError
from .disk import DiskBackend
from .eviction import PROMPTS
from .memory import MemoryBackend, check_limit
from .process import Writer
from .tiered import StoreStats, TieredStore
from .tiers import Tiers
from .writes import Writes

logger = logging.getLogger(__name__)

_SWEEP_S = 2.0
"""Longest sweep to open a store. The next process that opens it goes on."""


class ChunkStore(TieredStore):
    """A store with limits, in a folder that may be shared by processes, or in memory.

    Args:
        catalog: entries, texts and sources.
        tiers: backends of the payloads, fastest first.
        max_bytes: limit of the last tier, recorded in the catalog for all processes; 0: no limit, and the recorded one
            is removed; None: the recorded limit.
        writer: this process, if a backend knows it already; default a new one in the catalog's folder.

    Raises:
        ConfigurationError: a limit below 0.
    """

    catalog: Catalog

    def __init__(
        self, catalog: Catalog, tiers: Tiers, max_bytes: int | None = None, writer: Writer | None = None
    ) -> None:
        super().__init__(catalog, tiers)
        writer = writer or (Writer(catalog.folder) if catalog.folder is not None else None)
        self.writes = Writes(catalog, tiers, self.measure, writer)
        self._given_limit = self._new_limit = check_limit(max_bytes)
        self._has_looked = False
        """Whether this process compared the medium with the catalog."""
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
        if os.path.lexists(folder / CATALOG_FILE) or os.path.lexists(folder / "kv"):
            with waiting_at_most(ANSWER_WAIT_S):  # the first question may be waiting for it
                store.sweep(_SWEEP_S)
                try:
                    if store.catalog.limits.are_exceeded:  # a process was killed before it held them
                        store.shrink(_SWEEP_S)
                except StoreError as error:
                    logger.debug("the store's limits are not applied yet: %s", error)
        return store

    def on(self, backend: Backend) -> ChunkStore:
        self.apply_limit()
        alone = super().on(backend)
        alone.writes = self.writes.on(alone.tiers, alone.measure)
        return alone

    # -- limits -------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        """Bytes that payloads may take on the medium, incomplete writes included; None: no limit.

        Above it, the tenant with the most bytes loses its least recently used entries.
        """
        self.apply_limit()
        return self.catalog.limits.of_store

    def quota(self, namespace: str) -> int | None:
        return self.catalog.limits.quota(namespace)

    def set_limit(self, max_bytes: int | None) -> int:
        """Record the store's limit, for all processes; 0 or None removes it. Returns the number of entries evicted."""
        self._given_limit = check_limit(max_bytes)
        self.catalog.limits.set_of_store(max_bytes or None)
        self._new_limit = None  # last: another thread may be about to write
        return self.shrink()

    def set_quota(self, namespace: str, max_bytes: int | None) -> int:
        """Record a tenant's limit; 0 or None removes it. Returns the number of entries evicted."""
        self.catalog.limits.set_quota(namespace, check_limit(max_bytes) or None)
        return self.shrink()

    def apply_limit(self) -> None:
        """Record the limit that this store was made with, once."""
        limit = self._new_limit
        if limit is not None:
            self.set_limit(limit)

    def shrink(self, most_s: float = math.inf) -> int:
        """Evict until all limits hold, or for ``most_s`` seconds; returns the number of entries."""
        count = self.catalog.limits.shrink(self.writes.evict, most_s)
        self.tiers.count_evictions(count)
        return count

    # -- writes -------------------------------------------------------------------------------------------------

    def write(self, namespace: str, key: str, data: bytearray) -> bool:
        """Write a payload and its entry; False if it does not fit the limits. See :meth:`TenantStore.put`."""
        size, frame = self.tiers.round_up(len(data)), Frame.parse(data, key)
        try:
            self.complete()
            self.apply_limit()
            number = self.writes.begin(namespace, key, size, of_prompt=frame.digest == PROMPTS)
            if number is None:
                return False
            try:
                self.tiers.put(key, data)
            except BaseException:
                self.writes.end(number, None)
                raise
        except OSError as error:
            raise StoreError(
                f"could not write a chunk cache of {len(data) / 1e6:.1f} MB: {error}. Free some space, set a smaller "
                "limit, or choose another folder; nothing stored before was changed."
            ) from error
        self.writes.end(number, frame)
        return True

    def sweep(self, most_s: float = math.inf) -> int:
        """Complete or remove what killed processes left, for ``most_s`` seconds at most; returns how many writes there
        were. Raises StoreError if the catalog is of another version; other errors are only logged."""
        try:
            self.complete()
        except FormatError:
            raise
        except (OSError, MemoryError, StoreError) as error:
            logger.debug("what killed processes left is not looked for: %s", error)
            return 0
        return self.writes.sweep(most_s)

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
                if self.catalog.announcements.is_announced(key):
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

    # -- all tenants --------------------------------------------------------------------------------------------

    def drop_tenant(self, namespace: str) -> int:
        """Delete every entry, text and source of a tenant, and its quota; returns the number of entries."""
        return self.catalog.drop(namespace, self.writes.evict)

    def stats(self) -> StoreStats:
        limit = self.catalog.limits.of_store if self._new_limit is None else self._new_limit or None
        return replace(super().stats(), max_bytes=limit)


def is_store(folder: Path) -> bool:
    """Whether a folder holds a store. Raises StoreError if it holds one of an older format."""
    _refuse_old_format(folder)
    return is_file(folder / CATALOG_FILE)


def _refuse_old_format(folder: Path) -> None:
    chunks = () if (folder / "chunks").is_symlink() else folder.glob("chunks/*/*.safetensors")
    if (folder / "index.sqlite3").exists() or next(iter(chunks), None) is not None:
        raise StoreError(
            f"the store {folder} has an older format, which this version of cacheclip-rag does not read. Ingest the "
            "documents again into a new folder: cacheclip ingest PATH --store NEW_FOLDER. Then these files of the old "
            "one may be removed: chunks/, index.sqlite3*, sources.sqlite3*, library.sqlite3*, passages-*.faiss."
        )
