"""A failing disk, no file handles, no memory, files of another user or version: nothing whole is deleted."""

import errno
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_ingest import Library, LibrarySettings, repair_library

from cacheclip_rag.base import keys
from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.store import ChunkStore, TenantStore, codecs
from cacheclip_rag.store.ahead import LayerReads
from tests.conftest import some_of
from tests.store.samples import (
    collect_garbage,
    failing,
    is_intact,
    key,
    opened,
    path_of,
    put,
    remove_catalog,
    repair,
    run,
    totals_are_right,
    verify,
)

NUMBERS = range(1, 7)
ERRORS: dict[str, Callable[[], BaseException]] = {
    **{name: (lambda name=name: OSError(getattr(errno, name), name)) for name in ("EIO", "EMFILE", "EACCES", "ESTALE")},
    "no memory": lambda: MemoryError(),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = opened(folder := tmp_path_factory.mktemp("prepared") / "store")
    put(store, *NUMBERS)
    store.close()
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "store"))


CALLS = {
    "open": lambda path: path.endswith(".kv"),
    "open of folders": lambda path: len(path) == 2,
    "read": lambda path: path.endswith(".kv"),
    "stat": lambda path: path.endswith(".kv"),
    "listdir": lambda path: len(Path(path).name) == 2,
}


def ask(folder: Path) -> None:
    store = opened(folder)
    for number in NUMBERS:
        store.get(key(number))
    store.close()


ACTIONS: dict[str, Callable[[Path], object]] = {
    "ask": ask,
    "ask without a catalog": lambda folder: (remove_catalog(folder), ask(folder)),
    "drop what cannot be read": lambda folder: opened(folder).drop_unreadable([key(number) for number in NUMBERS]),
    "verify": verify,
    "repair": repair,
    "repair without a catalog": lambda folder: (remove_catalog(folder), repair(folder)),
    "gc": collect_garbage,
    "gc without a catalog": lambda folder: (remove_catalog(folder), collect_garbage(folder)),
    "open after a kill": lambda folder: opened(folder).chunk_store.sweep(),
}


def payloads(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("kv/*/*.kv")}


class TestFaults:
    @some_of(11, action=ACTIONS, call=CALLS, error=ERRORS)
    def test_delete_nothing(self, folder: Path, action: str, call: str, error: str) -> None:
        """And when they are over, everything is there: nothing was forgotten that repair cannot find."""
        if action == "open after a kill":
            kill_between_payload_and_entry(folder)
        before = payloads(folder)
        with failing(call.split()[0], ERRORS[error], CALLS[call]), suppress(StoreError):
            ACTIONS[action](folder)
        assert payloads(folder) == before
        repair(folder)
        assert verify(folder).is_clean
        store = opened(folder)
        assert all(is_intact(store, number) for number in NUMBERS) and totals_are_right(store)

    @pytest.mark.some(3)
    @pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
    @pytest.mark.parametrize("call", ["open", "read", "stat"])
    def test_are_reported(self, folder: Path, error: Callable[[], BaseException], call: str) -> None:
        bad = path_of(folder, 1).name
        with failing(call, error, lambda path: path.endswith(bad)) as failed:
            report, done = verify(folder), repair(folder)
        assert failed and report.unreadable == done.unreadable == [key(1)] and not report.is_clean
        assert (report.damaged, report.missing, done.deleted, done.forgotten) == ([], [], 0, 0)
        assert verify(folder).is_clean and is_intact(opened(folder), 1)

    @pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
    def test_of_the_catalog_do_not_replace_it(self, folder: Path, error: Callable[[], BaseException]) -> None:
        opened(folder).catalog.sources.add("t", "node", "a text")
        with failing("open", error, lambda path: "catalog" in path), suppress(StoreError, MemoryError):
            repair(folder)
        assert not list(folder.glob("*.damaged"))
        assert opened(folder).catalog.sources.texts("t") == ["a text"]

    @pytest.mark.some(2)
    @pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
    @pytest.mark.parametrize("name", ["catalog.sqlite3", "library.sqlite3"])
    def test_of_a_database_that_sqlite_calls_damaged_do_not_move_it(self, folder: Path, name: str, error: Any) -> None:
        """SQLite says "malformed" of pages that a disk does not give."""
        with closing(Library(folder)) as library:
            library.fix_settings(LibrarySettings())
        mend = {"catalog.sqlite3": repair, "library.sqlite3": repair_library}[name]
        content = bytearray((folder / name).read_bytes())
        content[4096:] = b"x" * (len(content) - 4096)
        (folder / name).write_bytes(content)
        before = payloads(folder)
        is_it = failing("read", error, lambda path: path.endswith(name))
        with is_it as failed, pytest.raises(StoreError, match="cannot be read .* it may be whole"):
            mend(folder)
        assert failed and (folder / name).read_bytes() == content and not [*folder.glob("*.damaged")]
        assert payloads(folder) == before and mend(folder) and [*folder.glob("*.damaged")], "it is damaged in truth"

    def test_while_writing_and_correcting_lose_no_entry(self, folder: Path) -> None:
        """What was written is known, also if it cannot be read at once."""
        store = opened(folder)
        with failing("read", ERRORS["EIO"], CALLS["read"]):
            put(store, 9)
            store._correct(key(1))
        assert key(1) in store and is_intact(store, 1) and is_intact(store, 9)
        assert totals_are_right(store) and verify(folder).is_clean


def kill_between_payload_and_entry(folder: Path) -> None:
    program = f"""
store = opened(Path({str(folder)!r}))
store.catalog.announcements.finish = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
put(store, 6)
"""
    assert run(program).returncode == -9


class TestOtherVersions:
    """A rolling upgrade: two versions of the package share a store."""

    @pytest.fixture
    def older(self, folder: Path) -> bytes:
        """Entry 1 was written by another version."""
        content = path_of(folder, 1).read_bytes()
        written = content[:8] + b"\x63" + content[9:]
        path_of(folder, 1).write_bytes(written)
        return written

    @pytest.mark.parametrize("catalog", [True, False])
    def test_are_misses_and_stay(self, folder: Path, older: bytes, catalog: bool, caplog: Any) -> None:
        if not catalog:
            remove_catalog(folder)
        store = opened(folder)
        assert [store.get(key(1)), store.get(key(1)), *LayerReads(store).begin([key(1)])] == [None] * 3
        if catalog:
            warnings = [record for record in caplog.records if record.levelname == "WARNING"]
            assert len(warnings) == 1 and "format 99" in caplog.text
        store.drop_unreadable([key(1)])
        store.chunk_store.sweep()
        store.close()
        report = verify(folder)
        assert report.is_clean and report.other_versions == [key(1)]
        assert repair(folder).other_versions == [key(1)] and collect_garbage(folder)["payloads"] == 0
        assert path_of(folder, 1).read_bytes() == older
        assert all(is_intact(opened(folder), number) for number in NUMBERS[1:])

    def test_of_a_killed_writer_stay(self, folder: Path) -> None:
        kill_between_payload_and_entry(folder)
        content = path_of(folder, 6).read_bytes()
        path_of(folder, 6).write_bytes(content[:8] + b"\x63" + content[9:])
        for _ in range(2):
            opened(folder)
        assert path_of(folder, 6).exists()
        path_of(folder, 6).write_bytes(content)
        assert is_intact(opened(folder), 6)

    def test_are_replaced_by_what_is_written_and_make_room(self, folder: Path, older: bytes) -> None:
        """Else the store would never hold the chunk again."""
        store = TenantStore(ChunkStore.open(folder), "t")
        put(store, 1)
        assert is_intact(store, 1)
        path_of(folder, 1).write_bytes(older)
        assert ChunkStore.open(folder).drop_tenant("t") == 6 and not payloads(folder)

    def test_have_entries_of_their_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two versions that answer from one store in turn compute a chunk once each, and rewrite nothing."""
        kv, written = torch.randn(2, 2, 2, 5, 4), dict[int, tuple[Path, bytes]]()
        for version in (2, 3, 2, 3):
            monkeypatch.setattr(keys, "FRAME_VERSION", version)
            monkeypatch.setattr(codecs, "FRAME_VERSION", version)
            own = keys.chunk_key(model_fingerprint="m", prefix_ids=[1], chunk_ids=[2, 3], rope_pin="", namespace="t")
            store = TenantStore(ChunkStore.open(tmp_path / "store"), "t")
            if store.get(own) is None:
                assert version not in written, "another version has replaced it"
                store.put(own, kv * version, "float32")
                path = tmp_path / "store" / "kv" / own[:2] / f"{own}.kv"
                written[version] = path, path.read_bytes()
            found = store.get(own)
            assert found is not None and torch.equal(found.tensor(), kv * version)
            assert all(path.read_bytes() == content for path, content in written.values())
        assert len(payloads(tmp_path / "store")) == 2
