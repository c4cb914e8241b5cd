"""The store on disk when things go wrong: damage, crashes, other processes. A bad payload is a miss, never wrong KV."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

from cacheclip_rag.errors import StoreError
from cacheclip_rag.store import ChunkStore, DiskBackend
from tests.store.samples import is_intact, key, kv, put, size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> ChunkStore:
    store = ChunkStore.open(folder)
    put(store, 1, 2)
    return store


@pytest.fixture
def first(store: ChunkStore, folder: Path) -> Path:
    """The payload of entry 1."""
    return path(folder, 1)


def path(folder: Path, number: int) -> Path:
    return folder / "kv" / key(number)[:2] / f"{key(number)}.kv"


def sql(folder: Path, statement: str, *arguments: object) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(folder / "catalog.sqlite3")
    try:
        with connection:
            return connection.execute(statement, arguments).fetchall()
    finally:
        connection.close()


def with_header(content: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    """A frame with another header, and the right checksum for it: written by a program, not by an accident."""
    magic, version, length, _ = struct.unpack_from("<8sIIQ", content)
    header = json.loads(content[24 : 24 + length])
    change(header)
    text = json.dumps(header).encode().ljust(length)
    return (
        struct.pack("<8sIIQ", magic, version, len(text), xxhash.xxh3_64_intdigest(text)) + text + content[24 + length :]
    )


def flip(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 0x10
    return bytes(changed)


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "truncated": lambda content, other: content[:-5],
    "cut in the header": lambda content, other: content[:60],
    "cut in the preamble": lambda content, other: content[:20],
    "empty": lambda content, other: b"",
    "flipped bit of data": lambda content, other: flip(content, -3),
    "flipped bit of the header": lambda content, other: flip(content, 40),
    "zeroed block": lambda content, other: content[:-64] + bytes(64),
    "garbage": lambda content, other: os.urandom(4096),
    "huge header": lambda content, other: content[:12] + b"\xff\xff\xff\xff" + content[16:],
    "of another key": lambda content, other: other,
    "appended": lambda content, other: content + b"tail",
    "another version": lambda content, other: content[:8] + b"\x63" + content[9:],
    "another magic": lambda content, other: b"safetens" + content[8:],
    "unknown codec": lambda content, other: with_header(content, lambda header: header.update(codec="int3")),
    "other shape": lambda content, other: with_header(content, lambda header: header.update(shape=[2, 2, 2, 2, 8, 1])),
    "fewer layers": lambda content, other: with_header(content, lambda header: header.update(shape=[1, 2, 4, 4, 4])),
    "shape of text": lambda content, other: with_header(content, lambda header: header.update(shape="abcde")),
    "header without a key": lambda content, other: with_header(content, lambda header: header.pop("key") and None),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
    @pytest.mark.parametrize("reopened", [False, True], ids=["same", "reopened"])
    def test_is_a_miss_with_one_warning_and_removed(
        self,
        store: ChunkStore,
        folder: Path,
        damage: Callable[[bytes, bytes], bytes],
        reopened: bool,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        path(folder, 1).write_bytes(damage(path(folder, 1).read_bytes(), path(folder, 2).read_bytes()))
        if reopened:
            store.close()
            store = ChunkStore.open(folder)
        with caplog.at_level(logging.WARNING, logger="cacheclip_rag"):
            assert store.get(key(1)) is None
        assert [record.levelname for record in caplog.records] == ["WARNING"] and key(1)[:12] in caplog.text
        assert not path(folder, 1).exists() and key(1) not in store
        assert list(store.keys()) == [key(2)] and store.stats().entries == 1
        assert (store.stats().hits, store.stats().misses) == (0, 1)
        caplog.clear()
        assert store.get(key(1)) is None and not caplog.records  # the second time it is an ordinary miss
        assert is_intact(store, 2)
        put(store, 1)
        assert is_intact(store, 1)

    def test_what_codec_of_says_of_damage(self, store: ChunkStore, first: Path) -> None:
        """A damaged header counts as missing, and nothing is removed: that is for get to say and do."""
        first.write_bytes(flip(first.read_bytes(), 40))
        assert store.codec_of(key(1)) is None and first.exists()

    def test_swapped_files(self, store: ChunkStore, folder: Path) -> None:
        one, other = path(folder, 1), path(folder, 2)
        contents = one.read_bytes(), other.read_bytes()
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        assert store.get(key(1)) is None and store.get(key(2)) is None
        assert list(store.keys()) == []

    def test_what_cannot_be_removed_is_a_miss(
        self, store: ChunkStore, first: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        first.write_bytes(b"garbage")

        def denied(*arguments: object, **options: object) -> None:
            raise PermissionError(13, "denied")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", denied)
            assert store.get(key(1)) is None
        assert "could not be removed" in caplog.text and is_intact(store, 2)


class TestCrashes:
    def test_survives_reopening(self, store: ChunkStore, folder: Path) -> None:
        store.close()
        again = ChunkStore.open(folder)
        assert list(again.keys()) == [key(1), key(2)] and again.stats().entries == 2
        assert is_intact(again, 1) and is_intact(again, 2)

    def test_temporary_file_of_a_killed_process_is_no_entry(self, store: ChunkStore, folder: Path) -> None:
        path(folder, 1).with_name(".tmp-abc123.kv").write_bytes(path(folder, 1).read_bytes()[:100])
        again = ChunkStore.open(folder)
        assert list(again.keys()) == [key(1), key(2)] and again.stats().entries == 2
        assert is_intact(again, 1)

    def test_killed_between_payload_and_entry_is_adopted(self, store: ChunkStore, folder: Path) -> None:
        sql(folder, "DELETE FROM entries WHERE key = ?", key(1))
        again = ChunkStore.open(folder)
        assert list(again.keys()) == [key(2)]
        assert key(1) in again and is_intact(again, 1)
        assert set(again.keys()) == {key(1), key(2)} and again.stats().bytes == 2 * size()

    def test_killed_while_replacing_the_entry_follows_the_payload(self, store: ChunkStore, folder: Path) -> None:
        sql(folder, "UPDATE entries SET bytes = 7, codec = 'bfloat16' WHERE key = ?", key(1))
        again = ChunkStore.open(folder)
        assert again.codec_of(key(1)) == "float32" and is_intact(again, 1) and again.stats().bytes == 2 * size()

    def test_lost_catalog_is_filled_again_by_reading(self, store: ChunkStore, folder: Path) -> None:
        store.close()
        for file in folder.glob("catalog.sqlite3*"):
            file.unlink()
        again = ChunkStore.open(folder)
        assert is_intact(again, 1) and is_intact(again, 2)
        assert again.stats().entries == 2 and again.release("t", ["text 1", "text 2"]) == 2

    def test_entry_without_payload_is_a_miss(
        self, store: ChunkStore, first: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        first.unlink()
        assert key(1) not in store
        with caplog.at_level(logging.WARNING, logger="cacheclip_rag"):
            assert store.get(key(1)) is None
        assert not caplog.records  # nothing is damaged
        assert list(store.keys()) == [key(2)]

    @pytest.mark.parametrize(
        "error",
        [OSError(5, "Input/output error"), PermissionError(13, "denied"), OSError(24, "Too many open files")],
        ids=["broken disk", "denied", "out of handles"],
    )
    def test_trouble_while_reading_loses_nothing(
        self, store: ChunkStore, error: OSError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An error of the disk says nothing about the file: a miss, a warning, and the entry stays."""

        def fail(*arguments: object, **options: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", fail)
            assert store.get(key(1)) is None and store.codec_of(key(1)) is None
        assert "cannot be read" in caplog.text
        assert is_intact(store, 1) and store.stats().entries == 2

    def test_full_disk_leaves_everything_as_it_was(
        self, store: ChunkStore, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No space left at the last moment: an error that says so, the old entries as they were, no leftovers."""

        def full(path: Path, data: bytes) -> None:
            with path.open("wb") as file:
                file.write(b"half")
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            with pytest.raises(StoreError, match="No space left.*nothing stored before was changed"):
                put(store, 3)
            with pytest.raises(StoreError):
                store.put(key(1), kv(9), "float32")
        assert key(3) not in store and store.get(key(3)) is None
        assert not list(folder.rglob(".tmp-*"))
        assert is_intact(store, 1) and is_intact(store, 2)

    def test_killed_while_putting(self, folder: Path) -> None:
        """SIGKILL at any moment: what is readable is intact, and the store goes on working."""
        program = f"""
from tests.store.samples import key, put
from cacheclip_rag.store import ChunkStore
store = ChunkStore.open({str(folder)!r})
number = 0
while True:
    put(store, number % 50)
    if number % 7 == 6:
        store.delete(key(number % 50))
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
            store = ChunkStore.open(folder)
            listed = list(store.keys())
            assert listed
            readable = [number for number in range(50) if key(number) in store]
            assert len(readable) > 5 and all(is_intact(store, number) for number in readable)
            for name in listed:
                store.get(name)
            assert store.stats().entries == len(list(store.keys())) == len(readable)
            put(store, 60)
            assert is_intact(store, 60)
            store.delete(key(60))
            store.close()


class TestSharing:
    def test_two_stores_on_one_folder_see_each_other(self, folder: Path) -> None:
        one, other = ChunkStore.open(folder), ChunkStore.open(folder)
        put(one, 1)
        assert is_intact(other, 1)
        put(other, 2)
        assert is_intact(one, 2)
        assert set(one.keys()) == set(other.keys()) == {key(1), key(2)}
        assert one.release("t", ["text 1"]) == 1
        assert other.get(key(1)) is None and key(1) not in other
        assert one.stats().bytes == other.stats().bytes == size()

    def test_a_use_through_one_protects_from_eviction_through_the_other(self, folder: Path) -> None:
        one, other = ChunkStore.open(folder, 2 * size()), ChunkStore.open(folder, 2 * size())
        put(one, 1, 2)
        assert is_intact(other, 1)
        put(one, 3)
        assert is_intact(other, 1) and other.get(key(2)) is None

    def test_kv_in_hand_outlives_its_payload(self, store: ChunkStore) -> None:
        first, second = store.get(key(1)), store.get(key(2))
        assert first is not None and second is not None
        store.delete(key(1))
        store.put(key(2), kv(9), "float32")
        assert torch.equal(first.kv, kv(1)) and torch.equal(second.kv, kv(2))

    def test_works_in_a_forked_child(self, store: ChunkStore, folder: Path) -> None:
        program = f"""
import os
from tests.store.samples import is_intact, put
from cacheclip_rag.store import ChunkStore
store = ChunkStore.open({str(folder)!r}, memory_bytes=10_000)
assert is_intact(store, 1)
child = os.fork()
if child == 0:
    put(store, 3)
    os._exit(0 if is_intact(store, 1) and is_intact(store, 2) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert is_intact(store, 2) and is_intact(store, 3)
"""
        subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)

    def test_reading_waits_for_no_writer(self, store: ChunkStore, folder: Path) -> None:
        other = sqlite3.connect(folder / "catalog.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        assert is_intact(store, 1) and is_intact(store, 2)
        other.execute("ROLLBACK")
        other.close()
        assert time.monotonic() - started < 5.0  # far below the 30 seconds that a writer waits

    def test_opened_by_many_at_once(self, folder: Path) -> None:
        """Nobody mistakes a catalog that another process is just making for one of another version."""
        code = "import sys; from cacheclip_rag.store import ChunkStore; ChunkStore.open(sys.argv[1]).stats()"
        opened = [subprocess.Popen([sys.executable, "-c", code, str(folder)]) for _ in range(4)]
        assert [process.wait() for process in opened] == [0, 0, 0, 0]


class TestUnusable:
    def test_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a folder")
        store = ChunkStore.open(tmp_path / "file" / "store")
        for use in (lambda: put(store, 1), lambda: list(store.keys()), lambda: store.get(key(1)), store.stats):
            with pytest.raises(StoreError, match="file"):
                use()

    def test_kernel_folder(self) -> None:
        """Unwritable for root as well, unlike a folder without write permission."""
        with pytest.raises(StoreError):
            put(ChunkStore.open("/proc/cacheclip-store"), 1)

    def test_damaged_catalog(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "catalog.sqlite3").write_bytes(b"this is no database, " * 100)
        with pytest.raises(StoreError, match="catalog.sqlite3"):
            ChunkStore.open(folder).stats()

    def test_catalog_of_another_version(self, store: ChunkStore, folder: Path) -> None:
        store.close()
        sql(folder, "PRAGMA user_version = 99")
        with pytest.raises(StoreError, match="format 99"):
            ChunkStore.open(folder).stats()

    def test_payloads_that_cannot_be_deleted(self, store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(backend: DiskBackend, keys: object) -> int:
            raise PermissionError(13, "denied")

        with monkeypatch.context() as patch:
            patch.setattr(DiskBackend, "delete", denied)
            with pytest.raises(StoreError, match="denied"):
                store.release("t", ["text 1"])
        assert is_intact(store, 1) and store.stats().entries == 2
