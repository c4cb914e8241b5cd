"""What every chunk-cache store promises: one class of tests, inherited by each store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.store import (
    CODECS,
    ChunkEntry,
    ChunkStore,
    DiskStore,
    MemoryStore,
    TieredStore,
    chunk_key,
    decode,
    encode,
    keeps,
)

TOKENS = 4
ENTRY_BYTES = 2 * 2 * 2 * TOKENS * 4 * 4  # layers, keys and values, heads, tokens, head_dim, float32


def key(number: int) -> str:
    return chunk_key(model_fingerprint="m", prefix_ids=[1], chunk_ids=[number], rope_pin="", namespace="t")


def kv(number: int, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 2, 2, tokens, 4, generator=generator).to(dtype)


def entry(number: int, tokens: int = TOKENS) -> ChunkEntry:
    return encode(kv(number, tokens), "float32")


def found(store: ChunkStore, number: int) -> torch.Tensor:
    got = store.get(key(number))
    assert got is not None, f"entry {number} is gone"
    return decode(got)


class StoreConformance:
    """Subclasses say how to open a store; ``again`` opens the same one a second time where that means something."""

    def open(self, folder: Path, max_bytes: int | None = None) -> ChunkStore:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> ChunkStore:
        return self.open(tmp_path)

    @pytest.mark.parametrize("codec", list(CODECS))
    def test_round_trip_is_lossless(self, store: ChunkStore, codec: str) -> None:
        """Bit for bit, odd values included."""
        written = kv(1, dtype=CODECS[codec])
        written[0, 0, 0, 0] = torch.tensor([float("inf"), float("-inf"), -0.0, 6e-8]).to(CODECS[codec])
        store.put(key(1), encode(written, codec))
        got = store.get(key(1))
        assert got is not None and got.codec == codec
        read = decode(got)
        assert read.dtype == CODECS[codec] and read.shape == written.shape
        assert torch.equal(read.contiguous().view(torch.uint8), written.view(torch.uint8))
        assert got.num_bytes == written.numel() * written.element_size() and got.num_tokens == TOKENS

    def test_non_contiguous_kv(self, store: ChunkStore) -> None:
        written = kv(1).transpose(2, 4)
        store.put(key(1), encode(written, "float32"))
        assert torch.equal(found(store, 1), written)

    def test_what_was_put_cannot_be_changed_from_outside(self, store: ChunkStore) -> None:
        written = kv(1)
        store.put(key(1), encode(written, "float32"))
        expected = written.clone()
        written.zero_()
        assert torch.equal(found(store, 1), expected)

    def test_miss_is_none(self, store: ChunkStore) -> None:
        assert store.get(key(1)) is None
        assert key(1) not in store
        assert list(store.keys()) == []

    def test_contains(self, store: ChunkStore) -> None:
        store.put(key(1), entry(1))
        assert key(1) in store and key(2) not in store
        assert 7 not in store and None not in store

    def test_delete(self, store: ChunkStore) -> None:
        store.put(key(1), entry(1))
        assert store.delete(key(1)) is True
        assert store.delete(key(1)) is False
        assert store.get(key(1)) is None and key(1) not in store and list(store.keys()) == []
        assert store.stats().bytes == 0
        store.put(key(1), entry(1))
        assert torch.equal(found(store, 1), kv(1))

    def test_overwrite(self, store: ChunkStore) -> None:
        store.put(key(1), entry(1))
        store.put(key(1), entry(2))
        assert torch.equal(found(store, 1), kv(2))
        assert store.stats().entries == 1 and store.stats().bytes == ENTRY_BYTES

    def test_overwrite_counts_the_new_size(self, store: ChunkStore) -> None:
        store.put(key(1), entry(1))
        store.put(key(1), entry(1, tokens=3 * TOKENS))
        assert store.stats().bytes == 3 * ENTRY_BYTES
        assert found(store, 1).shape[3] == 3 * TOKENS

    def test_keys_least_recently_used_first(self, store: ChunkStore) -> None:
        for number in (1, 2, 3):
            store.put(key(number), entry(number))
        assert list(store.keys()) == [key(1), key(2), key(3)]
        found(store, 1)
        assert list(store.keys()) == [key(2), key(3), key(1)]
        assert key(2) in store  # asking is not using
        assert list(store.keys()) == [key(2), key(3), key(1)]
        store.put(key(2), entry(2))
        assert list(store.keys()) == [key(3), key(1), key(2)]

    def test_least_recently_used_is_evicted(self, tmp_path: Path) -> None:
        store = self.open(tmp_path, 3 * ENTRY_BYTES)
        for number in (1, 2, 3):
            store.put(key(number), entry(number))
        found(store, 1)
        store.put(key(4), entry(4))
        assert key(2) not in store and store.get(key(2)) is None
        for number in (1, 3, 4):
            assert torch.equal(found(store, number), kv(number))
        assert store.stats().evictions == 1 and store.stats().bytes == 3 * ENTRY_BYTES

    def test_bytes_never_above_the_limit(self, tmp_path: Path) -> None:
        limit = 5 * ENTRY_BYTES + 17
        store = self.open(tmp_path, limit)
        for number in range(30):
            store.put(key(number % 3), entry(number, tokens=TOKENS * (1 + number % 4)))
            stats = store.stats()
            assert stats.bytes <= limit and stats.max_bytes == limit
            actual = sum(e.num_bytes for k in store.keys() if (e := store.get(k)) is not None)  # noqa: SIM118
            assert actual == stats.bytes and actual <= limit
            assert key(number % 3) in store

    def test_entry_above_the_limit_is_not_kept(self, tmp_path: Path) -> None:
        store = self.open(tmp_path, 2 * ENTRY_BYTES)
        store.put(key(1), entry(1))
        store.put(key(2), entry(2, tokens=3 * TOKENS))
        assert store.get(key(2)) is None and key(2) not in store
        assert torch.equal(found(store, 1), kv(1))  # and nothing was evicted for it
        assert store.stats().evictions == 0

    def test_limit_of_zero_keeps_nothing(self, tmp_path: Path) -> None:
        store = self.open(tmp_path, 0)
        store.put(key(1), entry(1))
        assert store.get(key(1)) is None and store.stats().bytes == 0

    def test_negative_limit_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="max_bytes"):
            self.open(tmp_path, -1)

    def test_stats(self, store: ChunkStore) -> None:
        store.put(key(1), entry(1))
        store.put(key(2), entry(2))
        found(store, 1)
        found(store, 1)
        store.get(key(9))
        stats = store.stats()
        assert (stats.entries, stats.bytes, stats.hits, stats.misses) == (2, 2 * ENTRY_BYTES, 2, 1)
        assert stats.max_bytes is None and stats.evictions == 0
        assert stats.to_dict()["hits"] == 2

    def test_usable_after_close(self, store: ChunkStore) -> None:
        store.put(key(1), entry(1))
        store.close()
        store.put(key(2), entry(2))
        assert torch.equal(found(store, 2), kv(2))
        assert torch.equal(found(store, 1), kv(1))
        store.close()
        store.close()

    @pytest.mark.parametrize("limit", [None, 4 * ENTRY_BYTES])
    def test_threads_hammering(self, tmp_path: Path, limit: int | None) -> None:
        """Whatever a thread reads under a key is that key's KV, whole."""
        store = self.open(tmp_path, limit)
        problems: list[str] = []

        def work(seed: int) -> None:
            try:
                for step in range(25):
                    number = (seed * 7 + step * 3) % 8
                    if step % 5 == 4:
                        store.delete(key(number))
                    elif step % 2:
                        store.put(key(number), entry(number))
                    elif (got := store.get(key(number))) is not None and not torch.equal(decode(got), kv(number)):
                        problems.append(f"wrong KV under {number}")
                    list(store.keys())
                    store.stats()
            except BaseException as error:
                problems.append(repr(error))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        for number in range(8):
            store.put(key(number), entry(number))
        assert limit is None or store.stats().bytes <= limit
        assert torch.equal(found(store, 7), kv(7))
        for present in store.keys():  # noqa: SIM118 - not a dict
            assert present in store


class TestMemoryStore(StoreConformance):
    def open(self, folder: Path, max_bytes: int | None = None) -> ChunkStore:
        return MemoryStore(max_bytes)


class TestDiskStore(StoreConformance):
    def open(self, folder: Path, max_bytes: int | None = None) -> ChunkStore:
        return DiskStore(folder / "store", max_bytes)


class TestTieredStore(StoreConformance):
    def open(self, folder: Path, max_bytes: int | None = None) -> ChunkStore:
        return TieredStore([MemoryStore(max_bytes), DiskStore(folder / "store", max_bytes)])

    def test_reading_promotes(self, tmp_path: Path) -> None:
        memory, disk = MemoryStore(), DiskStore(tmp_path / "store")
        disk.put(key(1), entry(1))
        store = TieredStore([memory, disk])
        assert torch.equal(found(store, 1), kv(1))
        assert key(1) in memory
        disk.path_of(key(1)).unlink()
        assert torch.equal(found(store, 1), kv(1))  # our own copy, not a view of the file

    def test_small_memory_tier_before_a_large_disk(self, tmp_path: Path) -> None:
        memory, disk = MemoryStore(2 * ENTRY_BYTES), DiskStore(tmp_path / "store")
        store = TieredStore([memory, disk])
        for number in range(6):
            store.put(key(number), entry(number))
        assert memory.stats().entries == 2 and store.stats().entries == 6
        for number in range(6):
            assert torch.equal(found(store, number), kv(number))

    def test_overwritten_by_one_too_large_for_the_memory_tier(self, tmp_path: Path) -> None:
        """The faster tier must not go on showing what the last tier no longer holds."""
        store = TieredStore([MemoryStore(ENTRY_BYTES), DiskStore(tmp_path / "store")])
        store.put(key(1), entry(1))
        store.put(key(1), entry(2, tokens=2 * TOKENS))
        assert torch.equal(found(store, 1), kv(2, tokens=2 * TOKENS))

    def test_use_in_memory_protects_from_eviction_on_disk(self, tmp_path: Path) -> None:
        store = TieredStore([MemoryStore(10 * ENTRY_BYTES), DiskStore(tmp_path / "store", 3 * ENTRY_BYTES)])
        for number in (1, 2, 3):
            store.put(key(number), entry(number))
        for number in (4, 5):
            found(store, 1)  # the hot one
            store.put(key(number), entry(number))
        assert torch.equal(found(TieredStore([DiskStore(tmp_path / "store")]), 1), kv(1))

    def test_no_tier_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="tier"):
            TieredStore([])


class TestCodecs:
    def test_unknown_codec(self) -> None:
        with pytest.raises(ConfigurationError, match="float32, bfloat16, float16"):
            encode(kv(1), "int3")

    @pytest.mark.parametrize(
        ("codec", "wanted", "enough"),
        [
            ("float32", "float32", True),
            ("float32", "bfloat16", True),
            ("float32", "float16", True),
            ("bfloat16", "bfloat16", True),
            ("bfloat16", "float32", False),
            ("bfloat16", "float16", False),
            ("float16", "bfloat16", False),
        ],
    )
    def test_keeps(self, codec: str, wanted: str, enough: bool) -> None:
        assert keeps(codec, wanted) is enough

    @pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
    def test_narrow_values_survive_float32(self, narrow: str) -> None:
        written = kv(1, dtype=CODECS[narrow])
        assert torch.equal(decode(encode(written, "float32")).to(CODECS[narrow]), written)
