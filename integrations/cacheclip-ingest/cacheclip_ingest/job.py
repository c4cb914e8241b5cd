"""An ingestion run: finds files, skips unchanged documents, precomputes chunk caches, embeds, and records passages.

Documents are read one at a time. Each document's chunk caches are stored first, one batch while the next one is
computed, then its passages and embeddings in one transaction. If a run is killed in between, the next run finds the
stored chunk caches by their content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheclip_rag import CacheClipEngine, CacheClipError, ConfigurationError
from cacheclip_rag.models import concrete
from cacheclip_rag.plugins import progress_bar
from cacheclip_rag.store import ChunkStore

from .documents import Reader
from .embedding import Embedder
from .frameworks import is_document, texts_by_name
from .library import Library, LibrarySettings
from .passages import PassageReader, read_each
from .plan import IngestPlan, plan_documents
from .survey import DocumentWork, IngestCounts, Survey


@dataclass(slots=True)
class IngestReport(IngestCounts):
    """Result of an ingestion run."""

    documents: int = 0
    """Documents in the library afterwards."""
    released: int = 0
    """Chunk caches deleted because no document contains their text any more."""
    evicted: int = 0
    """Texts of this run's passages whose KV is not stored at its end: the store's limit is too small."""


_Document = tuple[DocumentWork, list[str]]
"""A document to process and its passages."""


def ingest(
    paths: Iterable[str | Path | Any],
    *,
    library: Library,
    engine: CacheClipEngine,
    embedder: Embedder,
    settings: LibrarySettings,
    max_bytes: int | None = None,
    confirmed: bool = False,
    reader: Reader | None = None,
    types: Collection[str] | None = None,
) -> IngestReport:
    """Bring the library up to date with ``paths``. Only new, changed and damaged documents are processed.

    Documents that were ingested from a given folder, which could be looked at, and are not there any more are removed.

    Args:
        paths: files and folders, URLs of object storage, and documents of LangChain or LlamaIndex. Such a document is
            known by the ``source`` or ``file_path`` of its metadata, else by its id; several of one place are one. It
            stays until it is taken out with :func:`~cacheclip_ingest.remove_documents`.
        settings: recorded with the first document; a later run with other settings is refused.
        max_bytes: limit to record in the store first; 0: no limit; None: as recorded.
        confirmed: remove documents even if more than half of those of a given path are gone, or all of a folder.
        reader: reads every file in place of this package's readers: a function that gets a path, and returns a text, a
            :class:`~cacheclip_ingest.DocumentText`, or documents of LangChain or LlamaIndex. Files that it leaves to us
            it reads with :func:`~cacheclip_ingest.read_document`. A file that did not change is not read again, also by
            another reader.
        types: suffixes, such as ``.docx``, of the files in folders that are read; None: those that this package reads.

    Raises:
        DocumentError: a path does not exist, or no document was found.
        ConfigurationError: the library was made with other settings, or the reader returns something else.
        StoreError: the library or the store cannot be used.
    """
    if max_bytes is not None:
        store = engine.store.chunk_store
        if not isinstance(store, ChunkStore):
            raise ConfigurationError(f"max_bytes limits a store folder, got {engine.config.store!r}. Leave it out.")
        store.set_limit(max_bytes)
    settings = _concrete(settings, engine)
    survey = _survey(paths, library, engine, settings, types)
    report = survey.begin(IngestReport)
    _check_models(survey, engine, embedder)
    for path in survey.unchanged:
        engine.texts.index.add(library.passages_of(path))  # no effect, unless the store's catalog was lost
    done = []
    for item, passages in _precomputed(_documents(survey, engine, settings, reader), engine, report, survey):
        _record(item, passages, library, engine, embedder, settings, report)
        done.append(item.name)
    for path in survey.settle(report, confirmed):  # last, so that a renamed document's texts keep their KV
        library.remove(path, _releasing(engine, report))
    report.evicted = sum(_num_evicted(engine, library.passages_of(path)) for path in done)
    report.documents = len(library.documents())
    return report


def _concrete(settings: LibrarySettings, engine: CacheClipEngine) -> LibrarySettings:
    """``settings`` with the engine's dtype for ``auto``: another machine would choose another one, and find nothing."""
    return replace(settings, dtype=concrete(engine.config).dtype) if settings.dtype == "auto" else settings


def plan_ingestion(
    paths: Iterable[str | Path | Any],
    *,
    library: Library,
    engine: CacheClipEngine,
    settings: LibrarySettings,
    embedder: Embedder | None = None,
    max_bytes: int | None = None,
    confirmed: bool = False,
    reader: Reader | None = None,
    types: Collection[str] | None = None,
) -> IngestPlan:
    """What :func:`ingest` would do with ``paths``, and its cost. Changes nothing, and raises the same errors.

    Args:
        embedder: is checked too, if it is given.
        max_bytes: limit that the store would have; None: no limit.
        confirmed, reader, types: as of :func:`ingest`.
    """
    settings = _concrete(settings, engine)
    survey = _survey(paths, library, engine, settings, types)
    _check_models(survey, engine, embedder)
    documents = _documents(survey, engine, settings, reader)
    return plan_documents(survey, documents, engine, confirmed=confirmed, max_bytes=max_bytes)


def _survey(
    paths: Iterable[Any],
    library: Library,
    engine: CacheClipEngine,
    settings: LibrarySettings,
    types: Collection[str] | None,
) -> Survey:
    _ = engine.store  # refuses a store of an older format before anything is read
    library.check_settings(settings)
    given = [*paths]
    texts = texts_by_name(filter(is_document, given))
    places = [each for each in given if not is_document(each)]
    return Survey.take(places, library.documents(), damaged=library.damaged(), texts=texts, types=types)


def _check_models(survey: Survey, engine: CacheClipEngine, embedder: Embedder | None) -> None:
    """Load every model that the run needs, also those that it needs last. An unchanged library loads none."""
    if survey.work:
        if embedder is not None:
            embedder.embed(["text"])
        engine.chunk_caches()


def _documents(
    survey: Survey, engine: CacheClipEngine, settings: LibrarySettings, reader: Reader | None
) -> Iterator[_Document]:
    """Each document to process and its passages; the survey hears of others."""

    def made() -> PassageReader:
        sizes = settings.chunk_tokens, settings.overlap_tokens
        return PassageReader(engine.primary, *sizes, reader=reader, texts=survey.texts)

    return read_each(survey.work, made, survey.tell)


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


def _precomputed(
    documents: Iterable[_Document], engine: CacheClipEngine, report: IngestReport, survey: Survey
) -> Iterator[_Document]:
    """Store the chunk caches of documents, with a progress bar; gives the documents for which that worked."""
    with progress_bar("ingesting", sum(item.num_bytes for item in survey.work)) as advance:
        before = 0
        for group in _together(documents, engine):
            num_bytes = sum(item.num_bytes for item, _ in group)

            def show(share: float, before: int = before, num_bytes: int = num_bytes) -> None:
                advance(before + num_bytes * share)

            for item, passages in _precompute(group, engine, report, survey, show):
                report.chunks += len(passages)
                yield item, passages
            before += num_bytes


def _precompute(
    group: list[_Document],
    engine: CacheClipEngine,
    report: IngestReport,
    survey: Survey,
    show: Callable[[float], None],
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

    bad: dict[str, CacheClipError] = {}
    engine.precompute(texts, stored=stored, skipped=lambda text, _, error: bad.setdefault(text, error))
    for item, passages in group:
        if errors := [bad[text] for text in passages if text in bad]:
            survey.tell("failed", item.name, f"{item.name}: {errors[0]}")
        else:
            yield item, passages


def _record(
    item: DocumentWork,
    passages: list[str],
    library: Library,
    engine: CacheClipEngine,
    embedder: Embedder,
    settings: LibrarySettings,
    report: IngestReport,
) -> None:
    vectors = embedder.embed(passages)
    library.fix_settings(settings)  # after all models have worked, so that a failed run fixes no settings
    library.replace(item.name, item.version, passages, vectors, _releasing(engine, report))
    report.added += item.is_new
    report.changed += not item.is_new


def _num_evicted(engine: CacheClipEngine, texts: Iterable[str]) -> int:
    """How many texts are not stored."""
    models = engine.chunk_caches()
    return sum(any(text not in caches for caches in models) for text in set(texts))


def _releasing(engine: CacheClipEngine, report: IngestReport) -> Callable[[list[str]], None]:
    def release(texts: list[str]) -> None:
        report.released += engine.release(texts)

    return release
