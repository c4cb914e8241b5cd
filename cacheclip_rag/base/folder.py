"""Names, links and deletions in folders that others may write to.

A store folder is untrusted: a link in it would lead reads, writes and deletions out of it. Therefore a folder is opened
first, without following a link, and names are looked up in the open folder. So a folder that is replaced by a link
meanwhile changes nothing. (Windows has no such calls: there, links are looked for before.)
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_BY_DESCRIPTOR = os.open in os.supports_dir_fd and os.listdir in os.supports_fd
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_LINK
_FILE = _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Opening a pipe would wait for its writer."""
_NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)


class Folder:
    """An open folder, closed by its ``with`` block. Names are of things in it, never paths, and no link is followed."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        """``descriptor``: of the open folder; None where the system has none for folders."""
        self.path, self._descriptor = path, descriptor

    def names(self) -> list[str]:
        return os.listdir(self.path if self._descriptor is None else self._descriptor)

    def status(self, name: str) -> os.stat_result | None:
        """What a name stands for, or None."""
        try:
            return os.stat(self._place(name), dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a file. Raises OSError for a link (ELOOP)."""
        place = self._place(name)
        if not _NO_LINK and os.path.islink(place):
            raise OSError(errno.ELOOP, "it is a link", place)
        return os.open(place, flags | _FILE, mode, dir_fd=self._descriptor)

    def unlink(self, name: str) -> bool:
        """Remove a file or a link. False if there is none, or a folder, which is nobody's to remove."""
        try:
            os.unlink(self._place(name), dir_fd=self._descriptor)
        except FileNotFoundError:
            return False
        except OSError:
            if self.is_folder(name):
                return False
            raise
        return True

    def replace(self, name: str, target: Folder, new_name: str) -> None:
        """Move something into an open folder, in place of what has its new name."""
        os.replace(
            self._place(name), target._place(new_name), src_dir_fd=self._descriptor, dst_dir_fd=target._descriptor
        )

    def is_folder(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def folder(self, name: str, mode: int | None = None) -> Folder:
        """Open a folder in it, see :func:`open_folder`. With ``mode``, it is made if it is missing."""
        place = self._place(name)
        if mode is not None:
            with suppress(FileExistsError):
                os.mkdir(place, mode, dir_fd=self._descriptor)
        return Folder(self.path / name, _open(place, self._descriptor))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _place(self, name: str) -> str:
        if not name or name in (os.curdir, os.pardir) or {"/", os.sep, "\0"} & {*name}:
            raise ValueError(f"expected the name of a file in {self.path}, got {name!r}")
        return name if self._descriptor is not None else str(self.path / name)


def open_folder(root: Path, *names: str, make: bool = False) -> Folder:
    """Open the folder ``root/name/name``, for a ``with`` block. The root itself may be a link, because the user named
    it.

    Args:
        make: make what is missing: the root for its owner alone, folders in it with :func:`private_mode`.

    Raises:
        FileNotFoundError: it is missing.
        NotADirectoryError: there is a link, or something else, in place of a folder.
    """
    if make and not root.is_dir():
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    mode = private_mode(root) if make else None
    folder = Folder(root, os.open(root, _FOLDER & ~_NO_LINK) if _BY_DESCRIPTOR else None)
    for name in names:
        with folder:
            folder = folder.folder(name, mode)
    return folder


def is_file(path: Path) -> bool:
    """Whether a regular file, and no link to one, has this path. Raises OSError if nobody can tell."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def private_mode(root: Path) -> int:
    """Permissions of new folders in ``root``: 0700; 0770 if somebody made ``root`` so that its group may write to it.
    The mask of the process (umask) applies to them too."""
    mode = root.stat().st_mode
    return 0o770 if mode & stat.S_IWGRP and not mode & stat.S_IWOTH else 0o700


def _open(place: str, parent: int | None) -> int | None:
    """A descriptor of a folder; None where the system has none."""
    try:
        if _BY_DESCRIPTOR:
            return os.open(place, _FOLDER, dir_fd=parent)
        if os.path.isdir(place) and not os.path.islink(place):
            return None
        if not os.path.lexists(place):
            raise FileNotFoundError(errno.ENOENT, "there is no folder", place)
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
    raise NotADirectoryError(errno.ENOTDIR, "there is a link or a file in place of a folder", place)
