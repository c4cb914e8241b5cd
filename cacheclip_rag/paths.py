"""Where things live on disk, and how files appear there all at once or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_path", "cache_home", "fsync_folder"]


def cache_home() -> Path:
    """Folder of downloaded models: ``$CACHECLIP_HOME``, or ``cacheclip`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if explicit := os.environ.get("CACHECLIP_HOME"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cacheclip"


def fsync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` survive a power cut (no-op where folders cannot be opened)."""
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

    The temporary name starts with ``.tmp-`` so that leftovers of a killed process are recognisable.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".tmp-", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
        fsync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
