"""The chunk library of a tenant: which texts are stored, what prompts hold of them, and where they come from."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..store import ChunkStore, TextIndex, text_digest
from ..store.texts import TextMatch

__all__ = ["ChunkLibrary"]


class ChunkLibrary:
    """Texts of one namespace of a store. It needs no model: the catalog knows which entries belong to a text.

    A source (a node, a record) may be a part of a document, and goes with it. A text may come from several sources; it
    is orphaned when the last of them is gone.
    """

    def __init__(self, store: ChunkStore, namespace: str = "default") -> None:
        self._store, self._catalog, self._namespace = store, store.catalog, namespace
        self.index = TextIndex(store.catalog, namespace)
        """Finds stored texts inside a prompt."""

    def add(self, text: str, source: str | None = None, document: str = "") -> None:
        """Remember a text, so that it is found in prompts, and where it comes from if that is said."""
        self.index.add([text])
        if source is not None:
            self.add_source(text, source, document)

    def find(self, prompt: str, documents: Iterable[str] = ()) -> list[TextMatch]:
        """Stored texts and ``documents`` occurring in a prompt: leftmost, longest, not overlapping, in order."""
        return self.index.find(prompt, documents)

    def known(self, text: str) -> bool:
        """Whether a text was added, and not released since."""
        return self._catalog.has_text(self._namespace, text_digest(text))

    def release(self, texts: Iterable[str]) -> int:
        """Delete the KV of texts, of every model and chunk context; returns how many texts had any."""
        texts = list(texts)
        released = self._store.release(self._namespace, texts)
        self.index.remove(texts)
        return released

    # -- sources ------------------------------------------------------------------------------------------------

    def add_source(self, text: str, source: str, document: str = "") -> None:
        """Remember that a text comes from ``source`` (too)."""
        self._catalog.add_source(self._namespace, source, text, document)

    def texts(self, source: str | None = None) -> list[str]:
        """Every text that has a source, once; those of one source alone, if it is given."""
        return self._catalog.source_texts(self._namespace, source)

    def orphans(self, gone: Collection[str], keep: Collection[str] = ()) -> list[str]:
        """Texts that no source would hold any more without these sources and documents, except those to ``keep``."""
        return self._catalog.orphans(self._namespace, gone, keep)

    def remove_sources(self, gone: Iterable[str], *, texts: Iterable[str] | None = None) -> None:
        """Remove these sources and documents; of these texts alone, if any are given. No KV is deleted."""
        self._catalog.remove_sources(self._namespace, gone, texts=texts)

    def release_sources(self, gone: Iterable[str], keep: Collection[str] = ()) -> int:
        """Delete the KV of what came from these sources or documents and from no other; returns how many texts had any.

        Args:
            keep: texts whose KV stays, though these sources are removed.
        """
        gone = set(gone)
        released = self.release(self.orphans(gone, keep))
        self.remove_sources(gone)  # last: a killed run does it again
        return released
