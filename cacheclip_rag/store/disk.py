"""Payloads as files in a folder, shared by any number of processes.

A payload is written under a temporary name and then renamed, so that readers never see a partial file. Reading maps the
file into memory: cached pages are not copied, and reading one layer reads only that layer's pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..paths import atomic_path
from .backend import Backend

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["DiskBackend"]

_SUFFIX = ".kv"


class DiskBackend(Backend):
    """One file per payload: ``FOLDER/ab/abcd….kv``. The folder is made at the first write."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path_of(self, key: str) -> Path:
        """Path of the payload of ``key``."""
        assert key.isalnum(), f"a key must be made of letters and digits to be a file name, got {key!r}"
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        found: dict[str, Buffer] = {}
        for key in keys:
            try:
                found[key] = _map(self.path_of(key))
            except (FileNotFoundError, NotADirectoryError):
                continue
        return found

    def put(self, key: str, data: Buffer) -> None:
        with atomic_path(self.path_of(key)) as temporary:
            temporary.write_bytes(data)

    def delete(self, keys: Iterable[str]) -> int:
        return sum([_unlink(self.path_of(key)) for key in keys])

    def list(self) -> Iterator[str]:
        for file in self.folder.glob(f"[!.]*/[!.]*{_SUFFIX}"):
            yield file.stem

    def close(self) -> None:
        """Nothing to release: files are open only while they are read."""


def _map(path: Path) -> Buffer:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return b""  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # copy on write: a reader cannot change the file


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
