"""Care of the documents of a store: what is wrong with them, and how it is mended."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cacheclip_rag import StoreError
from cacheclip_rag.store import may_be_whole, set_aside

from .library import FILE_NAME, PATH_COLUMN, Library


def check_library(folder: str | Path) -> list[str]:
    """What is wrong with the documents of a store, in sentences; empty if nothing is. Changes nothing."""
    library = Library(folder)
    if not os.path.lexists(library.folder / FILE_NAME):
        return []
    try:
        _ = library.settings
        problems = [f"{library.folder / FILE_NAME}: {problem}" for problem in library.database.check()]
        return problems + [f"{path}: {problem}" for path, problem in library.damaged().items()]
    except StoreError as error:
        return [str(error)]
    finally:
        library.close()


def repair_library(folder: str | Path) -> list[str]:
    """Make the documents of a store usable; returns what was done, in sentences. Stop other users of the store before.

    Documents with damaged passages are removed from the library, so that the next ingestion processes them again. A
    file that cannot be used is moved aside to ``library.sqlite3.damaged``.
    """
    library = Library(folder)
    target = library.folder / FILE_NAME
    if not os.path.lexists(target):
        return []
    try:
        _ = library.settings
        if library.database.check():
            library.database.query("REINDEX")
        _ = library.settings
        if not library.database.check():
            return _remove_damaged(library)
        reason = "it is damaged"
    except StoreError as error:
        if may_be_whole(error):
            raise
        reason = str(error)
    library.close()
    try:
        aside = set_aside(library.folder, FILE_NAME)
    except OSError as error:
        raise StoreError(f"cannot move {target}: {error}. Check who may write to the store.") from error
    return [f"{FILE_NAME} was moved to {aside} ({reason}); ingest the documents again"]


def _remove_damaged(library: Library) -> list[str]:
    damaged = library.damaged()
    done = [f"{path} was removed ({problem}); ingest it again" for path, problem in damaged.items()]
    numbers = [row.number for row in library.rows() if row.path in damaged]
    rows = library.database.query(f"SELECT rowid, {PATH_COLUMN} FROM documents")
    library.database.execute_many(
        [
            *(("DELETE FROM passages WHERE id = ?", (number,)) for number in numbers),
            *(
                ("DELETE FROM documents WHERE rowid = ?", (number,))
                for number, path in rows
                if path.decode("utf-8", "replace") in damaged
            ),
            ("INSERT OR REPLACE INTO meta VALUES ('revision', ?)", (secrets.token_hex(8),)),
        ]
    )
    library.close()
    return done
