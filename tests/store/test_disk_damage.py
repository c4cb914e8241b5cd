"""The disk store when things go wrong: damage, crashes, other processes. A bad entry is a miss, never wrong KV."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cacheclip_rag.errors import StoreError
from cacheclip_rag.store import DiskStore, chunk_key, decode, encode


def key(number: int) -> str:
    return chunk_key(model_fingerprint="m", prefix_ids=[1], chunk_ids=[number], rope_pin="", namespace="t")


def kv(number: int) -> torch.Tensor:
    return torch.randn(2, 2, 2, 16, 4, generator=torch.Generator().manual_seed(number))


def put(store: DiskStore, *numbers: int) -> None:
    for number in numbers:
        store.put(key(number), encode(kv(number), "float32"))


def is_intact(store: DiskStore, number: int) -> bool:
    got = store.get(key(number))
    return got is not None and torch.equal(decode(got), kv(number))


def sql(store: DiskStore, statement: str, *arguments: object) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(store.folder / "index.sqlite3")
    try:
        with connection:
            return connection.execute(statement, arguments).fetchall()
    finally:
        connection.close()


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = DiskStore(tmp_path / "store")
    put(store, 1, 2)
    return store


def truncated(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def cut_in_the_header(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def flipped_data_bit(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)


def flipped_header_bit(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[12] ^= 0x10
    path.write_bytes(content)


def zeroed_block(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-64:] = bytes(64)
    path.write_bytes(content)


def garbage(path: Path, other: Path) -> None:
    path.write_bytes(os.urandom(4096))


def huge_header_length(path: Path, other: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def payload_of_another_key(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def appended(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"tail")


def foreign_safetensors(path: Path, other: Path) -> None:
    save_file({"weight": torch.ones(3)}, path)


def older_format(path: Path, other: Path) -> None:
    save_file({"kv": kv(1)}, path, metadata={"format": "0", "key": key(1), "codec": "float32", "checksum": "0"})


def right_header_without_kv(path: Path, other: Path) -> None:
    """A checksum of nothing over nothing, under the right key."""
    from cacheclip_rag.store.disk import _checksum

    metadata = {"format": "1", "key": key(1), "codec": "float32", "checksum": _checksum({"other": torch.ones(2)})}
    save_file({"other": torch.ones(2)}, path, metadata=metadata)


DAMAGE = [
    truncated,
    cut_in_the_header,
    empty,
    flipped_data_bit,
    flipped_header_bit,
    zeroed_block,
    garbage,
    huge_header_length,
    payload_of_another_key,
    appended,
    foreign_safetensors,
    older_format,
    right_header_without_kv,
]


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
    @pytest.mark.parametrize("reopened", [False, True], ids=["same", "reopened"])
    def test_is_a_miss_with_one_warning_and_removed(
        self,
        store: DiskStore,
        damage: Callable[[Path, Path], None],
        reopened: bool,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        damage(store.path_of(key(1)), store.path_of(key(2)))
        if reopened:
            store.close()
            store = DiskStore(store.folder)
        with caplog.at_level(logging.WARNING, logger="cacheclip_rag"):
            assert store.get(key(1)) is None
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert key(1)[:12] in caplog.text
        assert not store.path_of(key(1)).exists() and key(1) not in store
        assert list(store.keys()) == [key(2)] and store.stats().entries == 1
        caplog.clear()
        assert store.get(key(1)) is None and not caplog.records  # the second time it is an ordinary miss
        assert is_intact(store, 2)
        put(store, 1)
        assert is_intact(store, 1)

    def test_swapped_files(self, store: DiskStore, tmp_path: Path) -> None:
        first, second = store.path_of(key(1)), store.path_of(key(2))
        aside = tmp_path / "aside"
        first.rename(aside)
        second.rename(first)
        aside.rename(second)
        assert store.get(key(1)) is None and store.get(key(2)) is None
        assert list(store.keys()) == []

    def test_counts_as_a_miss(self, store: DiskStore) -> None:
        truncated(store.path_of(key(1)), store.path_of(key(2)))
        store.get(key(1))
        assert (store.stats().hits, store.stats().misses) == (0, 1)

    def test_every_single_flipped_byte_is_caught(self, store: DiskStore) -> None:
        """Any byte of the file, header and data; padding spaces in the header are the only ones that may not matter."""
        path = store.path_of(key(1))
        whole = path.read_bytes()
        for position in range(0, len(whole), 13):
            content = bytearray(whole)
            content[position] ^= 0x01
            path.write_bytes(content)
            got = store.get(key(1))
            assert got is None or torch.equal(decode(got), kv(1)), position
            path.write_bytes(whole)
        assert is_intact(store, 1)


class TestCrashes:
    def test_survives_reopening(self, store: DiskStore) -> None:
        store.close()
        again = DiskStore(store.folder)
        assert list(again.keys()) == [key(1), key(2)]
        assert is_intact(again, 1) and is_intact(again, 2)
        assert again.stats().entries == 2

    def test_leftover_temporary_file_is_no_entry(self, store: DiskStore) -> None:
        folder = store.path_of(key(1)).parent
        (folder / ".tmp-abc123.safetensors").write_bytes(store.path_of(key(1)).read_bytes()[:100])
        again = DiskStore(store.folder)
        assert list(again.keys()) == [key(1), key(2)] and again.stats().entries == 2
        assert is_intact(again, 1)

    def test_killed_between_rename_and_row_is_adopted(self, store: DiskStore) -> None:
        sql(store, "DELETE FROM entries WHERE key = ?", key(1))
        again = DiskStore(store.folder)
        assert list(again.keys()) == [key(2)]
        assert key(1) in again and is_intact(again, 1)
        assert set(again.keys()) == {key(1), key(2)} and again.stats().entries == 2

    def test_lost_index_is_found_again_by_name(self, store: DiskStore) -> None:
        store.close()
        for file in store.folder.glob("index.sqlite3*"):
            file.unlink()
        again = DiskStore(store.folder)
        assert is_intact(again, 1) and is_intact(again, 2)
        assert again.stats().entries == 2

    def test_payloads_have_the_permissions_of_any_new_file(self, store: DiskStore, tmp_path: Path) -> None:
        """Who ingests and who answers may be two users of one group: the umask decides, as elsewhere."""
        (tmp_path / "any").touch()
        assert store.path_of(key(1)).stat().st_mode == (tmp_path / "any").stat().st_mode

    def test_row_without_file_is_a_miss(self, store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
        store.path_of(key(1)).unlink()
        assert key(1) not in store
        with caplog.at_level(logging.WARNING, logger="cacheclip_rag"):
            assert store.get(key(1)) is None
        assert not caplog.records  # nothing is damaged
        assert list(store.keys()) == [key(2)]

    @pytest.mark.parametrize("error", [OSError(5, "Input/output error"), PermissionError(13, "denied")])
    def test_trouble_while_reading_loses_nothing(
        self, store: DiskStore, error: OSError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An error of the disk says nothing about the file: a miss, a warning, and the entry stays."""
        import cacheclip_rag.store.disk as disk

        def fail(*args: object, **kwargs: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(disk, "safe_open", fail)
            assert store.get(key(1)) is None
        assert "cannot be read" in caplog.text
        assert is_intact(store, 1) and store.stats().entries == 2

    def test_out_of_file_handles_loses_nothing(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """The payload library reports this as a missing file."""
        import cacheclip_rag.store.disk as disk

        def fail(*args: object, **kwargs: object) -> None:
            raise FileNotFoundError("No such file or directory")

        with monkeypatch.context() as patch:
            patch.setattr(disk, "safe_open", fail)
            assert store.get(key(1)) is None
        assert is_intact(store, 1) and store.stats().entries == 2

    def test_failed_write_leaves_nothing(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """No space left at the last moment: an error that says so, the old entries as they were, no leftovers."""
        import cacheclip_rag.store.disk as disk

        def full(tensors: object, path: Path, metadata: object = None) -> None:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(disk, "save_file", full)
            with pytest.raises(StoreError, match="No space left"):
                put(store, 3)
        assert key(3) not in store and store.get(key(3)) is None
        assert not list(store.folder.rglob(".tmp-*"))
        assert is_intact(store, 1) and is_intact(store, 2)

    def test_killed_while_putting(self, tmp_path: Path) -> None:
        """SIGKILL at any moment: what is readable is intact, and the store goes on working."""
        folder = tmp_path / "store"
        program = f"""
import torch
from cacheclip_rag.store import DiskStore, chunk_key, encode
store = DiskStore({str(folder)!r})
number = 0
while True:
    kv = torch.randn(2, 2, 2, 16, 4, generator=torch.Generator().manual_seed(number % 50))
    key = chunk_key(model_fingerprint="m", prefix_ids=[1], chunk_ids=[number % 50], rope_pin="", namespace="t")
    store.put(key, encode(kv, "float32"))
    if number % 7 == 6:
        store.delete(key)
    if number == 20:
        print("going", flush=True)
    number += 1
"""
        for pause in (0.0, 0.013):
            with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == b"going\n"
                time.sleep(pause)
                child.send_signal(signal.SIGKILL)
                child.wait()
            store = DiskStore(folder)
            listed = list(store.keys())
            assert listed
            readable = [n for n in range(50) if key(n) in store]
            assert len(readable) > 5
            assert all(is_intact(store, n) for n in readable)
            for name in listed:
                store.get(name)
            assert store.stats().entries == len(list(store.keys())) == len(readable)
            put(store, 60)
            assert is_intact(store, 60)
            store.delete(key(60))
            store.close()


class TestSharing:
    def test_two_stores_on_one_folder_see_each_other(self, tmp_path: Path) -> None:
        one, other = DiskStore(tmp_path / "store"), DiskStore(tmp_path / "store")
        put(one, 1)
        assert is_intact(other, 1)
        put(other, 2)
        assert is_intact(one, 2)
        assert set(one.keys()) == set(other.keys()) == {key(1), key(2)}
        one.delete(key(1))
        assert other.get(key(1)) is None and key(1) not in other
        assert one.stats().bytes == other.stats().bytes

    def test_a_use_through_one_protects_from_eviction_through_the_other(self, tmp_path: Path) -> None:
        size = encode(kv(0), "float32").num_bytes
        one, other = DiskStore(tmp_path / "store", 2 * size), DiskStore(tmp_path / "store", 2 * size)
        put(one, 1, 2)
        assert is_intact(other, 1)
        put(one, 3)
        assert is_intact(other, 1) and other.get(key(2)) is None

    def test_kv_in_hand_outlives_its_file(self, store: DiskStore) -> None:
        got = store.get(key(1))
        assert got is not None
        store.delete(key(1))
        assert torch.equal(decode(got), kv(1))

    def test_kv_in_hand_outlives_an_overwrite(self, store: DiskStore) -> None:
        got = store.get(key(1))
        assert got is not None
        store.put(key(1), encode(kv(9), "float32"))
        assert torch.equal(decode(got), kv(1))

    def test_works_in_a_forked_child(self, store: DiskStore) -> None:
        assert is_intact(store, 1)
        program = f"""
import os, torch
from cacheclip_rag.store import DiskStore
store = DiskStore({str(store.folder)!r})
assert store.get({key(1)!r}) is not None
child = os.fork()
if child == 0:
    os._exit(0 if store.get({key(2)!r}) is not None else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.get({key(2)!r}) is not None
"""
        subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


class TestUnwritable:
    def test_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a folder")
        store = DiskStore(tmp_path / "file" / "store")
        with pytest.raises(StoreError, match="store"):
            put(store, 1)
        with pytest.raises(StoreError):
            list(store.keys())

    def test_reading_from_it_is_an_error_too(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a folder")
        with pytest.raises(StoreError):
            DiskStore(tmp_path / "file" / "store").get(key(1))

    def test_kernel_folder(self) -> None:
        """Unwritable for root as well, unlike a folder without write permission."""
        with pytest.raises(StoreError):
            put(DiskStore("/proc/cacheclip-store"), 1)

    def test_damaged_index(self, tmp_path: Path) -> None:
        folder = tmp_path / "store"
        folder.mkdir()
        (folder / "index.sqlite3").write_bytes(b"this is no database, " * 100)
        with pytest.raises(StoreError, match="index"):
            DiskStore(folder).stats()

    def test_index_of_another_version(self, store: DiskStore) -> None:
        store.close()
        sql(store, "PRAGMA user_version = 99")
        with pytest.raises(StoreError, match="format 99"):
            DiskStore(store.folder).stats()

    def test_reading_waits_for_no_writer(self, store: DiskStore) -> None:
        other = sqlite3.connect(store.folder / "index.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        assert is_intact(store, 1) and is_intact(store, 2)
        other.execute("ROLLBACK")
        other.close()
        assert time.monotonic() - started < 5.0  # far below the 30 seconds that a writer waits

    def test_opened_by_many_at_once(self, tmp_path: Path) -> None:
        """Nobody mistakes an index that another process is just making for one of another version."""
        code = "import sys; from cacheclip_rag.store import DiskStore; DiskStore(sys.argv[1]).stats()"
        opened = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "new")]) for _ in range(4)]
        assert [process.wait() for process in opened] == [0, 0, 0, 0]
