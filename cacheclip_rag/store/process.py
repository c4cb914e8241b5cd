"""The name of a writing process, by which others see whether it still lives.

The process holds a lock on a file of its name until it ends, however it ends. So a killed process can be told from a
slow one, whatever clocks and process numbers say.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.folder import Folder, open_folder, private_mode

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: all writers are taken for living
    fcntl = None

_NAME = re.compile("[0-9a-f]{32}")


class Writer:
    """This process as a writer of a store folder. A forked process gets a name of its own."""

    def __init__(self, folder: Path) -> None:
        self._root = folder.absolute()
        self._lock = threading.Lock()
        _writers.add(self)
        self._pid = 0
        self._name = ""
        self._file: int | None = None

    @property
    def name(self) -> str:
        """32 hexadecimal digits; locked at first use. Raises OSError: the folder cannot be written."""
        with self._lock:
            if self._pid != os.getpid():
                self._name, self._file = self._register()
                self._pid = os.getpid()
            return self._name

    @staticmethod
    def is_name(name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    def names(self) -> set[str]:
        """Names that are registered, of living and killed processes. Raises OSError: nobody can tell, so that all
        writers must be taken for living."""
        try:
            with open_folder(self._root, "writers") as folder:
                return {name for name in folder.names() if self.is_name(name) and _is_regular(folder, name)}
        except FileNotFoundError:
            return set()

    def dead(self) -> Iterator[str]:
        """Names of writers whose processes have ended. Each stays locked while the caller handles it, and its file is
        removed afterwards. Raises OSError as :meth:`names` does."""
        for name in self.names() - {self._name} if fcntl is not None else ():
            with open_folder(self._root, "writers") as folder:
                try:
                    file = folder.open(name, os.O_RDWR)
                except OSError:
                    continue
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:  # it lives, or another process handles it
                    os.close(file)
                    continue
                try:
                    yield name
                    folder.unlink(name)
                finally:
                    os.close(file)

    def __del__(self) -> None:
        """Give the name up. Not before: another thread may be writing under it."""
        if self._file is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError), open_folder(self._root, "writers") as folder:
                folder.unlink(self._name)
            with contextlib.suppress(OSError):
                os.close(self._file)

    def _register(self) -> tuple[str, int]:
        with open_folder(self._root, "writers", make=True) as folder:
            while True:
                name = secrets.token_hex(16)
                file = folder.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, private_mode(self._root) & 0o666)
                if fcntl is None:
                    return name, file
                fcntl.flock(file, fcntl.LOCK_EX)
                if _is_there(folder, name, file):  # not removed by a sweep between making and locking it
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


def _is_regular(folder: Folder, name: str) -> bool:
    """Whether a name is a file's: nothing else can be locked by a writer."""
    status = folder.status(name)
    return status is not None and stat.S_ISREG(status.st_mode)


def _is_there(folder: Folder, name: str, file: int) -> bool:
    status = folder.status(name)
    return status is not None and status.st_ino == os.fstat(file).st_ino
