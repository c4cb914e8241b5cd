"""Payload files that are damaged, or are no files: a miss and a warning, never wrong KV, no wait, no lost process."""

import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.store import DiskBackend, TenantStore
from cacheclip_rag.store.tenant import ReadBuffer
from tests.store.samples import is_intact, key, kv, opened, path_of, put, remove_catalog, run, totals_are_right


@pytest.fixture
def first(store: TenantStore, folder: Path) -> Path:
    """The payload of entry 1."""
    return path_of(folder, 1)


Change = Callable[[bytes, bytes], bytes]


def header(**fields: object) -> Change:
    """Other fields of the header, or without them, and the right checksum: of a program, not of an accident."""

    def change(content: bytes, other: bytes) -> bytes:
        own = {**json.loads(content[24 : 24 + struct.unpack_from("<8sIIQ", content)[2]]), **fields}
        return with_text(content, json.dumps({name: each for name, each in own.items() if each is not None}).encode())

    return change


def with_text(content: bytes, text: bytes) -> bytes:
    """A frame with another text as its header, and the right checksum for it."""
    magic, version, length, _ = struct.unpack_from("<8sIIQ", content)
    text = text.ljust(length)
    start = struct.pack("<8sIIQ", magic, version, len(text), xxhash.xxh3_64_intdigest(text))
    return start + text + content[24 + length :]


def flip(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 0x10
    return bytes(changed)


DAMAGE: dict[str, Change] = {
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
    "another magic": lambda content, other: b"safetens" + content[8:],
    "unknown codec": header(codec="int3"),
    "other shape": header(shape=[2, 2, 2, 2, 8, 1]),
    "fewer layers": header(shape=[1, 2, 4, 4, 4]),
    "other layers": header(layers=[[4, 4, 4], [4, 4, 2]]),
    "fewer layers than the shape": header(layers=[[4, 4, 4]]),
    "layers without keys": header(layers=[[4, 0, 4], [4, 4, 4]]),
    "layers of text": header(layers="ab"),
    "shape of text": header(shape="abcde"),
    "nested too deeply": lambda content, other: with_text(content, b"[" * 100_000),
    "a number without end": lambda content, other: with_text(content, b'{"shape": 1' + b"0" * 50_000 + b"}"),
    "no object": lambda content, other: with_text(content, b"[1]"),
    "namespace of numbers": header(namespace=[1]),
    "half a character": header(namespace="\ud800"),
    "short digest": header(digest="00"),
    "digest of numbers": header(digest=[0]),
    "row of another text": header(text="00" * 64),
    "checksums of numbers": header(checksums=[1, 2]),
    "checksums of other heads": header(heads=["00"]),
    "heads of numbers": header(heads=[1, 2]),
    "a codec of lists": header(codec=[["int8"]]),
    "huge shape": header(shape=[2, 2, 2**70, 9, 9]),
    "header without a key": header(key=None),
}


class TestDamage:
    @pytest.mark.parametrize("kind", DAMAGE)
    def test_is_a_miss_with_one_warning_and_removed(
        self, store: TenantStore, folder: Path, kind: str, caplog: Any
    ) -> None:
        path_of(folder, 1).write_bytes(DAMAGE[kind](path_of(folder, 1).read_bytes(), path_of(folder, 2).read_bytes()))
        if [*DAMAGE].index(kind) % 2:
            store.close()
            store = opened(folder)
        with caplog.at_level(logging.WARNING, logger="cacheclip_rag"):
            assert store.get(key(1)) is None
        assert [record.levelname for record in caplog.records] == ["WARNING"] and key(1)[:12] in caplog.text
        assert not path_of(folder, 1).exists() and key(1) not in store
        assert store.keys() == [key(2)] and store.stats().entries == 1
        assert (store.stats().hits, store.stats().misses) == (0, 1)
        caplog.clear()
        assert store.get(key(1)) is None and not caplog.records  # the second time it is an ordinary miss
        assert is_intact(store, 2)
        put(store, 1)
        assert is_intact(store, 1)

    def test_asking_for_the_codec_reads_no_payload(self, store: TenantStore, first: Path) -> None:
        """It says what the catalog says, and removes nothing: damage is for get to find."""
        first.write_bytes(flip(first.read_bytes(), 40))
        assert store.codec_of(key(1)) == "float32" and first.exists()
        assert store.get(key(1)) is None and store.codec_of(key(1)) is None

    def test_entry_without_payload_is_a_miss(self, store: TenantStore, first: Path, caplog: Any) -> None:
        first.unlink()
        with caplog.at_level(logging.WARNING, logger="cacheclip_rag"):
            assert store.get(key(1)) is None
        assert not caplog.records  # nothing is damaged
        assert store.keys() == [key(2)] and key(1) not in store and totals_are_right(store)

    @pytest.mark.parametrize(
        "error", [OSError(5, "disk"), PermissionError(13), OSError(24, "files"), MemoryError()], ids=repr
    )
    def test_trouble_while_reading_loses_nothing(
        self, store: TenantStore, error: Exception, monkeypatch: Any, caplog: Any
    ) -> None:
        """An error of the disk says nothing about the file: a miss, one warning, and the entry stays."""

        def fail(*arguments: object, **options: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("cacheclip_rag.store.disk._read_into", fail)
            assert store.get(key(1)) is None and store.get(key(2)) is None
        assert [record.levelname for record in caplog.records].count("WARNING") == 1
        assert "cannot be read now" in caplog.text
        assert is_intact(store, 1) and store.stats().entries == 2

    def test_payloads_that_cannot_be_deleted(self, store: TenantStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(backend: DiskBackend, keys: object) -> int:
            raise PermissionError(13, "denied")

        with monkeypatch.context() as patch:
            patch.setattr(DiskBackend, "delete", denied)
            whole = store.chunk_store
            for use in (lambda: store.release(["text 1"]), lambda: whole.drop_tenant("t"), lambda: whole.set_limit(1)):
                with pytest.raises(StoreError, match="denied"):
                    use()
        assert store.stats().entries == 2 and totals_are_right(store)
        store.chunk_store.set_limit(None)
        assert is_intact(store, 1)


def bind_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the whole path is too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as opened_socket:
            opened_socket.bind(path.name)
    finally:
        os.chdir(before)


def sparse(num_bytes: int) -> Callable[[Path, bytes], object]:
    return lambda path, data: (path.write_bytes(data), os.truncate(path, num_bytes))


STRANGE: dict[str, Callable[[Path, bytes], object]] = {
    "pipe": lambda path, data: os.mkfifo(path),
    "socket": lambda path, data: bind_socket(path),
    # an intact payload, but a link may lead anywhere
    "link": lambda path, data: ((target := path.with_name("elsewhere")).write_bytes(data), path.symlink_to(target)),
    "link to nothing": lambda path, data: path.symlink_to("nowhere"),
    "folder": lambda path, data: path.mkdir(),
    "a terabyte": sparse(10**12),
    "within memory": sparse(2 * 10**9),
    "empty": lambda path, data: path.write_bytes(b""),
}


def replace(path: Path, kind: str) -> None:
    """By something that is no payload."""
    data = path.read_bytes()
    path.unlink()
    STRANGE[kind](path, data)


class TestNoFile:
    @pytest.mark.parametrize("kind", STRANGE)
    def test_in_place_of_a_payload_is_a_miss_and_goes(
        self, store: TenantStore, first: Path, kind: str, caplog: Any
    ) -> None:
        """No waiting for a pipe's writer, no link out of the store, no memory for a file of a terabyte."""
        replace(first, kind)
        got: list[object] = []
        reading = threading.Thread(target=lambda: got.append(store.get(key(1))), daemon=True)
        reading.start()
        reading.join(10)
        assert got == [None], "reading must not wait"
        assert [record.levelname for record in caplog.records].count("WARNING") >= 1 and key(1)[:12] in caplog.text
        assert is_intact(store, 2)
        if kind == "folder":  # a folder is not the store's to remove
            assert first.is_dir() and store.codec_of(key(1)) is None
            return
        assert not os.path.lexists(first) and key(1) not in store and totals_are_right(store)
        put(store, 1)
        assert is_intact(store, 1)

    @pytest.mark.parametrize("kind", STRANGE)
    def test_listing_and_opening_do_not_wait_for_it(
        self, store: TenantStore, first: Path, folder: Path, kind: str
    ) -> None:
        """Even if the catalog is missing, so that every payload's header is read."""
        replace(first, kind)
        store.close()
        remove_catalog(folder)
        done: list[int] = []
        opening = threading.Thread(target=lambda: done.append(opened(folder).stats().entries), daemon=True)
        opening.start()
        opening.join(10)
        assert done == [1]


class TestInHand:
    """A payload file may change at any moment: other programs, a network disk, a broken disk."""

    @pytest.mark.parametrize("tokens", [4, 50_000], ids=["small", "large"])
    @pytest.mark.parametrize("how", ["os.truncate(path, 100)", "open(path, 'r+b').write(bytes(os.path.getsize(path)))"])
    def test_cutting_off_or_overwriting_the_file_neither_kills_nor_changes(
        self, folder: Path, tokens: int, how: str
    ) -> None:
        """In a process of its own: what is mapped and cut off ends the process with SIGBUS."""
        program = f"""
folder = Path({str(folder)!r})
store = opened(folder)
put(store, 1, tokens={tokens})
got = store.get(key(1))
path = path_of(folder, 1)
{how}
assert torch.equal(got.tensor(), kv(1, {tokens})), "changed"
assert store.get(key(1)) is None
"""
        done = run(program)
        assert done.returncode == 0, (done.returncode, done.stderr)

    def test_kv_in_hand_outlives_its_payload(self, store: TenantStore) -> None:
        got, other = store.get(key(1)), store.get(key(2))
        assert got is not None and other is not None
        store.delete([key(1)])
        store.put(key(2), kv(9), "float32")
        assert torch.equal(got.tensor(), kv(1)) and torch.equal(other.tensor(), kv(2))

    def test_kv_read_into_the_callers_memory_holds_until_the_next_read(self, store: TenantStore) -> None:
        buffer = ReadBuffer()
        got = store.get(key(1), buffer)
        assert got is not None
        kept = got.tensor()
        assert torch.equal(kept, kv(1))
        other = store.get(key(2), buffer)
        assert other is not None and torch.equal(other.tensor(), kv(2)) and torch.equal(kept, kv(1))
        put(store, 3, tokens=300)
        larger = store.get(key(3), buffer)
        assert larger is not None and torch.equal(larger.tensor(), kv(3, 300))
        again = store.get(key(1), buffer)  # memory that is larger than the payload
        assert again is not None and torch.equal(again.tensor(), kv(1))
