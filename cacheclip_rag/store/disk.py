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
import re
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.folder import Folder, open_folder, private_mode
from ..base.keys import is_key
from .backend import Backend, Sink
from .process import Writer

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SUFFIX = ".kv"
_BLOCK_BYTES = 4096
_PIECE_BYTES = 1 << 22  # smaller pieces cost more calls than the cache saves
_SHARD = re.compile("[0-9a-f]{2}")
_TEMPORARY = re.compile("([0-9a-f]{32})-[0-9a-f]{1,16}")
_NOT_OURS = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""What opening a link, a socket or a folder ends in."""
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
        self._root = Path(folder).absolute()
        self.folder = self._root / "kv"
        self._writer = writer or Writer(self._root)

    def path_of(self, key: str) -> Path:
        return self.folder / key[:2] / _file_name(key)

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

    def read_parts(self, key: str, parts: Iterable[tuple[int, memoryview]]) -> bool:
        """Fill memory, each piece from its byte of a payload on, of one file whatever replaces it meanwhile. Whether
        all was there."""
        with self._opened(key) as (file, _):
            return file is not None and all(
                os.lseek(file, start, os.SEEK_SET) == start and _read_into(file, target, Sink()) == target.nbytes
                for start, target in parts
            )

    def head(self, key: str, num_bytes: int) -> tuple[Buffer, int] | None:
        with self._opened(key) as (file, size):
            if size is None:
                return None
            return (os.read(file, num_bytes) if file is not None else b""), size

    def occupied(self, key: str) -> int:
        try:
            with self._folder_of(key) as folder:
                status = folder.status(_file_name(key))
        except FileNotFoundError:
            return 0
        return 0 if status is None else max(self.round_up(status.st_size), getattr(status, "st_blocks", 0) * 512)

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
        name = _file_name(key)
        with (
            open_folder(self._root, "tmp", make=True) as folder,
            open_folder(self._root, "kv", key[:2], make=True) as target,
        ):
            temporary = f"{self._writer.name}-{secrets.token_hex(4)}"
            file = folder.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, private_mode(self._root) & 0o666)
            try:
                try:
                    _write_all(file, memoryview(data).cast("B"))
                finally:
                    os.close(file)
                # without fsync: a payload that a power failure damaged is a miss
                folder.replace(temporary, target, name)
            except BaseException:
                folder.unlink(temporary)
                raise

    def delete(self, keys: Iterable[str]) -> int:
        return sum([self._delete(key) for key in keys])

    def _delete(self, key: str) -> bool:
        try:
            with self._folder_of(key) as folder:
                return folder.unlink(_file_name(key))
        except (FileNotFoundError, NotADirectoryError):  # what is elsewhere is not the store's
            return False

    def list(self) -> Iterator[str]:
        """Every key. Raises OSError after all others if some folder could not be read."""
        failed: OSError | None = None
        for shard in filter(_SHARD.fullmatch, self._names("kv")):
            try:
                names = self._names("kv", shard)
            except OSError as error:
                failed = error
                continue
            except MemoryError:
                failed = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                continue
            yield from (key for key in map(_key_in, names) if key is not None and key.startswith(shard))
        if failed is not None:
            raise failed

    def sweep(self, writers: Collection[str]) -> int:
        """Remove the temporary files of killed processes; returns how many."""
        return self.remove_temporaries([name for name in self.temporaries() if self.writer_of(name) in writers])

    def temporaries(self) -> Sequence[str]:
        """Names of the files of writes that are not complete, and of what else is among them."""
        return self._names("tmp")

    def remove_temporaries(self, names: Iterable[str]) -> int:
        """Remove files among those of :meth:`temporaries`; returns how many existed."""
        try:
            with open_folder(self._root, "tmp") as folder:
                return sum([folder.unlink(name) for name in names])
        except (FileNotFoundError, NotADirectoryError):
            return 0

    @staticmethod
    def writer_of(temporary: str) -> str | None:
        """The writer of a temporary file; None if it is something else."""
        parts = _TEMPORARY.fullmatch(temporary)
        return parts[1] if parts is not None else None

    def foreign(self) -> Iterator[tuple[str, ...]]:
        """What is no payload among the payloads, and what stands in place of a folder of the store: names from the
        store's folder on."""
        with open_folder(self._root) as root:
            for name in ("kv", "tmp", "writers"):
                if root.status(name) is not None and not root.is_folder(name):
                    yield (name,)
        yield from (("writers", name) for name in self._names("writers") if not self._writer.is_name(name))
        for shard in self._names("kv"):
            try:
                with open_folder(self._root, "kv", shard) as folder:
                    names = folder.names()
            except NotADirectoryError:
                yield "kv", shard
            except OSError:  # a folder that cannot be read; list says so
                continue
            else:
                is_ours = bool(_SHARD.fullmatch(shard))
                others = (name for name in names if not is_ours or not (_key_in(name) or "").startswith(shard))
                yield from (("kv", shard, name) for name in others)

    def _names(self, *folders: str) -> Sequence[str]:
        """Names in a folder of the store; none if it is missing, or no folder."""
        try:
            with open_folder(self._root, *folders) as folder:
                return folder.names()
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def _folder_of(self, key: str) -> Folder:
        """Raises FileNotFoundError if nothing was ever stored there, NotADirectoryError for a link."""
        return open_folder(self._root, "kv", key[:2])

    def close(self) -> None:
        """Nothing to release: files are open only while they are read."""

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int | None, int | None]]:
        """The open file and its size. ``(None, None)``: no file; ``(None, 0)``: something that is not a file."""
        try:
            with self._folder_of(key) as folder:
                file = folder.open(_file_name(key), os.O_RDONLY)
        except FileNotFoundError:
            yield None, None
            return
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            yield None, 0
            return
        try:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode):
                yield file, status.st_size
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


def _file_name(key: str) -> str:
    if not is_key(key):
        raise ValueError(f"expected a key of 64 hexadecimal digits, got {key!r}. Make keys with chunk_key.")
    return key + _SUFFIX


def _key_in(name: str) -> str | None:
    """The key whose payload has this file name; None if it is no payload's."""
    key = name.removesuffix(_SUFFIX)
    return key if key != name and is_key(key) else None
