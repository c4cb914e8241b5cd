"""What a chunk-cache store promises, in memory, on disk, and with a memory tier before the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cacheclip_rag.errors import ConfigurationError, StoreError
from cacheclip_rag.store import ChunkStore, DiskBackend, MemoryBackend, Tiers, is_store
from cacheclip_rag.store.catalog import Catalog
from cacheclip_rag.testing.backends import problems_in_threads
from tests.store.samples import TOKENS, is_intact, key, kv, put, size

Open = Callable[..., ChunkStore]


@pytest.fixture(params=["memory", "disk", "tiered"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens a store; opens the same one again where that means something."""
    folder = None if request.param == "memory" else tmp_path / "store"
    memory_bytes = 3 * size() if request.param == "tiered" else 0
    return lambda max_bytes=None: ChunkStore.open(folder, max_bytes, memory_bytes)


@pytest.fixture
def store(opened: Open) -> ChunkStore:
    return opened()


class TestReadingAndWriting:
    @pytest.mark.parametrize("codec", ["float32", "bfloat16"])
    def test_what_was_put_is_got(self, store: ChunkStore, codec: str) -> None:
        store.put(key(1), kv(1), codec)
        for _ in range(2):  # the second time from the fastest tier
            got = store.get(key(1))
            assert got is not None and got.codec == codec == store.codec_of(key(1))
            assert torch.equal(got.kv, kv(1).to(getattr(torch, codec)))

    def test_what_was_put_cannot_be_changed_from_outside(self, store: ChunkStore) -> None:
        written = kv(1)
        store.put(key(1), written, "float32")
        written.zero_()
        assert is_intact(store, 1)

    def test_miss_is_none(self, store: ChunkStore) -> None:
        assert store.get(key(1)) is None and store.codec_of(key(1)) is None and list(store.keys()) == []

    def test_contains(self, store: ChunkStore) -> None:
        put(store, 1)
        assert key(1) in store and key(2) not in store
        assert 7 not in store and None not in store

    def test_delete(self, store: ChunkStore) -> None:
        put(store, 1)
        assert store.delete(key(1)) is True and store.delete(key(1)) is False
        assert store.get(key(1)) is None and key(1) not in store and list(store.keys()) == []
        assert store.stats().bytes == 0
        put(store, 1)
        assert is_intact(store, 1)

    def test_put_again_replaces_and_counts_the_new_size(self, store: ChunkStore) -> None:
        put(store, 1)
        put(store, 1, tokens=3 * TOKENS)
        assert is_intact(store, 1, tokens=3 * TOKENS)
        assert (store.stats().entries, store.stats().bytes) == (1, size(3 * TOKENS))

    def test_stats(self, store: ChunkStore) -> None:
        put(store, 1, 2)
        for number in (1, 1, 9):
            store.get(key(number))
        stats = store.stats()
        assert (stats.entries, stats.bytes, stats.hits, stats.misses) == (2, 2 * size(), 2, 1)
        assert stats.max_bytes is None and stats.evictions == 0
        assert stats.to_dict()["hits"] == 2

    def test_usable_after_close(self, store: ChunkStore) -> None:
        put(store, 1)
        store.close()
        put(store, 2)
        assert is_intact(store, 1) and is_intact(store, 2)
        store.close()
        store.close()


class TestEviction:
    def test_keys_least_recently_used_first(self, store: ChunkStore) -> None:
        put(store, 1, 2, 3)
        assert list(store.keys()) == [key(1), key(2), key(3)]
        store.get(key(1))
        assert key(2) in store  # asking is not using
        assert list(store.keys()) == [key(2), key(3), key(1)]
        put(store, 2)
        assert list(store.keys()) == [key(3), key(1), key(2)]

    def test_a_clock_that_is_set_back_changes_nothing(self, store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
        put(store, 1)
        monkeypatch.setattr("time.time", lambda: 0.0)
        put(store, 2)
        assert list(store.keys()) == [key(1), key(2)]

    def test_least_recently_used_is_evicted(self, opened: Open) -> None:
        store = opened(3 * size())
        put(store, 1, 2, 3)
        assert is_intact(store, 1)
        put(store, 4)
        assert key(2) not in store and store.get(key(2)) is None
        assert all(is_intact(store, number) for number in (1, 3, 4))
        assert store.stats().evictions == 1 and store.stats().bytes == 3 * size()

    def test_what_was_just_put_stays_though_all_others_are_used_meanwhile(
        self, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By other threads or processes, between writing the entry and making room for it."""
        store = opened(2 * size())
        put(store, 1, 2)
        totals = store.catalog.totals

        def used_meanwhile() -> tuple[int, int]:
            assert is_intact(store, 1) and is_intact(store, 2)
            return totals()

        with monkeypatch.context() as patch:
            patch.setattr(store.catalog, "totals", used_meanwhile)
            put(store, 3)
        assert is_intact(store, 3) and store.stats().evictions == 1

    def test_never_above_the_limit(self, opened: Open) -> None:
        limit = 5 * size() + 17
        store = opened(limit)
        for number in range(30):
            put(store, number % 3, tokens=TOKENS * (1 + number % 4))
            stats = store.stats()
            held = store.tiers.backends[-1].get_many(store.keys())
            assert stats.bytes == sum(memoryview(data).nbytes for data in held.values()) <= limit == stats.max_bytes
            assert key(number % 3) in store

    def test_many_small_entries_make_room_for_a_large_one(self, opened: Open) -> None:
        store = opened(200 * size(1))
        put(store, *range(200), tokens=1)
        put(store, 999, tokens=600)
        assert is_intact(store, 999, tokens=600) and store.stats().bytes <= 200 * size(1)
        assert store.stats().evictions == -(-size(600) // size(1)) and is_intact(store, 199, tokens=1)

    def test_entry_above_the_limit_is_not_kept(self, opened: Open, caplog: pytest.LogCaptureFixture) -> None:
        store = opened(2 * size())
        put(store, 1, 2)
        put(store, 2, tokens=100)
        assert "exceeds the store's limit" in caplog.text
        assert store.get(key(2)) is None and key(2) not in store  # nor is the older version served
        assert is_intact(store, 1) and store.stats().evictions == 0

    def test_limit_of_zero_keeps_nothing(self, opened: Open) -> None:
        store = opened(0)
        put(store, 1)
        assert store.get(key(1)) is None and store.stats().bytes == 0

    def test_negative_limits_are_refused(self, opened: Open, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="max_bytes"):
            opened(-1)
        with pytest.raises(ConfigurationError, match="max_bytes"):
            ChunkStore.open(tmp_path, None, memory_bytes=-1)

    @pytest.mark.parametrize("entries", [None, 4])
    def test_threads(self, opened: Open, entries: int | None) -> None:
        """Whatever a thread reads under a key is that key's KV, whole."""
        limit = None if entries is None else entries * size()
        store = opened(limit)

        def work(seed: int, problems: list[str]) -> None:
            for step in range(25):
                number = (seed * 7 + step * 3) % 8
                if step % 5 == 4:
                    store.delete(key(number))
                elif step % 2:
                    put(store, number)
                elif (got := store.get(key(number))) is not None and not torch.equal(got.kv, kv(number)):
                    problems.append(f"wrong KV under {number}")
                list(store.keys())
                store.stats()

        assert problems_in_threads(work) == []
        put(store, *range(8))
        assert limit is None or store.stats().bytes <= limit
        assert is_intact(store, 7) and all(present in store for present in store.keys())  # noqa: SIM118 - not a dict


class TestRelease:
    def test_every_entry_of_a_text_and_of_no_other(self, store: ChunkStore) -> None:
        """Whatever models and chunk contexts they are of: the catalog knows, nobody computes keys."""
        for number in (1, 2, 3):
            store.put(key(number), kv(number), "float32", namespace="t", text="same text")
        store.put(key(4), kv(4), "float32", namespace="t", text="other text")
        store.put(key(5), kv(5), "float32", namespace="u", text="same text")
        store.put(key(6), kv(6), "float32", namespace="t")
        assert store.release("t", ["same text", "unknown"]) == 1
        assert [number for number in range(1, 7) if key(number) in store] == [4, 5, 6]
        assert store.stats().entries == 3
        assert store.release("t", ["same text"]) == 0
        assert store.release("t", ["other text"]) == store.release("u", ["same text"]) == 1
        assert is_intact(store, 6)

    def test_an_entry_that_was_used_still_belongs_to_its_text(self, store: ChunkStore) -> None:
        put(store, 1)
        assert is_intact(store, 1)
        assert store.release("t", ["text 1"]) == 1 and store.get(key(1)) is None

    def test_an_adopted_payload_is_released_with_its_text(self, tmp_path: Path) -> None:
        store = ChunkStore.open(tmp_path / "store")
        put(store, 1)
        store.catalog.remove([key(1)])  # its writer was killed before it wrote the entry
        assert is_intact(store, 1)
        assert store.release("t", ["text 1"]) == 1 and store.get(key(1)) is None


class TestMemoryTier:
    def tiered(self, folder: Path, memory_bytes: int | None, max_bytes: int | None = None) -> ChunkStore:
        return ChunkStore(Catalog(folder), Tiers([MemoryBackend(memory_bytes), DiskBackend(folder / "kv")]), max_bytes)

    def test_reading_promotes(self, tmp_path: Path) -> None:
        put(ChunkStore.open(tmp_path), 1)
        store = self.tiered(tmp_path, None)
        assert key(1) in store and list(store.tiers.backends[0].list()) == []  # asking is not reading
        assert is_intact(store, 1)
        assert list(store.tiers.backends[0].list()) == [key(1)]
        store.tiers.backends[1].delete([key(1)])
        assert is_intact(store, 1)  # a copy, not a view of the file

    def test_damage_is_not_promoted(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        store = self.tiered(tmp_path, None)
        disk = store.tiers.backends[1]
        disk.put(key(1), b"garbage")
        assert store.get(key(1)) is None and "is damaged" in caplog.text
        assert list(store.tiers.backends[0].list()) == list(disk.list()) == []

    def test_small_memory_before_a_large_disk(self, tmp_path: Path) -> None:
        store = self.tiered(tmp_path, 2 * size())
        put(store, *range(6))
        assert len(list(store.tiers.backends[0].list())) == 2 and store.stats().entries == 6
        assert all(is_intact(store, number) for number in range(6))

    def test_use_in_memory_protects_from_eviction_on_disk(self, tmp_path: Path) -> None:
        store = self.tiered(tmp_path, 10 * size(), 3 * size())
        put(store, 1, 2, 3)
        for number in (4, 5):
            assert is_intact(store, 1)
            put(store, number)
        assert is_intact(ChunkStore.open(tmp_path), 1)

    def test_evicted_from_disk_is_gone_from_memory(self, tmp_path: Path) -> None:
        store = self.tiered(tmp_path, None, 2 * size())
        put(store, 1, 2, 3)
        assert store.get(key(1)) is None


class TestOldFormat:
    @pytest.mark.parametrize("files", [["index.sqlite3"], ["chunks/ab/abcd.safetensors"]])
    def test_is_refused_with_the_command_to_run(self, tmp_path: Path, files: list[str]) -> None:
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(b"")
        for look in (lambda: ChunkStore.open(tmp_path), lambda: is_store(tmp_path)):
            with pytest.raises(StoreError, match="cacheclip ingest PATH --store NEW_FOLDER.*index.sqlite3"):
                look()
        assert not (tmp_path / "catalog.sqlite3").exists()

    def test_what_is_a_store(self, tmp_path: Path) -> None:
        assert not is_store(tmp_path) and not is_store(tmp_path / "nowhere")
        store = ChunkStore.open(tmp_path)
        assert not is_store(tmp_path)  # nothing was written
        put(store, 1)
        assert is_store(tmp_path)
        ChunkStore.open(tmp_path)
