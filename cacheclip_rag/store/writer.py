"""The name of a writing process, by which others see whether it still lives.

The process holds a lock on a file of its name until it ends, however it ends. So a killed process can be told from a
slow one, whatever clocks and process numbers say.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.paths import make_private_folder, private_mode

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: all writers are taken for living
    fcntl = None

__all__ = ["Writer"]


class Writer:
    """This process as a writer of a store folder. A forked process gets a name of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "writers"
        self._lock = threading.Lock()
        _writers.add(self)
        self._pid = 0
        self._name = ""
        self._file: int | None = None

    @property
    def name(self) -> str:
        """32 hexadecimal digits; locked at first use.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._lock:
            if self._pid != os.getpid():
                self._name, self._file = self._register()
                self._pid = os.getpid()
            return self._name

    def names(self) -> set[str]:
        """Names that are registered, of living and killed processes."""
        return {path.name for path in self._folder.iterdir()} if self._folder.is_dir() else set()

    def dead(self) -> Iterator[str]:
        """Names of writers whose processes have ended. Each stays locked while the caller handles it, and its file is
        removed afterwards."""
        if fcntl is None or not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            if path.name == self._name:
                continue
            try:
                file = os.open(path, os.O_RDWR)
            except OSError:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # it lives, or another process handles it
                os.close(file)
                continue
            try:
                yield path.name
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            finally:
                os.close(file)

    def __del__(self) -> None:
        """Give the name up. Not before: another thread may be writing under it."""
        if self._file is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                (self._folder / self._name).unlink()
            with contextlib.suppress(OSError):
                os.close(self._file)

    def _register(self) -> tuple[str, int]:
        """Make and lock a file under a new name."""
        make_private_folder(self._folder.parent, self._folder.name)
        while True:
            name = secrets.token_hex(16)
            path = self._folder / name
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, private_mode(self._folder.parent) & 0o666)
            if fcntl is None:
                return name, file
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_there(path, file):  # not removed by a sweep between making and locking it
                return name, file
            os.close(file)


def _forget_in_fork() -> None:
    """Close the parent's lock files in a forked process, which would keep them locked after the parent's end."""
    for writer in [*_writers]:
        if writer._file is not None:
            with contextlib.suppress(OSError):
                os.close(writer._file)
            writer._file = None


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)


def _is_there(path: Path, file: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(file).st_ino
    except OSError:
        return False
