"""The texts of a tenant: stored texts, their sources, and the search for texts in prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..store import LEARNED, TenantStore
from ..store.sources import check_source


class ChunkTexts:
    """Texts of one namespace of a store. No model is needed: the catalog knows which entries belong to a text.

    A source (a node, a record) may be part of a document, and is removed with the document. A text may have several
    sources; it is orphaned when the last source is removed.
    """

    def __init__(self, store: TenantStore) -> None:
        self._store, self._catalog, self._namespace = store, store.catalog, store.namespace
        self.index = store.index
        """Finds stored texts in a prompt."""

    def add(self, text: str, source: str | None = None, document: str = "") -> None:
        """Add a text, so that prompts are searched for it, and its source if one is given."""
        self.index.add([text])
        if source is not None:
            self._catalog.sources.add(self._namespace, source, text, document)

    def release(self, texts: Iterable[str]) -> int:
        """Delete the KV of texts for every model and chunk context. Returns how many texts had any KV."""
        texts = list(texts)
        released = self._store.release(texts)
        self.index.remove(texts)
        self.index.add(
            [text for text in texts if self._store.holds_text(text)]
        )  # another process stored them meanwhile
        self.forget_learned(texts)
        self._store.note_erasure()  # last, and for texts without an entry too: prompts may hold them
        return released

    def evict(self, text: str) -> None:
        """Delete a text and its KV to make room. It may stay in the KV of earlier prompts, as after :meth:`release` it
        does not."""
        self._store.release([text], erases=False)
        self.index.remove([text])
        self.forget_learned([text])

    def forget_learned(self, texts: Iterable[str]) -> None:
        """Sources that a caller named are the caller's to remove; this one nobody named."""
        if self._store.chunk_store.wants is None:
            self.remove_sources([LEARNED], texts=texts)

    # -- sources ------------------------------------------------------------------------------------------------

    def add_source(self, text: str, source: str, document: str = "") -> None:
        """Record that a text comes from ``source``; other sources of the text stay. Raises ConfigurationError: it is
        that of learned texts."""
        check_source(source, document)
        self._catalog.sources.add(self._namespace, source, text, document)

    def learned(self) -> dict[str, int]:
        """Bytes of the KV of each learned text that has no other source, least recently used first."""
        self._store.flush()  # uses that wait to be recorded
        return self._catalog.sources.learned(self._namespace)

    def texts(self, source: str | None = None) -> list[str]:
        """Texts that have a source, each once; with ``source``, only the texts of that source."""
        return self._catalog.sources.texts(self._namespace, source)

    def sources(self) -> list[str]:
        """All sources, each once."""
        return self._catalog.sources.names(self._namespace)

    def orphans(self, gone: Collection[str], keep: Collection[str] = ()) -> list[str]:
        """Texts that would have no source without the sources and documents ``gone``, except the texts in ``keep``."""
        return self._catalog.sources.orphans(self._namespace, gone, keep)

    def remove_sources(self, gone: Iterable[str], *, texts: Iterable[str] | None = None) -> None:
        """Remove sources and documents; with ``texts``, only from these texts. Deletes no KV."""
        self._catalog.sources.remove(self._namespace, gone, texts=texts)
