"""The disk tier: one safetensors file a chunk, an SQLite index beside, for many processes at once.

Layout of a store folder::

    chunks/ab/abcd….safetensors    payload; its header holds format version, key, codec and a checksum of the data
    index.sqlite3                  key -> bytes, last use; texts of prompt matching (see ``texts``)

A payload is written first, under a temporary name, and renamed; the index row comes second; eviction deletes the row
last. Killed anywhere in between, the store is left with a whole file and no row (adopted when next asked for) or with
a row and no file (a miss). A lock file was rejected: readers would wait for writers that only ever add.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import StoreError
from ..paths import atomic_path
from .base import ChunkStore, StoreStats, check_limit
from .codecs import CODECS, ChunkEntry
from .database import Database
from .keys import FORMAT_VERSION

__all__ = ["DiskStore"]

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, bytes INTEGER NOT NULL, num_tokens INTEGER NOT NULL, last_used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (last_used);
"""


class DiskStore(ChunkStore):
    """Chunk caches under ``folder``, at most ``max_bytes`` of payload (None: no limit), least recently used out first.

    Raises:
        StoreError: the folder or its index cannot be opened or written.
    """

    def __init__(self, folder: str | Path, max_bytes: int | None = None) -> None:
        self.folder = Path(folder).expanduser()
        self._max_bytes = check_limit(max_bytes)
        self._database = Database(self.folder / "index.sqlite3", _SCHEMA)
        self._hits = self._misses = self._evictions = 0

    def path_of(self, key: str) -> Path:
        """Where the payload of ``key`` lives."""
        return self.folder / "chunks" / key[:2] / f"{key}.safetensors"

    def get(self, key: str) -> ChunkEntry | None:
        try:
            entry = _read(self.path_of(key), key)
        except FileNotFoundError:
            entry = None
            # asked again: out of file handles looks the same
            if not self.path_of(key).exists() and self._database.query("SELECT 1 FROM entries WHERE key = ?", (key,)):
                self._forget(key)
        except OSError as error:  # the disk or the process is in trouble: no verdict on the file
            logger.warning("chunk cache %s… cannot be read now (%s); it is computed for this answer", key[:12], error)
            entry = None
        except (SafetensorError, ValueError, KeyError) as error:
            logger.warning("chunk cache %s… is damaged (%s); it is removed and will be computed again", key[:12], error)
            entry = None
            self._remove_damaged(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._best_effort(*self._row(key, entry))
        return entry

    def put(self, key: str, entry: ChunkEntry) -> None:
        if self._max_bytes is not None and entry.num_bytes > self._max_bytes:
            logger.warning(
                "a chunk cache of %d bytes exceeds the store's limit of %d and is not kept",
                entry.num_bytes,
                self._max_bytes,
            )
            self.delete(key)  # an older version must not go on being served
            return
        metadata = {
            "format": str(FORMAT_VERSION),
            "key": key,
            "codec": entry.codec,
            "checksum": _checksum(entry.tensors),
        }
        try:
            with atomic_path(self.path_of(key)) as temporary:
                save_file(dict(entry.tensors), temporary, metadata=metadata)
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"could not write a chunk cache of {entry.num_bytes / 1e6:.1f} MB under {self.folder}: {error}. Free "
                "some space, set a smaller limit, or choose another folder; nothing stored before was touched."
            ) from error
        self._database.execute(*self._row(key, entry))
        self._evict(keep=key)

    def touch(self, key: str) -> None:
        self._best_effort("UPDATE entries SET last_used = ? WHERE key = ?", (time.time(), key))

    def delete(self, key: str) -> bool:
        path = self.path_of(key)
        existed = path.exists()
        path.unlink(missing_ok=True)
        return self._forget(key) or existed

    def keys(self) -> Iterator[str]:
        return iter([row[0] for row in self._database.query("SELECT key FROM entries ORDER BY last_used, key")])

    def stats(self) -> StoreStats:
        ((count, total),) = self._database.query("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM entries")
        return StoreStats(count, total, self._max_bytes, self._hits, self._misses, self._evictions)

    def codec_of(self, key: str) -> str | None:
        path = self.path_of(key)
        try:
            with safe_open(path, framework="pt") as payload:
                return _codec_in(payload.metadata() or {}, key)
        except (SafetensorError, ValueError, OSError):  # missing or damaged: get says which
            return None

    def close(self) -> None:
        self._database.close()

    def _row(self, key: str, entry: ChunkEntry) -> tuple[str, tuple[str, int, int, float]]:
        """Statement that notes a use; it also adopts a whole payload whose row a killed process never wrote."""
        row = (key, entry.num_bytes, entry.num_tokens, time.time())
        return "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", row

    def _best_effort(self, sql: str, arguments: tuple[object, ...]) -> None:
        """Run a statement that only orders eviction: reading goes on with a full disk, and waits for no writer."""
        try:
            self._database.execute_at_once(sql, arguments)
        except StoreError as error:
            logger.debug("a use was not recorded: %s", error)

    def _remove_damaged(self, key: str) -> None:
        try:
            self.delete(key)
        except (OSError, StoreError) as error:  # a store that may not be written still serves the rest
            logger.warning("the damaged chunk cache %s… could not be removed: %s", key[:12], error)

    def _forget(self, key: str) -> bool:
        return self._database.execute("DELETE FROM entries WHERE key = ?", (key,)) > 0

    def _evict(self, keep: str) -> None:
        if self._max_bytes is None:
            return
        excess = self.stats().bytes - self._max_bytes
        if excess <= 0:
            return
        rows = self._database.query("SELECT key, bytes FROM entries WHERE key != ? ORDER BY last_used, key", (keep,))
        for key, size in rows:
            if excess <= 0:
                return
            self.delete(key)
            self._evictions += 1
            excess -= size


def _read(path: Path, key: str) -> ChunkEntry:
    """Map a payload and check that it is what its name says. Raises ValueError or SafetensorError if it is not."""
    if not path.exists():
        raise FileNotFoundError(path)
    with safe_open(path, framework="pt") as payload:
        header = payload.metadata() or {}
        codec = _codec_in(header, key)
        tensors = {name: payload.get_tensor(name) for name in payload.keys()}  # noqa: SIM118 - not a dict
    if "kv" not in tensors:
        raise ValueError("it holds no KV")
    if _checksum(tensors) != header.get("checksum"):
        raise ValueError("its checksum does not match its content")
    return ChunkEntry(tensors, codec)


def _codec_in(header: Mapping[str, str], key: str) -> str:
    """Codec named by a payload's header. Raises ValueError if the header is not this key's."""
    if header.get("format") != str(FORMAT_VERSION) or header.get("key") != key or header.get("codec") not in CODECS:
        raise ValueError("its header belongs to another entry or version")
    return header["codec"]


def _checksum(tensors: object) -> str:
    """xxh3 over names, shapes and bytes: guards against damage (not against forgery; keys do that for content)."""
    assert isinstance(tensors, dict)
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor: torch.Tensor = tensors[name]
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]  # it is a buffer
    return digest.hexdigest()
