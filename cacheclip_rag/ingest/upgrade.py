"""Encoding a library again: after a context was trained, or for another chunk context.

Text by text, what is missing is computed, and only then the KV with earlier contexts is deleted. Both may be stored
meanwhile: answers are right at any time, and a text that is not encoded yet is computed as fresh text. If a run is
killed, the next one finds what is done by its content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..chunks.batches import in_batches
from ..chunks.caches import ChunkCaches
from ..engine import CacheClipEngine
from ..progress import progress_bar
from ..store import text_digest
from .library import Library
from .plan import IngestPlan, price

__all__ = ["UpgradeReport", "plan_upgrade", "upgrade"]


@dataclass(slots=True)
class UpgradeReport:
    """Result of :func:`upgrade`."""

    documents: int = 0
    """Documents of the library."""
    chunks: int = 0
    """Different passages."""
    computed: int = 0
    """Passages whose KV was computed."""
    removed: int = 0
    """Entries of earlier chunk contexts that were deleted."""
    evicted: int = 0
    """Passages whose KV is not stored at the end: the store's limit is too small."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def upgrade(library: Library, engine: CacheClipEngine) -> UpgradeReport:
    """Encode all passages for the engine's models and chunk context, and delete their KV with the contexts that the
    library recorded before.

    Reads no document: passages and embeddings stay. Entries of other models, dtypes, system prompts and methods stay
    too. The engine's chunk context is recorded in the library's settings first, so that new answers use it.

    Raises:
        StoreError: the library or the store cannot be used.
        PromptTooLongError: a passage does not fit after the new chunk context. The passages before it are done.
        EncodingError: another process that computes chunks failed with some. The others are done.
    """
    models, context = engine.chunk_caches(), engine.context_of()  # all models load before anything is changed
    known = library.contexts()
    earlier = [engine.parts.primary(each) for each in known if each != context]
    library.set_contexts(dict.fromkeys([*known, context]))
    library.change_chunk_context(engine.config.chunk_context)
    report = UpgradeReport(documents=len(library.documents()))
    total = sum(1 for _ in _texts(library))
    with progress_bar("encoding", total, "passages") as advance:
        # one by one, unless the primary's runtime takes more at once
        for batch in in_batches(_texts(library), str, characters=models[0].runtime.batch_characters or 1):
            report.chunks += len(batch)
            report.computed += engine.precompute(batch)
            report.removed += sum([_remove(engine, text, models, earlier) for text in batch])
            advance(report.chunks)
    report.evicted = sum(not _is_stored(text, models) for text in _texts(library))
    if not report.evicted:
        _remove_prefixes(engine, models[0], earlier)
        library.set_contexts([context])
    return report


def plan_upgrade(library: Library, engine: CacheClipEngine, max_bytes: int | None = None) -> IngestPlan:
    """The cost of :func:`upgrade`. Changes nothing. ``max_bytes``: limit of the store; None: no limit."""
    found = IngestPlan(unchanged=len(library.documents()), max_bytes=max_bytes)
    found.chunks = sum(1 for _ in _texts(library))
    price(engine, _texts(library), found)
    return found


def _texts(library: Library) -> Iterator[str]:
    """Passages, document by document, each text once."""
    seen: set[bytes] = set()
    for path in library.documents():
        for text in library.passages_of(path):
            if (digest := text_digest(text)) not in seen:
                seen.add(digest)
                yield text


def _is_stored(text: str, models: list[ChunkCaches]) -> bool:
    return all(text in caches for caches in models)


def _remove(engine: CacheClipEngine, text: str, models: list[ChunkCaches], earlier: list[ChunkCaches]) -> int:
    """Delete the KV of a text with earlier contexts, once it is stored with the new one."""
    if not earlier or not _is_stored(text, models):
        return 0
    # an auxiliary model of the same weights may have its KV under the key of an earlier context
    needed = {caches.key(text) for caches in models}
    return engine.store.delete({caches.key(text) for caches in earlier} - needed)


def _remove_prefixes(engine: CacheClipEngine, current: ChunkCaches, earlier: list[ChunkCaches]) -> None:
    """Delete the KV of earlier contexts themselves, unless the shared prefix alone has it."""
    needed = {current.prefix_key, engine.parts.prefix_caches.prefix_key}
    engine.store.delete([caches.prefix_key for caches in earlier if caches.prefix_key not in needed])
