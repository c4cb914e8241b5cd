"""What one engine erases leaves the memory of the others with the next look, also of those that nobody asks.

A call of ``look_at_all`` stands for ten seconds; the clock has a test of its own. The thread may look in between, so
that no test says that something is still there.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.store import ChunkStore, TenantStore, erasures
from cacheclip_rag.store.catalog import Catalog
from cacheclip_rag.store.erasures import LOOK_S, Erasures, look_at_all
from cacheclip_rag.store.memory import MemoryBackend
from cacheclip_rag.store.tiers import Tiers
from tests.conftest import SENTENCES
from tests.engine.asking import SHORT, rag

Make = Callable[..., CacheClipEngine]


@pytest.fixture
def passages() -> list[str]:
    generator = random.Random(3)
    return [" ".join(generator.sample(SENTENCES, 5)) for _ in range(4)]


@pytest.fixture
def pair(make: Make, tmp_path: Path, passages: list[str]) -> tuple[CacheClipEngine, CacheClipEngine]:
    """Two engines on one folder; the second one holds KV of the passages in every place of its memory."""
    options = {"store": tmp_path / "store", "method": "cacheclip", "recompute_ratio": 0.4}
    one, other = make(**options), make(**options, memory_bytes=1 << 28)
    one.precompute(passages)
    other.generate(rag(passages), SHORT)
    other.generate(rag(passages, "Where?"), SHORT, method="full")
    assert in_memory(other, passages) and all(kept(other))
    return one, other


def kept(engine: CacheClipEngine) -> tuple[int, int, int]:
    """Bytes of exact and of continued KV, and texts whose token ids are kept."""
    stats = engine.prefixes.stats
    texts = sum(each.tokenize.cache_info().currsize for each in engine.chunk_caches())
    return stats.bytes, stats.continued_bytes, texts


def in_memory(engine: CacheClipEngine, texts: list[str]) -> list[str]:
    """Those of the texts of which the memory tier has KV of any model."""
    held = {*engine.store.chunk_store.tiers.backends[0].list()}
    keys = {text: {caches.key(text) for caches in engine.chunk_caches()} for text in texts}
    return [text for text in texts if held & keys[text]]


class TestOneProcess:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("others", [False, True])
    def test_what_an_engine_erased_itself_is_not_dropped_twice(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], passages: list[str], others: bool
    ) -> None:
        """Answers after its own erasure keep their KV at the next look, unless another engine erased something, too."""
        one, other = pair
        other.release(passages[:1])
        assert kept(other) == (0, 0, 0)
        other.generate(rag(passages[1:]), SHORT)
        other.generate(rag(passages[1:], "Where?"), SHORT, method="full")
        if others:
            one.release(passages[3:])
        look_at_all()
        assert (kept(other) == (0, 0, 0)) is others and all(kept(other)) is not others

    @pytest.mark.some(3)
    @pytest.mark.parametrize("erase", ["release", "source", "drop", "delete"])
    def test_everything_goes_with_the_next_look(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], passages: list[str], erase: str
    ) -> None:
        one, other = pair
        one.precompute(passages[:1], source="a")
        keys = [caches.key(passages[0]) for caches in one.chunk_caches()]
        {
            "release": lambda: one.release(passages[:1]),
            "source": lambda: one.release(sources=["a"]),
            "drop": lambda: one.store.chunk_store.drop_tenant("default"),
            "delete": lambda: one.store.delete(keys),
        }[erase]()
        look_at_all()
        assert kept(other) == (0, 0, 0)
        assert in_memory(other, passages) == ([] if erase == "drop" else passages[1:])

    def test_a_text_that_was_never_stored(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], passages: list[str]
    ) -> None:
        """Prompts may have held it."""
        one, other = pair
        assert one.release(["It is in no store."]) == 0
        look_at_all()
        assert kept(other) == (0, 0, 0) and in_memory(other, passages) == passages

    def test_what_other_tenants_erase_costs_nothing(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], make: Make, passages: list[str], tmp_path: Path
    ) -> None:
        _, other = pair
        before = kept(other)
        south = make(store=tmp_path / "store", namespace="south")
        south.precompute(passages[:1])
        south.release(passages[:1])
        other.precompute(passages)
        look_at_all()
        assert kept(other)[:2] == before[:2] and in_memory(other, passages) == passages

    def test_engines_that_share_a_store_in_memory(self, make: Make, passages: list[str]) -> None:
        """Of several tenants' engines, say, or of two methods."""
        store = ChunkStore.open(None)
        one, other = (make(store=store, method="cacheclip", recompute_ratio=0.4) for _ in range(2))
        one.precompute(passages)
        other.generate(rag(passages), SHORT)
        one.release(passages[:1])
        look_at_all()
        assert kept(other) == (0, 0, 0)

    def test_an_answer_that_began_before(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], passages: list[str]
    ) -> None:
        one, other = pair
        events = other.stream(rag(passages, "When?"), SHORT)
        next(events)
        one.release(passages[:1])
        look_at_all()
        list(events)
        assert kept(other)[:2] == (0, 0)

    def test_a_copy_that_a_slow_read_leaves_there(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], passages: list[str]
    ) -> None:
        one, other = pair
        key, tiers = other.parts.models.caches_after_prefix.key(passages[0]), other.store.chunk_store.tiers
        data = tiers.get_many([key])[key]
        one.release(passages[:1])
        look_at_all()
        tiers.promote(key, data, 1)
        look_at_all()
        assert in_memory(other, passages) == passages[1:]

    def test_a_catalog_that_cannot_be_asked_is_asked_again(
        self,
        pair: tuple[CacheClipEngine, CacheClipEngine],
        passages: list[str],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        one, other = pair
        one.release(passages[:1])
        with monkeypatch.context() as patched:

            def fails(*_: Any) -> Any:
                raise StoreError("the disk is gone")

            patched.setattr(Catalog, "erasures", fails)
            patched.setattr(Catalog, "unknown_of", fails)
            look_at_all()
            look_at_all()
        said = [each for each in caplog.messages if "what others erase" in each]
        assert said and all("the disk is gone" in each for each in said)
        look_at_all()
        assert kept(other) == (0, 0, 0) and in_memory(other, passages) == passages[1:]

    def test_one_who_fails_holds_up_nobody(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], make: Make, passages: list[str], tmp_path: Path
    ) -> None:
        """And is asked again."""
        _, other = pair
        asked: list[str] = []

        class Failing:
            def drop_kv(self) -> None:
                asked.append("once more")
                raise MemoryError("no room")

        failing = Failing()
        other.store.chunk_store.erasures.watch("default", failing)
        other.store.catalog.note_erasure("default")
        look_at_all()
        assert kept(other) == (0, 0, 0)
        count = len(asked)
        look_at_all()
        assert len(asked) > count >= 1

    def test_a_catalog_that_was_deleted(self, pair: tuple[CacheClipEngine, CacheClipEngine], tmp_path: Path) -> None:
        """Nobody knows what was erased before."""
        _, other = pair
        files = tmp_path / "store"
        for file in files.glob("catalog.sqlite3*"):
            file.unlink()
        look_at_all()
        assert kept(other) == (0, 0, 0)
        assert not [*other.store.chunk_store.tiers.backends[0].list()]
        assert not [*files.glob("catalog.sqlite3*")], "who deletes a store does not find it made anew"

    def test_a_catalog_that_another_process_made_anew(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], tmp_path: Path
    ) -> None:
        """Between two looks: it does not say what was erased before."""
        _, other = pair
        for file in (tmp_path / "store").glob("catalog.sqlite3*"):
            file.unlink()
        beside = ChunkStore.open(tmp_path / "store")
        beside.complete()
        assert beside.catalog.erasures("default") == 0
        look_at_all()
        assert kept(other) == (0, 0, 0)
        beside.close()

    def test_a_store_that_is_made_later(self, make: Make, passages: list[str], tmp_path: Path) -> None:
        """That is no erasure."""
        engine = make(store=tmp_path / "new", method="full")
        engine.generate(rag(passages), SHORT, method="prefix")
        before = engine.prefixes.stats.bytes
        engine.precompute(passages)
        look_at_all()
        assert engine.prefixes.stats.bytes == before > 0

    def test_a_closed_engine_holds_nothing_and_is_watched_again(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], passages: list[str]
    ) -> None:
        one, other = pair
        store = other.store.chunk_store
        other.close()
        assert not store.erasures.is_watched
        assert in_memory(other, passages) == [] and kept(other)[:2] == (0, 0)
        other.generate(rag(passages), SHORT)
        one.release(passages[:1])
        look_at_all()
        assert kept(other) == (0, 0, 0) and in_memory(other, passages) == passages[1:]

    def test_a_store_without_an_engine(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], passages: list[str], tmp_path: Path
    ) -> None:
        one, _ = pair
        key = one.parts.models.caches_after_prefix.key(passages[0])
        store = TenantStore(ChunkStore.open(tmp_path / "store", memory_bytes=1 << 28), "default")
        assert store.get(key) is not None and key in store.chunk_store.tiers.backends[0].list()
        putting = TenantStore(ChunkStore.open(tmp_path / "store", memory_bytes=1 << 28), "default")
        putting.put(key, torch.zeros(1, 2, 1, 3, 4), "float32", text=passages[0])
        assert key in putting.chunk_store.tiers.backends[0].list()
        one.release(passages[:1])
        look_at_all()
        for each in (store, putting):
            assert key not in each.chunk_store.tiers.backends[0].list()
            each.close()

    def test_memory_that_is_free_but_still_holds_kv(
        self, make: Make, tmp_path: Path, passages: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a GPU, PyTorch keeps it, page-locked memory too."""
        engine, given = make(store=tmp_path / "store"), list[str]()
        engine.generate(rag(passages), SHORT)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("of the GPU"))
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given.append("page-locked"), raising=False)
        engine.store.catalog.note_erasure("default")
        look_at_all()
        assert {*given} == {"of the GPU", "page-locked"}


class Numbers:
    """A catalog whose number of erasures is told to it."""

    number: int | None = 1
    fails: Container[str] = ()
    """Names of methods."""

    def __init__(self) -> None:
        self.meanwhile = lambda: None

    def erasures(self, namespace: str) -> int | None:
        self.meanwhile()
        if "erasures" in self.fails:
            raise StoreError("the disk is gone")
        return self.number

    def unknown_of(self, keys: Sequence[str]) -> list[str]:
        if "unknown_of" in self.fails:
            raise StoreError("the disk is gone")
        return []


class Holder:
    """Counts how often it dropped its KV, and does something else meanwhile."""

    def __init__(self) -> None:
        self.dropped, self.meanwhile = 0, lambda: None

    def drop_kv(self) -> None:
        self.dropped += 1
        self.meanwhile()


class TestMeanwhile:
    """What happens while a holder drops its KV."""

    @pytest.fixture
    def watched(self) -> tuple[Erasures, Numbers, Holder]:
        numbers, holder = Numbers(), Holder()
        tiers = Tiers([MemoryBackend(), MemoryBackend()])
        tiers.put("key", b"payload")
        found = Erasures(numbers, tiers)
        found.watch("default", holder)
        return found, numbers, holder

    def test_it_leaves(self, watched: tuple[Erasures, Numbers, Holder]) -> None:
        found, numbers, holder = watched
        holder.meanwhile, numbers.number = lambda: found.unwatch(holder), 2
        found.look()
        assert not found.is_watched

    def test_the_catalog_is_another_one(self, watched: tuple[Erasures, Numbers, Holder]) -> None:
        """Also if it says the same number."""
        found, numbers, holder = watched
        holder.meanwhile = found.doubt
        found.drop_own(holder)
        found.look()
        assert holder.dropped == 2
        holder.meanwhile, numbers.meanwhile = lambda: None, found.doubt
        found.look()
        assert holder.dropped == 3

    def test_a_catalog_that_fails_at_first(self, watched: tuple[Erasures, Numbers, Holder]) -> None:
        """Nobody knows what was erased by the time it answers."""
        found, numbers, _ = watched
        late, numbers.fails = Holder(), {"erasures"}
        found.watch("default", late)
        numbers.fails, numbers.number = (), 0
        found.look()
        assert late.dropped == 1

    def test_an_outage_is_said_once(
        self, watched: tuple[Erasures, Numbers, Holder], caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is over when everything can be asked."""
        found, numbers, _ = watched
        for fails, said in (({"erasures"}, 1), ({"unknown_of"}, 1), ((), 1), ({"unknown_of"}, 2), ({"erasures"}, 2)):
            numbers.fails = fails
            found.look()
            assert caplog.text.count("what others erase") == said


class TestClock:
    def test_the_thread_looks_every_ten_seconds(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], passages: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, other = pair
        slept, mine, own_sleep = list[float](), threading.current_thread(), erasures.time.sleep

        class Over(Exception):
            pass

        class FakeTime:
            @staticmethod
            def sleep(seconds: float) -> None:
                if threading.current_thread() is not mine:
                    own_sleep(seconds)
                    return
                if slept:
                    raise Over
                slept.append(seconds)

        one.release(passages[:1])
        monkeypatch.setattr(erasures, "time", FakeTime)
        with pytest.raises(Over):
            erasures._follow()
        assert slept == [LOOK_S] == [10.0] and kept(other) == (0, 0, 0)
        assert any(each.name == "cacheclip-erasures" and each.daemon for each in threading.enumerate())

    @pytest.mark.long
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
    def test_a_child_of_a_fork_has_a_thread_of_its_own(
        self, pair: tuple[CacheClipEngine, CacheClipEngine], passages: list[str]
    ) -> None:
        """It has the parent's KV, also if nobody asks it anything."""
        one, _ = pair
        key = one.parts.models.caches_after_prefix.key(passages[0])
        arguments = [sys.executable, "-W", "ignore", "-c", FORKS, str(one.config.store), key]
        ran = subprocess.run(arguments, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


FORKS = """
import os, sys, threading
from cacheclip_rag.store import ChunkStore, TenantStore, erasures
folder, key = sys.argv[1:]
store = TenantStore(ChunkStore.open(folder, memory_bytes=1 << 28), "default")
alive = lambda: [thread.name for thread in threading.enumerate()].count("cacheclip-erasures")
assert alive() == 0 and store.get(key) is not None and alive() == 1
if not (child := os.fork()):
    assert alive() == 1
    store.catalog.note_erasure("default")
    store.delete([key])
    erasures.look_at_all()
    os._exit([*store.chunk_store.tiers.backends[0].list()] != [])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


ANOTHER_PROCESS = """
import sys
from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.models.load import load_model
from cacheclip_rag.store.erasures import look_at_all
model, folder = sys.argv[1:]
load_model(model).eos_ids = frozenset()
options = {"method": "anchored", "chunk_context": "prefix", "memory_bytes": 1 << 28}
engine = CacheClipEngine(primary=model, auxiliary=None, store=folder, **options)
held = lambda: (engine.prefixes.stats.continued_bytes, len([*engine.store.chunk_store.tiers.backends[0].list()]))
engine.generate(sys.stdin.readline().replace("|", "\\n\\n"), SamplingParams(max_tokens=4))
print(*held(), flush=True)
sys.stdin.readline()
look_at_all()
print(*held(), flush=True)
"""


@pytest.mark.long
def test_two_processes(tiny_models: dict[str, str], make: Make, passages: list[str], tmp_path: Path) -> None:
    one = make(store=tmp_path / "store", auxiliary=None, method="anchored")
    one.precompute(passages)
    arguments = [sys.executable, "-c", ANOTHER_PROCESS, tiny_models["llama"], str(tmp_path / "store")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        print(rag(passages).replace("\n\n", "|"), file=other.stdin, flush=True)
        continued, copies = map(int, other.stdout.readline().split())
        assert continued > 0 and copies >= len(passages)
        one.release(passages[:1])
        print("look", file=other.stdin, flush=True)
        assert other.stdout.readline().split() == ["0", str(copies - 1)]
    assert other.returncode == 0
