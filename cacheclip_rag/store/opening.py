"""Opens a store, wherever it is: what is behind a URL, another distribution opens."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Protocol

from ..base.errors import ConfigurationError, MissingExtraError, StoreError
from ..base.guests import STORES, guests, lacking, load_guest
from ..base.paths import SCHEMES, is_url
from ..base.urls import shown_url
from .chunk_store import ChunkStore
from .tiered import TieredStore
from .tiers import Tiers


class StoreKind(Protocol):
    """Stores behind URLs of one scheme: a module or an object that is an entry point of the group ``cacheclip.stores``,
    by the scheme. Importing it imports no client of any storage.

    ``url``: with the place of a hot tier, if it has one (``s3://bucket/prefix?hot=valkey://host:6379``). All but
    ``open_store`` raise StoreError if storage does not answer, or there is no store at the URL.
    """

    def open_store(self, url: str, *, codec: str | None, memory_bytes: int) -> TieredStore:
        """A store that was made. If storage does not answer, nothing is found until it does.

        Args:
            codec: of the engine, for stores that hold several; None: that of the store.
            memory_bytes: size of a memory tier; 0: none.
        """

    def tiers(self, url: str, namespace: str, codec: str | None) -> Tiers:
        """A store's payloads without its catalog, for processes that carry out plans of another one."""

    def create(self, url: str, codec: str | None = None) -> dict[str, Any]:
        """Make a store, or return what it was made with; the result has its ``codec``. Raises ConfigurationError if it
        was made with another one."""

    def stats(self, url: str) -> dict[str, Any]:
        """What each tenant holds."""

    def set_quota(self, url: str, namespace: str, max_bytes: int | None) -> None:
        """Limit what a tenant holds; None: no limit."""

    def verify(self, url: str) -> dict[str, Any]:
        """Read everything and compare it with its checksums: ``damaged`` and ``missing`` say what is wrong."""

    def gc(self, url: str, grace_s: float) -> dict[str, Any]:
        """Delete what nobody can use, if it is older than ``grace_s`` seconds."""

    def compact(self, url: str) -> dict[str, Any]:
        """Put small files of the catalog together."""


class TenantsError(StoreError):
    """Some tenants could not be looked after. The others were."""

    def __init__(self, message: str, found: Mapping[str, Any]) -> None:
        """``found``: what was done for the others."""
        super().__init__(message)
        self.found = dict(found)


def store_kind(url: str) -> StoreKind:
    """What opens the store at a URL.

    Raises:
        ConfigurationError: no store has URLs of this scheme.
        MissingExtraError: the distribution that has them is not installed.
    """
    scheme, known = url.partition("://")[0], guests(STORES)
    if scheme in known:
        expected = "a StoreKind (see cacheclip_rag.store) with all its functions"
        kind: StoreKind = load_guest(STORES, scheme, expected, lambda each: not lacking(each, StoreKind))
        return kind
    if scheme in SCHEMES:
        raise MissingExtraError("cacheclip-shared (for stores in object storage)", "shared")
    raise ConfigurationError(
        f"expected the URL of a store ({', '.join(sorted({*SCHEMES, *known}))}), got {shown_url(url)!r}."
    )


def open_chunk_store(
    store: str | PathLike[str] | None, max_bytes: int | None = None, memory_bytes: int = 0, codec: str | None = None
) -> TieredStore:
    """A store in a folder, in memory (None), or behind a URL; other arguments are those of :meth:`ChunkStore.open`.

    Args:
        codec: of the engine, for shared stores that hold several.

    Raises:
        StoreError: the folder holds a store of an older format, or there is no store at the URL. Storage that does not
            answer is a warning.
        MissingExtraError: the distribution for the URL is not installed.
    """
    if not is_url(store):
        return ChunkStore.open(str(store) if store else None, max_bytes, memory_bytes)
    return store_kind(str(store)).open_store(str(store), codec=codec, memory_bytes=memory_bytes)
