"""The documents of a store: passages, embeddings and settings in one SQLite file.

Every passage has a digest. A search reads and checks all passages once per change of the library, and keeps their
embeddings in memory, in a FAISS index: 1.1 s and 150 MB for 100,000 passages of 384 dimensions. A damaged passage is
left out, and its document is processed again by the next ingestion. (The index in a file was rejected: reading it and
checking it against the passages takes as long.)
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from cacheclip_rag import ConfigurationError, EngineConfig, StoreError
from cacheclip_rag.models import loader_of
from cacheclip_rag.plugins import Closing, expanded
from cacheclip_rag.store import Database

from .embedding import DEFAULT_EMBEDDING, Vectors

logger = logging.getLogger(__name__)

FILE_NAME = "library.sqlite3"
VERSION = 4
"""Increase this number when a table changes."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (path TEXT PRIMARY KEY, digest TEXT NOT NULL, num_passages INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS passages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL REFERENCES documents (path), ordinal INTEGER NOT NULL,
    text TEXT NOT NULL, vector BLOB NOT NULL, digest BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS passages_by_path ON passages (path);
CREATE INDEX IF NOT EXISTS passages_by_text ON passages (text);
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# as bytes: SQLite refuses to read a whole table if one text in it is not UTF-8
_PASSAGE = "SELECT id, CAST(path AS BLOB), ordinal, CAST(text AS BLOB), CAST(vector AS BLOB), digest FROM passages"
PATH_COLUMN = "ifnull(CAST(path AS BLOB), x'')"
_BATCH = 1000
Release = Callable[[list[str]], object]
_DEFAULTS = EngineConfig()


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """Settings of a store's documents. The first ingestion fixes them, because mixed settings would not match."""

    primary: str = _DEFAULTS.primary
    auxiliary: str | None = _DEFAULTS.auxiliary
    embedding: str = DEFAULT_EMBEDDING
    dtype: str = _DEFAULTS.dtype
    namespace: str = _DEFAULTS.namespace
    chunk_tokens: int = 512
    """Most tokens in a passage."""
    overlap_tokens: int = 0
    chunk_context: str = _DEFAULTS.chunk_context
    codec: str | None = None
    """Codec of the primary's chunk caches, as of :class:`~cacheclip_rag.config.EngineConfig`.
    Any but None is the auxiliary's too."""

    def engine_config(self, store: str | Path, **options: object) -> EngineConfig:
        """Settings of an engine for documents with these settings; ``options`` are those of the others."""
        fixed = {each.name: getattr(self, each.name) for each in fields(self) if hasattr(_DEFAULTS, each.name)}
        return EngineConfig.from_options(None, {**options, **fixed, "store": str(store)})


MODELS = ("primary", "auxiliary", "embedding")
"""Settings that name a model."""


def differences(mine: LibrarySettings, theirs: LibrarySettings, names: Iterable[str]) -> str:
    """Which of these settings differ, in words; empty if none does."""
    found = []
    for name in names:
        here, there = getattr(mine, name), getattr(theirs, name)
        is_same = _same_model(here) == _same_model(there) if name in MODELS else here == there
        if not is_same:
            found.append(f"{name} {there!r}, not {here!r}")
    return "; ".join(found)


def _same_model(name: str | None) -> str | None:
    """Of a path the last part, because files may be moved: KV is found by digests, not by names."""
    return None if name is None else loader_of(name).bare_name


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved passage."""

    text: str
    path: str
    """File of the passage."""
    ordinal: int
    """Number of the passage in that file, from 0."""
    score: float
    """Cosine similarity to the question."""


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage as it is stored."""

    number: int
    path: str
    ordinal: Any
    text: str
    vector: bytes
    is_intact: bool
    """Whether path, ordinal, text and vector have the digest that they were stored with."""

    @classmethod
    def read(
        cls, number: int, path: bytes | None, ordinal: Any, text: bytes | None, vector: bytes | None, digest: Any
    ) -> StoredPassage:
        path, text, vector = path or b"", text or b"", vector or b""
        is_intact = bool(digest == _digest(path, ordinal, text, vector))
        return cls(number, path.decode("utf-8", "replace"), ordinal, text.decode("utf-8", "replace"), vector, is_intact)


def _digest(path: bytes, ordinal: Any, text: bytes, vector: bytes) -> bytes:
    """Digest of a passage: 16 bytes."""
    head = f"{ordinal!r} {len(path)} {len(text)} {len(vector)} ".encode()
    return hashlib.blake2b(b"".join((head, path, text, vector)), digest_size=16).digest()


@dataclass(frozen=True, slots=True, eq=False)
class _Embeddings:
    """All intact passages of one revision of the library."""

    revision: str
    numbers: list[int]
    """Ids of the passages."""
    index: Any
    """FAISS index of their vectors in the same order: inner product, exact."""


class PassageIndex:
    """The embeddings of a library's intact passages, in memory, and what is nearest to a vector among them."""

    def __init__(self, folder: Path, database: Database, rows: Callable[[], Iterable[StoredPassage]]) -> None:
        """``rows``: all passages as they are stored now."""
        self._folder, self._database, self._rows = folder, database, rows
        self._embeddings: _Embeddings | None = None
        self._reported: set[str] = set()
        """Documents whose damage was logged."""

    def replaced(self, path: str) -> None:
        """A document is another one now: its damage would be news."""
        self._reported.discard(path)

    def check(self, path: str, num_texts: int, vectors: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Raise ConfigurationError unless these are the vectors of so many texts of a document, and as long as those of
        the other documents."""
        if vectors.ndim != 2 or len(vectors) != num_texts or not np.isfinite(vectors).all():
            raise ConfigurationError(
                f"expected {num_texts} finite vectors from the embedding model, got an array of shape {vectors.shape}."
            )
        other = next((row for row in self._rows() if row.is_intact and row.path != path), None)
        if other is not None and len(other.vector) != 4 * vectors.shape[1]:
            raise _wrong_dimensions(self._folder, vectors.shape[1], len(other.vector) // 4)

    def search(self, vector: Vectors, top_k: int) -> list[Passage]:
        """The ``top_k`` passages nearest to ``vector`` ``(1, dimensions)``, best first, each text once.

        Damaged passages are left out, with one warning for each document.

        Raises:
            ConfigurationError: ``top_k`` is below 1, or the vector has other dimensions than the passages.
        """
        if top_k < 1:
            raise ConfigurationError(f"the number of passages must be 1 or more, got {top_k}.")
        embeddings = self._read()
        if not embeddings.numbers:
            return []
        if embeddings.index.d != vector.shape[1]:
            raise _wrong_dimensions(self._folder, vector.shape[1], embeddings.index.d)
        passages: dict[str, Passage] = {}
        wanted = 0
        while len(passages) < top_k and wanted < len(embeddings.numbers):  # equal passages are merged: more are needed
            wanted = min(len(embeddings.numbers), 2 * max(wanted, top_k))
            scores, places = embeddings.index.search(np.asarray(vector, np.float32), wanted)
            for score, place in zip(scores[0].tolist(), places[0].tolist(), strict=True):
                rows = self._database.query(f"{_PASSAGE} WHERE id = ?", (embeddings.numbers[place],))
                for row in self._intact(rows):
                    passages.setdefault(row.text, Passage(row.text, row.path, row.ordinal, score))
        return list(passages.values())[:top_k]

    def _read(self) -> _Embeddings:
        """Passages and index, read again after a change."""
        import faiss

        rows = self._database.query("SELECT value FROM meta WHERE name = 'revision'")
        revision = str(rows[0][0]) if rows else ""
        if self._embeddings is None or self._embeddings.revision != revision:
            numbers, sizes, vectors = [], set(), bytearray()
            for row in self._intact(self._rows()):
                numbers.append(row.number)
                sizes.add(len(row.vector))
                vectors += row.vector
            if len(sizes) > 1:
                raise StoreError(
                    f"the passages in {self._folder / FILE_NAME} have vectors of several sizes. Ingest the documents "
                    "into another folder."
                )
            index = None
            if numbers:
                matrix = np.frombuffer(vectors, np.float32).reshape(len(numbers), -1)
                index = faiss.IndexFlatIP(matrix.shape[1])
                index.add(matrix)
            self._embeddings = _Embeddings(revision, numbers, index)
        return self._embeddings

    def _intact(self, rows: Iterable[StoredPassage | Sequence[Any]]) -> Iterator[StoredPassage]:
        for values in rows:
            row = values if isinstance(values, StoredPassage) else StoredPassage.read(*values)
            if row.is_intact:
                yield row
            elif row.path not in self._reported:
                self._reported.add(row.path)
                logger.warning("a passage of %s is damaged and is not used. Ingest the document again.", row.path)


class Library(Closing):
    """Documents and passages under a store folder. Methods raise StoreError if the file cannot be used. A ``with``
    block closes it at its end."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = expanded(folder).absolute()
        self.database = Database(self.folder / FILE_NAME, _SCHEMA, VERSION)
        self.database.on_replaced = lambda: logger.warning(
            "the library %s was deleted or replaced, and its documents are lost. Ingest them again.", self.folder
        )
        self._index = PassageIndex(self.folder, self.database, self.rows)

    @classmethod
    def open(cls, folder: str | Path) -> Library:
        """An existing library.

        Raises:
            StoreError: ``folder`` holds no library.
        """
        library = cls(folder)
        if not (library.folder / FILE_NAME).is_file() or library.settings is None:
            raise StoreError(
                f"no documents are stored in {folder}. Ingest some: cacheclip ingest PATH --store {folder}"
            )
        return library

    # -- settings -----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> LibrarySettings | None:
        """Settings of the first ingestion; None in a new library. Raises StoreError if they are damaged."""
        rows = dict(self.database.query("SELECT name, value FROM meta WHERE name IN ('settings', 'settings_digest')"))
        if not rows:
            return None
        value = str(rows.get("settings"))
        if rows.get("settings_digest") != _digest_of_settings(value):
            raise StoreError(
                f"the settings in {self.folder / FILE_NAME} are damaged. Run: cacheclip store repair --store "
                f"{self.folder}, then ingest the documents again."
            )
        fields = json.loads(value)
        if fields["chunk_context"] == "auto":  # the default of earlier versions
            fields["chunk_context"] = "passages"
        return LibrarySettings(**fields)

    def check_settings(self, settings: LibrarySettings) -> None:
        """Raise ConfigurationError, naming each difference, if the library was made with other settings."""
        known = self.settings
        if known is None:
            return
        if found := differences(settings, known, asdict(settings)):
            raise ConfigurationError(
                f"the store {self.folder} was made with {found}. Leave these options out to use this "
                "store, or choose another folder."
            )

    def fix_settings(self, settings: LibrarySettings) -> None:
        """Record the settings if none are recorded; otherwise check them as :meth:`check_settings` does."""
        value = json.dumps(asdict(settings))
        self.database.execute(
            "INSERT OR IGNORE INTO meta SELECT 'settings', ? UNION ALL SELECT 'settings_digest', ?",
            (value, _digest_of_settings(value)),
        )
        self.check_settings(settings)

    # -- documents ----------------------------------------------------------------------------------------------

    def documents(self) -> dict[str, str]:
        """Path to digest of every document."""
        digest = "ifnull(CAST(digest AS BLOB), x'')"
        rows = self.database.query(f"SELECT {PATH_COLUMN}, {digest} FROM documents ORDER BY path")
        return {path.decode("utf-8", "replace"): digest.decode("utf-8", "replace") for path, digest in rows}

    def passages(self) -> list[tuple[str, int, str]]:
        """All intact passages as (path, ordinal, text), in order."""
        return sorted((row.path, row.ordinal, row.text) for row in self.rows() if row.is_intact)

    def passages_of(self, path: str) -> list[str]:
        """Texts of the intact passages of one document, in order."""
        rows = self.database.query(f"{_PASSAGE} WHERE path = ? ORDER BY ordinal", (path,))
        return [row.text for row in (StoredPassage.read(*values) for values in rows) if row.is_intact]

    def damaged(self) -> dict[str, str]:
        """Documents of which passages are damaged, missing or left over, and what is wrong. They must be ingested
        again."""
        query = self.database.query(f"SELECT {PATH_COLUMN}, num_passages FROM documents")
        expected = {path.decode("utf-8", "replace"): count for path, count in query}
        intact, found = dict.fromkeys(expected, 0), {}
        for row in self.rows():
            if not row.is_intact:
                found[row.path] = f"passage {row.ordinal} is damaged"
            elif row.path not in expected:
                found[row.path] = "its passages belong to no document"
            else:
                intact[row.path] += 1
        for path, count in expected.items():
            if path not in found and intact[path] != count:
                found[path] = f"{intact[path]} of {count} passages are there"
        return dict(sorted(found.items()))

    def replace(
        self, path: str, digest: str, texts: Sequence[str], vectors: Vectors, release: Release = lambda texts: None
    ) -> list[str]:
        """Replace a document in one transaction; returns texts that no passage uses any more.

        Args:
            release: is given these texts first. If it fails, the document stays, so that another run tries it again.

        Raises:
            ConfigurationError: the vectors do not fit the texts, or those of the library.
        """
        if texts:
            self._index.check(path, len(texts), np.asarray(vectors))
        rows = []
        for ordinal, text in enumerate(texts):
            vector = np.asarray(vectors[ordinal], dtype=np.float32).tobytes()
            rows.append((path, ordinal, text, vector, _digest(path.encode(), ordinal, text.encode(), vector)))
        return self._change(
            path,
            texts,
            [
                ("INSERT INTO documents VALUES (?, ?, ?)", (path, digest, len(texts))),
                *(
                    ("INSERT INTO passages (path, ordinal, text, vector, digest) VALUES (?, ?, ?, ?, ?)", row)
                    for row in rows
                ),
            ],
            release,
        )

    def remove(self, path: str, release: Release = lambda texts: None) -> list[str]:
        """Remove a document, as :meth:`replace` does."""
        return self._change(path, [], [], release)

    def _change(
        self, path: str, texts: Sequence[str], additions: Sequence[tuple[str, Sequence[Any]]], release: Release
    ) -> list[str]:
        of_others = "SELECT 1 FROM passages WHERE text = ? AND path != ? LIMIT 1"
        before = set(self.passages_of(path)).difference(texts)
        unused = [text for text in before if not self.database.query(of_others, (text, path))]
        release(unused)
        self.database.execute_many(
            [
                ("DELETE FROM passages WHERE path = ?", (path,)),
                ("DELETE FROM documents WHERE path = ?", (path,)),
                *additions,
                # random, not a counter: a library that is made anew must not look like the old one
                ("INSERT OR REPLACE INTO meta VALUES ('revision', ?)", (secrets.token_hex(8),)),
            ]
        )
        self._index.replaced(path)
        return unused

    def rows(self) -> Iterator[StoredPassage]:
        """All passages, damaged ones too, in the order in which they were stored."""
        last = -1
        while rows := self.database.query(f"{_PASSAGE} WHERE id > ? ORDER BY id LIMIT {_BATCH}", (last,)):
            yield from (StoredPassage.read(*values) for values in rows)
            if rows[-1][0] <= last:  # a damaged page: asking on would never end
                raise StoreError(
                    f"{self.folder / FILE_NAME} is damaged: its passages are out of order. Run cacheclip store repair "
                    f"--store {self.folder}"
                )
            last = rows[-1][0]

    def search(self, vector: Vectors, top_k: int) -> list[Passage]:
        """As :meth:`PassageIndex.search`."""
        return self._index.search(vector, top_k)

    def close(self) -> None:
        self.database.close()


def _wrong_dimensions(folder: Path, found: int, expected: int) -> ConfigurationError:
    return ConfigurationError(
        f"the embedding model gives vectors of {found} dimensions, but the passages in {folder} have {expected}. Use "
        "the embedding model that the documents were ingested with, or ingest them into another folder."
    )


def _digest_of_settings(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()
