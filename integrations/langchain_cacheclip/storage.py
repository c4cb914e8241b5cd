"""Bytes by name, beside the chunk caches: for embeddings, parent documents, and whatever else retrieval keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash
from langchain_core.stores import ByteStore

from cacheclip_rag.errors import ConfigurationError

__all__ = ["CacheClipByteStore"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS named (
    name TEXT PRIMARY KEY, value BLOB NOT NULL, checksum BLOB NOT NULL, size INTEGER NOT NULL, used REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS named_by_use ON named (used);
"""
_TOTAL = "SELECT coalesce(sum(size), 0) FROM named"


class CacheClipByteStore(ByteStore):
    """A key-value store in one file, as careful as the store of chunk caches: a value is written whole or not at all, a
    damaged one is a missing one, several processes may share it, and above a limit the least recently used go.

    For ``CacheBackedEmbeddings``, ``MultiVectorRetriever`` and the like.

    Args:
        folder: that of the chunk-cache store, or one of its own.
        max_bytes: of all values; None for no limit. A larger value is not kept.

    Raises:
        ConfigurationError: a name that is no string, a value that is not bytes, a limit below 0.
        StoreError: a folder that cannot be written.

    >>> embeddings = CacheBackedEmbeddings.from_bytes_store(model, CacheClipByteStore("my-store"), namespace="minilm")
    """

    def __init__(self, folder: str | Path, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ConfigurationError(f"max_bytes must be 0 or more, or None for no limit, got {max_bytes}.")
        from cacheclip_rag.store.database import Database  # its package loads torch

        self._database = Database(Path(folder).expanduser() / "named.sqlite3", _SCHEMA)
        self._max_bytes = max_bytes

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values, None for those that are not there."""
        return [self._get(_checked(key)) for key in keys]

    def _get(self, name: str) -> bytes | None:
        rows = self._database.query("SELECT value, checksum FROM named WHERE name = ?", (name,))
        if not rows or _checksum(rows[0][0]) != rows[0][1]:
            return None
        self._database.execute("UPDATE named SET used = ? WHERE name = ?", (time.time(), name))
        return bytes(rows[0][0])

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Keep all of them, or none."""
        rows = []
        for key, value in key_value_pairs:
            if not isinstance(value, bytes):
                raise ConfigurationError(f"a value must be bytes, got {type(value).__name__}. Encode it first.")
            rows.append((_checked(key), value, _checksum(value), len(value), time.time()))
        self._database.execute_many(("INSERT OR REPLACE INTO named VALUES (?, ?, ?, ?, ?)", row) for row in rows)
        self._evict()

    def mdelete(self, keys: Sequence[str]) -> None:
        self._database.execute_many(("DELETE FROM named WHERE name = ?", (_checked(key),)) for key in keys)

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """Names that begin with ``prefix``, in order."""
        for (name,) in self._database.query("SELECT name FROM named ORDER BY name"):
            if name.startswith(prefix or ""):
                yield name

    def _evict(self) -> None:
        while self._max_bytes is not None and self._database.query(_TOTAL)[0][0] > self._max_bytes:
            self._database.execute(
                "DELETE FROM named WHERE name IN (SELECT name FROM named ORDER BY used, rowid LIMIT 16) "
                f"AND ({_TOTAL}) > ?",
                (self._max_bytes,),
            )


def _checked(key: str) -> str:
    if not isinstance(key, str):
        raise ConfigurationError(f"a name must be a string, got {type(key).__name__}.")
    return key


def _checksum(value: bytes) -> bytes:
    return xxhash.xxh3_128_digest(value)
