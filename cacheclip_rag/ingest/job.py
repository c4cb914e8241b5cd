"""An ingestion run: finds files, skips unchanged documents, precomputes chunk caches, embeds, and records passages.

Documents are read one at a time. Each document's chunk caches are stored first, one batch while the next one is
computed, then its passages and embeddings in one transaction. If a run is killed in between, the next run finds the
stored chunk caches by their content.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..base.errors import DocumentError, EncodingError
from ..base.progress import progress_bar
from ..engine import CacheClipEngine
from ..models.load import concrete
from .documents import (
    MARKDOWN_SUFFIXES,
    SUFFIXES,
    TABLE_SUFFIXES,
    EmptyFileError,
    digest_file,
    find_files,
    is_read,
    printable,
    read_document,
)
from .embedding import Embedder
from .library import Library, LibrarySettings
from .plan import IngestCounts, IngestPlan, Problems, price
from .splitting import Splitter
from .text import HTML_SUFFIXES

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class IngestReport(IngestCounts):
    """Result of an ingestion run."""

    documents: int = 0
    """Documents in the library afterwards."""
    released: int = 0
    """Chunk caches deleted because no document contains their text any more."""
    evicted: int = 0
    """Texts of this run's passages whose KV is not stored at its end: the store's limit is too small."""


@dataclass(frozen=True, slots=True)
class _DocumentWork:
    """A document to process."""

    path: Path
    digest: str
    num_bytes: int
    is_new: bool


_Document = tuple[_DocumentWork, list[str]]
"""A document to process and its passages."""


@dataclass(slots=True)
class _Survey:
    """What a run finds before it processes anything. Texts are not kept."""

    roots: list[Path]
    files: list[Path] = field(default_factory=list)
    work: list[_DocumentWork] = field(default_factory=list)
    unchanged: list[Path] = field(default_factory=list)
    failed: Problems = field(default_factory=list)
    skipped: Problems = field(default_factory=list)
    notes: Problems = field(default_factory=list)


def ingest(
    paths: Iterable[str | Path],
    *,
    library: Library,
    engine: CacheClipEngine,
    embedder: Embedder,
    settings: LibrarySettings,
    max_bytes: int | None = None,
) -> IngestReport:
    """Bring the library up to date with ``paths``. Only new, changed and damaged documents are processed.

    Documents that were ingested from a given folder and no longer exist there are removed.

    Args:
        settings: recorded with the first document; a later run with other settings is refused.
        max_bytes: limit to record in the store first; 0: no limit; None: as recorded.

    Raises:
        DocumentError: a path does not exist, or no document was found.
        ConfigurationError: the library was made with other settings.
        StoreError: the library or the store cannot be used.
    """
    if max_bytes is not None:
        engine.store.chunk_store.set_limit(max_bytes)
    settings = _concrete(settings, engine)
    survey = _survey(paths, library, engine, settings)
    report = IngestReport(
        unchanged=len(survey.unchanged), failed=survey.failed, skipped=survey.skipped, notes=survey.notes
    )
    _check_models(survey, engine, embedder)
    for path in survey.unchanged:
        engine.library.index.add(library.passages_of(str(path)))  # no effect, unless the store's catalog was lost
    done = []
    with progress_bar("ingesting", sum(item.num_bytes for item in survey.work)) as advance:
        before = 0
        for group in _together(_passages(survey, engine, settings), engine):
            num_bytes = sum(item.num_bytes for item, _ in group)

            def show(share: float, before: int = before, num_bytes: int = num_bytes) -> None:
                advance(before + num_bytes * share)

            for item, passages in _precompute(group, engine, report, show):
                report.chunks += len(passages)
                _record(item, passages, library, engine, embedder, settings, report)
                done.append(str(item.path))
            before += num_bytes
    _remove_gone(library, engine, survey, report)  # last, so that a renamed document's texts keep their KV
    report.evicted = sum(_num_evicted(engine, library.passages_of(path)) for path in done)
    report.documents = len(library.documents())
    return report


def _concrete(settings: LibrarySettings, engine: CacheClipEngine) -> LibrarySettings:
    """``settings`` with the engine's dtype for ``auto``: another machine would choose another one, and find nothing."""
    return replace(settings, dtype=concrete(engine.config).dtype) if settings.dtype == "auto" else settings


def plan_ingestion(
    paths: Iterable[str | Path],
    *,
    library: Library,
    engine: CacheClipEngine,
    settings: LibrarySettings,
    embedder: Embedder | None = None,
    max_bytes: int | None = None,
) -> IngestPlan:
    """What :func:`ingest` would do with ``paths``, and its cost. Changes nothing, and raises the same errors.

    Args:
        embedder: is checked too, if it is given.
        max_bytes: limit that the store would have; None: no limit.
    """
    settings = _concrete(settings, engine)
    survey = _survey(paths, library, engine, settings)
    _check_models(survey, engine, embedder)
    found = IngestPlan(
        unchanged=len(survey.unchanged),
        max_bytes=max_bytes,
        failed=survey.failed,
        skipped=survey.skipped,
        notes=survey.notes,
    )

    def texts() -> Iterator[str]:
        for item, passages in _passages(survey, engine, settings):
            found.added += item.is_new
            found.changed += not item.is_new
            found.chunks += len(passages)
            yield from passages

    price(engine, texts(), found)
    found.removed = sum(1 for _ in _gone(library, survey))
    return found


def _survey(
    paths: Iterable[str | Path], library: Library, engine: CacheClipEngine, settings: LibrarySettings
) -> _Survey:
    """What there is to do. Reads every file once, in pieces."""
    _ = engine.store  # refuses a store of an older format before anything is read
    survey = _Survey([Path(os.path.realpath(Path(path).expanduser())) for path in paths])
    survey.files = list(find_files(survey.roots, _reporter(survey.skipped), _reporter(survey.failed)))
    if not (survey.files or survey.failed) and not _known_under(library, survey.roots):
        reasons = "".join(f" Skipped: {problem['error']}" for problem in survey.skipped[:3])
        raise DocumentError(
            f"no documents in {', '.join(map(printable, survey.roots))}. Expected {', '.join(sorted(SUFFIXES))}."
            f"{reasons}"
        )
    library.check_settings(settings)
    known, damaged = library.documents(), library.damaged()
    for file in survey.files:
        try:
            digest, num_bytes = digest_file(file)
        except DocumentError as error:
            _reporter(survey.failed)(file, str(error))
            continue
        if known.get(str(file)) == digest and str(file) not in damaged:
            survey.unchanged.append(file)
        else:
            survey.work.append(_DocumentWork(file, digest, num_bytes, str(file) not in known))
    return survey


def _check_models(survey: _Survey, engine: CacheClipEngine, embedder: Embedder | None) -> None:
    """Load every model that the run needs, also those that it needs last. An unchanged library loads none."""
    if survey.work:
        if embedder is not None:
            embedder.embed(["text"])
        engine.chunk_caches()


def _reporter(problems: Problems) -> Callable[[Path, str], None]:
    def report(path: Path, error: str) -> None:
        logger.info("left out: %s", error)
        problems.append({"path": printable(path), "error": error})

    return report


def _passages(survey: _Survey, engine: CacheClipEngine, settings: LibrarySettings) -> Iterator[_Document]:
    """Each document to process and its passages. Documents that cannot be read are reported as failed."""
    splitter: Splitter | None = None  # made at the first change, so that an unchanged library loads no model
    for item in survey.work:
        try:
            text = read_document(item.path, item.digest)
        except EmptyFileError as error:
            _reporter(survey.skipped)(item.path, str(error))
            survey.files.remove(item.path)  # what it held before is gone
            continue
        except DocumentError as error:
            _reporter(survey.failed)(item.path, str(error))
            continue
        survey.notes += [
            {"path": printable(item.path), "note": f"{printable(item.path)}: {note}"} for note in text.notes
        ]
        splitter = splitter or Splitter(engine.primary.tokenizer, settings.chunk_tokens, settings.overlap_tokens)
        suffix = item.path.suffix.lower()
        passages = splitter.split(
            text, markdown=suffix in MARKDOWN_SUFFIXES | HTML_SUFFIXES, table=suffix in TABLE_SUFFIXES
        )
        # some tokenizers drop all characters of a text, for instance invisible characters
        yield item, [passage for passage in passages if len(engine.primary.tokenize(passage))]


def _together(documents: Iterable[_Document], engine: CacheClipEngine) -> Iterator[list[_Document]]:
    """Documents whose passages are computed together: one, unless the primary's runtime takes more at once."""
    group: list[_Document] = []
    characters = 0
    for item, passages in documents:
        group.append((item, passages))
        characters += sum(map(len, passages))
        if characters >= (engine.primary.batch_characters or 0):
            yield group
            group, characters = [], 0
    if group:
        yield group


def _precompute(
    group: list[_Document], engine: CacheClipEngine, report: IngestReport, show: Callable[[float], None]
) -> Iterator[_Document]:
    """Store the chunk caches of a group, and ``show`` the share that is done; gives the documents for which that
    worked. Others are reported as failed."""
    texts = [passage for _, passages in group for passage in passages]
    done = 0

    def stored(num_texts: int, computed: int) -> None:
        nonlocal done
        done += num_texts
        report.computed += computed
        show(done / len(texts))

    try:
        engine.precompute(texts, stored=stored)
    except EncodingError as error:
        logger.info("documents are computed one by one after a failure: %s", error)
        for item, passages in group:
            try:
                report.computed += engine.precompute(passages)
            except EncodingError as failure:
                _reporter(report.failed)(item.path, f"{printable(item.path)}: {failure}")
            else:
                yield item, passages
        return
    yield from group


def _record(
    item: _DocumentWork,
    passages: list[str],
    library: Library,
    engine: CacheClipEngine,
    embedder: Embedder,
    settings: LibrarySettings,
    report: IngestReport,
) -> None:
    vectors = embedder.embed(passages)
    library.fix_settings(settings)  # after all models have worked, so that a failed run fixes no settings
    unused = library.replace(str(item.path), item.digest, passages, vectors)
    report.released += engine.release(unused)
    report.added += item.is_new
    report.changed += not item.is_new


def _num_evicted(engine: CacheClipEngine, texts: Iterable[str]) -> int:
    """How many texts are not stored."""
    models = engine.chunk_caches()
    return sum(any(text not in caches for caches in models) for text in set(texts))


def _known_under(library: Library, roots: Iterable[Path]) -> list[str]:
    folders = [root for root in roots if root.is_dir()]
    return [p for p in library.documents() if any(Path(p).is_relative_to(folder) for folder in folders)]


def _remove_gone(library: Library, engine: CacheClipEngine, survey: _Survey, report: IngestReport) -> None:
    for path in list(_gone(library, survey)):
        report.released += engine.release(library.remove(path))
        report.removed += 1


def _gone(library: Library, survey: _Survey) -> Iterator[str]:
    """Documents that were ingested from one of the roots and no longer exist, or are skipped now."""
    present = {str(file) for file in survey.files}
    skipped = {problem["path"] for problem in survey.skipped if is_read(Path(problem["path"]))}
    for path in _known_under(library, survey.roots):
        # a file named itself may have a suffix that folders skip
        if path not in present and (path in skipped or not _exists(path)):
            yield path


def _exists(path: str) -> bool:
    """Whether a file may be there: also if its folder cannot be read."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
