"""A catalog that is missing, damaged, foreign or read-only: reads go on, and the store says what to do."""

import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.store import TenantStore
from tests.store.samples import (
    BLOCK,
    bytes_on_disk,
    change,
    is_intact,
    key,
    opened,
    path_of,
    payload_files,
    put,
    remove_catalog,
    totals_are_right,
)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestMissing:
    def test_deleted_under_a_store_in_use(self, store: TenantStore, folder: Path, caplog: Any) -> None:
        """The next use finds all payloads again, and says what is lost."""
        remove_catalog(folder)
        assert is_intact(store, 1) and key(2) in store and set(store.keys()) == {key(1), key(2)}
        assert "2 chunk caches were found" in caplog.text and "limits, sources" in caplog.text
        put(store, 3)
        assert all(is_intact(store, number) for number in (1, 2, 3))
        assert store.chunk_store.stats().bytes == bytes_on_disk(folder) and totals_are_right(store)

    def test_the_limit_given_holds_again(self, folder: Path) -> None:
        """Payloads that a new catalog does not know must not hide from the limit."""
        store = opened(folder, 4 * BLOCK)
        put(store, 1, 2, 3, 4)
        remove_catalog(folder)
        put(store, 5, 6)
        assert store.chunk_store.limit == 4 * BLOCK and bytes_on_disk(folder) <= 4 * BLOCK
        assert is_intact(store, 5) and is_intact(store, 6) and store.stats().entries == 4


class TestUnusable:
    @pytest.mark.parametrize("content", [b"this is no database, " * 100, os.urandom(20_000)], ids=["text", "noise"])
    def test_reads_go_on_without_it_with_one_warning(
        self, store: TenantStore, folder: Path, caplog: Any, content: bytes
    ) -> None:
        store.close()
        remove_catalog(folder)
        (folder / "catalog.sqlite3").write_bytes(content)
        again = opened(folder)
        assert is_intact(again, 1) and is_intact(again, 2) and again.codec_of(key(1)) == "float32"
        assert again.get(key(9)) is None and key(9) not in again
        [warning] = warnings(caplog)
        assert "read without it" in warning and "cacheclip store repair" in warning
        for write in (lambda: put(again, 3), lambda: again.delete([key(1)]), again.stats, again.keys):
            with pytest.raises(StoreError, match=r"catalog\.sqlite3 cannot be used.*cacheclip store repair --store"):
                write()
        assert len(payload_files(folder)) == 2

    def test_database_of_another_program(self, store: TenantStore, folder: Path) -> None:
        """Though its version number is ours: nothing is written into it."""
        [(version,)] = store.catalog.database.query("PRAGMA user_version")
        store.close()
        remove_catalog(folder)
        change(folder, "CREATE TABLE photos (name TEXT)")
        change(folder, f"PRAGMA user_version = {version}")
        before = (folder / "catalog.sqlite3").read_bytes()
        with pytest.raises(StoreError, match="another program"):
            put(opened(folder), 3)
        assert (folder / "catalog.sqlite3").read_bytes() == before

    def test_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        """Nothing can be stored there, and nothing is."""
        (tmp_path / "file").write_text("not a folder")
        store = opened(tmp_path / "file" / "store")
        with pytest.raises(StoreError, match="file"):
            put(store, 1)
        assert store.get(key(1)) is None and store.keys() == [] and store.stats().entries == 0


def no_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access

    def may(path: Any, mode: int, **options: Any) -> bool:
        return access(path, mode, **options) and not (mode & os.W_OK and str(path).startswith(str(folder)))

    monkeypatch.setattr(os, "access", may)


class TestReadOnly:
    @pytest.fixture
    def read_only(self, store: TenantStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TenantStore:
        """As seen by a user who may only read. The tests may run as root, whom permissions do not stop: so the system's
        answer is changed, and not the permissions."""
        store.close()
        no_writing(folder, monkeypatch)
        return opened(folder)

    def test_can_be_read(self, read_only: TenantStore, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix == ".kv"}
        assert all(is_intact(read_only, 1) and is_intact(read_only, 2) for _ in range(40))  # uses are lost
        assert read_only.get(key(9)) is None and key(1) in read_only
        assert read_only.stats().entries == 2 and read_only.chunk_store.stats().bytes == 2 * BLOCK
        assert warnings(caplog) == [] and read_only.catalog.database.file.read_only
        read_only.close()
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix == ".kv"} == before

    def test_cannot_be_written_and_says_so(self, read_only: TenantStore, folder: Path) -> None:
        changes: list[Callable[[], Any]] = [lambda: put(read_only, 3), lambda: read_only.delete([key(1)])]
        changes += [lambda: read_only.release(["text 1"]), lambda: read_only.chunk_store.set_limit(10**6)]
        for use in changes:
            with pytest.raises(StoreError, match="may only be read"):
                use()
        assert is_intact(read_only, 1) and len(payload_files(folder)) == 2

    def test_damage_is_a_miss_and_stays(self, read_only: TenantStore, folder: Path, caplog: Any) -> None:
        path_of(folder, 1).write_bytes(b"garbage")
        assert read_only.get(key(1)) is None and "could not be removed" in caplog.text
        assert path_of(folder, 1).exists() and is_intact(read_only, 2)

    def test_what_others_store_is_seen_after_a_restart(
        self, store: TenantStore, folder: Path, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """On a read-only mount, where SQLite cannot make the shared memory of its write-ahead log."""
        store.close()
        mounted = tmp_path / "mounted"
        mounted.symlink_to(folder, target_is_directory=True)  # one machine writes by one path, another reads by this
        no_writing(mounted, monkeypatch)
        connect = sqlite3.connect

        def connected(name: str, **options: Any) -> sqlite3.Connection:
            if str(mounted) in name and "immutable=1" not in name:
                raise sqlite3.OperationalError("unable to open database file")
            return connect(name, **options)

        monkeypatch.setattr(sqlite3, "connect", connected)
        reader, writer = opened(mounted), opened(folder)
        assert key(1) in reader and key(3) not in reader
        put(writer, 3)
        assert key(3) in writer and key(3) not in reader and is_intact(reader, 1)
        writer.close()
        assert key(3) not in reader and is_intact(reader, 1)
        reader.close()
        again = opened(mounted)
        assert key(3) in again and is_intact(again, 3)
        again.close()
