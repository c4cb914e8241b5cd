"""The cache folder, and atomic writing of files."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from os import PathLike
from pathlib import Path

SCHEMES = ("s3", "gs", "az", "file")
"""Of URLs of shared stores."""
HOT_SCHEMES = ("valkey", "valkeys", "redis", "rediss")
"""Of URLs of hot tiers; those in ``s`` are encrypted."""


def is_url(store: object) -> bool:
    """Whether a store is in object storage, not in a folder of this machine."""
    return "://" in str(store)


def split_hot(store: str) -> tuple[str, str]:
    """A shared store's URL, and that of the hot tier before it, or "": ``URL?hot=valkey://HOST:PORT`` names both, so
    that whatever takes a store takes them."""
    url, _, hot = store.partition("?hot=")
    return url.rstrip("/"), hot


def expanded(path: str | PathLike[str]) -> Path:
    """A path with a home folder in place of ``~`` or ``~user``. Other names that begin with ``~`` stay as they are:
    office programs make such files."""
    return Path(os.path.expanduser(path))


@lru_cache
def at_first_use(path: str | PathLike[str]) -> Path:
    """A path that does not depend on the working directory any more, after the first call for it in this process."""
    return expanded(path).absolute()


def cache_home() -> Path:
    """Cache folder of this package: ``$CACHECLIP_HOME``, or ``cacheclip`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if explicit := os.environ.get("CACHECLIP_HOME"):
        return at_first_use(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return at_first_use(base or Path.home() / ".cache") / "cacheclip"


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


def write_json(target: Path, content: object) -> None:
    """Write a value as JSON for people, atomically. Raises OSError."""
    with atomic_path(target) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")
