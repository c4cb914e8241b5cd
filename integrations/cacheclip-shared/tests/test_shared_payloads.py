"""Payloads of a shared store that are damaged, empty or foreign: misses, until the next write of their keys."""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import obstore
import pytest
from cacheclip_shared.care import create
from cacheclip_shared.objects import Breaker, ObjectBackend, Objects
from cacheclip_shared.place import SharedPlace, object_name
from cacheclip_shared.store import GRACE_S, SharedStore
from store_entries import is_intact, key, kv, put
from thinned import some_of

from cacheclip_rag.store import TenantStore, encode_frame, text_digest

SHAPE = tuple(kv(1).shape)


def frame_of(number: int, namespace: str = "t", of: int = 1, tokens: int = 4, codec: str = "float32") -> bytes:
    """The payload that is read under the key of ``of``."""
    digest = text_digest(f"text {number}")
    return bytes(encode_frame(kv(number, tokens), codec, key(of), namespace=namespace, digest=digest))


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "its header": lambda data: flipped(data, 60),
    "its last layer": lambda data: flipped(data, len(data) - 1),
    "random": lambda data: random.Random(1).randbytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "of another key": lambda data: frame_of(2, of=2),
    "of another tenant": lambda data: frame_of(1, "u"),
    "of another codec": lambda data: frame_of(1, codec="int8"),
    "of another shape": lambda data: frame_of(1, tokens=9),
}


@pytest.fixture(params=["s3", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    made = request.getfixturevalue("bucket") if request.param == "s3" else f"file://{tmp_path / 'store'}"
    create(made)
    return str(made)


Make = Callable[..., TenantStore]


@pytest.fixture
def machine(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes machines that serve a tenant, each with a home of its own."""
    made: list[SharedStore] = []

    def make(namespace: str = "t", **options: Any) -> TenantStore:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / f"home {len(made)}"))
        made.append(SharedStore(SharedPlace(url), **options))
        made[-1].commits = False
        return TenantStore(made[-1], namespace)

    yield make
    for store in made:
        store.close()


def objects(store: TenantStore) -> ObjectBackend:
    assert isinstance(store.chunk_store, SharedStore)
    return store.chunk_store.objects


def name(number: int = 1, namespace: str = "t") -> str:
    return object_name(namespace, key(number), "float32")


def overwrite(store: TenantStore, data: bytes) -> None:
    obstore.put(objects(store).place.objects, name(), data)


def stored(store: TenantStore) -> tuple[bytes, str]:
    found = obstore.get(objects(store).place.objects, name())
    return bytes(found.bytes()), found.meta["e_tag"]


@pytest.mark.some(3)
@some_of(2, is_known=[True, False], kind=DAMAGES)
def test_the_next_write_of_its_key_replaces_what_is_damaged(
    machine: Make, kind: str, is_known: bool, caplog: Any
) -> None:
    """Until then it is a miss, and stays; storage is asked as ever. ``is_known``: the reader saw it whole before."""
    writer, reader = machine(), machine(memory_bytes=1 << 20)
    put(writer, 1, 3)
    assert not is_known or reader.codec_of(key(1)) == "float32"
    whole = stored(writer)[0]
    damaged = DAMAGES[kind](whole)
    assert damaged != whole
    overwrite(writer, damaged)
    kept = reader.get(key(1), shape=SHAPE)
    assert kept is None or kind == "of another codec", "which is compared by whoever asks for it"
    assert is_intact(reader, 3) and not objects(reader).breaker.is_open
    assert stored(reader)[0] == damaged and "remove" not in caplog.text
    assert not is_known or kept is not None or "is a miss until it is computed again" in caplog.text
    put(reader, 1)
    assert stored(writer)[0] == whole and f"{name()} was damaged" in caplog.text and "written again" in caplog.text
    assert is_intact(reader, 1) and is_intact(machine(), 1)
    before = stored(writer)
    put(machine(), 1)
    assert stored(writer) == before, "what is whole is written once"


def meanwhile(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Do something between a look at an object and its replacement."""
    take = Objects.take

    def taken(self: Objects, name: str) -> Any:
        found = take(self, name)
        run()
        return found

    monkeypatch.setattr(Objects, "take", taken)


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_what_another_machine_has_replaced_meanwhile_stays(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, theirs = machine(), frame_of(2)
    overwrite(one, b"damaged")
    meanwhile(monkeypatch, lambda: overwrite(one, theirs))
    put(one, 1)
    assert stored(one)[0] == theirs


def test_what_a_cleaning_removes_meanwhile_is_written(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine()
    overwrite(one, b"damaged")
    meanwhile(monkeypatch, lambda: obstore.delete(objects(one).place.objects, name()))
    put(one, 1)
    assert is_intact(machine(), 1)


def test_what_is_damaged_is_not_made_young(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingestion that finds it computes it again: else it would write the damage over what another one has mended."""
    one = machine()
    put(one, 1, 3)
    overwrite(one, stored(one)[0][:-1])
    before = stored(one)
    later = time.time() + GRACE_S
    monkeypatch.setattr("cacheclip_shared.store.time.time", lambda: later)
    assert isinstance(one.chunk_store, SharedStore)
    one.chunk_store.look_again("t", [text_digest(f"text {number}").hex() for number in (1, 3)])
    assert stored(one) == before and [key(number) in one for number in (1, 3)] == [False, True]


def in_its_place(store: TenantStore, kind: str) -> None:
    """Something that is no file, or a file that is shorter than a reader thinks."""
    path = Path(objects(store).place.url.removeprefix("file://")) / name()
    path.unlink()
    made = {"folder": path.mkdir, "circular link": lambda: path.symlink_to(path), "pipe": lambda: os.mkfifo(path)}
    made.get(kind, lambda: (path.parent.rmdir(), path.parent.write_bytes(b"")))()


@pytest.mark.parametrize("url", ["folder"], indirect=True)
@pytest.mark.parametrize("kind", ["folder", "circular link", "pipe", "file for its folder"])
def test_something_else_in_its_place_is_no_outage(machine: Make, kind: str) -> None:
    writer, reader = machine(), machine()
    put(writer, 1, 3)
    assert reader.codec_of(key(1)) == "float32"
    in_its_place(writer, kind)
    assert reader.get(key(1)) is None and machine().get(key(1)) is None
    assert is_intact(reader, 3) and not objects(reader).breaker.is_open


@pytest.mark.parametrize("size", [0, 10])
def test_a_part_behind_the_end_is_no_outage(machine: Make, size: int) -> None:
    one = machine()
    put(one, 1, 3)
    overwrite(one, bytes(size))
    assert objects(one).read_part(key(1), 100, memoryview(bytearray(50))) == 0
    assert objects(one).head(key(1), 50) == (bytes(size), size)
    assert is_intact(one, 3) and not objects(one).breaker.is_open


def test_failing_storage_is_an_outage(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails, and a server that does not answer."""
    one = machine()
    for error in ("Generic LocalFileSystem error: Input/output error (os error 5)", "Stale file handle (os error 116)"):
        monkeypatch.setattr(obstore, "get", lambda *_, error=error, **__: (_ for _ in ()).throw(OSError(error)))
        with suppress(OSError):
            objects(one).fetch("x")
        assert objects(one).breaker.is_open
        objects(one).breaker._until, objects(one).breaker.is_open = 0.0, False


@pytest.mark.parametrize(
    ("said", "is_open"),
    [
        ("Error performing PUT http://169.254.169.254/latest/api/token: Server returned status code: 403", True),
        ("Error performing POST https://sts.eu-north-1.amazonaws.com/: Server returned status code: 400", True),
        ("Error performing GET https://s3.amazonaws.com/b/p/key: Server returned status code: 400", False),
    ],
)
def test_without_credentials_nothing_is_known_of_an_object(said: str, is_open: bool) -> None:
    def ask() -> None:
        raise OSError(said)

    breaker = Breaker()
    with pytest.raises(OSError, match="status code"):
        breaker.call(ask)
    assert breaker.is_open == is_open
