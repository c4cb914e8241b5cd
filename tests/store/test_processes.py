"""A store that several processes use at once, some of which are killed."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag.store import Catalog, ChunkStore, MemoryBackend, TenantStore, Tiers
from tests.store.samples import (
    BLOCK,
    blocks,
    bytes_on_disk,
    is_intact,
    key,
    kv,
    opened,
    path_of,
    payload_files,
    put,
    remove_catalog,
    run,
    totals_are_right,
)
from tests.store.worker import NUMBERS, tokens_of, workers


def agree(store: TenantStore, folder: Path) -> bool:
    """Whether every entry has a payload, every payload an entry, and all bytes are counted."""
    assert sorted(store.chunk_store.tiers.list()) == sorted(store.keys())
    assert store.chunk_store.stats().bytes == bytes_on_disk(folder)
    return totals_are_right(store)


def stopped(pids: list[int]) -> None:
    """Wait until processes have stopped, or ended."""
    for pid in pids:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
            time.sleep(0.0002)


class TestManyWriters:
    @pytest.mark.long
    def test_the_disk_never_holds_more_than_the_limit(self, folder: Path) -> None:
        """Four processes, whose writes alone would fill the store twice. They are halted for each look."""
        limit = 40 * BLOCK
        assert 4 * max(blocks(tokens_of(number)) for number in range(NUMBERS)) > 1.5 * limit
        samples = []
        with workers(folder) as processes:
            pids = processes.start(4, 1.5, limit)
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                stopped(pids)
                samples.append(bytes_on_disk(folder))
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
                time.sleep(0.002)
            assert processes.wait() == [0, 0, 0, 0]
        assert len(samples) > 10 and limit / 2 < max(samples) <= limit
        store = opened(folder)
        assert store.chunk_store.limit == limit and agree(store, folder)
        assert not list((folder / "tmp").iterdir()) and not list((folder / "writers").iterdir())

    @pytest.mark.long
    def test_killed_at_any_moment(self, folder: Path) -> None:
        """Writes, reads, evictions and deletions: what is readable is intact, and nothing is left behind."""
        limit = 60 * BLOCK
        held = 0
        with workers(folder) as processes:
            for pause in (0.25, 0.4, 0.31, 0.5):
                pids = processes.start(3, 60, limit)
                time.sleep(pause)
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                assert processes.wait() == [signal.SIGKILL] * 3
                store = opened(folder)
                assert not list((folder / "tmp").iterdir()) and store.catalog.announcements.writers() == []
                listed = store.keys()
                for name in listed:  # an eviction that was cut off leaves entries, and no payloads
                    store.get(name)
                assert agree(store, folder) and bytes_on_disk(folder) <= limit
                present = [number for number in range(NUMBERS) if key(number) in store]
                assert all(is_intact(store, number, tokens_of(number)) for number in present)
                assert store.chunk_store.stats().tiers[-1].damaged == 0
                held += len(present)
                put(store, 60)
                assert is_intact(store, 60) and store.delete([key(60)]) == 1
                store.close()
        assert held > 10


class TestKilled:
    """At one moment of a write, seen by the next process that opens the store."""

    def die(self, folder: Path, patch: str, *, max_bytes: int | None = None, catalog: bool = True) -> TenantStore:
        """Entry 1 is there; the writer of entry 3 is killed where ``patch`` says. ``catalog``: it stays."""
        put(opened(folder, max_bytes), 1)
        program = f"""
def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)
store = opened(Path({str(folder)!r}))
{patch}
put(store, 3)
"""
        done = run(program)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(list((folder / "writers").iterdir())) >= 1
        if not catalog:
            assert len(list((folder / "tmp").iterdir())) == 1
            remove_catalog(folder)
        return opened(folder)

    def test_before_the_payload_has_its_name(self, folder: Path) -> None:
        store = self.die(folder, "os.replace = die")
        assert store.keys() == [key(1)] and is_intact(store, 1) and agree(store, folder)
        assert not list((folder / "tmp").iterdir()) and store.get(key(3)) is None
        put(store, 3)
        assert is_intact(store, 3)

    def test_between_payload_and_entry(self, folder: Path) -> None:
        """The payload is whole: it is kept, with its text."""
        store = self.die(folder, "store.catalog.announcements.finish = die")
        assert set(store.keys()) == {key(1), key(3)} and is_intact(store, 3) and agree(store, folder)
        assert store.release(["text 3"]) == 1 and store.get(key(3)) is None

    def test_between_payload_and_entry_of_an_older_version(self, folder: Path) -> None:
        """The entry follows the payload."""
        patch = "put(store, 3)\nstore.catalog.announcements.finish = die\n"
        patch += "store.put(key(3), kv(9, 300), 'bfloat16', text='other')"
        store = self.die(folder, patch)
        assert store.codec_of(key(3)) == "bfloat16" and agree(store, folder)
        got = store.get(key(3))
        assert got is not None and torch.equal(got.tensor(), kv(9, 300).bfloat16())
        assert store.release(["text 3"]) == 0 and store.release(["other"]) == 1

    def test_while_it_evicts(self, folder: Path) -> None:
        """Payloads are deleted inside the transaction that is undone: their entries are misses, and then gone."""
        patch = "tiers = store.chunk_store.tiers\ndelete = tiers.delete\n"
        patch += "tiers.delete = lambda keys: (delete(keys), die())"
        store = self.die(folder, patch, max_bytes=BLOCK)
        assert store.keys() == [key(1)] and payload_files(folder) == []
        assert store.get(key(1)) is None and agree(store, folder)

    def test_its_files_are_removed_though_the_catalog_is_gone(self, folder: Path) -> None:
        store = self.die(folder, "os.replace = die", catalog=False)
        assert not list((folder / "tmp").iterdir()) and agree(store, folder) and is_intact(store, 1)

    def test_temporary_file_of_an_unknown_writer(self, folder: Path) -> None:
        """Its lock file was removed, so nobody can be writing it."""
        put(opened(folder), 1)
        (folder / "tmp" / f"{'0' * 32}-abcd").write_bytes(b"half")
        assert agree(opened(folder), folder) and not list((folder / "tmp").iterdir())


class TestLivingWriters:
    def announced(self, store: TenantStore, folder: Path) -> tuple[int, Path]:
        """A write in progress: its number, and its temporary file."""
        writer = store.chunk_store.writes.writer
        assert writer is not None
        number, _ = store.catalog.announcements.reserve("t", key(9), BLOCK, writer.name, store.chunk_store.writes.evict)
        temporary = folder / "tmp" / f"{writer.name}-abcd"
        temporary.write_bytes(b"half")
        assert number is not None
        return number, temporary

    def test_are_left_alone_by_who_opens_the_store(self, folder: Path) -> None:
        """However long they take."""
        store = opened(folder)
        put(store, 1)
        number, temporary = self.announced(store, folder)
        for _ in range(2):
            other = opened(folder)
            assert temporary.exists() and len(other.catalog.announcements.writers()) == 1
            assert other.chunk_store.stats().bytes == 2 * BLOCK
        done = run(f"store = opened(Path({str(folder)!r})); put(store, 2); store.close()")
        assert done.returncode == 0, done.stderr
        assert temporary.exists() and store.chunk_store.stats().bytes == 3 * BLOCK
        temporary.unlink()
        store.catalog.announcements.abandon(number)
        assert agree(store, folder)

    def test_a_writer_that_registers_during_a_sweep_is_not_dead(self, folder: Path, monkeypatch: Any) -> None:
        put(opened(folder), 1)
        sweeping, newcomer, begun = opened(folder), opened(folder), list[Path]()

        def and_then_another_begins(look: Callable[[], Any]) -> Callable[[], Any]:
            def looked() -> Any:
                found = look()
                if not begun:
                    begun.append(self.announced(newcomer, folder)[1])
                return found

            return looked

        writer, catalog = sweeping.chunk_store.writes.writer, sweeping.catalog
        monkeypatch.setattr(writer, "names", and_then_another_begins(writer.names))  # type: ignore[union-attr]
        monkeypatch.setattr(catalog.announcements, "writers", and_then_another_begins(catalog.announcements.writers))
        sweeping.chunk_store.sweep()
        assert begun[0].exists() and len(newcomer.catalog.announcements.writers()) == 1

    def test_a_forked_child_has_a_name_of_its_own(self, folder: Path) -> None:
        """And closing the store in the child does not end the parent's."""
        program = f"""
folder = Path({str(folder)!r})
store = opened(folder, memory_bytes=10_000)
put(store, 1)
writer = store.chunk_store.writes.writer
name = writer.name
child = os.fork()
if child == 0:
    ok = writer.name != name and is_intact(store, 1)
    put(store, 3)
    store.close()
    os._exit(0 if ok and is_intact(store, 3) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert writer.name == name and (folder / "writers" / name).exists()
assert name not in list(opened(folder).chunk_store.writes.writer.dead())
put(store, 2)
assert is_intact(store, 2) and is_intact(store, 3) and totals_are_right(store)
"""
        done = run(program)
        assert done.returncode == 0, done.stderr

    def test_a_store_that_is_gone_gives_the_name_up(self, folder: Path) -> None:
        store = opened(folder)
        put(store, 1)
        store.close()  # another thread may still be writing
        assert len(list((folder / "writers").iterdir())) == 1
        put(store, 2)
        assert is_intact(store, 2) and agree(store, folder)
        del store
        gc.collect()
        assert not list((folder / "writers").iterdir())

    def test_a_backend_without_a_folder_of_its_own(self, folder: Path) -> None:
        """Its writes are announced in the catalog under a name too, which other processes do not sweep."""
        store = ChunkStore(Catalog(folder), Tiers([MemoryBackend()]))
        number = store.writes.begin("t", key(1), 100)
        assert number is not None and ChunkStore(Catalog(folder), Tiers([MemoryBackend()])).sweep() == 0
        assert len(store.catalog.announcements.writers()) == 1


Both = tuple[TenantStore, TenantStore]


class TestAtOnce:
    """What another process does between two steps of this one."""

    @pytest.fixture
    def both(self, folder: Path) -> Both:
        store = opened(folder)
        put(store, 1, 2)
        return store, opened(folder)

    def test_a_payload_that_was_replaced_by_a_larger_one_is_not_damaged(
        self, both: Both, folder: Path, monkeypatch: Any, caplog: Any
    ) -> None:
        """Its entry still says the older size."""
        reader, writer = both
        finish, seen = writer.catalog.announcements.finish, []

        def read_before(*arguments: Any) -> None:
            seen.append(is_intact(reader, 1, tokens=600))
            finish(*arguments)

        monkeypatch.setattr(writer.catalog.announcements, "finish", read_before)
        put(writer, 1, tokens=600)
        assert seen == [True] and "damaged" not in caplog.text
        assert is_intact(reader, 1, tokens=600) and agree(reader, folder)

    def test_an_entry_that_was_evicted_and_written_again_while_it_was_read(
        self, both: Both, folder: Path, monkeypatch: Any
    ) -> None:
        reader, writer = both
        find = reader.chunk_store.tiers.find

        def find_nothing(*arguments: Any) -> Any:
            writer.delete([key(1)])
            found = find(*arguments)
            put(writer, 1)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(reader.chunk_store.tiers, "find", find_nothing)
            assert reader.get(key(1)) is None
        assert agree(reader, folder) and is_intact(reader, 1)

    @pytest.mark.parametrize("how", ["delete", "release", "damaged", "drop"])
    def test_what_is_written_while_it_is_deleted_has_an_entry_or_no_payload(
        self, both: Both, folder: Path, monkeypatch: Any, how: str
    ) -> None:
        deleting, writer = both
        if how == "damaged":
            path_of(folder, 1).write_bytes(b"garbage")
        delete = deleting.chunk_store.tiers.delete
        writing = threading.Thread(target=put, args=(writer, 1))

        def deleted(keys: Any) -> int:
            count = delete(keys)
            if writing.ident is None:
                writing.start()
            writing.join(0.5)  # a write that waits goes on afterwards
            return count

        uses: dict[str, Callable[[], object]] = {
            "delete": lambda: deleting.delete([key(1)]),
            "release": lambda: deleting.release(["text 1"]),
            "damaged": lambda: deleting.get(key(1)),
            "drop": lambda: deleting.chunk_store.drop_tenant("t"),
        }
        with monkeypatch.context() as patch:
            patch.setattr(deleting.chunk_store.tiers, "delete", deleted)
            uses[how]()
        writing.join(10)
        assert agree(deleting, folder) and is_intact(deleting, 1)


class TestSharing:
    def test_a_use_through_one_protects_from_eviction_through_the_other(self, folder: Path) -> None:
        one, other = opened(folder, 2 * BLOCK), opened(folder, 2 * BLOCK)
        put(one, 1, 2)
        assert is_intact(other, 1)
        other.flush()
        put(one, 3)
        assert is_intact(other, 1) and other.get(key(2)) is None

    @pytest.mark.long
    def test_opened_by_many_at_once(self, folder: Path) -> None:
        """Nobody mistakes a catalog that another process is just making for one of another version."""
        with workers(folder) as processes:
            processes.start(4, 0.05, 10**9)
            assert processes.wait() == [0, 0, 0, 0]
        assert agree(opened(folder), folder)
