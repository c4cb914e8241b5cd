"""Verify finds what is wrong, repair leaves nothing wrong, and neither loses what is whole."""

import io
import itertools
import os
import random
import re
import shutil
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_care import CatalogCare, clear, collect_garbage, repair, verify
from cacheclip_ingest import Library
from store_entries import (
    bytes_on_disk,
    change,
    is_intact,
    key,
    kv,
    opened,
    path_of,
    payload_files,
    put,
    totals_are_right,
)
from typing_extensions import Buffer

from cacheclip_rag import ConfigurationError, StoreError
from cacheclip_rag.store import Catalog, ChunkStore, Database, TenantStore

LONG = "text number {} is long enough to be found in a prompt"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = ChunkStore.open(folder := tmp_path_factory.mktemp("prepared") / "store", 10_000_000)
    for name, count in (("t", 5), ("u", 3)):
        tenant = TenantStore(store, name)
        for number in range(1, count + 1):
            tenant.put(key(number, name), kv(number), "float32", text=LONG.format(number))
    store.catalog.sources.add("t", "node", LONG.format(1), "document")
    store.set_quota("u", 5_000_000)
    store.close()
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """Entries 1 to 5 of tenant t and 1 to 3 of tenant u, with texts that are found, a source, a limit and a quota."""
    return Path(shutil.copytree(prepared, tmp_path / "store"))


def intact(folder: Path, *numbers: int) -> bool:
    """Those entries of tenant t, or all five."""
    store = opened(folder)
    return all(is_intact(store, number) for number in numbers or range(1, 6))


def test_a_whole_store_is_clean_and_repair_changes_nothing(folder: Path) -> None:
    report = verify(folder)
    assert report.is_clean and report.entries == 8 and report.bytes == 8 * 4096
    done = repair(folder)
    assert done.entries == 8 and not any((done.deleted, done.forgotten, done.recorded, done.moved_files))
    assert verify(folder).is_clean and intact(folder)


def test_every_kind_of_damage_is_named_and_repaired(folder: Path) -> None:
    data = bytearray(path_of(folder, 1).read_bytes())
    data[-1] ^= 1
    path_of(folder, 1).write_bytes(data)  # a layer
    path_of(folder, 2).write_bytes(path_of(folder, 3).read_bytes())  # another's payload
    path_of(folder, 4).unlink()
    (folder / "kv" / "notes.txt").write_text("not the store's")
    (folder / "tmp" / f"{'0' * 32}-1").write_text("of a process that is gone")
    change(folder, f"DELETE FROM entries WHERE key = '{key(5)}'")  # a payload without an entry
    change(folder, "DELETE FROM texts WHERE namespace = 'u'", "UPDATE totals SET bytes = bytes + 1")
    report = verify(folder)
    assert set(report.damaged) == {key(1), key(2)} and report.missing == [key(4)]
    assert set(report.unknown_files) == {str(path_of(folder, 5).relative_to(folder)), "kv/notes.txt"}
    assert [line.split(":")[0] for line in report.problems] == ["text index", "catalog"]
    assert not list(folder.glob("tmp/*")), "what dead processes left goes when the store is opened"
    done = repair(folder)
    assert (done.entries, done.deleted, done.forgotten, done.recorded) == (5, 2, 1, 1)
    assert done.moved_files == ["unknown/notes.txt"] and (folder / "unknown" / "notes.txt").exists()
    assert verify(folder).is_clean and intact(folder, 3, 5)
    assert totals_are_right(opened(folder))
    [match] = TenantStore(ChunkStore.open(folder), "u").index.find(LONG.format(3))
    assert (match.start, match.stop) == (0, len(LONG.format(3)))


@pytest.mark.parametrize("damage", ["garbage", "cut", "deleted", "foreign"])
def test_a_catalog_is_made_anew_from_headers_alone(folder: Path, damage: str) -> None:
    """They say of every payload what the old one said."""
    path, before = folder / "catalog.sqlite3", [*CatalogCare(ChunkStore.open(folder).catalog.database).entries()]
    if damage == "garbage":
        path.write_bytes(os.urandom(20_000))
    elif damage == "cut":
        os.truncate(path, 5000)
    else:
        path.unlink()
    if damage == "foreign":
        change(folder, "CREATE TABLE entries (a)", "PRAGMA user_version = 3")
    if damage != "deleted":  # then opening it made it anew
        assert [line.split(":")[0] for line in verify(folder).problems] == ["catalog"]
    done = repair(folder)
    assert done.entries == 8 and done.moved_files == ([] if damage == "deleted" else ["catalog.sqlite3.damaged"])
    assert [*CatalogCare(ChunkStore.open(folder).catalog.database).entries()] == before
    assert verify(folder).is_clean and intact(folder)
    store = opened(folder)
    assert store.release([LONG.format(2)]) == 1 and not is_intact(store, 2)
    prompt = f"{LONG.format(9)} {LONG.format(4)}"
    assert [prompt[m.start : m.stop] for m in store.index.find(prompt)] == [LONG.format(4)]


def test_what_can_be_read_of_a_damaged_catalog_is_kept(folder: Path) -> None:
    """Sources, limits and quotas are in no payload."""
    path = folder / "catalog.sqlite3"
    with closing(sqlite3.connect(path)) as catalog:
        page = catalog.execute("SELECT rootpage FROM sqlite_master WHERE name = 'entries_by_text'").fetchone()[0]
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = os.urandom(4096)
    path.write_bytes(data)
    assert not verify(folder).is_clean
    repair(folder)
    store = ChunkStore.open(folder)
    assert verify(folder).is_clean and store.limit == 10_000_000 and store.catalog.limits.quota("u") == 5_000_000
    assert store.catalog.sources.texts("t", "node") == [LONG.format(1)]


@pytest.mark.parametrize("of", ["store", "tenant"])
def test_opening_evicts_down_to_the_limit(folder: Path, of: str) -> None:
    """A process that was to lower it may have been killed before it evicted."""
    limits = {"store": f"UPDATE meta SET value = {6 * 4096} WHERE name = 'max_bytes'"}
    change(folder, limits.get(of, "UPDATE quotas SET bytes = 4096"))
    store = ChunkStore.open(folder)
    assert store.stats().entries == 6 and totals_are_right(store)
    assert store.catalog.tenants()["u"].entries == (3 if of == "store" else 1)
    assert verify(folder).is_clean and repair(folder).entries == 6


def test_garbage_is_what_nobody_can_use(folder: Path) -> None:
    store = opened(folder)
    store.index.add(["a text whose KV was evicted long ago"])
    store.catalog.remove("t", [key(2)])
    store.close()
    found = collect_garbage(folder)
    assert (found["payloads"], found["texts"], found["writes"], found["evicted"]) == (1, 2, 0, 0)
    assert verify(folder).is_clean and verify(folder).entries == 7 and intact(folder, 1, 3, 4, 5)
    assert opened(folder).index.known(LONG.format(1)), "it has a source"


def test_clear_of_one_tenant_and_of_all(folder: Path) -> None:
    assert clear(folder, "u") == 3 and clear(folder, "nobody") == 0
    assert intact(folder) and opened(folder).catalog.limits.quota("u") is None
    assert clear(folder) == 5 and payload_files(folder) == []
    report = verify(folder)
    assert report.is_clean and report.entries == 0
    store = opened(folder)
    assert store.chunk_store.limit == 10_000_000 and not store.index.known(LONG.format(1))
    assert store.catalog.sources.texts("t") == []
    put(store, 1)
    assert is_intact(store, 1)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    for run in (verify, repair, collect_garbage, clear):
        with pytest.raises(StoreError, match="cacheclip ingest PATH --store"):
            run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_verify_reads_while_others_write(folder: Path) -> None:
    """An announced payload that has no entry yet is not garbage."""
    store = opened(folder)
    writer = store.chunk_store.writes.writer.name  # type: ignore[union-attr]
    number, _ = store.catalog.announcements.reserve("t", key(9), 4096, writer, lambda keys: None)
    assert number is not None
    store.chunk_store.tiers.put(key(9), b"half")
    assert verify(folder).unknown_files == []
    assert collect_garbage(folder)["payloads"] == 0 and path_of(folder, 9).exists()
    store.catalog.announcements.abandon(number)
    assert verify(folder).unknown_files == [str(path_of(folder, 9).relative_to(folder))]


class TestWhatSomethingElseWrote:
    """SQLite lets any value into any column, and a folder may hold anything."""

    @pytest.mark.some(4)
    @pytest.mark.parametrize(
        "sql",
        [
            "DELETE FROM meta",
            "UPDATE meta SET value = 'many'",
            "UPDATE meta SET value = NULL WHERE name = 'uses'",
            "UPDATE entries SET codec = 'x'",
            "UPDATE entries SET codec = x'00', bytes = 'large', last_use = 'never'",
            "UPDATE entries SET bytes = -5",
            "UPDATE texts SET start = 'here', length = x'01'",
            "UPDATE texts SET digest = hex(digest)",
            "UPDATE totals SET bytes = 'all', entries = 'some'",
            "INSERT INTO quotas VALUES ('t', 'much')",
            "UPDATE entries SET key = '-1' WHERE last_use = 1",
            "UPDATE entries SET key = x'01', last_use = -1 WHERE last_use = 2",
        ],
    )
    def test_reads_writes_and_repair_go_on(self, folder: Path, sql: str) -> None:
        change(folder, sql)
        store = opened(folder)
        for number in range(1, 6):
            got = store.get(key(number))
            assert got is None or torch.equal(got.tensor(), kv(number))
        store.index.find(" ".join(LONG.format(number) for number in range(1, 6)))
        put(store, 1, 9)
        store.close()
        repair(folder)
        assert verify(folder).is_clean and is_intact(opened(folder), 9)

    def test_senseless_rows_are_named(self, folder: Path) -> None:
        change(folder, f"UPDATE entries SET bytes = 'large' WHERE key = '{key(1)}'")
        change(folder, "UPDATE texts SET length = 'long' WHERE namespace = 'u'")
        assert "catalog: 4 rows that this package did not write" in verify(folder).problems
        repair(folder)
        assert verify(folder).is_clean and intact(folder, 1)

    @pytest.mark.parametrize("kind", ["folder", "pipe", "circle"])
    def test_what_is_no_file_in_place_of_the_catalog(self, folder: Path, kind: str) -> None:
        path = folder / "catalog.sqlite3"
        path.unlink()
        {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "circle": lambda: path.symlink_to(path)}[kind]()
        assert repair(folder).entries == 8
        assert verify(folder).is_clean and intact(folder)

    def test_folders_in_place_of_files(self, folder: Path) -> None:
        """Of a payload, and of a temporary file."""
        path_of(folder, 1).unlink()
        path_of(folder, 1).mkdir()
        assert not is_intact(opened(folder), 1)
        (folder / "tmp" / "things").mkdir()
        assert "tmp/things" in verify(folder).unknown_files and collect_garbage(folder)["temporaries"] == 0
        assert sorted(repair(folder).moved_files) == sorted([f"unknown/{key(1)}.kv", "unknown/things"])
        assert verify(folder).is_clean

    def test_an_entry_learns_the_codec_of_its_payload(self, folder: Path) -> None:
        store = opened(folder)
        change(folder, "UPDATE entries SET codec = 'bfloat16'")
        assert store.codec_of(key(1)) == "bfloat16" and is_intact(store, 1) and store.codec_of(key(1)) == "float32"

    def test_altered_texts_of_sources_are_not_used(self, folder: Path) -> None:
        store = opened(folder)
        store.catalog.sources.add("t", "other", LONG.format(2))
        store.catalog.sources.add("t", "third", LONG.format(3))
        store.close()
        change(folder, "UPDATE sources SET text = 'altered' WHERE source = 'node'")
        change(folder, "UPDATE sources SET text = CAST(x'ff' AS TEXT) WHERE source = 'other'")
        assert opened(folder).catalog.sources.texts("t") == [LONG.format(3)]
        assert opened(folder).catalog.sources.orphans("t", ["node", "third"]) == [LONG.format(3)]
        assert verify(folder).problems == ["catalog: 2 texts of sources were altered"]
        repair(folder)
        assert verify(folder).is_clean and opened(folder).catalog.sources.texts("t") == [LONG.format(3)]


def test_a_catalog_of_another_version_is_refused_not_repaired(folder: Path) -> None:
    change(folder, "PRAGMA user_version = 2")
    for run in (verify, repair, collect_garbage, ChunkStore.open):
        with pytest.raises(StoreError, match="format 2.*cacheclip ingest PATH --store NEW_FOLDER"):
            run(folder)
    assert not list(folder.glob("*.damaged"))


def test_repair_keeps_the_order_of_uses(folder: Path) -> None:
    store = opened(folder)
    for number in (3, 1, 5):
        store.get(key(number))
    before = store.keys()
    store.close()
    repair(folder)
    assert opened(folder).keys() == before


def test_reading_makes_nothing(tmp_path: Path) -> None:
    store = ChunkStore.open(tmp_path / "none", memory_bytes=1000)
    tenant = TenantStore(store, "t")
    assert tenant.get(key(1)) is None and key(1) not in tenant and tenant.index.find("x" * 99) == []
    assert store.limit is None and store.stats().entries == 0 and tenant.release(["x" * 99]) == 0
    assert not list(tmp_path.iterdir())


def test_names_of_tenants(tmp_path: Path) -> None:
    store = ChunkStore.open(tmp_path)
    for name in ("", "\ud800", "x" * 256, "é" * 128):
        with pytest.raises(ConfigurationError, match="namespace"):
            TenantStore(store, name)
    tenant = TenantStore(store, "\U0001f40b" * 63)
    tenant.put(key(1, tenant.namespace), kv(1), "float32")
    assert is_intact(tenant, 1)


def test_a_key_of_another_tenant_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(StoreError, match="another tenant"):
        TenantStore(ChunkStore.open(folder), "u").put(key(1), kv(9), "float32")
    assert intact(folder, 1)


def test_a_payload_that_another_process_replaced_is_read_anew(folder: Path) -> None:
    """By one of another codec, while this process has the older one in memory."""
    ours, theirs = opened(folder, memory_bytes=1 << 20), opened(folder)
    theirs.put(key(1), kv(1), "int8")
    assert ours.get(key(1)).codec == "int8"  # type: ignore[union-attr]
    theirs.put(key(1), kv(1), "float32")
    assert ours.get(key(1)).codec == "float32" and is_intact(ours, 1)  # type: ignore[union-attr]


def test_a_folder_in_place_of_a_payload_holds_up_no_writer(folder: Path) -> None:
    store = opened(folder)
    for number in (1, 2, 3, 4, 5):
        path_of(folder, number).unlink()
        path_of(folder, number).mkdir()
    store.chunk_store.set_limit(3 * 4096)
    put(store, 9)
    assert is_intact(store, 9) and store.get(key(5)) is None


def test_a_write_that_is_not_complete_goes_with_its_tenant(folder: Path) -> None:
    store = ChunkStore.open(folder)
    tenant, writing = TenantStore(store, "u"), store.tiers.put

    def dropped_meanwhile(name: str, data: Buffer) -> None:
        writing(name, data)
        assert ChunkStore.open(folder).drop_tenant("u") == 3
        assert store.catalog.total("u").bytes == 4096, "it counts as long as it is there"

    store.tiers.put = dropped_meanwhile  # type: ignore[method-assign]
    put(tenant, 8)
    assert tenant.get(key(8, "u")) is None and not path_of(folder, 8, "u").exists()
    assert totals_are_right(store) and store.stats().bytes == bytes_on_disk(folder)
    # a writer that is killed meanwhile
    store.catalog.announcements.reserve("u", key(9, "u"), 4096, "0" * 32, lambda keys: None)
    writing(key(9, "u"), b"x" * 99)
    ChunkStore.open(folder, max_bytes=None)
    assert payload_files(folder) != []
    store.catalog.announcements.reserve("u", key(7, "u"), 4096, "1" * 32, lambda keys: None)
    writing(key(7, "u"), bytes(path_of(folder, 1).read_bytes()))
    store.drop_tenant("u")
    ChunkStore.open(folder)
    assert not path_of(folder, 7, "u").exists() and verify(folder).is_clean
    assert clear(folder) == 5 and payload_files(folder) == []


def test_what_is_written_after_its_tenant_was_dropped_outlives_an_older_write(folder: Path) -> None:
    store, other = ChunkStore.open(folder), ChunkStore.open(folder)
    writing = store.tiers.put

    def dropped_and_written_meanwhile(name: str, data: Buffer) -> None:
        other.drop_tenant("u")
        put(TenantStore(other, "u"), 8)
        writing(name, data)

    store.tiers.put = dropped_and_written_meanwhile  # type: ignore[method-assign]
    TenantStore(store, "u").put(key(8, "u"), kv(8), "bfloat16")
    found = TenantStore(ChunkStore.open(folder), "u").get(key(8, "u"))
    assert found is not None and found.codec == "bfloat16" and verify(folder).is_clean


@pytest.mark.long
def test_many_entries_go_in_batches(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    put(store, *range(600), tokens=1)
    assert store.chunk_store.set_limit(50 * 4096) == 550 and store.stats().entries == 50
    assert totals_are_right(store)
    store.chunk_store.set_limit(None)
    put(store, *range(300), tokens=1)
    assert store.chunk_store.drop_tenant("t") >= 300 and payload_files(tmp_path / "store") == []


def test_short_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may give less than was asked for, even less than a header."""
    readinto = io.FileIO.readinto

    class Short(io.FileIO):
        def readinto(self, buffer: Buffer, /) -> int:
            return readinto(self, memoryview(buffer)[:10])

    monkeypatch.setattr("cacheclip_rag.store.disk.io.FileIO", Short)
    assert is_intact(opened(folder), 1) and path_of(folder, 1).exists()


@pytest.mark.parametrize("what", ["library", "catalog"])
def test_rows_out_of_order_do_not_go_on_for_ever(folder: Path, what: str) -> None:
    row = (0, b"path", 0, b"text", b"", b"") if what == "library" else (key(1), "t", None, 1, 1, "float32")

    class Repeating(Database):
        def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            return [row]

    owner: Any = Library(folder) if what == "library" else CatalogCare(Catalog(folder).database)
    setattr(owner, "database" if what == "library" else "_database", Repeating(None, "", 1))
    rows = owner.rows if what == "library" else owner.entries
    with pytest.raises(StoreError, match="out of order"):
        deque(itertools.islice(rows(), 1000), maxlen=0)


class TestFlippedBits:
    @pytest.mark.long
    def test_in_names_of_the_catalog(self, folder: Path) -> None:
        """Text that is no UTF-8 any more: a repair ends, and nothing is wrong afterwards."""
        opened(folder).close()
        change(folder, "PRAGMA wal_checkpoint(TRUNCATE)")
        original = (folder / "catalog.sqlite3").read_bytes()
        places = [match.start() for name in (key(1), key(2), "float32", "node", "document", "max_bytes", "CREATE")
                  for match in re.finditer(name.encode(), original)]  # fmt: skip
        assert len(places) > 20
        for place in places:
            for file in folder.glob("catalog.sqlite3*"):
                file.unlink()
            data = bytearray(original)
            data[place + 2] ^= 0x80
            (folder / "catalog.sqlite3").write_bytes(data)
            verify(folder)
            repair(folder)
            left = verify(folder)
            assert left.is_clean and intact(folder), (place, left)

    @pytest.mark.some(4)
    @pytest.mark.parametrize(
        "sql",
        [
            "UPDATE entries SET namespace = CAST(x'74ff' AS TEXT) WHERE key > '8'",
            "UPDATE entries SET codec = CAST(x'ff' AS TEXT)",
            "UPDATE entries SET key = CAST(x'ff' AS TEXT) || substr(key, 2) WHERE namespace = 'u'",
            "UPDATE texts SET namespace = CAST(x'ff' AS TEXT) WHERE namespace = 'u'",
            "UPDATE contents SET namespace = CAST(x'ff' AS TEXT) WHERE namespace = 'u'",
            "UPDATE sources SET source = CAST(x'ff' AS TEXT)",
            "UPDATE sources SET document = CAST(x'ff' AS TEXT)",
            "UPDATE sources SET namespace = CAST(x'ff' AS TEXT)",
            "UPDATE quotas SET namespace = CAST(x'ff' AS TEXT)",
            "UPDATE totals SET namespace = CAST(x'ff' AS TEXT) WHERE namespace = 'u'",
            "UPDATE meta SET name = CAST(x'ff' AS TEXT) WHERE name = 'uses'",
            "INSERT INTO writes VALUES (1, CAST(x'ff' AS TEXT), CAST(x'ff' AS TEXT), 1, CAST(x'ff' AS TEXT))",
        ],
    )
    def test_in_each_column(self, folder: Path, sql: str) -> None:
        for name in "tu":
            TenantStore(ChunkStore.open(folder), name).index.add([LONG.format(number) * 4 for number in range(1, 4)])
        change(folder, sql)
        store = opened(folder)
        assert all(store.get(key(number)) is None or is_intact(store, number) for number in range(1, 6))
        assert store.keys() is not None and store.stats() is not None
        store.close()
        assert not verify(folder).is_clean
        repair(folder)
        left = verify(folder)
        assert left.is_clean and intact(folder), left


class TestPartsOfTexts:
    """A payload holds no text: what the catalog lost of it comes from sources, or from adding it again."""

    TEXTS = tuple(f"Page {n}. " + " ".join(f"{LONG.format(n * 100 + line)}." for line in range(5)) for n in (1, 2))

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Two texts with KV, of which the first has a source."""
        store = opened(tmp_path)
        for number, text in enumerate(self.TEXTS, 1):
            store.put(key(number), kv(number), "float32", text=text)
        store.index.add(self.TEXTS)
        store.catalog.sources.add("t", "node", self.TEXTS[0])
        store.close()
        assert self.found(tmp_path) == [True, True]
        return tmp_path

    def found(self, folder: Path) -> list[bool]:
        """Which texts are found in part."""
        texts = TenantStore(ChunkStore.open(folder), "t").index
        return [[match.of for match in texts.find(f"It says: {text[9:150]}!")] == [text] for text in self.TEXTS]

    def test_a_deleted_catalog_loses_them(self, folder: Path) -> None:
        (folder / "catalog.sqlite3").unlink()
        assert repair(folder).found_whole_only == 2
        texts = TenantStore(ChunkStore.open(folder), "t").index
        whole = [[(match.start, match.stop, match.of) for match in texts.find(text)] for text in self.TEXTS]
        assert whole == [[(0, len(text), None)] for text in self.TEXTS]
        assert self.found(folder) == [False, False]
        texts.add(self.TEXTS[:1])
        assert self.found(folder) == [True, False] and repair(folder).found_whole_only == 1
        [match] = texts.find(f"It says: {self.TEXTS[1][9:150]}!", self.TEXTS)
        assert match.of == self.TEXTS[1], "it was given"

    @pytest.mark.parametrize("table", ["contents", "anchors"])
    def test_a_repair_brings_back_what_it_can(self, folder: Path, table: str) -> None:
        change(folder, f"DELETE FROM {table}")
        assert self.found(folder) == [False, False]
        assert repair(folder).found_whole_only == (table == "contents")
        assert self.found(folder) == [True, table == "anchors"]

    def test_a_damaged_text_is_removed(self, folder: Path) -> None:
        change(folder, "UPDATE contents SET text = x'00'")
        assert repair(folder).found_whole_only == 1 and self.found(folder) == [True, False]
        [(count,)] = ChunkStore.open(folder).catalog.database.query("SELECT count(DISTINCT content) FROM anchors")
        assert count == 1


def test_a_healthy_store_is_clean_beside_writers(folder: Path) -> None:
    """Whatever others do between two looks: put, replace, delete, evict, drop."""
    stop = threading.Event()

    def write(seed: int) -> None:
        chance, store = random.Random(seed), ChunkStore.open(folder)
        store.set_limit(12 * 4096)
        while not stop.is_set():
            tenant, number, action = TenantStore(store, chance.choice("tu")), chance.randrange(1, 9), chance.random()
            if action < 0.7:
                codec = chance.choice(("float32", "bfloat16"))
                tenant.put(key(number, tenant.namespace), kv(number), codec, text=LONG.format(number))
            elif action < 0.95:
                tenant.release([LONG.format(number)])
            else:
                store.drop_tenant("u")
        store.close()

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    wrong = [report for report in (verify(folder) for _ in range(25)) if not report.is_clean]
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == [] and verify(folder).is_clean
