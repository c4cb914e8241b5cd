"""What every chunk-cache store is: KV by key in tiers of backends, with a catalog."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any, Self

from ..base.closing import Closing
from .backend import Backend
from .codecs import Frame
from .entries import Entry
from .erasures import Erasures
from .tiers import Tiers, TierStats
from .view import CatalogView

logger = logging.getLogger(__name__)

_HEAD_BYTES = 1 << 16
"""Enough for the header of a frame with 1,500 layers."""
_MOST_HEADER_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Contents of a store, and counters since it was opened in this process."""

    entries: int
    """Stored chunk caches."""
    bytes: int
    """Bytes that they take: whole disk blocks, headers and incomplete writes included."""
    max_bytes: int | None
    """Limit of the store; None: no limit."""
    tenants: int
    """Namespaces that hold something."""
    tiers: tuple[TierStats, ...]
    """Fastest first."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tiers": [tier.to_dict() for tier in self.tiers]}


class TieredStore(Closing, ABC):
    """A store for several tenants. Read and write through a :class:`TenantStore`. Safe to share between threads. A
    ``with`` block closes it at its end.

    To add a kind of store: a class with the two abstract methods, and a :class:`~.opening.StoreKind` that opens it.
    """

    codec: str | None = None
    """Codec that the store was made with, for engines that choose none."""

    wants: Callable[[str, str], bool] | None = None
    """Whether the KV of a tenant's text that an answer missed is worth storing; None: always."""

    def __init__(self, catalog: CatalogView, tiers: Tiers) -> None:
        """
        Args:
            catalog: entries, texts and sources.
            tiers: backends of the payloads, fastest first.
        """
        self.catalog, self.tiers = catalog, tiers
        self.erasures = Erasures(catalog, tiers)
        """What others erase."""
        self._warned: set[str] = set()

    @abstractmethod
    def write(self, namespace: str, key: str, data: bytearray) -> bool:
        """Write a payload and its entry; False if it does not fit the limits. See :meth:`TenantStore.put`."""

    @abstractmethod
    def drop_tenant(self, namespace: str) -> int:
        """Forget every entry of a tenant; returns their number."""

    def commit(self, namespace: str | None = None) -> int:
        """Let other machines find what a tenant, or any, stored and released here; returns how many texts."""
        return 0

    @property
    def limit(self) -> int | None:
        """Bytes that payloads may take on the medium, incomplete writes included; None: no limit."""
        return None

    def quota(self, namespace: str) -> int | None:
        """A tenant's limit in bytes; None: only the store's limit."""
        return None

    def on(self, backend: Backend) -> Self:
        """This store with one of its tiers alone: what is written does not reach the others."""
        alone = copy(self)
        alone.tiers = Tiers([backend])
        return alone

    def measure(self, key: str) -> Entry | None:
        """The entry of a payload on the last tier, from its header; None if there is none. Raises what :meth:`header`
        does."""
        frame = self.header(key)
        return self.entry_of(frame) if frame is not None else None

    def entry_of(self, frame: Frame) -> Entry:
        """The entry of a payload on the last tier."""
        return Entry.of(frame, self.tiers.occupied(frame.key))

    def header(self, key: str) -> Frame | None:
        """The header of a payload on the last tier; None if it is missing.

        Raises:
            FrameError: it is damaged or, as OtherVersionError, of another version.
            OSError: it cannot be read now, and may be intact.
            MemoryError: likewise.
        """
        head = self.tiers.head(key, _HEAD_BYTES)
        if head is not None and _HEAD_BYTES < (needed := Frame.header_bytes(head[0])) <= _MOST_HEADER_BYTES:
            head = self.tiers.head(key, needed)
        return Frame.parse(head[0], key, num_bytes=head[1]) if head is not None else None

    def stats(self) -> StoreStats:
        """Sizes and counters."""
        total, tiers = self.catalog.total(), self.tiers.stats()
        tiers[-1].bytes = total.bytes
        return StoreStats(total.entries, total.bytes, None, len(self.catalog.tenants()), tuple(tiers))

    def warn_once(self, kind: str, message: str, *arguments: object) -> None:
        """Log a warning unless one of this kind was logged before by this store."""
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        logger.log(level, message, *arguments)

    def close(self) -> None:
        """Close handles; the store may be used again afterwards."""
        if not self.erasures.is_watched:  # nobody would drop them
            self.tiers.drop_old_copies(lambda keys: keys)
        self.tiers.close()
        self.catalog.close()
