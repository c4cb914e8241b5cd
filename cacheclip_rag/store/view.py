"""The seam of catalogs: what the package asks the catalog of any store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from ..finding.texts import TextIndex
from .entries import Entry, Total


class SourcesView(Protocol):
    """Where texts come from. A text may have several sources; each may be part of a document."""

    def add(self, namespace: str, source: str, text: str, document: str = "") -> None:
        """Record that a text comes from a source."""

    def texts(self, namespace: str, source: str | None = None) -> list[str]:
        """Texts that have a source, or this one, each once."""

    def names(self, namespace: str) -> list[str]:
        """All sources, each once."""

    def holders(self, namespace: str, digest: bytes) -> list[tuple[str, str]]:
        """Sources of a text, each with its document or an empty string."""

    def orphans(self, namespace: str, gone: Collection[str], keep: Collection[str] = ()) -> list[str]:
        """Texts that would have no source without the sources and documents ``gone``, except those in ``keep``."""

    def learned(self, namespace: str) -> dict[str, int]:
        """Bytes of the KV of each learned text that has no other source, least recently used first."""

    def remove(self, namespace: str, gone: Iterable[str], *, texts: Iterable[str] | None = None) -> None:
        """Remove sources and documents; with ``texts``, only from these texts."""


class ErasuresView(Protocol):
    """What others erased from a store."""

    def erasures(self, namespace: str) -> int | None:
        """A number that changes when something of a tenant is erased; 0: nothing was; None: there is no catalog."""

    def note_erasure(self, namespace: str) -> None:
        """Let all processes of the store drop what they hold of a tenant."""

    def unknown_of(self, keys: Sequence[str]) -> list[str]:
        """The keys that have no entry of anyone."""


class CatalogView(ErasuresView, Protocol):
    """Entries, texts and sources of a store, by tenant. Safe to share between threads.

    An entry of another tenant is answered as one that does not exist. All methods raise StoreError if the catalog
    cannot be used.
    """

    @property
    def sources(self) -> SourcesView:
        """Where texts come from."""

    def text_index(self, namespace: str) -> TextIndex:
        """Finds a tenant's texts in prompts."""

    def entries_of(self, namespace: str, keys: Sequence[str]) -> dict[str, Entry]:
        """A tenant's entries by key. Keys without one are left out."""

    def keys(self, namespace: str) -> list[str]:
        """A tenant's keys, least recently used first."""

    def keys_of(self, namespace: str, digest: bytes) -> list[str]:
        """Keys of all entries of one text, for every model and chunk context."""

    def has_texts(self, namespace: str) -> bool:
        """Whether a tenant has an entry of any text."""

    def use(self, keys: Sequence[str]) -> None:
        """Number these uses, in order."""

    def remove(
        self,
        namespace: str,
        keys: Sequence[str],
        delete: Callable[[Sequence[str]], int] | None = None,
        *,
        erases: bool = True,
    ) -> int:
        """Remove a tenant's entries; returns how many existed. ``delete`` deletes their payloads, where a store deletes
        any. ``erases``: KV that processes hold of the tenant goes, too."""

    def correct(self, key: str, measure: Callable[[str], Entry | None]) -> None:
        """Make the entry say what the medium holds under a key. ``measure`` looks; whatever it raises, the entry
        stays."""

    def total(self, namespace: str | None = None) -> Total:
        """What a tenant holds; None: what the store holds."""

    def tenants(self) -> dict[str, Total]:
        """What each tenant holds that holds anything."""

    def check_writable(self) -> None:
        """Raise StoreError if nothing can be written now."""

    def close(self) -> None:
        """Close handles; the catalog may be used again afterwards."""
