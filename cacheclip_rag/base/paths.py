"""Folders on disk, and atomic writing of files."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_path", "cache_home", "fsync_folder", "make_private_folder", "private_mode"]


def cache_home() -> Path:
    """Cache folder of this package: ``$CACHECLIP_HOME``, or ``cacheclip`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if explicit := os.environ.get("CACHECLIP_HOME"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cacheclip"


def make_private_folder(root: Path, *names: str) -> Path:
    """Make ``root``, for its owner alone, and a folder in it with the permissions of :func:`private_mode`; returns the
    folder."""
    if not root.is_dir():
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    folder = root
    for name in names:
        folder = folder / name
        if not folder.is_dir():
            folder.mkdir(mode=private_mode(root), exist_ok=True)
    return folder


def private_mode(root: Path) -> int:
    """Permissions of new folders in ``root``: 0700; 0770 if somebody made ``root`` so that its group may write to it.
    The mask of the process (umask) applies to them too."""
    mode = root.stat().st_mode
    return 0o770 if mode & stat.S_IWGRP and not mode & stat.S_IWOTH else 0o700


def fsync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` durable (no-op if the system cannot open folders)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it onto ``target`` if the block succeeds, else delete it.

    The temporary name starts with ``.tmp-``, so that leftovers of a killed process can be recognised. The file gets the
    permissions of a new file (umask), because some libraries write private files.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-{secrets.token_hex(8)}{target.suffix}"
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    mode = os.fstat(handle).st_mode & 0o777
    os.close(handle)
    try:
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
        fsync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
