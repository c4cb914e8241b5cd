"""Finding and reading documents. No device blocks a run, and links that lead out of the given folders are skipped."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
import stat
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cacheclip_rag import CacheClipError, DocumentError, MissingExtraError
from cacheclip_rag.plugins import expanded

from .frameworks import text_of
from .html import html_text
from .office import OFFICE_SUFFIXES, missing_reader, office_text
from .pdf import PYPDF, pdf_text
from .text import (
    HTML_SUFFIXES,
    SAVE_AS_TEXT,
    ZIP_START,
    DocumentText,
    cleaned,
    decoded,
    encoding_of_page,
    notes_on_markdown,
    without_comments,
)

logger = logging.getLogger(__name__)

MARKDOWN_SUFFIXES = frozenset({".md", ".markdown"})
TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
PDF_SUFFIX = ".pdf"
SUFFIXES = MARKDOWN_SUFFIXES | {".txt", ".text", ".rst", PDF_SUFFIX}
"""File types read from folders, beside Office files where what reads them is installed. A file that is named itself is
read with any suffix: as PDF or Office file if the suffix says so, else as text."""
Reader = Callable[[Path], object]
"""Reads a file: returns a text, a :class:`~cacheclip_ingest.DocumentText` (with notes, and whether it is Markdown), or
documents of LangChain or LlamaIndex. It raises DocumentError for a file that it cannot read."""

_UNSEEN = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
"""Kinds of characters that nobody sees."""
_OFFICE = frozenset(f".{kind}" for kind in "doc docx docm xls xlsx xlsm ppt pptx odt ods odp rtf epub pages".split())
"""Types of documents that other programs make text of."""

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors which say that nothing is there. All others say nothing about that."""

Tell = Callable[[Path, str], None]
"""Is told a path that is left out, and why."""


def _nobody(path: Path, reason: str) -> None:
    """Told to nobody."""


class EmptyFileError(DocumentError):
    """A file holds no text that anybody sees."""

    def __init__(self, message: str, notes: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.notes = [*notes]
        """What it holds in place of text, such as pictures."""


def find_files(
    paths: Iterable[str | Path],
    skipped: Tell = _nobody,
    failed: Tell = _nobody,
    types: Collection[str] | None = None,
) -> Iterator[Path]:
    """The given files, and text, Markdown, PDF and Office files in the given folders, each once, in order, links last.
    Hidden files and folders are left out without a word.

    Links to folders are not followed. A path that is given itself may be a link.

    Args:
        skipped: is told files of other types, PDF files if pypdf is not installed, links that lead out of the given
            folder or to nothing, devices, pipes and sockets.
        failed: is told files and folders that cannot be looked at.
        types: suffixes of the files in folders, where another reader reads them; None: those that are read here.

    Raises:
        DocumentError: a path does not exist, or is neither a file nor a folder.
    """
    seen: set[str] = set()
    found: list[Path] = []
    for given in paths:
        path = Path(os.path.realpath(expanded(given)))
        found += sorted(_files_at(path, given, skipped, failed, types))
    for file in sorted(found, key=os.path.islink):  # a link is read only if its file is not
        if types is None and (reason := reason_of_installation(file)):
            skipped(file, f"{printable(file)} {reason}")
            continue
        real = os.path.realpath(file)
        if real not in seen:
            seen.add(real)
            yield file


def _files_at(
    path: Path, given: str | Path, skipped: Tell, failed: Tell, types: Collection[str] | None
) -> Iterator[Path]:
    """A given file, or the files of a given folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno in ABSENT:
            raise DocumentError(
                f"no such file or folder: {printable(given)}. Give text, Markdown or PDF files, or folders that "
                "contain them. What is gone for good is taken out of a store with cacheclip store remove."
            ) from error
        failed(path, f"{printable(path)} cannot be looked at: {error.strerror or error}.")
        return
    if stat.S_ISREG(mode):
        yield path
    elif stat.S_ISDIR(mode):
        yield from _files_in(path, skipped, failed, types)
    else:
        raise DocumentError(
            f"neither a file nor a folder: {printable(given)}. Give text, Markdown or PDF files, or folders that "
            "contain them."
        )


def _files_in(root: Path, skipped: Tell, failed: Tell, types: Collection[str] | None) -> Iterator[Path]:
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        except OSError as error:
            failed(folder, f"the folder {printable(folder)} cannot be read: {error.strerror or error}.")
            continue
        for path in (folder / name for name in names):
            try:
                mode = os.lstat(path).st_mode
                target = _followed(path) if stat.S_ISLNK(mode) else mode
            except OSError as error:
                if error.errno not in ABSENT:
                    failed(path, f"{printable(path)} cannot be looked at: {error.strerror or error}.")
                continue
            if stat.S_ISDIR(mode):
                folders.append(path)
            elif reason := _reason_to_skip(path, root, mode, target, types):
                skipped(path, f"{printable(path)} {reason}")
            elif stat.S_ISREG(target):  # a link to a folder inside leads to what is read anyway
                yield path


def _followed(link: Path) -> int:
    """Mode of a link's target; 0 if there is none. Raises OSError if it cannot be looked at."""
    try:
        return os.stat(link).st_mode
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        return 0


def _reason_to_skip(path: Path, root: Path, mode: int, target_mode: int, types: Collection[str] | None) -> str:
    """Why a path of a folder is not read; empty if there is no reason."""
    if not stat.S_ISDIR(target_mode) and (reason := reason_of_type(path, types)):
        return reason
    if not target_mode:
        return "is a link to nothing."
    if stat.S_ISLNK(mode):
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root):
            return f"is a link that leads out of {printable(root)}; give its target as a path of its own to ingest it."
        if any(part.startswith(".") for part in target.relative_to(root).parts):
            return "is a link to a hidden file."
    return "" if stat.S_ISREG(target_mode) or stat.S_ISDIR(target_mode) else "is a device, pipe or socket."


def reason_of_type(path: Path, types: Collection[str] | None = None) -> str:
    """Why files of this type are not read from folders; empty if they are. ``types``: as of :func:`find_files`."""
    suffix = path.suffix.lower()
    missing = missing_reader(suffix) if types is None else None
    if suffix in (SUFFIXES | OFFICE_SUFFIXES if types is None else types) and missing is None:
        return ""
    kind = f"of type {printable(path.suffix)}" if path.suffix else "without a type"
    way = SAVE_AS_TEXT if suffix in _OFFICE else "If it is text, give it by its own name."
    if missing is not None:
        way += f" To have it read: {missing}"
    return f"is a file {kind}, which is not read from a folder. {way}"


def is_gone(path: str) -> bool:
    """Whether no file is at a place, or a link stands in place of it or of a folder above.
    (A document's path has no link in it.) Raises OSError if the place cannot be looked at."""
    folder = os.path.dirname(path)
    try:
        return os.path.realpath(folder, strict=True) != folder or not stat.S_ISREG(os.lstat(path).st_mode)
    except ValueError:  # no path: another program wrote it into a shared store
        return True
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        return True


def reason_of_installation(path: Path) -> str:
    """Why this installation cannot read files of this type; empty if it can."""
    if path.suffix.lower() != PDF_SUFFIX or importlib.util.find_spec("pypdf") is not None:
        return ""
    return f"is not read: {MissingExtraError(PYPDF, 'pdf')}"


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
    shows of an HTML page (in the encoding that the page names), or the text of a PDF or Office file. What readers do
    not see (:class:`~cacheclip_ingest.unseen.Unseen`) is left out, with a note.

    Args:
        digest: what :func:`digest_file` gave before.

    Raises:
        DocumentError: the file is unreadable, empty, binary, in another encoding, encrypted, without text, or has
            another digest.
        MissingExtraError: what reads the PDF file, or decrypts it, is not installed.
    """
    with _opened(path) as file:
        data = file.read()
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise _changed(path)
    return document_text(path, data)


def text_read_by(reader: Reader, path: Path, digest: str | None = None) -> DocumentText:
    """Text of a file as ``reader`` gives it, cleaned as that of :func:`read_document`.

    Raises:
        DocumentError: the reader cannot read the file, there is no text in it, or it has another digest.
        ConfigurationError: the reader returns something else than a text or documents.
    """
    try:
        value = reader(path)
    except (CacheClipError, MemoryError):
        raise
    except Exception as error:  # one file never ends a run
        raise DocumentError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
    text = text_of(value)
    found = (_finished_markdown if text.is_markdown else _finished)(path, text)
    if digest is not None and digest_file(path)[0] != digest:
        raise _changed(path)
    return found


def _changed(path: Path) -> DocumentError:
    return DocumentError(f"{path} was changed while the run was going on. Run ingest again.")


def document_text(path: Path, data: bytes) -> DocumentText:
    """Text of a file's bytes, as of :func:`read_document`. ``path`` says the type, and names the file in errors."""
    try:
        found = _text_in(path, data)
    except (DocumentError, MissingExtraError, MemoryError):
        raise
    except Exception as error:  # one file never ends a run
        raise DocumentError(f"{path} cannot be read ({type(error).__name__}: {error}). {SAVE_AS_TEXT}") from error
    for note in found.notes:
        logger.info("%s: %s", printable(path), note)
    return found


def _text_in(path: Path, data: bytes) -> DocumentText:
    suffix = path.suffix.lower()
    if suffix == PDF_SUFFIX and data.strip():
        return _finished(path, pdf_text(path, data))
    if suffix in OFFICE_SUFFIXES and data.startswith(ZIP_START):
        if (missing := missing_reader(suffix)) is None:
            return _finished(path, office_text(path, data))
        raise DocumentError(f"{path} looks binary: it is an Office file. {SAVE_AS_TEXT} To have it read: {missing}")
    if suffix in HTML_SUFFIXES:
        source = decoded(path, data, encoding_of_page(data))
        page = html_text(source)
        return _finished(path, DocumentText(page, [*source.notes, *page.notes], is_markdown=True))
    found = decoded(path, data)
    if suffix in MARKDOWN_SUFFIXES:
        return _finished_markdown(path, found)
    return _finished(path, found)


def _finished_markdown(path: Path, written: DocumentText) -> DocumentText:
    """A text of Markdown as somebody wrote it, without what readers do not see."""
    shown = without_comments(written)
    found = cleaned(shown)
    notes = [*written.notes, *shown.notes, *notes_on_markdown(found)]
    return _unless_empty(path, DocumentText(found, [*notes, *found.notes], is_markdown=True))


def _finished(path: Path, read: DocumentText) -> DocumentText:
    found = cleaned(read)
    return _unless_empty(path, DocumentText(found, [*read.notes, *found.notes], is_markdown=read.is_markdown))


def _unless_empty(path: Path, found: DocumentText) -> DocumentText:
    if all(unicodedata.category(character) in _UNSEEN for character in found):
        raise EmptyFileError(f"{path} is empty.", found.notes)
    return found
