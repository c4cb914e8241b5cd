"""Finding and reading documents. No device blocks a run, and links that lead out of the given folders are skipped."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..base.errors import DocumentError, MissingExtraError
from .pdf import PYPDF, pdf_text
from .text import (
    HTML_SUFFIXES,
    SAVE_AS_TEXT,
    DocumentText,
    cleaned,
    decoded,
    encoding_of_page,
    html_text,
    notes_on_markdown,
)

logger = logging.getLogger(__name__)

MARKDOWN_SUFFIXES = frozenset({".md", ".markdown"})
TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
PDF_SUFFIX = ".pdf"
SUFFIXES = MARKDOWN_SUFFIXES | {".txt", ".text", ".rst", PDF_SUFFIX}
"""File types read from folders. A file that is named itself is read with any suffix: as PDF if it is ``.pdf``, else as
text."""

_UNSEEN = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
"""Kinds of characters that nobody sees."""
_OFFICE = frozenset(f".{kind}" for kind in "doc docx docm xls xlsx xlsm ppt pptx odt ods odp rtf epub pages".split())
"""Types of documents that other programs make text of."""

Tell = Callable[[Path, str], None]
"""Is told a path that is left out, and why."""


def _nobody(path: Path, reason: str) -> None:
    """Told to nobody."""


class EmptyFileError(DocumentError):
    """A file holds nothing that anybody sees."""


def find_files(paths: Iterable[str | Path], skipped: Tell = _nobody, failed: Tell = _nobody) -> Iterator[Path]:
    """The given files, and text, Markdown and PDF files in the given folders, each once, in order. Hidden files and
    folders are left out without a word.

    Links to folders are not followed. A path that is given itself may be a link.

    Args:
        skipped: is told files of other types, PDF files if pypdf is not installed, links that lead out of the given
            folder or to nothing, devices, pipes and sockets.
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
                f"{what}: {printable(given)}. Give text, Markdown or PDF files, or folders that contain them."
            )
        for file in [path] if path.is_file() else sorted(_files_in(path, skipped, failed)):
            if file.suffix.lower() == PDF_SUFFIX and (missing := _no_pdf()):
                skipped(file, f"{printable(file)} is not read: {missing}")
                continue
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
        for path in (Path(folder, name) for name in [*links, *sorted(names)]):
            if path.name.startswith("."):
                continue
            if path.name not in links and path.suffix.lower() not in SUFFIXES:
                kind = f"of type {printable(path.suffix)}" if path.suffix else "without a type"
                way = SAVE_AS_TEXT if path.suffix.lower() in _OFFICE else "If it is text, give it by its own name."
                skipped(path, f"{printable(path)} is a file {kind}, which is not read from a folder. {way}")
            elif reason := _reason_to_skip(path, root):
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


def is_read(path: Path) -> bool:
    """Whether files of this type are read from folders, as far as this installation can."""
    return path.suffix.lower() in SUFFIXES and not (path.suffix.lower() == PDF_SUFFIX and _no_pdf())


def _no_pdf() -> str:
    """Why PDF files cannot be read; empty if they can."""
    if importlib.util.find_spec("pypdf") is not None:
        return ""
    return str(MissingExtraError(PYPDF, "pdf"))


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


def read_document(path: Path, digest: str | None = None) -> DocumentText:
    """Text of a file, with notes on what its readers see and the text lacks: UTF-8, UTF-16 or UTF-32, what a browser
    shows of an HTML page (in the encoding that the page names), or the text of a PDF file.

    Args:
        digest: what :func:`digest_file` gave before.

    Raises:
        DocumentError: the file is unreadable, empty, binary, in another encoding, encrypted, without text, or has
            another digest.
        MissingExtraError: a PDF file, and pypdf, or what it needs to decrypt the file, is not installed.
    """
    with _opened(path) as file:
        data = file.read()
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise DocumentError(f"{path} was changed while the run was going on. Run ingest again.")
    suffix = path.suffix.lower()
    if suffix == PDF_SUFFIX:
        found = pdf_text(path, data)
    else:
        found = decoded(path, data, encoding_of_page(data) if suffix in HTML_SUFFIXES else None)
    notes = [*found.notes]
    if suffix in HTML_SUFFIXES:
        found = html_text(found)
        notes += found.notes
    found = cleaned(found)
    if suffix in MARKDOWN_SUFFIXES:
        notes += notes_on_markdown(found)
    if all(unicodedata.category(character) in _UNSEEN for character in found):
        error = DocumentError if suffix in HTML_SUFFIXES or notes else EmptyFileError
        raise error(" ".join([f"{path} is empty.", *notes, *found.notes]))
    found = DocumentText(found, [*notes, *found.notes])
    for note in found.notes:
        logger.info("%s: %s", printable(path), note)
    return found
