"""Finding and reading documents. No device blocks a run, and links that lead out of the given folders are skipped."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import DocumentError

__all__ = ["MARKDOWN_SUFFIXES", "SUFFIXES", "digest_file", "find_files", "printable", "read_document"]

MARKDOWN_SUFFIXES = frozenset({".md", ".markdown"})
SUFFIXES = MARKDOWN_SUFFIXES | {".txt", ".text", ".rst"}
"""File types read from folders. A file that is named itself is read with any suffix."""

Tell = Callable[[Path, str], None]
"""Is told a path that is left out, and why."""

_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def _nobody(path: Path, reason: str) -> None:
    """Told to nobody."""


def find_files(paths: Iterable[str | Path], skipped: Tell = _nobody, failed: Tell = _nobody) -> Iterator[Path]:
    """The given files, and text and Markdown files in the given folders (without hidden files), each once, in order.

    Links to folders are not followed. A path that is given itself may be a link.

    Args:
        skipped: is told links that lead out of the given folder or to nothing, devices, pipes and sockets.
        failed: is told folders that cannot be read.

    Raises:
        DocumentError: a path does not exist, or is neither a file nor a folder.
    """
    seen: set[str] = set()
    for given in paths:
        path = Path(os.path.realpath(Path(given).expanduser()))
        if not path.is_dir() and not path.is_file():
            what = "is neither a file nor a folder" if path.exists() else "no such file or folder"
            raise DocumentError(
                f"{what}: {printable(given)}. Give text or Markdown files, or folders that contain them."
            )
        for file in [path] if path.is_file() else sorted(_files_in(path, skipped, failed)):
            real = os.path.realpath(file)
            if real not in seen:  # not a link to a file that is read already
                seen.add(real)
                yield file


def _files_in(root: Path, skipped: Tell, failed: Tell) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        failed(Path(error.filename), f"the folder {printable(error.filename)} cannot be read: {error.strerror}.")

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        wanted = [n for n in names if not n.startswith(".") and Path(n).suffix.lower() in SUFFIXES]
        for path in (Path(folder, name) for name in [*links, *wanted]):
            if reason := _reason_to_skip(path, root):
                skipped(path, f"{printable(path)} {reason}.")
            elif path.is_file():
                yield path


def _reason_to_skip(path: Path, root: Path) -> str:
    """Why a path of a folder is not read; empty if there is no reason."""
    if not path.exists():
        return "is a link to nothing"
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root):
            return f"is a link that leads out of {printable(root)}; give its target as a path of its own to ingest it"
        if any(part.startswith(".") for part in target.relative_to(root).parts):
            return "is a link to a hidden file"
    return "" if path.is_file() or path.is_dir() else "is a device, pipe or socket"


def printable(path: str | Path) -> str:
    """A path as printable text, even if its name is not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading. Raises DocumentError if it cannot be read to the end of the block."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # opening a pipe does not wait
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise DocumentError(f"the name of {printable(path)} is not UTF-8. Rename the file or folder.") from error
    try:
        with open(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DocumentError(f"{path} is a device, pipe or socket. Give files.")
            yield file
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error}.") from error


def digest_file(path: Path) -> tuple[str, int]:
    """SHA-256 and size of a file, which is read in pieces.

    Raises:
        DocumentError: the file cannot be read, or its name is not UTF-8.
    """
    with _opened(path) as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
        return digest.hexdigest(), file.tell()


def read_document(path: Path, digest: str | None = None) -> str:
    """Text of a file: UTF-8, or UTF-16 with a byte-order mark.

    Args:
        digest: what :func:`digest_file` gave before.

    Raises:
        DocumentError: the file is unreadable, empty, binary, in another encoding, or has another digest.
    """
    with _opened(path) as file:
        data = file.read()
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise DocumentError(f"{path} was changed while the run was going on. Run ingest again.")
    encoding = next((name for bom, name in _BOMS.items() if data.startswith(bom)), "utf-8")
    if encoding == "utf-8" and b"\x00" in data[:65536]:
        raise DocumentError(f"{path} looks binary (it contains zero bytes); convert it to text or Markdown first.")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path} is not {encoding.upper()} (byte {error.start}: {error.reason}). Convert it, for instance with: "
            f"iconv -f LATIN1 -t UTF-8 '{path.name}'"
        ) from error
    if not text.strip():
        raise DocumentError(f"{path} is empty.")
    return text.replace("\r\n", "\n")
