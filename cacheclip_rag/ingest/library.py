"""The documents of a store: passages, embeddings and settings in SQLite, and a FAISS index for search.

The FAISS file is derived from SQLite and named after the library's revision. A missing or older file is built again, so
a killed run always leaves a usable library.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigurationError, MissingExtraError, StoreError
from ..paths import atomic_path
from ..store.database import Database
from .embedding import Vectors

__all__ = ["Library", "LibrarySettings", "Passage"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (path TEXT PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS passages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL REFERENCES documents (path), ordinal INTEGER NOT NULL,
    text TEXT NOT NULL, vector BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS passages_by_path ON passages (path);
CREATE INDEX IF NOT EXISTS passages_by_text ON passages (text);
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """Settings of a store's documents. The first ingestion fixes them, because mixed settings would not match."""

    primary: str
    auxiliary: str | None
    embedding: str
    dtype: str
    namespace: str
    chunk_tokens: int
    overlap_tokens: int
    chunk_context: str


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


class Library:
    """Documents and passages under a store folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._database = Database(self.folder / "library.sqlite3", _SCHEMA, 3)

    @classmethod
    def open(cls, folder: str | Path) -> Library:
        """An existing library.

        Raises:
            StoreError: ``folder`` holds no library.
        """
        library = cls(folder)
        if not (library.folder / "library.sqlite3").is_file() or library.settings is None:
            raise StoreError(
                f"no documents are stored in {folder}. Ingest some: cacheclip ingest PATH --store {folder}"
            )
        return library

    # -- settings -----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> LibrarySettings | None:
        """Settings of the first ingestion; None in a new library."""
        rows = self._database.query("SELECT value FROM meta WHERE name = 'settings'")
        if not rows:
            return None
        values = json.loads(rows[0][0])
        values.setdefault("chunk_context", values.pop("behind", "prefix"))  # stores of the first version
        return LibrarySettings(**values)

    def check_settings(self, settings: LibrarySettings) -> None:
        """Raise ConfigurationError, naming each difference, if the library was made with other settings."""
        known = self.settings
        if known is None:
            return
        mine, theirs = asdict(settings), asdict(known)
        differences = [f"{name} {theirs[name]!r}, not {mine[name]!r}" for name in mine if mine[name] != theirs[name]]
        if differences:
            raise ConfigurationError(
                f"the store {self.folder} was made with {'; '.join(differences)}. Leave these options out to use this "
                "store, or choose another folder."
            )

    def fix_settings(self, settings: LibrarySettings) -> None:
        """Record the settings if none are recorded; otherwise check them as :meth:`check_settings` does."""
        value = json.dumps(asdict(settings))
        self._database.execute("INSERT OR IGNORE INTO meta VALUES ('settings', ?)", (value,))
        self.check_settings(settings)

    @property
    def max_bytes(self) -> int | None:
        """Limit of the chunk-cache store in this folder, recorded for all commands; None: no limit."""
        rows = self._database.query("SELECT value FROM meta WHERE name = 'max_bytes'")
        return int(rows[0][0]) if rows else None

    def set_max_bytes(self, max_bytes: int | None) -> None:
        """Record the limit of the chunk-cache store; None removes it."""
        self._database.execute("DELETE FROM meta WHERE name = 'max_bytes'")
        if max_bytes is not None:
            self._database.execute("INSERT OR REPLACE INTO meta VALUES ('max_bytes', ?)", (str(max_bytes),))

    # -- documents ----------------------------------------------------------------------------------------------

    def documents(self) -> dict[str, str]:
        """Path to digest of every document."""
        return dict(self._database.query("SELECT path, digest FROM documents ORDER BY path"))

    def passages(self) -> list[tuple[str, int, str]]:
        """All passages as (path, ordinal, text), in order."""
        return self._database.query("SELECT path, ordinal, text FROM passages ORDER BY path, ordinal")

    def passages_of(self, path: str) -> list[str]:
        """Texts of one document, in order."""
        rows = self._database.query("SELECT text FROM passages WHERE path = ? ORDER BY ordinal", (path,))
        return [text for (text,) in rows]

    def replace(self, path: str, digest: str, texts: Sequence[str], vectors: Vectors) -> list[str]:
        """Replace a document in one transaction; returns texts that no passage uses any more."""
        rows = [(path, n, text, vectors[n].tobytes()) for n, text in enumerate(texts)]
        return self._change(
            path,
            [
                ("INSERT INTO documents VALUES (?, ?)", (path, digest)),
                *(("INSERT INTO passages (path, ordinal, text, vector) VALUES (?, ?, ?, ?)", row) for row in rows),
            ],
        )

    def remove(self, path: str) -> list[str]:
        """Remove a document; returns texts that no passage uses any more."""
        return self._change(path, [])

    def _change(self, path: str, additions: Sequence[tuple[str, Sequence[Any]]]) -> list[str]:
        before = set(self.passages_of(path))
        self._database.execute_many(
            [
                ("DELETE FROM passages WHERE path = ?", (path,)),
                ("DELETE FROM documents WHERE path = ?", (path,)),
                *additions,
                # random, not a counter: a new library must not use index files of an older one in the same folder
                ("INSERT OR REPLACE INTO meta VALUES ('revision', ?)", (secrets.token_hex(8),)),
            ]
        )
        return [t for t in before if not self._database.query("SELECT 1 FROM passages WHERE text = ? LIMIT 1", (t,))]

    def close(self) -> None:
        self._database.close()

    # -- search -------------------------------------------------------------------------------------------------

    def search(self, vector: Vectors, top_k: int) -> list[Passage]:
        """The ``top_k`` passages nearest to ``vector`` ``(1, dimensions)``, best first, each text once."""
        if top_k < 1:
            raise ConfigurationError(f"the number of passages must be 1 or more, got {top_k}.")
        index = self.index()
        if index is None:
            return []
        passages: dict[str, Passage] = {}
        wanted = top_k
        while len(passages) < top_k:  # identical passages are merged, so more may be needed
            wanted *= 2
            scores, ids = index.search(vector, min(index.ntotal, wanted))
            for score, passage_id in zip(scores[0].tolist(), ids[0].tolist(), strict=True):
                rows = self._database.query("SELECT text, path, ordinal FROM passages WHERE id = ?", (passage_id,))
                for text, path, ordinal in rows:
                    passages.setdefault(text, Passage(text, path, ordinal, score))
            if wanted >= index.ntotal:
                break
        return list(passages.values())[:top_k]

    def index(self) -> Any | None:
        """The FAISS index of all passages (inner product, exact), read or built; None without passages."""
        try:
            import faiss
        except ImportError as error:
            raise MissingExtraError("faiss-cpu", "ingest") from error
        rows = self._database.query("SELECT value FROM meta WHERE name = 'revision'")
        if not rows:
            return None
        target = self.folder / f"passages-{rows[0][0]}.faiss"
        if target.is_file():
            try:
                return faiss.read_index(str(target))
            except RuntimeError:  # damaged: build it again
                target.unlink(missing_ok=True)
        return self._build_index(faiss, target)

    def _build_index(self, faiss: Any, target: Path) -> Any | None:
        rows = self._database.query("SELECT id, vector FROM passages ORDER BY id")
        if not rows:
            return None
        vectors = np.stack([np.frombuffer(vector, dtype=np.float32) for _, vector in rows])
        index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
        index.add_with_ids(vectors, np.array([number for number, _ in rows], dtype=np.int64))
        try:
            with atomic_path(target) as temporary:
                faiss.write_index(index, str(temporary))
        except (OSError, RuntimeError) as error:
            raise StoreError(
                f"cannot write the search index {target}: {error}. Free some space and try again."
            ) from error
        _remove_all(path for path in self.folder.glob("passages-*.faiss") if path != target)
        return index


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
