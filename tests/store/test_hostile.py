"""A store folder that somebody else prepared: nothing outside it is touched, and nothing hangs."""

import os
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_ingest import Library, check_library, repair_library
from cacheclip_testing import FakeRuntime

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.base.database import Database
from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.base.folder import open_folder
from cacheclip_rag.models import register_runtime
from cacheclip_rag.store import ChunkStore, StoreReader, TenantStore, decode_frame, encode_frame
from cacheclip_rag.store.ahead import LayerReads
from tests.conftest import some_of
from tests.store.samples import (
    change,
    clear,
    collect_garbage,
    frame,
    is_intact,
    key,
    kv,
    opened,
    path_of,
    put,
    repair,
    verify,
)

PLACES = ["kv", "kv/ab", "tmp", "writers", "unknown", "chunks"]
"""Folders of a store."""
NAMES = [f"{'0' * 32}", f"{'0' * 32}-abcd", f"{key(1)}.kv", "notes.txt", "index.sqlite3", "catalog.sqlite3"]
"""Names that a store gives to its own files, and others."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = opened(folder := tmp_path_factory.mktemp("prepared") / "store")
    put(store, 1, 2)
    store.close()
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "store"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Files that look as those of a store, which none of it may touch."""
    outside = tmp_path / "outside"
    for name in (".", "ab", key(1)[:2], "b"):
        (outside / name).mkdir(exist_ok=True, parents=True)
        for file in NAMES:
            (outside / name / file).write_bytes(frame(1) if file.endswith(".kv") else b"precious")
    return outside


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def use_everything(folder: Path) -> None:
    """Whatever a user does with a store. StoreError is an answer."""

    def use(*actions: Callable[[], object]) -> None:
        for action in actions:
            with suppress(StoreError):
                action()

    def question() -> None:
        store, text = ChunkStore.open(folder, memory_bytes=1000), "a text of more than sixteen characters" * 9
        tenant = TenantStore(store, "t")
        for number in (1, 2, 3):
            got = tenant.get(key(number))
            assert got is None or torch.equal(got.tensor(), kv(number))
        use(lambda: put(tenant, 1, 2, 3), lambda: tenant.delete([key(3)]), lambda: store.set_limit(8192))
        use(lambda: store.set_limit(None), store.sweep, lambda: tenant.index.add([text]))
        tenant.index.find(text)
        store.close()

    use(question)
    for of_folder in (verify, collect_garbage, repair, repair_library, check_library):
        use(lambda of_folder=of_folder: of_folder(folder))  # type: ignore[misc]
    use(lambda: Library(folder).documents(), question, lambda: clear(folder))
    use(lambda: StoreReader(folder, "t")._tiers.get_many([key(1)]))


class TestLinks:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("place", PLACES)
    def test_in_place_of_a_folder(self, folder: Path, outside: Path, place: str) -> None:
        """Whatever is done, nothing beside the store is read as a payload, written or deleted."""
        before = contents(outside)
        target = folder / (place if place != "kv/ab" else f"kv/{key(1)[:2]}")
        if target.is_dir():
            target.rename(folder.parent / "moved")
        target.symlink_to(outside)
        use_everything(folder)
        assert contents(outside) == before

    @some_of(
        3,
        ending=("", "-wal", "-shm", "-journal", ".damaged", ".damaged-wal"),
        name=("catalog.sqlite3", "library.sqlite3"),
        kind=("empty", "text", "catalog", "nothing"),
    )
    def test_in_place_of_a_database(self, folder: Path, outside: Path, name: str, ending: str, kind: str) -> None:
        """An empty file would become a catalog; what is missing would be made."""
        victim, catalog = outside / "victim", (folder / "catalog.sqlite3").read_bytes()
        if kind != "nothing":
            victim.write_bytes({"empty": b"", "text": b"precious", "catalog": catalog}[kind])
        before = contents(outside)
        link = folder / f"{name}{ending}"
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        use_everything(folder)
        assert contents(outside) == before

    @pytest.mark.parametrize("name", ["catalog.sqlite3", "library.sqlite3"])
    @pytest.mark.parametrize("ending", ["", ".damaged"])
    def test_named_in_a_journal(self, folder: Path, outside: Path, name: str, ending: str) -> None:
        """SQLite rolls such a journal back when it opens the database, and deletes the file that it names."""
        Library(folder).documents()
        with suppress(StoreError):
            repair_library(folder)
        database = folder / name
        if not database.exists():
            sqlite3.connect(database).execute("CREATE TABLE t (x)").connection.close()
        with sqlite3.connect(database) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        for each in ("-wal", "-shm"):
            database.with_name(name + each).unlink(missing_ok=True)
        if ending:
            shutil.copy(database, folder / f"{name}{ending}")
        pages, victim = database.stat().st_size // 4096, str(outside / "notes.txt").encode()
        numbers = struct.pack(">IIIII", 0, 1, pages, 512, 4096)
        magic = bytes.fromhex("d9d505f920a163d7")
        tail = struct.pack(">I", (1 << 30) // 4096 + 1) + victim + struct.pack(">II", len(victim), sum(victim)) + magic
        (folder / f"{name}{ending}-journal").write_bytes((magic + numbers).ljust(512, b"\0") + tail)
        before = contents(outside)
        if not ending:
            with pytest.raises(StoreError, match="journal"):
                Database(database, "", 1).query("SELECT 1")
        use_everything(folder)
        assert contents(outside) == before
        if (name, ending) == ("catalog.sqlite3", ""):
            repair(folder)
            assert ChunkStore.open(folder).stats().entries >= 0

    @pytest.mark.parametrize("place", [f"writers/{'0' * 32}", f"tmp/{'0' * 32}-abcd", "tmp/x", "writers/x"])
    def test_in_place_of_a_file(self, folder: Path, outside: Path, place: str) -> None:
        before = contents(outside)
        (folder / place).symlink_to(outside / "notes.txt")
        (folder / f"{place}-2").symlink_to(outside)
        use_everything(folder)
        assert contents(outside) == before

    def test_the_folder_itself_may_be_one(self, folder: Path, tmp_path: Path) -> None:
        """The user named it."""
        (tmp_path / "named").symlink_to(folder)
        store = opened(tmp_path / "named")
        assert is_intact(store, 1)
        put(store, 3)
        assert is_intact(opened(folder), 3)

    def test_that_come_while_a_folder_is_open_change_nothing(self, folder: Path, outside: Path) -> None:
        before = contents(outside)
        with open_folder(folder, "writers") as writers:
            (folder / "writers").rename(folder / "other")
            (folder / "writers").symlink_to(outside)
            assert writers.names() == os.listdir(folder / "other") and not writers.unlink("notes.txt")
        assert contents(outside) == before

    @pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "", "/etc/passwd", "a\0b"])
    def test_names_are_no_paths(self, folder: Path, name: str) -> None:
        with open_folder(folder, "kv") as payloads:
            for use in (payloads.unlink, payloads.status, payloads.folder, lambda n: payloads.open(n, os.O_RDONLY)):
                with pytest.raises(ValueError, match="expected the name of a file"):
                    use(name)

    @pytest.mark.parametrize("place", ["kv", "tmp", "writers"])
    def test_are_named_and_moved_aside(self, folder: Path, outside: Path, place: str) -> None:
        """And the store works again; what was behind a link to payloads is not the store's."""
        (folder / place).rename(folder.parent / "moved")
        (folder / place).symlink_to(outside)
        assert place in verify(folder).unknown_files
        done = repair(folder)
        assert f"unknown/{place}" in done.moved_files and (folder / "unknown" / place).is_symlink()
        assert verify(folder).is_clean
        store = opened(folder)
        put(store, 3)
        assert is_intact(store, 3) and is_intact(store, 1) == (place != "kv")


BESIDE_DATABASES = [f"{name}.sqlite3-{end}" for name in ("catalog", "library") for end in ("wal", "shm", "journal")]


class TestNoFiles:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("place", [f"writers/{'0' * 32}", f"tmp/{'0' * 32}-abcd", *BESIDE_DATABASES])
    @pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir])
    def test_in_place_of_a_file(self, folder: Path, place: str, kind: Callable[[Any], None]) -> None:
        kind(folder / place)
        use_everything(folder)

    @pytest.mark.some(4)
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("kind", [os.mkfifo, lambda path: path.write_bytes(b"x")])
    def test_in_place_of_a_folder(self, folder: Path, place: str, kind: Callable[[Any], None]) -> None:
        if (folder / place).is_dir():
            (folder / place).rename(folder.parent / "moved")
        kind(folder / place)
        use_everything(folder)
        repair(folder)
        assert verify(folder).is_clean

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
    def test_a_device(self, folder: Path) -> None:
        path_of(folder, 1).unlink()
        with suppress(PermissionError):  # where containers forbid it
            os.mknod(path_of(folder, 1), 0o20666, os.makedev(1, 5))  # zeros without end
        assert opened(folder).get(key(1)) is None
        use_everything(folder)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
SCHEMAS = {
    "view": f"DROP TABLE totals; CREATE VIEW totals AS {ENDLESS} 'x' AS namespace, i AS entries, i AS bytes FROM n;",
    "view of writes": f"DROP TABLE writes; CREATE VIEW writes AS {ENDLESS} i AS id, 'k' AS key, 't' AS namespace, "
    "1 AS bytes, hex(i) AS writer FROM n;",
    "trigger": f"CREATE TRIGGER more AFTER INSERT ON entries BEGIN INSERT INTO meta {ENDLESS} i, 1 FROM n; END;",
    "trigger of ours": "DROP TRIGGER entry_added; CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN "
    f"INSERT INTO meta {ENDLESS} i, 1 FROM n; END;",
    "index": "CREATE INDEX more ON entries (hex(zeroblob(100000)));",
    "other table": "CREATE VIRTUAL TABLE more USING fts5(x);",
    "column": "ALTER TABLE meta ADD COLUMN x TEXT DEFAULT 'y';",
}


class TestCatalogs:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
    def test_of_another_schema_are_refused_and_made_anew(self, folder: Path, schema: str) -> None:
        """Before any statement of theirs runs; reading goes on without them."""
        change(folder, schema)
        store = opened(folder)
        assert is_intact(store, 1) and is_intact(store, 2)
        with pytest.raises(StoreError, match="did not make.*store repair"):
            put(store, 3)
        assert repair(folder).entries == 2 and verify(folder).is_clean

    @pytest.mark.some(3)
    @pytest.mark.parametrize("writer", ["../../x", "/etc/x", "**", "*", "..", "", "\x00", "?" * 32, "[0-9a-f]" * 4])
    def test_names_of_writers_are_compared_only(self, folder: Path, tmp_path: Path, writer: str) -> None:
        beside = [tmp_path / "x-1", folder / "x-1", tmp_path / "x", folder / "tmp" / "x-1"]
        for path in beside:
            path.write_bytes(b"precious")
        names = (key(9), f"-{key(9)}", "../../x", b"\xff")
        sql = "INSERT INTO writes (key, namespace, bytes, writer) VALUES (?, 't', 1, ?)"
        change(folder, sql, rows=[(name, writer) for name in names])
        store = opened(folder)
        assert is_intact(store, 1) and store.chunk_store.sweep() == 0
        assert collect_garbage(folder)["payloads"] == 0
        assert repair(folder).entries == 2
        assert all(path.exists() for path in beside[:3]) and intact(folder)

    @pytest.mark.some(3)
    @pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "x" * 5000, "\x00", "A" * 64, "*" * 64])
    def test_names_of_entries_are_no_paths(self, folder: Path, tmp_path: Path, name: str) -> None:
        (tmp_path / "x.kv").write_bytes(b"precious")
        row = (name, "t", None, 4096, 1, "float32", 0)
        change(folder, "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", rows=[row])
        use_everything(folder)
        assert (tmp_path / "x.kv").read_bytes() == b"precious"

    def test_many_rows_hold_nobody_up(self, folder: Path) -> None:
        """Tenants that hold nothing are not gone through one by one."""
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000) INSERT INTO"
        change(folder, f"{numbers} quotas SELECT 'q' || i, 5 FROM n;")
        change(folder, f"{numbers} writes SELECT i, 'k', 't', 0, hex(i) FROM n;")
        asked: list[str] = []
        store = ChunkStore.open(folder)
        store.catalog.database._open().set_trace_callback(asked.append)
        store.sweep()
        store.shrink()
        assert len(asked) < 100 and is_intact(TenantStore(store, "t"), 1)
        store.close()
        assert repair(folder).entries == 2 and clear(folder) == 2

    def test_opening_ends_what_was_left_for_a_while_only(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tenants above their quotas, and writes of a killed process: the rest waits for the next opening."""
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000) INSERT INTO"
        change(
            folder,
            f"{numbers} quotas SELECT 'q' || i, 5 FROM n;",
            f"{numbers} entries SELECT printf('%064x', i), 'q' || i, NULL, 4096, 1, 'float32', i FROM n;",
            f"{numbers} writes SELECT i, printf('%064x', i + 5000), 't', 0, '{'0' * 32}' FROM n;",
        )
        count = "SELECT (SELECT COUNT(*) FROM entries), (SELECT COUNT(*) FROM writes)"
        left = []
        for seconds in (0.0, 600.0):
            monkeypatch.setattr("cacheclip_rag.store.chunk_store._SWEEP_S", seconds)
            store = ChunkStore.open(folder)
            left += store.catalog.database.query(count)
            store.close()
        (entries, writes), last = left
        assert entries > 1000 and writes > 1000 and last == (2, 0)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("size", [10**7, 3 * 10**7])
    def test_texts_that_grow_without_end(self, folder: Path, size: int) -> None:
        """A text of a gigabyte in a megabyte."""
        text = "A text that is long enough to be found in part, if it only were whole. " * 5
        store = opened(folder)
        store.index.add([text])
        assert store.index.find(text[30:200])
        packer = zlib.compressobj(9)
        packed = b"".join([packer.compress(bytes(10**6)) for _ in range(size // 10**6)]) + packer.flush()
        change(folder, "UPDATE contents SET text = ?", rows=[(packed,)])
        assert len([*store.index.texts()]) == (size < 1 << 24)
        store.index.find(text[30:200])
        repair(folder)
        assert not store.index.find(text[30:200])


def intact(folder: Path) -> bool:
    store = opened(folder)
    return is_intact(store, 1) and is_intact(store, 2)


class TestShapes:
    """Whoever can write to the store can write right checksums, too."""

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        "shape", [(2, 2, 2, 5, 4), (2, 2, 2, 3, 4), (1, 2, 2, 4, 4), (2, 2, 1, 4, 8), (2, 2, 2, 4, 8)]
    )
    @pytest.mark.parametrize("in_parts", [False, True])
    def test_another_shape_than_the_models_is_damage(self, folder: Path, shape: Any, in_parts: bool) -> None:
        store, wanted = opened(folder), {key(1): (2, 2, 2, 4, 4)}
        path_of(folder, 1).write_bytes(encode_frame(torch.zeros(shape), "float32", key(1), namespace="t"))
        if in_parts:
            assert [*LayerReads(store).begin([key(1)], wanted)] == [None]
        assert store.get(key(1), shape=wanted[key(1)]) is None and not path_of(folder, 1).exists()
        assert store.get(key(2), shape=(2, 2, 2, 4, 4)) is not None

    @pytest.mark.some(3)
    @pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
    @pytest.mark.parametrize("of", ["shorter", "wider", "fewer layers"])
    def test_an_engine_answers_as_without_it(self, tmp_path: Path, of: str, memory_bytes: int) -> None:
        """No error of ours, and the right answer: the chunk is computed as fresh text and stored again."""
        texts = [f"Page {n} says that the keeper wrote down the hour and the wind of day {n}." for n in range(3)]
        register_runtime("fake", FakeRuntime)
        settings: dict[str, Any] = {"primary": "fake:primary", "auxiliary": None, "method": "direct"}
        engine = CacheClipEngine(**settings, store=tmp_path, memory_bytes=memory_bytes, prefix_cache_bytes=0)
        engine.precompute(texts)
        prompt = "\n\n".join(texts) + "\n\nWhat does the keeper write?"
        expected = engine.generate(prompt)
        assert expected.stats.hits == 3
        engine.close()
        frames = {path: decode_frame(path.read_bytes(), path.stem) for path in tmp_path.glob("kv/*/*.kv")}
        path, stored = next((path, each) for path, each in frames.items() if each.frame.digest)
        kv = stored.tensor()
        other = {"shorter": kv[:, :, :, 1:], "wider": torch.cat([kv, kv], -1), "fewer layers": kv.repeat(2, 1, 1, 1, 1)}
        header = {"namespace": "default", "digest": stored.frame.digest, "text": stored.frame.text}
        path.write_bytes(encode_frame(other[of], stored.codec, path.stem, **header))  # type: ignore[arg-type]
        engine = CacheClipEngine(**settings, store=tmp_path, memory_bytes=memory_bytes, prefix_cache_bytes=0)
        for hits in (2, 3):
            answer = engine.generate(prompt)
            assert (answer.text, answer.stats.hits) == (expected.text, hits)

    def test_no_memory_is_taken_for_what_the_model_cannot_have(self, folder: Path, monkeypatch: Any) -> None:
        huge = encode_frame(torch.zeros(2, 2, 2, 200_000, 4), "float32", key(1), namespace="t")
        path_of(folder, 1).write_bytes(huge)
        change(folder, f"UPDATE entries SET bytes = {len(huge)} WHERE key = '{key(1)}'")
        taken: list[int] = []
        take = lambda size: taken.append(size) or memoryview(bytearray(size))  # noqa: E731
        monkeypatch.setattr("cacheclip_rag.store.tenant.new_memory", take)
        assert opened(folder).get(key(1), shape=(2, 2, 2, 4, 4)) is None and taken == []
