"""Payloads as files in a folder, shared by any number of processes.

A payload is written in a folder of temporary files and then renamed, so that readers never see a partial file. Reading
copies the file into memory of the reader: a mapped file that another program cuts off kills the process that reads it,
and one that is overwritten changes KV that was checked already.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.paths import make_private_folder, private_mode
from .backend import Backend, Sink
from .writer import Writer

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CAN_DROP_PAGE_CACHE", "PAGE_CACHE", "DiskBackend"]

_SUFFIX = ".kv"
_BLOCK_BYTES = 4096
_PIECE_BYTES = 1 << 22  # smaller pieces cost more calls than the cache saves
_NO_FILE = (FileNotFoundError, NotADirectoryError)
_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""A link would lead out of the store, and opening a pipe would wait for its writer."""
PAGE_CACHE = "page cache"
"""The medium of files that the system holds in memory."""
CAN_DROP_PAGE_CACHE = hasattr(os, "posix_fadvise")
"""Whether files can be dropped from the system's page cache (Linux)."""
_mincore: Any = getattr(ctypes.CDLL(None), "mincore", None) if CAN_DROP_PAGE_CACHE else None


class DiskBackend(Backend):
    """One file per payload: ``FOLDER/kv/ab/abcd….kv``. Folders are made at the first write, for their owner alone."""

    name = "disk"
    has_parts = True

    def __init__(self, folder: str | Path, writer: Writer | None = None) -> None:
        """``writer``: this process, by whose name temporary files are known; default a new one."""
        self._root = Path(folder)
        self.folder = self._root / "kv"
        self._folder = str(self.folder)
        self._temporary = Path(folder) / "tmp"
        self._writer = writer or Writer(Path(folder))

    def path_of(self, key: str) -> Path:
        """Path of the payload of ``key``."""
        return Path(self._path_of(key))

    def _path_of(self, key: str) -> str:
        assert key.isalnum(), f"a key must be made of letters and digits to be a file name, got {key!r}"
        return f"{self._folder}{os.sep}{key[:2]}{os.sep}{key}{_SUFFIX}"  # ten times as fast as with pathlib

    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        return self._read_each(keys)

    def read(self, key: str, sink: Sink) -> Buffer | None:
        with self._opened(key) as (file, size):
            if file is None:
                return None if size is None else b""
            target = sink.allocate(size or 0)
            return target[: _read_into(file, target, sink)]

    def read_part(self, key: str, start: int, target: memoryview) -> int:
        with self._opened(key) as (file, _):
            if file is None:
                return 0
            os.lseek(file, start, os.SEEK_SET)
            return _read_into(file, target, Sink())

    def head(self, key: str, num_bytes: int) -> tuple[Buffer, int] | None:
        with self._opened(key) as (file, size):
            if size is None:
                return None
            return (os.read(file, num_bytes) if file is not None else b""), size

    def occupied(self, key: str) -> int:
        try:
            found = os.lstat(self._path_of(key))
        except _NO_FILE:
            return 0
        return max(self.round_up(found.st_size), getattr(found, "st_blocks", 0) * 512)

    def round_up(self, num_bytes: int) -> int:
        return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES

    def medium(self, key: str) -> str:
        """The page cache if it has most of the file, else the mounted file system: stores on one have one speed."""
        with contextlib.suppress(OSError, ValueError), self._opened(key) as (file, size):
            if file is not None and size and _cached_share(file, size) > 0.5:
                return PAGE_CACHE
        return f"disk at {self._mount}"

    @cached_property
    def _mount(self) -> Path:
        folder = self._root.absolute()
        return next((each for each in (folder, *folder.parents) if each.is_mount()), folder)

    def drop_cached(self, keys: Iterable[str]) -> None:
        for key in keys if CAN_DROP_PAGE_CACHE else ():
            with self._opened(key) as (file, _):
                if file is not None:
                    os.fsync(file)  # what is not written yet would stay
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def put(self, key: str, data: Buffer) -> None:
        target = self.path_of(key)
        make_private_folder(self._root, self._temporary.name)
        make_private_folder(self._root, self.folder.name, target.parent.name)
        temporary = self._temporary / f"{self._writer.name}-{secrets.token_hex(4)}"
        mode = private_mode(self._root) & 0o666
        file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), mode)
        try:
            try:
                _write_all(file, memoryview(data).cast("B"))
            finally:
                os.close(file)
            # without fsync: a payload that a power failure damaged is a miss
            os.replace(temporary, target)
        except BaseException:
            _unlink(temporary)
            raise

    def delete(self, keys: Iterable[str]) -> int:
        return sum([_unlink(self.path_of(key)) for key in keys])

    def list(self) -> Iterator[str]:
        for file in self.folder.glob(f"[!.]*/[!.]*{_SUFFIX}"):
            yield file.stem

    def sweep(self, writer: str) -> int:
        """Remove the temporary files of a killed process; returns how many."""
        return sum([_unlink(file) for file in self._temporary.glob(f"{writer}-*")])

    def temporaries(self) -> Iterator[Path]:
        """Files of writes that are not complete."""
        if self._temporary.is_dir():
            yield from self._temporary.iterdir()

    def close(self) -> None:
        """Nothing to release: files are open only while they are read."""

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int | None, int | None]]:
        """The open file and its size. ``(None, None)``: no file; ``(None, 0)``: something that is not a file."""
        try:
            file = os.open(self._path_of(key), _OPEN)
        except _NO_FILE:
            yield None, None
            return
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a socket, a folder
                raise
            yield None, 0
            return
        try:
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode):
                yield file, found.st_size
            else:
                yield None, 0
        finally:
            os.close(file)


def _read_into(file: int, target: memoryview, sink: Sink) -> int:
    """Fill ``target`` from a file; returns the bytes read, fewer if the file was cut off meanwhile. Each piece is
    checked when it is there."""
    done = 0
    with io.FileIO(file, closefd=False) as stream:
        while done < target.nbytes and (count := stream.readinto(target[done : done + _PIECE_BYTES])):
            done += count
            sink.received(done)
    return done


def _cached_share(file: int, size: int) -> float:
    """Share of a file's pages that are in the system's page cache; 0.0 where the system does not say."""
    if _mincore is None:
        return 0.0
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with mmap.mmap(file, size, access=mmap.ACCESS_READ) as mapped:  # no byte of it is read
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        failed = _mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
    return 0.0 if failed else float((pages & 1).mean())


def _write_all(file: int, data: memoryview) -> None:
    done = 0
    while done < data.nbytes:
        done += os.write(file, data[done:])


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except _NO_FILE:
        return False
    except OSError:
        if path.is_dir() and not path.is_symlink():
            return False  # no payload, and not ours to remove
        raise
    return True
