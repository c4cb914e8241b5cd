"""The door's side of this distribution: a :class:`cacheclip_rag.store.StoreKind`, under the entry points
``cacheclip.stores``."""

from __future__ import annotations

from cacheclip_rag.store import Tiers

from .care import compact, create, gc, set_quota, stats, verify
from .hot import with_hot
from .objects import ObjectBackend
from .place import SharedPlace
from .store import SharedStore

__all__ = ["compact", "create", "gc", "open_store", "set_quota", "stats", "tiers", "verify"]


def open_store(url: str, *, codec: str | None, memory_bytes: int) -> SharedStore:
    return SharedStore.at(SharedPlace(url), codec=codec, memory_bytes=memory_bytes)


def tiers(url: str, namespace: str, codec: str | None) -> Tiers:
    return Tiers(with_hot(ObjectBackend(SharedPlace(url), namespace, codec)))
