"""The chunk-cache store: KV by key, in tiers of backends, with a catalog.

A store folder::

    kv/ab/abcd….kv      payloads (see ``codecs``)
    catalog.sqlite3     entries, texts and sources (see ``catalog``)

Writing stores the payload first and the entry second; deleting removes the entry last. If a process is killed in
between, a payload has no entry (it gets one when it is read), or an entry has no payload (a miss). A lock file was
rejected: readers would wait for writers, which only add.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import StoreError
from .catalog import FILE_NAME, Catalog, Entry
from .codecs import Frame, FrameError, StoredKV, encode
from .disk import DiskBackend
from .keys import text_digest
from .memory import MemoryBackend, check_limit
from .tiers import Tiers

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ChunkStore", "StoreStats", "is_store"]

logger = logging.getLogger(__name__)

_VICTIMS = 64
"""Entries per query for eviction."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Contents of a store, and counters since it was opened."""

    entries: int
    """Stored chunk caches."""
    bytes: int
    """Bytes of their payloads."""
    max_bytes: int | None
    """Limit above which the least recently used entries are evicted; None: no limit."""
    hits: int
    misses: int
    evictions: int

    def to_dict(self) -> dict[str, int | None]:
        return asdict(self)


class ChunkStore:
    """Maps keys (see :func:`~cacheclip_rag.store.keys.chunk_key`) to KV. Safe to share between threads; a folder may be
    shared by processes.

    A missing key gives None. A damaged or foreign payload is removed: it counts as a miss, with one warning. A payload
    that cannot be read now (OSError of its backend) counts as a miss, with a warning, and stays.

    Args:
        catalog: entries, texts and sources.
        tiers: backends of the payloads, fastest first.
        max_bytes: limit of the last tier, above which the least recently used entries are evicted; None: no limit.

    Raises:
        ConfigurationError: a limit below 0.
        StoreError: the catalog or the last tier cannot be used.
    """

    def __init__(self, catalog: Catalog, tiers: Tiers, max_bytes: int | None = None) -> None:
        self.catalog, self.tiers = catalog, tiers
        self._max_bytes = check_limit(max_bytes)
        self._hits = self._misses = self._evictions = 0

    @classmethod
    def open(cls, folder: str | Path | None, max_bytes: int | None = None, memory_bytes: int = 0) -> ChunkStore:
        """A store in a folder, or in memory if ``folder`` is None. The folder is made at the first write.

        Args:
            memory_bytes: size of a memory tier before the disk; 0: no memory tier.

        Raises:
            StoreError: the folder holds a store of an older format.
        """
        if folder is None:
            return cls(Catalog(), Tiers([MemoryBackend()]), max_bytes)
        folder = Path(folder).expanduser()
        _refuse_old_format(folder)
        memory = [MemoryBackend(memory_bytes)] if memory_bytes else []
        return cls(Catalog(folder), Tiers([*memory, DiskBackend(folder / "kv")]), max_bytes)

    def get(self, key: str) -> StoredKV | None:
        """The stored KV, or None. Counts as a use for eviction. Do not write to the tensor."""
        found = self._find(key)
        if found is None:
            self._misses += 1
            return None
        data, tier = found
        try:
            frame = Frame.parse(data, key)
            stored = StoredKV(frame.kv(verify=not self.tiers.backends[tier].in_memory), frame.codec)
        except FrameError as error:
            logger.warning("chunk cache %s… is damaged (%s); it is removed and will be computed again", key[:12], error)
            self._remove_damaged(key)
            self._misses += 1
            return None
        self._hits += 1
        self.tiers.promote(key, data, tier)
        self._record_use(frame)
        return stored

    def put(
        self, key: str, kv: torch.Tensor, codec: str, *, namespace: str = "default", text: str | None = None
    ) -> None:
        """Store KV atomically. May evict other entries to stay within the limit.

        Args:
            kv: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE.
            codec: name in :data:`~cacheclip_rag.store.codecs.CODECS`.
            text: the chunk's text, for :meth:`release`; None for KV without a text (the shared prefix).

        Raises:
            ConfigurationError: an unknown codec.
            StoreError: the KV could not be written; nothing stored before was changed.
        """
        data = encode(kv, codec, key, namespace=namespace, text=text)
        if self._max_bytes is not None and len(data) > self._max_bytes:
            logger.warning(
                "a chunk cache of %d bytes exceeds the store's limit of %d and is not stored",
                len(data),
                self._max_bytes,
            )
            self.delete(key)  # an older version must not be read any more
            return
        try:
            self.tiers.put(key, data)
        except OSError as error:
            raise StoreError(
                f"could not write a chunk cache of {len(data) / 1e6:.1f} MB: {error}. Free some space, set a smaller "
                "limit, or choose another folder; nothing stored before was changed."
            ) from error
        self.catalog.record(_entry_of(Frame.parse(data, key)))
        self._evict(keep=key)

    def delete(self, key: str) -> bool:
        """Remove an entry; True if it existed."""
        return self._delete([key])

    def release(self, namespace: str, texts: Iterable[str]) -> int:
        """Remove every entry of these texts, for every model and chunk context. Returns how many texts had an entry."""
        return sum([self._delete(self.catalog.keys_of(namespace, text_digest(text))) for text in texts])

    def codec_of(self, key: str) -> str | None:
        """Codec of a key's entry, or None. Reads the header only, and does not count as a use for eviction."""
        try:
            found = self.tiers.find(key)
            return Frame.parse(found[0], key).codec if found else None
        except (OSError, FrameError):  # get logs the reason
            return None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.codec_of(key) is not None

    def keys(self) -> Iterator[str]:
        """All keys, least recently used first."""
        return iter(self.catalog.keys())

    def stats(self) -> StoreStats:
        """Sizes and counters."""
        return StoreStats(*self.catalog.totals(), self._max_bytes, self._hits, self._misses, self._evictions)

    def close(self) -> None:
        """Close handles; the store may be used again afterwards."""
        self.tiers.close()
        self.catalog.close()

    def _find(self, key: str) -> tuple[Buffer, int] | None:
        try:
            found = self.tiers.find(key)
        except OSError as error:  # the medium failed; the payload may be intact
            logger.warning("chunk cache %s… cannot be read now (%s); it is computed for this answer", key[:12], error)
            return None
        if found is None and self.catalog.holds(key):
            self.catalog.remove([key])
        return found

    def _record_use(self, frame: Frame) -> None:
        """Record a use. A payload without an entry (its writer was killed) gets one. A full disk or a busy catalog does
        not stop the read: the use is then not recorded."""
        try:
            self.catalog.use(_entry_of(frame))
        except StoreError as error:
            logger.debug("a use was not recorded: %s", error)

    def _delete(self, keys: list[str]) -> bool:
        try:
            removed = self.tiers.delete(keys)
        except OSError as error:
            raise StoreError(f"could not delete a chunk cache: {error}. Check who may write to the store.") from error
        return bool(self.catalog.remove(keys)) or removed > 0

    def _remove_damaged(self, key: str) -> None:
        try:
            self.delete(key)
        except StoreError as error:  # a read-only store can still be read
            logger.warning("the damaged chunk cache %s… could not be removed: %s", key[:12], error)

    def _evict(self, keep: str) -> None:
        if self._max_bytes is None:
            return
        excess = self.catalog.totals()[1] - self._max_bytes
        while excess > 0 and (victims := self.catalog.least_recently_used(_VICTIMS, keep=keep)):
            for key, size in victims:
                if excess <= 0:
                    return
                self.delete(key)
                self._evictions += 1
                excess -= size


def is_store(folder: Path) -> bool:
    """Whether a folder holds a store. Raises StoreError if it holds one of an older format."""
    _refuse_old_format(folder)
    return (folder / FILE_NAME).is_file()


def _entry_of(frame: Frame) -> Entry:
    return Entry(frame.key, frame.namespace, frame.text, frame.data.nbytes, frame.num_tokens, frame.codec)


def _refuse_old_format(folder: Path) -> None:
    if (folder / "index.sqlite3").exists() or next(folder.glob("chunks/*/*.safetensors"), None) is not None:
        raise StoreError(
            f"the store {folder} has an older format, which this version of cacheclip-rag does not read. Ingest the "
            "documents again into a new folder: cacheclip ingest PATH --store NEW_FOLDER. Then these files of the old "
            "one may be removed: chunks/, index.sqlite3*, sources.sqlite3*, library.sqlite3*, passages-*.faiss."
        )
