"""Operations of several steps on a store that machines share, of which any one step fails.

What one machine stored or released is kept until a commit of it succeeds, whatever fails: nothing is lost, nothing that
was released comes back, and other machines see all of it or nothing. The store is in a folder: no server is needed.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from cacheclip_shared import care
from cacheclip_shared.objects import Objects
from cacheclip_shared.place import SharedPlace
from cacheclip_shared.store import GRACE_S, SharedStore
from cacheclip_shared.table import TextTable
from store_steps import Steps, counted_catalogs, failing as failing_catalog, full_disk, step_numbers

from cacheclip_rag import StoreError
from cacheclip_rag.chunks.texts import ChunkTexts
from cacheclip_rag.store import TenantStore, chunk_key

TENANTS = ("t", "u")


def text(number: int) -> str:
    return f"The lamp of lighthouse number {number} burned oil until the electric light came."


def key(number: int, tenant: str) -> str:
    return chunk_key(model_fingerprint="m", prefix_ids=[1], chunk_ids=[number], rope_pin="", namespace=tenant)


def put(store: TenantStore, *numbers: int) -> None:
    for number in numbers:
        kv = torch.full((2, 2, 1, 4, 4), float(number))
        store.put(key(number, store.namespace), kv, "float32", text=text(number))
        ChunkTexts(store).add(text(number), f"source {number}", "a document")


class Machine:
    """Tenants of a store, with a copy of its catalog."""

    def __init__(self, folder: Path, home: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CACHECLIP_HOME", str(home))
            self.place = SharedPlace(f"file://{folder}")
            self.replica = self.place.replica
            self.store = SharedStore.at(self.place)
        self.tenants = {name: TenantStore(self.store, name) for name in TENANTS}

    def there(self) -> dict[str, list[int]]:
        """Texts that each tenant finds as a whole and in parts, all of them with KV."""
        found = self.known()
        for name, known in found.items():
            store = self.tenants[name]
            held = [number for number in known if store.holds_text(text(number))]
            assert held == known and all(store.get(key(number, name)) is not None for number in known)
            parts = {number for number in range(1, 5) if text(number) in ChunkTexts(store).index.texts()}
            assert {*known} == parts
        return found

    def known(self) -> dict[str, list[int]]:
        """Texts that each tenant finds as a whole."""
        indexes = {name: ChunkTexts(store).index for name, store in self.tenants.items()}
        return {name: [n for n in range(1, 5) if index.find(text(n), parts=False)] for name, index in indexes.items()}

    def sources(self) -> dict[str, list[str]]:
        return {name: sorted(ChunkTexts(store).sources()) for name, store in self.tenants.items()}


class Act(NamedTuple):
    run: Callable[[Machine], object]
    there: dict[str, list[int]]
    sources: dict[str, list[str]]


def put_and_release(machine: Machine) -> None:
    put(machine.tenants["t"], 3)
    for store in machine.tenants.values():
        ChunkTexts(store).release([text(1), text(2)])


def remove_a_document(machine: Machine) -> None:
    texts = ChunkTexts(machine.tenants["t"])
    texts.release(texts.orphans(["a document"]))
    texts.remove_sources(["a document"])


ACTS = {
    "put and release": Act(put_and_release, {"t": [3], "u": []}, {"t": ["source 3"], "u": []}),
    "remove a document": Act(
        remove_a_document, {"t": [2], "u": [1, 2]}, {"t": ["another source"], "u": ["source 1", "source 2"]}
    ),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread commits or polls in between."""
    monkeypatch.setattr(SharedStore, "_wake", lambda store: None)
    with counted_catalogs():
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two texts of each tenant, in ``store``, and the homes of two machines that know them."""
    root = tmp_path_factory.mktemp("shared")
    care.create(f"file://{root / 'store'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedStore, "_wake", lambda store: None)
        one = Machine(root / "store", root / "one")
        for store in one.tenants.values():
            put(store, 1, 2)
        ChunkTexts(one.tenants["t"]).add(text(2), "another source", "another document")
        one.store.commit()
        other = Machine(root / "store", root / "other")
        other.store.poll()
        for machine in (one, other):
            assert machine.there() == {"t": [1, 2], "u": [1, 2]}
        leave(root, one, other)
    return root


def close(*machines: Machine) -> None:
    for machine in machines:
        machine.store.close()


def leave(root: Path, *machines: Machine) -> None:
    """For :func:`machines` to go on with."""
    for machine in machines:
        machine.store.close()
        machine.replica.rename(root / f"replica {machine.replica.parent.parent.name}")


def machines(prepared: Path, root: Path) -> tuple[Machine, Machine]:
    """The same at another place."""
    shutil.copytree(prepared / "store", root / "store")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("one", "other"):
            patch.setenv("CACHECLIP_HOME", str(root / name))
            shutil.copytree(prepared / f"replica {name}", SharedPlace(f"file://{root / 'store'}").replica)
    return Machine(root / "store", root / "one"), Machine(root / "store", root / "other")


@contextmanager
def failing(steps: Steps, *, interrupted: bool = False, replies: bool = True) -> Iterator[None]:
    """In this block, requests to storage and to the table, and commits of the copy of the catalog, are counted and
    fail. ``interrupted``: by Ctrl-C; ``replies``: also after they were carried out."""
    error: Callable[[], BaseException] = KeyboardInterrupt if interrupted else full_disk
    ask, tried = Objects._ask, TextTable._tried

    def asking(objects: Objects, request: str, *arguments: Any, **options: Any) -> Any:
        steps.take(f"storage: {request}", error)
        return ask(objects, request, *arguments, **options)

    def trying(table: TextTable, run: Callable[[], Any]) -> Any:
        def then() -> Any:
            steps.take("the table", error)
            found = run()
            if replies:
                steps.take("the table's reply", error)
            return found

        return tried(table, then)

    with pytest.MonkeyPatch.context() as patch, failing_catalog(steps, () if interrupted else ("COMMIT",)):
        patch.setattr(Objects, "_ask", asking)
        patch.setattr(TextTable, "_tried", trying)
        yield


def each_step(root: Path, run: Callable[[Path, Steps], None], least: int) -> None:
    """Run with a first step that fails, with a second one, and so on, until there are no more."""
    for number in step_numbers():
        steps = Steps(number)
        try:
            run(root / str(number), steps)
        except BaseException as error:
            error.add_note(f"step {number} failed: {steps.failed if steps.has_failed else None}")
            raise
        if not steps.has_failed:
            assert number >= least, f"only {number} steps"
            return


class TestCommit:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(("name", "interrupted"), [*((name, False) for name in ACTS), ("put and release", True)])
    def test_what_waits_is_committed_by_the_next_one(
        self, prepared: Path, tmp_path: Path, name: str, interrupted: bool
    ) -> None:
        act = ACTS[name]

        def run(root: Path, steps: Steps) -> None:
            one, other = machines(prepared, root)
            before = other.there()
            act.run(one)
            assert one.there() == act.there
            with failing(steps, interrupted=interrupted):
                try:
                    one.store.commit()
                except (StoreError, KeyboardInterrupt):
                    assert steps.has_failed
            other.store.poll()
            seen = other.there()
            assert all(seen[tenant] in (before[tenant], act.there[tenant]) for tenant in TENANTS), "half of it is seen"
            one.store.commit()
            other.store.poll()
            for machine in (one, other):
                assert machine.there() == act.there and machine.sources() == act.sources
                machine.store.close()

        each_step(tmp_path, run, least=6)

    @pytest.mark.parametrize("way", ["text", "source"])
    def test_what_is_released_while_a_commit_fails_does_not_come_back(
        self, prepared: Path, tmp_path: Path, way: str, monkeypatch: Any
    ) -> None:
        one, other = machines(prepared, tmp_path)
        texts = ChunkTexts(one.tenants["t"])
        put(one.tenants["t"], 3, 4)

        def release_and_fail(*_: object) -> int:
            texts.release([text(3)] if way == "text" else texts.orphans(["source 3"]))
            texts.remove_sources([] if way == "text" else ["source 3"])
            raise StoreError("storage does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(TextTable, "commit", release_and_fail)
            with pytest.raises(StoreError, match="does not answer"):
                one.store.commit()
        put(one.tenants["u"], 3)
        one.store.commit()
        other.store.poll()
        assert one.there() == other.there() == {"t": [1, 2, 4], "u": [1, 2, 3]}
        close(one, other)

    def test_who_commits_at_the_same_time_sees_whether_the_other_one_failed(
        self, prepared: Path, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """Else a text would count as released, and its removal wait for a thread."""
        one, other = machines(prepared, tmp_path)
        ChunkTexts(one.tenants["t"]).release([text(1)])
        begun, gate, commit = threading.Event(), threading.Event(), TextTable.commit

        def fail_once(table: TextTable, *given: Any) -> int:
            if begun.is_set():
                return commit(table, *given)
            begun.set()
            assert gate.wait(60)
            raise StoreError("storage does not answer")

        monkeypatch.setattr(TextTable, "commit", fail_once)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(one.store.commit)
            assert begun.wait(60)
            second = pool.submit(one.store.commit)
            wait([second], 0.2)  # time for a second one that does not wait for the first
            put(one.tenants["u"], 3)
            assert one.store.commit("u") == 1, "another tenant does not wait"
            gate.set()
            assert isinstance(first.exception(), StoreError) and second.result() == 0
        other.store.poll()
        assert one.there() == other.there() == {"t": [2], "u": [1, 2, 3]}
        close(one, other)

    def test_a_machine_that_leaves_commits_to_others_commits_what_it_releases(
        self, prepared: Path, tmp_path: Path
    ) -> None:
        one, other = machines(prepared, tmp_path)
        one.store.commits = False
        put(one.tenants["t"], 3)
        ChunkTexts(one.tenants["t"]).release([text(1)])
        one.store.commit()
        other.store.poll()
        assert other.there() == {"t": [2], "u": [1, 2]}
        assert one.store.take_rows("t")["text"].to_pylist() == [text(3)]
        close(one, other)


def leave_garbage(machine: Machine) -> None:
    """Payloads of released texts, and small files of the tables."""
    for store in machine.tenants.values():
        put(store, 3)
        machine.store.commit()
        ChunkTexts(store).release([text(1), text(3)])
        machine.store.commit()


def leave_damage(machine: Machine) -> None:
    """A damaged payload, and one that is gone, of each tenant."""
    for name, store in machine.tenants.items():
        for number, change in ((1, lambda name: machine.store.objects.replace(name, b"damaged")), (2, None)):
            (found,) = machine.store.objects.locate(name, [key(number, name)])[key(number, name)]
            change(found.name) if change else machine.store.objects.remove([found.name])
        put(store, 3)
    machine.store.commit()


CARES: dict[str, tuple[Callable[[Machine], object], Callable[[str], object], list[int], int]] = {
    "gc": (leave_garbage, lambda url: care.gc(url, grace_s=0), [2], 12),
    "compact": (leave_garbage, care.compact, [2], 8),
    "verify": (leave_damage, care.verify, [3], 12),
}


def named(machine: Machine) -> dict[str, list[int]]:
    """Texts of which rows name KV."""
    found = {name: TextTable(machine.place, name).rows(["text", "kv"]).to_pylist() for name in TENANTS}
    texts = {name: {row["text"] for row in rows if row["kv"]} for name, rows in found.items()}
    return {name: [number for number in range(1, 5) if text(number) in texts[name]] for name in TENANTS}


def payloads(machine: Machine) -> dict[str, list[int]]:
    return {name: [n for n in range(1, 5) if machine.store.objects.locate(name, [key(n, name)])] for name in TENANTS}


class TestFirstSight:
    def test_garbage_collection_deletes_what_it_saw_without_a_row_for_the_whole_time(
        self, prepared: Path, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """However old a payload is: its row may have gone just now, or be about to be committed."""
        one, _ = machines(prepared, tmp_path)
        texts, clock = ChunkTexts(one.tenants["t"]), [time.time() + 9 * GRACE_S]
        monkeypatch.setattr(care, "time", SimpleNamespace(time=lambda: clock[0]))

        def after(seconds: float) -> tuple[int, list[int]]:
            clock[0] += seconds
            return care.gc(one.place.url)["deleted"], payloads(one)["t"]

        assert after(0.0) == (0, [1, 2])
        texts.release([text(1)])
        one.store.commit()
        assert after(9 * GRACE_S) == after(GRACE_S - 1.0) == (0, [1, 2])
        put(one.tenants["t"], 1)
        one.store.commit()
        assert after(9 * GRACE_S) == (0, [1, 2]), "it has a row again"
        texts.release([text(1)])
        one.store.commit()
        assert after(9 * GRACE_S) == after(GRACE_S - 1.0) == (0, [1, 2])
        assert after(1.0) == (1, [2])
        one.store.close()


class TestCare:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("name", CARES)
    def test_a_second_try_does_the_rest(self, prepared: Path, tmp_path: Path, name: str) -> None:
        prepare, look_after, there, least = CARES[name]
        one, other = machines(prepared, tmp_path / "before")
        prepare(one)
        leave(tmp_path / "before", one, other)

        def run(root: Path, steps: Steps) -> None:
            one, other = machines(tmp_path / "before", root)
            with failing(steps, replies=False):
                try:
                    look_after(one.place.url)
                except StoreError:
                    assert steps.has_failed
            other.store.poll()
            assert all({*there} <= {*found} for found in payloads(other).values()), "a payload with a row is gone"
            look_after(one.place.url)
            if name != "compact":
                assert payloads(other) == dict.fromkeys(TENANTS, there)
                assert named(other) == dict.fromkeys(TENANTS, there)
            other.store.poll()
            assert all({*there} <= {*known} for known in other.known().values())
            close(one, other)

        each_step(tmp_path, run, least)
