"""What a chunk-cache store promises, in memory, on disk, and with a memory tier before the disk."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing.backends import problems_in_threads

from cacheclip_rag.base.errors import ConfigurationError, StoreError
from cacheclip_rag.store import ChunkStore, DiskBackend, MemoryBackend, TenantStore, Tiers, is_store, text_digest
from cacheclip_rag.store.catalog import Catalog
from tests.store.samples import (
    BLOCK,
    TOKENS,
    CatalogCare,
    blocks,
    bytes_on_disk,
    full_disk,
    is_intact,
    key,
    kv,
    opened,
    put,
    size,
    totals_are_right,
)


@dataclass(frozen=True)
class Kind:
    """A kind of store."""

    folder: Path | None
    memory_bytes: int

    def open(self, max_bytes: int | None = None) -> TenantStore:
        """Tenant t; the same store again where that means something."""
        return opened(self.folder, max_bytes, self.memory_bytes)

    def bytes_of(self, tokens: int = TOKENS) -> int:
        """Bytes that a payload takes on the medium."""
        return size(tokens) if self.folder is None else blocks(tokens)


@pytest.fixture(params=["memory", "disk", "tiered"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return Kind(
        None if request.param == "memory" else tmp_path / "store", 3 * size() if request.param == "tiered" else 0
    )


@pytest.fixture
def store(kind: Kind) -> TenantStore:
    return kind.open()


def evictions(store: TenantStore) -> int:
    return store.chunk_store.stats().tiers[-1].evictions


class TestReadingAndWriting:
    @pytest.mark.parametrize("codec", ["float32", "bfloat16"])
    def test_what_was_put_is_got(self, store: TenantStore, codec: str) -> None:
        assert store.put(key(1), kv(1), codec)
        for _ in range(2):  # the second time from the fastest tier
            got = store.get(key(1))
            assert got is not None and got.codec == codec == store.codec_of(key(1))
            assert torch.equal(got.tensor(), kv(1).to(getattr(torch, codec)))

    def test_what_was_put_and_what_is_got_share_no_memory(self, store: TenantStore) -> None:
        written = kv(1)
        store.put(key(1), written, "float32")
        written.zero_()
        for _ in range(2):
            assert is_intact(store, 1)
            got = store.get(key(1))
            assert got is not None
            got.tensor().zero_()
        assert is_intact(store, 1)

    def test_delete(self, store: TenantStore) -> None:
        put(store, 1, 2)
        assert store.delete([key(1), key(9)]) == 1 and store.delete([key(1)]) == 0
        assert store.get(key(1)) is None and key(1) not in store and store.keys() == [key(2)]
        assert 7 not in store and None not in store
        assert store.delete([key(2)]) == 1 and store.stats().bytes == 0 == store.chunk_store.stats().tenants
        put(store, 1)
        assert is_intact(store, 1)

    def test_put_again_replaces_and_counts_the_new_size(self, kind: Kind, store: TenantStore) -> None:
        put(store, 1)
        put(store, 1, tokens=300)
        assert is_intact(store, 1, tokens=300)
        assert (store.stats().entries, store.stats().bytes) == (1, kind.bytes_of(300))

    def test_stats(self, kind: Kind, store: TenantStore) -> None:
        put(store, 1, 2)
        put(TenantStore(store.chunk_store, "u"), 1)
        for number in (1, 1, 9):
            store.get(key(number))
        stats, whole = store.stats(), store.chunk_store.stats()
        unit = kind.bytes_of()
        assert stats.to_dict() == {"entries": 2, "bytes": 2 * unit, "max_bytes": None, "hits": 2, "misses": 1}
        assert (whole.entries, whole.bytes, whole.max_bytes, whole.tenants) == (3, 3 * unit, None, 2)
        last = whole.to_dict()["tiers"][-1]
        assert (last["bytes"], last["damaged"], last["evictions"]) == (3 * unit, 0, 0)
        assert sum(tier.hits for tier in whole.tiers) == 2

    def test_usable_after_close(self, store: TenantStore) -> None:
        put(store, 1)
        store.close()
        put(store, 2)
        assert is_intact(store, 1) and is_intact(store, 2)
        store.close()
        store.close()


class TestEviction:
    def test_keys_least_recently_used_first(self, store: TenantStore, monkeypatch: pytest.MonkeyPatch) -> None:
        put(store, 1, 2, 3)
        assert store.keys() == [key(1), key(2), key(3)]
        store.get(key(1))
        assert key(2) in store  # asking is not using
        assert store.keys() == [key(2), key(3), key(1)]
        monkeypatch.setattr("time.time", lambda: 0.0)  # a clock that is set back changes nothing
        put(store, 2)
        assert store.keys() == [key(3), key(1), key(2)]

    def test_least_recently_used_is_evicted(self, kind: Kind) -> None:
        store = kind.open(3 * kind.bytes_of())
        put(store, 1, 2, 3)
        assert is_intact(store, 1)
        put(store, 4)
        assert key(2) not in store and store.get(key(2)) is None
        assert all(is_intact(store, number) for number in (1, 3, 4))
        assert evictions(store) == 1 and store.stats().bytes == 3 * kind.bytes_of()

    def test_uses_are_recorded_in_batches_and_when_the_store_is_closed(self, kind: Kind) -> None:
        store = kind.open()
        put(store, 1, 2)
        for _ in range(63):
            store.get(key(1))
        assert store.catalog.keys("t") == [key(1), key(2)]
        store.get(key(1))
        assert store.catalog.keys("t") == [key(2), key(1)]
        store.get(key(2))
        store.close()
        assert store.catalog.keys("t") == [key(1), key(2)]

    def test_what_was_just_put_stays_though_all_others_are_used_meanwhile(self, kind: Kind, monkeypatch: Any) -> None:
        """By other threads or processes, between making room for the payload and writing the entry."""
        store = kind.open(2 * kind.bytes_of())
        put(store, 1, 2)
        write = store.chunk_store.tiers.put

        def used_meanwhile(name: str, data: Any) -> None:
            assert is_intact(store, 2)
            store.flush()
            write(name, data)

        with monkeypatch.context() as patch:
            patch.setattr(store.chunk_store.tiers, "put", used_meanwhile)
            put(store, 3)
        assert is_intact(store, 3) and is_intact(store, 2) and evictions(store) == 1

    def test_never_above_the_limit(self, kind: Kind) -> None:
        limit = 2 * kind.bytes_of(400) + 17
        store = kind.open(limit)
        for number in range(30):
            put(store, number % 5, tokens=TOKENS * (1 + number * 37 % 100))
            last = store.chunk_store.tiers.last
            held = sum(last.occupied(name) for name in last.list())
            assert store.stats().bytes == held <= limit == store.chunk_store.stats().max_bytes
            assert key(number % 5) in store

    def test_entry_above_the_limit_is_not_kept(self, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
        store = kind.open(2 * kind.bytes_of())
        put(store, 1, 2)
        assert not store.put(key(2), kv(2, 600), "float32")
        assert "exceeds the store's limit" in caplog.text
        assert store.get(key(2)) is None and key(2) not in store  # nor is the older version served
        assert is_intact(store, 1) and evictions(store) == 0

    def test_negative_limits_are_refused(self, kind: Kind, tmp_path: Path) -> None:
        store = kind.open().chunk_store
        changes: list[Callable[[], object]] = [lambda: store.set_limit(-1), lambda: store.set_quota("t", -1)]
        for refused in (lambda: kind.open(-1), lambda: ChunkStore.open(tmp_path, None, memory_bytes=-1), *changes):
            with pytest.raises(ConfigurationError, match="max_bytes"):
                refused()

    @pytest.mark.some(3)
    @pytest.mark.parametrize("entries", [None, 4])
    def test_threads(self, kind: Kind, entries: int | None) -> None:
        """Whatever a thread reads under a key is that key's KV, whole."""
        limit = None if entries is None else entries * kind.bytes_of()
        store = kind.open(limit)

        def work(seed: int, problems: list[str]) -> None:
            for step in range(25):
                number = (seed * 7 + step * 3) % 8
                if step % 5 == 4:
                    store.delete([key(number)])
                elif step % 2:
                    put(store, number)
                elif (got := store.get(key(number))) is not None and not torch.equal(got.tensor(), kv(number)):
                    problems.append(f"wrong KV under {number}")
                store.keys()
                store.stats()

        assert problems_in_threads(work) == []
        put(store, *range(8))
        assert limit is None or store.stats().bytes <= limit
        assert is_intact(store, 7) and all(present in store for present in store.keys())  # noqa: SIM118 - not a dict
        assert totals_are_right(store)


def announced(store: TenantStore) -> tuple[int, int]:
    """A write of two blocks under way: its number, and what it evicted."""
    writes = store.chunk_store.writes
    assert writes.writer is not None
    number, evicted = store.catalog.announcements.reserve("t", key(9), 2 * BLOCK, writes.writer.name, writes.evict)
    assert number is not None
    return number, evicted


class TestLimit:
    def test_a_second_store_keeps_the_recorded_limit(self, tmp_path: Path) -> None:
        """One command sets it; others, which name none, must not grow the store beyond it."""
        put(opened(tmp_path, 3 * BLOCK), 1)
        other = opened(tmp_path)
        assert other.chunk_store.limit == 3 * BLOCK
        put(other, 2, 3, 4, 5)
        assert other.keys() == [key(3), key(4), key(5)] and bytes_on_disk(tmp_path) == 3 * BLOCK
        opened(tmp_path, 2 * BLOCK).chunk_store.apply_limit()
        assert other.chunk_store.limit == 2 * BLOCK and other.keys() == [key(4), key(5)]

    def test_zero_removes_the_recorded_limit(self, tmp_path: Path) -> None:
        """As with cacheclip ingest and cacheclip store limit, which read the same settings."""
        put(opened(tmp_path, 2 * BLOCK), 1)
        store = opened(tmp_path, 0)
        assert store.chunk_store.stats().max_bytes is None
        put(store, 2, 3, 4)
        assert store.stats().entries == 4 and opened(tmp_path).chunk_store.limit is None
        lower = opened(tmp_path, 3 * BLOCK)
        put(lower, 9)
        assert lower.keys() == [key(3), key(4), key(9)] and bytes_on_disk(tmp_path) == 3 * BLOCK, "at the first write"

    def test_lowering_the_limit_evicts(self, kind: Kind) -> None:
        store = kind.open()
        put(store, *range(6))
        assert is_intact(store, 0)
        store.flush()
        assert store.chunk_store.set_limit(3 * kind.bytes_of()) == 3 == evictions(store)
        assert store.keys() == [key(4), key(5), key(0)]
        assert sorted(store.chunk_store.tiers.list()) == sorted(store.keys())
        assert store.chunk_store.set_limit(None) == 0
        put(store, *range(6))
        assert store.stats().entries == 6

    def test_announced_writes_count(self, tmp_path: Path) -> None:
        store, other = opened(tmp_path, 3 * BLOCK), opened(tmp_path)
        put(store, 1, 2, 3)
        number, evicted = announced(other)
        assert evicted == 2
        assert store.stats().bytes == 3 * BLOCK and store.stats().entries == 1
        put(store, 4)
        assert store.keys() == [key(4)] and store.stats().bytes == 3 * BLOCK
        other.catalog.announcements.abandon(number)
        assert store.stats().bytes == BLOCK and totals_are_right(store)

    def test_a_writer_waits_for_room_that_others_have_announced(self, tmp_path: Path) -> None:
        store, other = opened(tmp_path, 2 * BLOCK), opened(tmp_path)
        put(other, 1)
        number, _ = announced(other)
        writer = threading.Thread(target=put, args=(store, 2))
        writer.start()
        try:
            writer.join(0.3)
            assert writer.is_alive() and list(store.chunk_store.tiers.list()) == []
        finally:
            other.catalog.announcements.abandon(number)
            writer.join(10)
        assert not writer.is_alive() and is_intact(store, 2)

    def test_waiting_for_room_ends_with_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cacheclip_rag.store.writes._WAIT_S", 0.1)
        store, other = opened(tmp_path, 2 * BLOCK), opened(tmp_path)
        put(store, 1)
        announced(other)
        with pytest.raises(StoreError, match="other writers have announced"):
            put(store, 2)

    def test_the_older_version_goes_last(self, tmp_path: Path) -> None:
        """It is lost if the write fails, so that others make room first."""
        store = opened(tmp_path, 3 * blocks(30_000))
        put(store, 1, 2, 3, tokens=30_000)
        with full_disk(10**6), pytest.raises(StoreError, match="could not write"):
            put(store, 1, tokens=60_000)
        assert is_intact(store, 1, tokens=30_000) and store.keys() == [key(1)]


Both = tuple[TenantStore, TenantStore]


class TestTenants:
    @pytest.fixture
    def both(self, kind: Kind) -> Both:
        store = kind.open()
        return store, TenantStore(store.chunk_store, "u")

    def test_eviction_for_a_quota_is_within_the_tenant(self, kind: Kind, both: Both) -> None:
        ours, theirs = both
        put(theirs, *range(3))
        put(ours, *range(4))
        assert ours.chunk_store.set_quota("t", 3 * kind.bytes_of()) == 1
        put(ours, 9)
        assert ours.keys() == [key(2), key(3), key(9)] and ours.stats().max_bytes == 3 * kind.bytes_of()
        assert all(is_intact(theirs, number) for number in range(3)) and theirs.stats().max_bytes is None
        assert not ours.put(key(1), kv(1, 600), "float32")  # larger than the quota
        ours.chunk_store.set_quota("t", None)
        assert ours.put(key(1), kv(1, 600), "float32")

    @pytest.mark.some(3)
    def test_a_flood_evicts_none_of_the_others(self, kind: Kind) -> None:
        """Twenty tenants under one limit: who holds most loses first, whoever was used least recently."""
        store = kind.open(100 * kind.bytes_of()).chunk_store
        others = [TenantStore(store, f"tenant {number}") for number in range(19)]
        for other in others:
            put(other, *range(4))
        flood = TenantStore(store, "flood")
        put(flood, *range(120))
        assert all(is_intact(other, number) for other in others for number in range(4))
        assert flood.stats().entries == 100 - 19 * 4 == len(flood.keys())
        assert flood.keys()[-1] == key(119, "flood")
        assert store.stats().bytes == 100 * kind.bytes_of() and totals_are_right(store)

    def test_dropping_a_tenant(self, both: Both) -> None:
        ours, theirs = both
        for tenant in both:
            put(tenant, 1, 2)
            tenant.index.add(["A text that is long enough to be found in a prompt, and a little longer."])
            tenant.catalog.sources.add(tenant.namespace, "node", "text 1")
        assert is_intact(ours, 1)  # in the memory tier too
        ours.chunk_store.set_quota("t", 10**6)
        assert ours.chunk_store.drop_tenant("t") == 2 and ours.chunk_store.drop_tenant("t") == 0
        assert ours.get(key(1)) is None and ours.keys() == [] and ours.stats().max_bytes is None
        assert ours.catalog.sources.texts("t") == [] and theirs.catalog.sources.texts("u") == ["text 1"]
        assert set(ours.catalog.tenants()) == {"u"} and totals_are_right(ours)
        assert is_intact(theirs, 1) and is_intact(theirs, 2)
        assert sorted(ours.chunk_store.tiers.list()) == sorted(theirs.keys())
        for table, left in (("texts", 1), ("sources", 1), ("quotas", 0)):
            assert len(ours.catalog.database.query(f"SELECT * FROM {table}")) == left

    def test_not_there_and_not_yours_ask_the_same(self, both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
        """The queries, and so the time, do not tell that another tenant stores a text."""
        ours, theirs = both
        put(theirs, 1)
        database = ours.catalog.database
        query, asked = database.query, list[tuple[str, int]]()

        def spy(sql: str, arguments: Any = ()) -> list[Any]:
            rows = query(sql, arguments)
            asked.append((sql, len(rows)))
            return rows

        monkeypatch.setattr(database, "query", spy)
        seen = []
        for name in (key(1, "u"), key(2, "u"), key(1)):
            for ask in (ours.get, ours.codec_of, ours.__contains__):
                asked.clear()
                assert not ask(name)
                seen.append((ask.__name__, tuple(asked)))
        assert len(set(seen)) == 3 and all(len(queries) == 1 for _, queries in seen)


class TestRelease:
    def test_every_entry_of_a_text_and_of_no_other(self, store: TenantStore) -> None:
        """Whatever models and chunk contexts they are of: the catalog knows, nobody computes keys."""
        other = TenantStore(store.chunk_store, "u")
        for number in (1, 2, 3):
            store.put(key(number), kv(number), "float32", text="same text")
        store.put(key(4), kv(4), "float32", text="other text")
        other.put(key(5, "u"), kv(5), "float32", text="same text")
        store.put(key(6), kv(6), "float32")
        assert store.release(["same text", "unknown"]) == 1
        assert [number for number in range(1, 7) if key(number) in store] == [4, 6]
        assert store.stats().entries == 2 and is_intact(other, 5)
        assert store.release(["same text"]) == 0
        assert store.release(["other text"]) == other.release(["same text"]) == 1
        assert is_intact(store, 6)

    def test_the_entry_knows_its_text_tokens_and_codec(self, kind: Kind, store: TenantStore) -> None:
        put(store, 1)
        entry = store.catalog.entries_of("t", [key(1)]).get(key(1))
        assert entry is not None and list(CatalogCare(store.catalog.database).entries()) == [entry]
        assert (entry.digest, entry.num_tokens, entry.codec) == (text_digest("text 1"), TOKENS, "float32")
        assert entry.num_bytes == kind.bytes_of()


class TestMemoryTier:
    def tiered(self, folder: Path, memory_bytes: int | None, max_bytes: int | None = None) -> TenantStore:
        tiers = Tiers([MemoryBackend(memory_bytes), DiskBackend(folder)])
        return TenantStore(ChunkStore(Catalog(folder), tiers, max_bytes), "t")

    def memory(self, store: TenantStore) -> list[str]:
        return list(store.chunk_store.tiers.backends[0].list())

    def test_reading_promotes(self, tmp_path: Path) -> None:
        put(opened(tmp_path), 1)
        store = self.tiered(tmp_path, None)
        assert key(1) in store and self.memory(store) == []  # asking is not reading
        assert is_intact(store, 1)
        assert self.memory(store) == [key(1)]
        assert store.chunk_store.tiers.begin(key(1), 8)[2] == 1  # type: ignore[index]  # parts are read outside memory
        other = self.tiered(tmp_path, None)
        assert other.chunk_store.tiers.get_many([key(1)]) and self.memory(other) == [key(1)]
        store.chunk_store.tiers.last.delete([key(1)])
        assert is_intact(store, 1)  # a copy, not a view of the file

    def test_damage_is_not_promoted(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        put(opened(tmp_path), 1)
        store = self.tiered(tmp_path, None)
        disk = store.chunk_store.tiers.last
        disk.put(key(1), b"garbage")
        assert store.get(key(1)) is None and "is damaged" in caplog.text
        assert self.memory(store) == list(disk.list()) == []
        assert [tier.damaged for tier in store.chunk_store.stats().tiers] == [0, 1]
        put(store, 1)
        disk.put(key(1), b"garbage")
        assert is_intact(store, 1), "from memory"
        assert store.drop_unreadable([key(1)]) == 1 and self.memory(store) == []

    def test_counters_of_each_tier(self, tmp_path: Path) -> None:
        put(opened(tmp_path), 1)
        store = self.tiered(tmp_path, None)
        for _ in range(3):
            assert is_intact(store, 1)
        memory, disk = store.chunk_store.stats().tiers
        assert (memory.name, memory.hits, memory.misses, memory.bytes) == ("memory", 2, 1, size())
        assert (disk.name, disk.hits, disk.misses, disk.bytes) == ("disk", 1, 0, BLOCK)
        assert memory.read_s > 0 and disk.read_s > 0
        store.chunk_store.tiers.count_hit(1)  # what is read in parts
        memory, disk = store.chunk_store.stats().tiers
        assert (memory.hits, memory.misses, disk.hits) == (2, 2, 2)

    def test_a_copy_that_fails_leaves_no_older_one(self, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
        store = self.tiered(tmp_path, None)
        put(store, 1)

        def fails(*_: Any) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(MemoryBackend, "put", fails)
        put(store, 1)
        assert self.memory(store) == [] and "tier memory has no copy" in caplog.text and is_intact(store, 1)

    def test_use_in_memory_protects_from_eviction_on_disk(self, tmp_path: Path) -> None:
        store = self.tiered(tmp_path, 10 * size(), 3 * BLOCK)
        put(store, 1, 2, 3)
        for number in (4, 5):
            assert is_intact(store, 1)
            put(store, number)
        assert is_intact(opened(tmp_path), 1)

    @pytest.mark.parametrize("how", ["released", "dropped", "evicted"])
    def test_what_another_process_deleted_is_not_served(self, tmp_path: Path, how: str) -> None:
        """A text that was released must not live on in the memory of a server."""
        store, other = self.tiered(tmp_path, None), opened(tmp_path)
        put(store, 1)
        assert is_intact(store, 1) and self.memory(store) == [key(1)]
        whole = other.chunk_store
        others = {"dropped": lambda: whole.drop_tenant("t"), "evicted": lambda: whole.set_limit(1)}
        assert {"released": lambda: other.release(["text 1"]), **others}[how]() == 1
        assert store.get(key(1)) is None and self.memory(store) == []


class TestOldFormat:
    @pytest.mark.parametrize("files", [["index.sqlite3"], ["chunks/ab/abcd.safetensors"]])
    def test_is_refused_with_the_command_to_run(self, tmp_path: Path, files: list[str]) -> None:
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(b"")
        looks: list[Callable[[], object]] = [lambda: ChunkStore.open(tmp_path), lambda: is_store(tmp_path)]
        for look in looks:
            with pytest.raises(StoreError, match="cacheclip ingest PATH --store NEW_FOLDER.*index.sqlite3"):
                look()
        assert not (tmp_path / "catalog.sqlite3").exists()

    def test_what_is_a_store(self, tmp_path: Path) -> None:
        assert not is_store(tmp_path) and not is_store(tmp_path / "nowhere")
        store = opened(tmp_path)
        assert not is_store(tmp_path) and list(tmp_path.iterdir()) == []  # nothing was written
        put(store, 1)
        assert is_store(tmp_path)
        ChunkStore.open(tmp_path)
