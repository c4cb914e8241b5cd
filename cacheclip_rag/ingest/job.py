"""An ingestion run: find files, skip what is unchanged, precompute chunk caches, embed, record.

Order within a document: chunk caches first, then passages and embeddings in one transaction. A run killed in between
has lost nothing: its chunk caches are found again by their content when the run is repeated.
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
    """What a run did."""

    documents: int = 0
    """Documents in the library afterwards."""
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    chunks: int = 0
    """Passages of added and changed documents."""
    computed: int = 0
    """Chunks among these whose KV had to be computed."""
    released: int = 0
    """Chunk caches deleted because no document holds their text any more."""
    failed: list[dict[str, str]] = field(default_factory=list)
    """Documents that could not be read: ``{"path", "error"}``; the others went on."""

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
    """Bring the library up to date with ``paths``; running it again does only what changed.

    Documents that were ingested from a given folder and are gone from it are removed.

    Args:
        settings: recorded with the first document; a later run with others is refused.

    Raises:
        DocumentError: a path does not exist, or no document was found at all.
        ConfigurationError: the library was made with other settings.
    """
    roots, files, work, report = _survey(paths, library, engine, settings)
    for path in sorted(({str(file) for file in files} & set(library.documents())) - {item.path for item in work}):
        engine.library.index.add(library.passages_of(path))  # known already, unless the store's catalog was lost
    total = sum(len(item.passages) for item in work)
    with progress_bar("precomputing", total, "chunks") as advance:
        for item in work:
            _ingest_one(item, library, engine, embedder, settings, report, advance)
    _remove_gone(library, engine, roots, files, report)  # last: a renamed document's texts are in use by now
    library.index()  # built now, so that the first question need not wait for it
    report.documents = len(library.documents())
    return report


def plan(
    paths: Iterable[str | Path], *, library: Library, engine: CacheClipEngine, settings: LibrarySettings
) -> IngestPlan:
    """What :func:`ingest` would do with ``paths`` and what it would take; changes nothing. Raises what it raises."""
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
    """Where to look, what is there, what of it is to be done, and a report of what is not."""
    _ = engine.store  # an older format is refused before anything is read
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
    """Documents that were ingested from a folder and are not there any more."""
    present = {str(file) for file in files}
    for path in _known_under(library, roots):
        if path not in present and not Path(path).exists():  # a file named on its own may be one a folder passes over
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
    splitter: Splitter | None = None  # made at the first change: an unchanged library loads no model
    for path, text in texts.items():
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if known.get(str(path)) == digest:
            report.unchanged += 1
            continue
        splitter = splitter or Splitter(engine.primary.tokenizer, settings.chunk_tokens, settings.overlap_tokens)
        passages = splitter.split(text, markdown=path.suffix.lower() in MARKDOWN_SUFFIXES)
        # some tokenizers drop all of a text: invisible characters, say
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
    library.fix_settings(settings)  # all models have worked: a run that fails before binds the store to nothing
    unused = library.replace(item.path, item.digest, item.passages, vectors)
    report.released += engine.release(unused)
    report.added += item.is_new
    report.changed += not item.is_new
