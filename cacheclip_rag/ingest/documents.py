"""Reading documents from files and folders."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import DocumentError

__all__ = ["MARKDOWN_SUFFIXES", "SUFFIXES", "find_files", "printable", "read_document"]

MARKDOWN_SUFFIXES = frozenset({".md", ".markdown"})
SUFFIXES = MARKDOWN_SUFFIXES | {".txt", ".text", ".rst"}
"""File types read from folders. A file that is named itself is read with any suffix."""

_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def find_files(paths: Iterable[str | Path]) -> Iterator[Path]:
    """The given files, and text and Markdown files in the given folders (without hidden files), each once, in order.

    Raises:
        DocumentError: a path does not exist.
    """
    seen: set[Path] = set()
    for given in paths:
        path = Path(given).expanduser().resolve()
        if not path.exists():
            raise DocumentError(
                f"no such file or folder: {given}. Give text or Markdown files, or folders that contain them."
            )
        found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if _wanted(p, path))
        for file in found:
            if file.resolve() not in seen:  # not a link to a file that is read already
                seen.add(file.resolve())
                yield file


def _wanted(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and not hidden and path.suffix.lower() in SUFFIXES


def printable(path: Path) -> str:
    """A path as printable text, even if its name is not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def read_document(path: Path) -> str:
    """Text of a file: UTF-8, or UTF-16 with a byte-order mark.

    Raises:
        DocumentError: the file is unreadable, empty, binary, or in another encoding.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise DocumentError(f"the name of {printable(path)} is not UTF-8. Rename the file or folder.") from error
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error}.") from error
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
