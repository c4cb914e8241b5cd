"""Computes and stores chunks for every model, and releases them by text or source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ..base.database import ANSWER_WAIT_S, is_busy, waiting_at_most
from ..base.errors import CacheClipError, ConfigurationError, EncodingError
from ..chunks.batches import in_batches
from ..chunks.caches import ChunkCaches
from ..chunks.context import ChunkContext
from ..chunks.write_behind import WriteBehind
from ..prompt.messages import Documents
from ..prompt.segments import Chunk, chunk_texts, normalise_chunk
from ..store import LEARNED
from ..store.sources import check_source

if TYPE_CHECKING:
    from .parts import Parts

logger = logging.getLogger(__name__)

_MOST_LATE = 256
"""Chunks that are remembered while another process uses the catalog."""


class ChunkWriter:
    """Writes the chunk caches of one engine."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.late: dict[tuple[str, ChunkContext], list[tuple[str, str]]] = {}
        """Chunks that are to be stored after a later answer, with their sources and documents."""

    def precompute(
        self,
        texts: Documents,
        context: ChunkContext,
        source: str | None = None,
        document: str = "",
        stored: Callable[[int, int], object] | None = None,
        skipped: Callable[[str, Sequence[str], CacheClipError], object] | None = None,
    ) -> int:
        """See :meth:`cacheclip_rag.engine.CacheClipEngine.precompute`. Without texts, no model is loaded."""
        check_source(document)
        origins = _origins(texts)
        chunks = iter(chunk_texts(texts))
        first = next(chunks, None)
        if first is None:
            return 0
        most = self._parts.models.runtime.batch_characters
        total = 0
        with WriteBehind() as behind:
            for batch in in_batches(chain((first,), chunks), lambda text: text, characters=most):
                models = self._parts.models.chunk_caches(context)
                good, bad = _checked(batch, models, only_first=skipped is None)
                if skipped is None:
                    computed = _write(good, models, behind)
                else:
                    computed, failed = _write_each(good, models, behind)
                    bad |= failed
                    for text, error in bad.items():
                        names = [name for name, _ in origins.get(text, ())]
                        skipped(text, [*([source] if source else []), *names], error)
                behind.add(partial(self._record, [text for text in good if text not in bad], origins, source, document))
                if skipped is None and bad:
                    raise next(iter(bad.values()))
                if stored is not None:
                    behind.add(partial(stored, len(batch), computed))
                total += computed
        self._parts.store.commit()
        return total

    def _record(
        self, chunks: Sequence[str], origins: Mapping[str, Sequence[tuple[str, str]]], source: str | None, document: str
    ) -> None:
        texts = self._parts.texts
        if source != LEARNED:
            texts.forget_learned(chunks)  # they stay, also if what was learned goes
        for chunk in chunks:
            texts.add(chunk, source, document)
            for name, whole in origins.get(chunk, ()):
                texts.add_source(chunk, name, whole)

    def release(self, texts: Iterable[str]) -> int:
        chunks = list(chunk_texts(texts))
        if not chunks:
            return 0  # the prefix cache keeps its blocks
        try:
            count = sum(bool(self._parts.texts.release([chunk])) for chunk in chunks)
        finally:  # after the chunks: an answer that began before their end may have left their KV there
            self._parts.drop_erased()
        self._parts.store.commit()
        return count

    def release_sources(self, gone: Iterable[str], keep: Iterable[str] = ()) -> int:
        if isinstance(gone, str):
            raise ConfigurationError("expected a list of sources, got one string: put it in a list.")
        names = set(gone)
        if not names:
            return 0
        texts = self._parts.texts
        released = self.release(texts.orphans(names, set(chunk_texts(keep))))
        texts.remove_sources(names)  # last, so that a killed run can be repeated
        self._parts.store.commit()
        return released

    def store_missing(
        self, chunks: Sequence[str], prompt: Iterable[object], documents: Documents, context: ChunkContext
    ) -> None:
        """Store chunks that were missing, but none that was released meanwhile. The answer is complete already, so an
        error is only logged. Chunks that cannot be stored because another process uses the catalog are stored
        after a later answer."""
        if self._parts.config.on_miss != "store":
            return
        origins, named = _origins(documents), {*chunk_texts(documents)}
        named.update(each.whole for each in prompt if isinstance(each, Chunk))
        late = {(chunk, context): origins.get(chunk, []) for chunk in chunks}
        late |= {each: self.late.pop(each) for each in [*self.late]}
        unnamed = {*chunks} - named
        with waiting_at_most(ANSWER_WAIT_S):
            for (chunk, behind), known in late.items():
                try:
                    self._parts.store.check_writable()  # before anything is computed
                    if chunk in unnamed and not self._parts.texts.index.known(chunk):
                        continue
                    wants = self._parts.store.chunk_store.wants
                    if wants is None or wants(self._parts.config.namespace, chunk):
                        self._store_missing(chunk, behind, known)
                except Exception as error:  # for instance out of memory
                    if is_busy(error) and len(self.late) < _MOST_LATE:
                        self.late[chunk, behind] = known
                    why = str(error) or type(error).__name__
                    logger.warning("a chunk of this prompt could not be stored: %s", why)

    def _store_missing(self, chunk: str, context: ChunkContext, origins: Sequence[tuple[str, str]]) -> None:
        texts = self._parts.texts
        is_known = partial(texts.index.known, chunk)
        is_wanted = is_known if is_known() else lambda: True  # a stored text may be released while it is computed
        for caches in self._parts.models.usable(context):
            caches.write(chunk, is_wanted)
        if not is_wanted():
            return
        texts.add(chunk)
        for source, document in origins:
            texts.add_source(chunk, source, document)


def _write(chunks: Sequence[str], models: Sequence[ChunkCaches], behind: WriteBehind) -> int:
    """Compute the KV of chunks for every model where it is missing; returns for how many it was."""
    for caches in models:
        if not caches.prefix.is_known and any(chunk not in caches for chunk in chunks):
            behind.catch_up()
            _ = caches.prefix.kv  # before another model's chunks may evict it from a store that is full
    # a list, not a generator: every model must run
    written = [caches.write_many(chunks, behind) for caches in models]
    return sum(any(each) for each in zip(*written, strict=True))


def _write_each(
    chunks: Sequence[str], models: Sequence[ChunkCaches], behind: WriteBehind
) -> tuple[int, dict[str, CacheClipError]]:
    """Like :func:`_write`; chunks whose KV cannot be computed are returned with the reason."""
    try:
        return _write(chunks, models, behind), {}
    except EncodingError as error:
        if len(chunks) == 1:
            return 0, {chunks[0]: error}
    written = [_write_each([chunk], models, behind) for chunk in chunks]
    return sum(count for count, _ in written), {text: error for _, bad in written for text, error in bad.items()}


def _checked(
    batch: Sequence[str], models: Sequence[ChunkCaches], *, only_first: bool
) -> tuple[list[str], dict[str, CacheClipError]]:
    """The chunks that can be stored for every model, and why the others cannot; ``only_first``: until the first of
    these."""
    good: list[str] = []
    bad: dict[str, CacheClipError] = {}
    for chunk in batch:
        try:
            if not chunk:
                raise ConfigurationError("a chunk must hold text, got an empty or blank string.")
            for caches in models:
                caches.check_length(chunk)
        except CacheClipError as error:
            bad[chunk] = error
            if only_first:
                break
        else:
            good.append(chunk)
    return good, bad


def _origins(documents: Documents) -> dict[str, list[tuple[str, str]]]:
    """Sources and documents of each chunk, as far as they are known."""
    by_text: dict[str, list[tuple[str, str]]] = {}
    for text, origins in documents.items() if isinstance(documents, Mapping) else ():
        by_text.setdefault(normalise_chunk(text), []).extend(origins)
    return by_text
