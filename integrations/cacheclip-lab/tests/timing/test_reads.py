"""The reading speed of tiers: what is measured, and that the store is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cacheclip_lab.timing.reads import _NAMESPACE, has_room, measure_reads
from cacheclip_testing import ThrottledBackend
from fake_time import FakeTime
from store_entries import is_intact, put

from cacheclip_rag import StoreError
from cacheclip_rag.store import (
    PAGE_CACHE,
    Backend,
    Catalog,
    ChunkStore,
    DiskBackend,
    KVShape,
    MemoryBackend,
    TenantStore,
    Tiers,
    layer_shapes,
)

SHAPES = [(4, 2, 2, tokens, 64) for tokens in (64, 64, 256, 256)]
KV = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in SHAPES]
GROUPS = [[0], [0, 1], [2], [2, 3]]
MEGABYTE = 1_000_000


class Remote(ThrottledBackend):
    name = "remote"


Before = Callable[[str, int, int], None]


def slow(backend: Backend, megabytes_per_s: float = 1.0, before: Before | None = None) -> ThrottledBackend:
    return ThrottledBackend(backend, bytes_per_s=megabytes_per_s * MEGABYTE, before_read=before)


def store_of(folder: Path, *backends: Backend) -> ChunkStore:
    """A store with two entries, in all tiers."""
    store = ChunkStore(Catalog(folder), Tiers(backends))
    put(TenantStore(store, "t"), 1, 2)
    return store


def state(store: ChunkStore) -> object:
    """All that a store holds, tier by tier, in order of use."""
    folder = store.catalog.folder
    assert folder is not None
    payloads = {path.name: path.read_bytes() for path in folder.rglob("*.kv")}
    order = {name: store.catalog.keys(name) for name in store.catalog.tenants()}
    tiers = [list(backend.list()) for backend in store.tiers.backends]
    return store.catalog.total(), order, payloads, tiers, [*(folder / "tmp").iterdir()], store.tiers.stats()


def test_each_tier_that_is_not_in_memory_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTime(monkeypatch)
    near, far = Remote(DiskBackend(tmp_path / "near"), bytes_per_s=10e6), slow(DiskBackend(tmp_path))
    found = measure_reads(store_of(tmp_path, MemoryBackend(), near, far), KV, GROUPS, "float32")
    assert {(read.medium, read.entries) for read in found} == {
        (name, count) for name in ("remote", "throttled") for count in (1, 2)
    }
    for read in found:
        speed = {"remote": 10e6, "throttled": 1e6}[read.medium]
        assert read.seconds == pytest.approx(read.num_bytes / speed, rel=0.15), "headers are read too"


def test_the_store_is_left_as_it_was(tmp_path: Path) -> None:
    room = 300_000  # for one of the entries that are measured, which would evict the others
    store = store_of(tmp_path, MemoryBackend(room), Remote(DiskBackend(tmp_path / "near")), DiskBackend(tmp_path))
    before = state(store)
    assert measure_reads(store, KV, GROUPS, "float32")
    assert state(store) == before
    assert all(is_intact(TenantStore(store, "t"), number) for number in (1, 2))


@pytest.mark.parametrize("when", [0, 3])
def test_the_store_is_left_as_it_was_after_an_error(tmp_path: Path, when: int) -> None:
    count = 0

    def fail(key: str, start: int, num_bytes: int) -> None:
        nonlocal count
        count += 1
        if count > when:
            raise OSError("the network is gone")

    store = store_of(tmp_path, MemoryBackend(), slow(DiskBackend(tmp_path), 1e6, fail))
    before = state(store)
    with pytest.raises(StoreError, match="gave no chunk cache back"):
        measure_reads(store, KV, GROUPS, "float32")
    assert count > when and state(store) == before


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    store = store_of(tmp_path, DiskBackend(tmp_path))
    before = state(store)
    put(TenantStore(store, _NAMESPACE), 5)
    assert state(store) != before
    measure_reads(store, KV, GROUPS, "float32")
    assert state(store) == before


def test_a_tier_with_a_limit_of_its_own_is_no_measure(tmp_path: Path) -> None:
    """It drops what it has no room for. The last tier's entries are removed all the same."""

    class Small(MemoryBackend):
        name, in_memory = "small", False

    store = store_of(tmp_path, Small(1000), DiskBackend(tmp_path))
    before = state(store)
    with pytest.raises(StoreError, match="'small' gave no"):
        measure_reads(store, KV, GROUPS, "float32")
    assert state(store) == before


def test_nothing_is_evicted(tmp_path: Path) -> None:
    """There is room for exactly what is written, or nothing should be."""
    store = store_of(tmp_path, DiskBackend(tmp_path))
    held, most = store.catalog.total().bytes, 0

    class Counting(DiskBackend):
        def put(self, key: str, data: object) -> None:
            nonlocal most
            super().put(key, data)  # type: ignore[arg-type]
            most = max(most, store.catalog.total().bytes)

    store.tiers = Tiers([Counting(tmp_path)])
    measure_reads(store, KV, GROUPS, "float32")
    store.set_limit(most)
    assert most > held and has_room(store, SHAPES, "float32")
    before = state(store)
    measure_reads(store, KV, GROUPS, "float32")
    assert state(store) == before
    store.set_limit(most - 1)
    assert not has_room(store, SHAPES, "float32")


def test_files_are_measured_from_the_medium_and_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system says where they are."""
    cold: set[str] = set()
    disk = DiskBackend(tmp_path)
    monkeypatch.setattr(DiskBackend, "drop_cached", lambda self, keys: cold.update(keys))
    monkeypatch.setattr(DiskBackend, "medium", lambda self, key: "disk" if key in cold else PAGE_CACHE)

    def warm(key: str, start: int, num_bytes: int) -> None:
        cold.discard(key)

    class Watched(ThrottledBackend):
        def medium(self, key: str) -> str:
            return self.backend.medium(key)

        def drop_cached(self, keys: object) -> None:
            self.backend.drop_cached(keys)  # type: ignore[arg-type]

    found = measure_reads(store_of(tmp_path, Watched(disk, before_read=warm)), KV, GROUPS, "float32")
    assert [read.medium for read in found] == ["disk", PAGE_CACHE] * len(GROUPS)


def test_padding_is_not_written(tmp_path: Path) -> None:
    """The entries are as large as those of a model whose layers differ in width."""
    shape = KVShape(((2, 64, 64), (1, 16, 0)), 64)
    kv, sizes = [torch.zeros(*shape)], list[int]()
    remote = slow(DiskBackend(tmp_path), 1000, lambda key, start, num_bytes: sizes.append(start + num_bytes))
    measure_reads(store_of(tmp_path, remote), kv, [[0]], "float32", [shape])
    assert 0 < max(sizes) < sum(each.num_numbers for each in layer_shapes(shape)) * 4 + 4096 < kv[0].nbytes
