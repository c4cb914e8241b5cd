"""What an ingestion finds before it processes anything, and what is gone: the same for every kind of store."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, TypeVar

from cacheclip_rag import DocumentError
from cacheclip_rag.plugins import expanded, is_url

from .bucket import find_objects
from .documents import (
    SUFFIXES,
    digest_file,
    find_files,
    is_gone,
    printable,
    reason_of_installation,
    reason_of_type,
)
from .text import DocumentText

logger = logging.getLogger(__name__)

Problems = list[dict[str, str]]


@dataclass(slots=True)
class IngestCounts:
    """What an ingestion run does, or would do, with documents."""

    added: int = 0
    """Documents."""
    changed: int = 0
    """Changed documents, and those that were damaged in the library."""
    unchanged: int = 0
    removed: int = 0
    """Documents that are gone, or empty now."""
    unconfirmed: list[str] = field(default_factory=list)
    """Documents that are gone, or empty now, and were kept, because they are most of what was ingested from a given
    path, or all of a folder that is still there. A run that is ``confirmed`` removes them."""
    chunks: int = 0
    """Passages of added and changed documents."""
    computed: int = 0
    """Passages whose KV was not stored."""
    failed: Problems = field(default_factory=list)
    """Documents and folders that could not be read: ``{"path", "error"}``. The others are ingested."""
    skipped: Problems = field(default_factory=list)
    """Paths that are left out on purpose, such as files of other types, and links that lead out of the given folder:
    ``{"path", "error"}``."""
    notes: Problems = field(default_factory=list)
    """What readers of these documents see and their text lacks, such as pages that were scanned:
    ``{"path", "note"}``."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_CountsT = TypeVar("_CountsT", bound=IngestCounts)


@dataclass(frozen=True, slots=True)
class DocumentWork:
    """A document to process."""

    name: str
    """Path or URL."""
    digest: str
    """SHA-256 of a file; empty for an object."""
    version: str
    """What is recorded with the document."""
    num_bytes: int
    is_new: bool


@dataclass(slots=True)
class Survey:
    """What there is to do. Texts of files are not kept."""

    known: Mapping[str, str]
    """Version of each document that was ingested before, by path or URL."""
    roots: set[str] = field(default_factory=set)
    """Given paths and URLs. A path is here with and without following its links."""
    found: dict[str, str] = field(default_factory=dict)
    """Version of each document that was found."""
    work: list[DocumentWork] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: Problems = field(default_factory=list)
    skipped: Problems = field(default_factory=list)
    notes: Problems = field(default_factory=list)
    texts: Mapping[str, DocumentText] = field(default_factory=dict)
    """Documents that are no files, by name."""
    types: Collection[str] | None = None
    """Suffixes of the files in folders, where another reader reads them."""
    _empty: set[str] = field(default_factory=set)
    _unseen: set[str] = field(default_factory=set)
    """Documents and folders that could not be read."""
    _listed: set[str] = field(default_factory=set)
    """URLs of all objects that were found, read or not."""

    @classmethod
    def take(
        cls,
        paths: Iterable[str | Path],
        known: Mapping[str, str],
        *,
        damaged: Collection[str] = (),
        version: Callable[[str], str] = str,
        texts: Mapping[str, DocumentText] = MappingProxyType({}),
        types: Collection[str] | None = None,
    ) -> Survey:
        """Look at files, folders and URLs. Reads every file once, in pieces.

        Args:
            damaged: documents that are processed although they did not change.
            version: makes of a digest what is recorded.
            texts: documents that are no files, by name. None of them is ever gone.
            types: suffixes of the files in folders; None: those that this package reads.

        Raises:
            DocumentError: a path does not exist, or no document was found.
        """
        survey, paths = cls(known, texts=texts, types=types), [*paths]
        for name, tag, digest, num_bytes in survey._find(paths):
            survey.found[name] = version(tag)
            if known.get(name) == version(tag) and name not in damaged:
                survey.unchanged.append(name)
            else:
                survey.work.append(DocumentWork(name, digest, version(tag), num_bytes, name not in known))
        if not (survey.found or survey.failed) and not any(map(survey._is_here, known)):
            reasons = "".join(f" Skipped: {problem['error']}" for problem in survey.skipped[:3])
            given = ", ".join(map(printable, paths))
            expected = ", ".join(sorted(SUFFIXES if types is None else types))
            raise DocumentError(f"no documents in {given}. Expected {expected}.{reasons}")
        return survey

    def begin(self, kind: type[_CountsT]) -> _CountsT:
        """A report or a plan, with what is known before anything is processed."""
        return kind(unchanged=len(self.unchanged), failed=self.failed, skipped=self.skipped, notes=self.notes)

    def tell(self, kind: str, name: str, said: str) -> None:
        """Take what is wrong with a document: ``failed``, ``skipped``, ``empty``, or a ``note``."""
        if kind == "note":
            self.notes.append({"path": printable(name), "note": f"{printable(name)}: {said}"})
            return
        if kind == "failed" and name in self.known:
            said = f"{said} Its text of an earlier run is still stored; cacheclip store remove takes it out."
        logger.info("left out: %s", said)
        (self.failed if kind == "failed" else self.skipped).append({"path": printable(name), "error": said})
        if kind == "failed":
            self._unseen.add(name)
        elif kind == "empty":
            self._empty.add(name)

    def fail_others(self, done: Collection[str], reason: str) -> bool:
        """Take the documents to process of which nothing was heard as failed, for a reason; whether there are any."""
        heard = {*done, *self._unseen, *self._empty}
        others = [item.name for item in self.work if item.name not in heard]
        for name in others:
            self.tell("failed", name, f"{name} is not stored: {reason}.")
        return bool(others)

    def _teller(self, kind: str) -> Callable[[Path, str], None]:
        return lambda path, said: self.tell(kind, str(path), said)

    def settle(self, report: IngestCounts, confirmed: bool) -> list[str]:
        """Documents to remove, when all others were processed; counts them."""
        gone = self._gone()
        if gone and not confirmed and self._loses_most(gone):
            report.unconfirmed = gone
            return []
        report.removed = len(gone)
        return gone

    # -- what is there --------------------------------------------------------------------------------------------

    def _find(self, paths: list[str | Path]) -> Iterator[tuple[str, str, str, int]]:
        """Name, what tells its versions apart, SHA-256 of a file, and bytes."""
        urls = [str(path).rstrip("/") for path in paths if is_url(path)]
        files = [expanded(path) for path in paths if not is_url(path)]
        self.roots = {*urls, *(each for path in files for each in (os.path.abspath(path), os.path.realpath(path)))}
        for name, text in self.texts.items():
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            yield name, digest, "", len(text)
        for file in find_files(files, self._teller("skipped"), self._teller("failed"), self.types):
            try:
                digest, num_bytes = digest_file(file)
            except DocumentError as error:
                self.tell("failed", str(file), str(error))
            else:
                yield str(file), digest, digest, num_bytes
        for url in urls:
            yield from self._find_objects(url)

    def _find_objects(self, root: str) -> Iterator[tuple[str, str, str, int]]:
        try:
            for name, tag, num_bytes in find_objects(root):
                self._listed.add(name)
                parts, path = name.removeprefix(f"{root}/").split("/"), Path(name)
                is_named = name == root
                is_hidden = not is_named and any(part.startswith(".") for part in parts)
                if is_hidden or not (num_bytes or path.suffix) or name in self.found:  # or the marker of a folder
                    continue
                reason = "" if is_named else reason_of_type(path, self.types)
                if reason := reason or ("" if self.types else reason_of_installation(path)):
                    self.tell("skipped", name, f"{name} {reason}")
                else:
                    yield name, tag, "", num_bytes
        except OSError as error:
            self.tell("failed", root, f"the documents of {root} cannot be listed: {error}.")

    # -- what is gone ---------------------------------------------------------------------------------------------

    def _is_here(self, name: str) -> bool:
        return not self.roots.isdisjoint(_folders_of(name))

    def _gone(self) -> list[str]:
        """Documents of the given paths that are empty now, or whose place could be looked at and had none."""
        others = (name for name in self.known if name not in self.found and self._is_here(name))
        return sorted({*filter(self._is_absent, others)} | self._empty.intersection(self.known))

    def _is_absent(self, name: str) -> bool:
        if not self._unseen.isdisjoint([name, *_folders_of(name)]):
            return False
        if is_url(name):
            return name not in self._listed
        try:
            return is_gone(name)
        except OSError as error:
            self.tell("failed", name, f"{printable(name)} cannot be looked at: {error.strerror or error}.")
            return False

    def _loses_most(self, gone: Iterable[str]) -> bool:
        """Whether most of what was ingested from a given path is lost, or all of a folder that is still there: a share
        may not be mounted, or files not be written to their end. A single document may be emptied."""
        lost = self._not_renamed(gone)
        named = self.roots.intersection(lost)  # files given by their own names count together
        if len(named) > 1 and 2 * len(named) > len(self.roots.intersection(self.known)):
            return True
        missing = _by_folder(name for name in lost if name not in self._empty)
        known = _by_folder(self.known)
        for folder, number in _by_folder(lost).items():
            if folder in self.roots and 2 * number > known[folder] and (number > 1 or missing[folder]):
                return True
            if 1 < known[folder] == missing[folder] and os.path.isdir(folder):
                return True
        return False

    def _not_renamed(self, gone: Iterable[str]) -> list[str]:
        """Those for which no new document has the same version."""
        others = self._unseen.union(self._empty, self.known)
        new = Counter(version for name, version in self.found.items() if name not in others)
        lost = []
        for name in gone:
            new[self.known[name]] -= 1
            if new[self.known[name]] < 0:
                lost.append(name)
        return lost


def is_in(name: str, folder: str) -> bool:
    """Whether a document is below a folder or URL."""
    return folder in _folders_of(name)


def _folders_of(name: str) -> list[str]:
    """The folders that a document is in, and what takes their place in a URL."""
    if not is_url(name):
        return [str(folder) for folder in PurePath(name).parents]
    parts = name.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


def _by_folder(names: Iterable[str]) -> Counter[str]:
    """How many documents each folder has."""
    return Counter(folder for name in names for folder in _folders_of(name))
