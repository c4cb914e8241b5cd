"""An ingestion run: finds files, skips unchanged documents, precomputes chunk caches, embeds, and records passages.

Each document's chunk caches are stored first, then its passages and embeddings in one transaction. If a run is killed
in between, the next run finds the stored chunk caches by their content.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..engine import CacheClipEngine
from ..errors import DocumentError
from ..progress import Advance, progress_bar
from .documents import MARKDOWN_SUFFIXES, find_files, printable, read_document
from .embedding import Embedder
from .library import Library, LibrarySettings
from .plan import IngestPlan, price
from .splitting import Splitter

__all__ = ["IngestReport", "ingest", "plan"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class IngestReport:
    """Result of an ingestion run."""

    documents: int = 0
    """Documents in the library afterwards."""
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    chunks: int = 0
    """Passages of added and changed documents."""
    computed: int = 0
    """Passages whose KV was computed."""
    released: int = 0
    """Chunk caches deleted because no document contains their text any more."""
    failed: list[dict[str, str]] = field(default_factory=list)
    """Documents that could not be read: ``{"path", "error"}``. The other documents were ingested."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Work:
    path: str
    digest: str
    passages: list[str]
    is_new: bool


def ingest(
    paths: Iterable[str | Path],
    *,
    library: Library,
    engine: CacheClipEngine,
    embedder: Embedder,
    settings: LibrarySettings,
) -> IngestReport:
    """Bring the library up to date with ``paths``. Only new and changed documents are processed.

    Documents that were ingested from a given folder and no longer exist there are removed.

    Args:
        settings: recorded with the first document; a later run with other settings is refused.

    Raises:
        DocumentError: a path does not exist, or no document was found.
        ConfigurationError: the library was made with other settings.
    """
    roots, files, work, report = _survey(paths, library, engine, settings)
    for path in sorted(({str(file) for file in files} & set(library.documents())) - {item.path for item in work}):
        engine.library.index.add(library.passages_of(path))  # no effect, unless the store's catalog was lost
    total = sum(len(item.passages) for item in work)
    with progress_bar("precomputing", total, "chunks") as advance:
        for item in work:
            _ingest_one(item, library, engine, embedder, settings, report, advance)
    _remove_gone(library, engine, roots, files, report)  # last, so that a renamed document's texts keep their KV
    library.index()  # build the index now, so that the first question does not wait
    report.documents = len(library.documents())
    return report


def plan(
    paths: Iterable[str | Path], *, library: Library, engine: CacheClipEngine, settings: LibrarySettings
) -> IngestPlan:
    """What :func:`ingest` would do with ``paths``, and its cost. Changes nothing, and raises the same errors."""
    roots, files, work, report = _survey(paths, library, engine, settings)
    found = IngestPlan(
        unchanged=report.unchanged, failed=report.failed, chunks=sum(len(item.passages) for item in work)
    )
    found.added = sum(item.is_new for item in work)
    found.changed = len(work) - found.added
    found.removed = sum(1 for _ in _gone(library, roots, files))
    price(engine, [passage for item in work for passage in item.passages], found)
    return found


def _survey(
    paths: Iterable[str | Path], library: Library, engine: CacheClipEngine, settings: LibrarySettings
) -> tuple[list[Path], list[Path], list[_Work], IngestReport]:
    """Roots, files, documents to process, and a report of unchanged and unreadable documents."""
    _ = engine.store  # refuses a store of an older format before anything is read
    roots = [Path(path).expanduser().resolve() for path in paths]
    files = list(find_files(roots))
    if not files and not any(_known_under(library, roots)):
        raise DocumentError(
            f"no text or Markdown files in {', '.join(map(str, roots))}. Expected .txt, .md, .markdown, .text or .rst."
        )
    report = IngestReport()
    texts = _read_all(files, report)
    library.check_settings(settings)
    return roots, files, _changed(library, engine, texts, settings, report), report


def _read_all(files: Iterable[Path], report: IngestReport) -> dict[Path, str]:
    texts = {}
    for file in files:
        try:
            texts[file] = read_document(file)
        except DocumentError as error:
            logger.info("skipped: %s", error)
            report.failed.append({"path": printable(file), "error": str(error)})
    return texts


def _known_under(library: Library, roots: Iterable[Path]) -> list[str]:
    folders = [root for root in roots if root.is_dir()]
    return [p for p in library.documents() if any(Path(p).is_relative_to(folder) for folder in folders)]


def _remove_gone(
    library: Library, engine: CacheClipEngine, roots: Iterable[Path], files: Iterable[Path], report: IngestReport
) -> None:
    for path in list(_gone(library, roots, files)):
        report.released += engine.release(library.remove(path))
        report.removed += 1


def _gone(library: Library, roots: Iterable[Path], files: Iterable[Path]) -> Iterator[str]:
    """Documents that were ingested from one of the roots and no longer exist."""
    present = {str(file) for file in files}
    for path in _known_under(library, roots):
        if path not in present and not Path(path).exists():  # a file named itself may have a suffix that folders skip
            yield path


def _changed(
    library: Library,
    engine: CacheClipEngine,
    texts: dict[Path, str],
    settings: LibrarySettings,
    report: IngestReport,
) -> list[_Work]:
    known = library.documents()
    work = []
    splitter: Splitter | None = None  # made at the first change, so that an unchanged library loads no model
    for path, text in texts.items():
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if known.get(str(path)) == digest:
            report.unchanged += 1
            continue
        splitter = splitter or Splitter(engine.primary.tokenizer, settings.chunk_tokens, settings.overlap_tokens)
        passages = splitter.split(text, markdown=path.suffix.lower() in MARKDOWN_SUFFIXES)
        # some tokenizers drop all characters of a text, for instance invisible characters
        passages = [passage for passage in passages if len(engine.primary.tokenize(passage))]
        work.append(_Work(str(path), digest, passages, str(path) not in known))
    return work


def _ingest_one(
    item: _Work,
    library: Library,
    engine: CacheClipEngine,
    embedder: Embedder,
    settings: LibrarySettings,
    report: IngestReport,
    advance: Advance,
) -> None:
    for passage in item.passages:
        report.computed += engine.precompute([passage])
        report.chunks += 1
        advance(report.chunks)
    vectors = embedder.embed(item.passages)
    library.fix_settings(settings)  # after all models have worked, so that a failed run fixes no settings
    unused = library.replace(item.path, item.digest, item.passages, vectors)
    report.released += engine.release(unused)
    report.added += item.is_new
    report.changed += not item.is_new
