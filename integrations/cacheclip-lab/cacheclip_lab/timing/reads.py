"""Measures how long a store's tiers take to read KV, on the way that requests take: checked, and layer by layer where
the tier can do so. The store is left as it was found."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from cacheclip_rag import StoreError
from cacheclip_rag.store import Backend, ReadAgain, ReadAhead, TenantStore, TieredStore, frame_bytes

_NAMESPACE = "cacheclip-profile"
"""Tenant of the KV that is read. What a killed run left of it is removed by the next one."""


class TimedRead(NamedTuple):
    """One reading of several entries."""

    medium: str
    """As :meth:`~cacheclip_rag.store.Backend.medium` calls it."""
    entries: int
    num_bytes: int
    """Of all of them, as the catalog counts them."""
    seconds: float
    at_once: int = 1
    """Reads that were under way together."""


def has_room(store: TieredStore, shapes: Sequence[Sequence[int]], codec: str) -> bool:
    """Whether KV of these shapes fits a store's limit, so that nothing is evicted for it."""
    limit = store.limit
    size = sum(store.tiers.round_up(frame_bytes(shape, codec, namespace=_NAMESPACE)) for shape in shapes)
    return limit is None or store.catalog.total().bytes + size <= limit


def measure_reads(
    store: TieredStore,
    kv: Sequence[torch.Tensor],
    groups: Sequence[Sequence[int]],
    codec: str,
    shapes: Sequence[Sequence[int] | None] | None = None,
) -> list[TimedRead]:
    """Read groups of entries from each tier that is not in memory: first from the medium itself, as far as the system
    allows it, then once more. ``kv`` must fit the store's limit (:func:`has_room`); ``shapes`` tell padding.
    Raises StoreError or OSError if the store cannot be written or read, or does not keep what is written."""
    backends = [backend for backend in store.tiers.backends if not backend.in_memory]
    if not backends:
        return []
    found = []
    keys = [hashlib.sha256(f"{_NAMESPACE} {number}".encode()).hexdigest() for number in range(len(kv))]
    try:
        last = TenantStore(store.on(store.tiers.last), _NAMESPACE)
        for key, each, shape in zip(keys, kv, shapes or [None] * len(kv), strict=True):
            if not last.put(key, each, codec, shape=shape):
                raise StoreError("the store's limit leaves no room for a chunk cache")
        for backend in backends:
            if backend is not store.tiers.last:
                for key, data in store.tiers.last.get_many(keys).items():
                    backend.put(key, data)
            tenant = TenantStore(store.on(backend), _NAMESPACE)
            for group in groups:
                chosen = [keys[number] for number in group]
                backend.drop_cached(chosen)
                found += [_read(tenant, backend, chosen, num_layers=kv[0].shape[0]) for _ in range(2)]
    finally:
        store.drop_tenant(_NAMESPACE)
        store.tiers.delete(keys)  # what a tier did not keep has no entry any more
    return [each for each in found if each is not None]


def _read(tenant: TenantStore, backend: Backend, keys: Sequence[str], *, num_layers: int) -> TimedRead | None:
    """None if the entries are not all on one medium."""
    entries = tenant.catalog.entries_of(tenant.namespace, keys)
    media = {backend.medium(key) for key in keys}
    seconds = None
    with ReadAhead(tenant, keys) as reading, suppress(ReadAgain):
        if all([reading.kv(number) is not None for number in range(len(keys))]):
            reading.wait(num_layers - 1)
            seconds = reading.busy_s()
    if seconds is None:
        raise StoreError(f"tier {backend.name!r} gave no chunk cache back that was written to it")
    if len(media) > 1:
        return None
    num_bytes = sum(entry.num_bytes for entry in entries.values())
    return TimedRead(media.pop(), len(keys), num_bytes, seconds, backend.reads_at_once)
