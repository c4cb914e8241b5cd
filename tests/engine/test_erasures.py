"""What one engine erases leaves the memory of the others with the next look, also of those that nobody asks.

A call of ``look_at_all`` stands for ten seconds; the clock has a test of its own. The thread may look in between, so
that no test says that something is still there.
"""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, StoreError
from cacheclip_rag.store import Catalog, ChunkStore, MemoryBackend, TenantStore, Tiers, erasures
from cacheclip_rag.store.erasures import LOOK_S, Erasures, look_at_all
from tests.conftest import SENTENCES, Logs, Make, Models, Patch, raising
from tests.engine.asking import SHORT, rag

Pair = tuple[CacheClipEngine, CacheClipEngine]


@pytest.fixture
def passages() -> list[str]:
    generator = random.Random(3)
    return [" ".join(generator.sample(SENTENCES, 5)) for _ in range(4)]


@pytest.fixture
def pair(make: Make, tmp_path: Path, passages: list[str]) -> Pair:
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
        self, pair: Pair, passages: list[str], others: bool
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
    def test_everything_goes_with_the_next_look(self, pair: Pair, passages: list[str], erase: str) -> None:
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

    def test_a_text_that_was_never_stored(self, pair: Pair, passages: list[str]) -> None:
        """Prompts may have held it."""
        one, other = pair
        assert one.release(["It is in no store."]) == 0
        look_at_all()
        assert kept(other) == (0, 0, 0) and in_memory(other, passages) == passages

    def test_what_other_tenants_erase_costs_nothing(
        self, pair: Pair, make: Make, passages: list[str], tmp_path: Path
    ) -> None:
        _, other = pair
        before = kept(other)
        south = make(stored=passages[:1], store=tmp_path / "store", namespace="south")
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

    def test_an_answer_that_began_before_and_a_copy_that_a_slow_read_leaves(
        self, pair: Pair, passages: list[str]
    ) -> None:
        one, other = pair
        key, tiers = other.parts.models.caches_after_prefix.key(passages[0]), other.store.chunk_store.tiers
        events, data = other.stream(rag(passages, "When?"), SHORT), tiers.get_many([key])[key]
        next(events)
        one.release(passages[:1])
        look_at_all()
        list(events)
        assert kept(other)[:2] == (0, 0)
        tiers.promote(key, data, 1)
        look_at_all()
        assert in_memory(other, passages) == passages[1:]

    def test_a_catalog_that_cannot_be_asked_is_asked_again(
        self, pair: Pair, passages: list[str], monkeypatch: Patch, caplog: Logs
    ) -> None:
        one, other = pair
        one.release(passages[:1])
        with monkeypatch.context() as patched:
            for name in ("erasures", "unknown_of"):
                patched.setattr(Catalog, name, raising(StoreError("the disk is gone")))
            look_at_all()
            look_at_all()
        said = [each for each in caplog.messages if "what others erase" in each]
        assert said and all("the disk is gone" in each for each in said)
        look_at_all()
        assert kept(other) == (0, 0, 0) and in_memory(other, passages) == passages[1:]

    def test_one_who_fails_holds_up_nobody(self, pair: Pair) -> None:
        """And is asked again."""
        _, other = pair
        failing = Holder(raising(MemoryError("no room")))
        other.store.chunk_store.erasures.watch("default", failing)
        other.store.catalog.note_erasure("default")
        look_at_all()
        assert kept(other) == (0, 0, 0)
        count = failing.dropped
        look_at_all()
        assert failing.dropped > count >= 1

    @pytest.mark.parametrize("is_made_anew", [False, True])
    def test_a_catalog_that_was_deleted(self, pair: Pair, tmp_path: Path, is_made_anew: bool) -> None:
        """Nobody knows what was erased before, nor does one that another process makes anew between two looks."""
        _, other = pair
        files = tmp_path / "store"
        for file in files.glob("catalog.sqlite3*"):
            file.unlink()
        if is_made_anew:
            with closing(ChunkStore.open(files)) as beside:
                beside.complete()
                assert beside.catalog.erasures("default") == 0
                look_at_all()
                assert kept(other) == (0, 0, 0)
            return
        look_at_all()
        assert kept(other) == (0, 0, 0) and not [*other.store.chunk_store.tiers.backends[0].list()]
        assert not [*files.glob("catalog.sqlite3*")], "who deletes a store does not find it made anew"

    def test_a_store_that_is_made_later(self, make: Make, passages: list[str], tmp_path: Path) -> None:
        """That is no erasure."""
        engine = make(store=tmp_path / "new", method="full")
        engine.generate(rag(passages), SHORT, method="prefix")
        before = engine.prefixes.stats.bytes
        engine.precompute(passages)
        look_at_all()
        assert engine.prefixes.stats.bytes == before > 0

    def test_a_closed_engine_holds_nothing_and_is_watched_again(self, pair: Pair, passages: list[str]) -> None:
        one, other = pair
        store = other.store.chunk_store
        other.close()
        assert not store.erasures.is_watched
        assert in_memory(other, passages) == [] and kept(other)[:2] == (0, 0)
        other.generate(rag(passages), SHORT)
        one.release(passages[:1])
        look_at_all()
        assert kept(other) == (0, 0, 0) and in_memory(other, passages) == passages[1:]

    def test_a_store_without_an_engine(self, pair: Pair, passages: list[str], tmp_path: Path) -> None:
        one, _ = pair
        key = one.parts.models.caches_after_prefix.key(passages[0])
        store, putting = (
            TenantStore(ChunkStore.open(tmp_path / "store", memory_bytes=1 << 28), "default") for _ in range(2)
        )
        assert store.get(key) is not None
        putting.put(key, torch.zeros(1, 2, 1, 3, 4), "float32", text=passages[0])
        for is_erased in (False, True):
            assert all((key in each.chunk_store.tiers.backends[0].list()) != is_erased for each in (store, putting))
            one.release(passages[:1])
            look_at_all()
        for each in (store, putting):
            each.close()

    def test_memory_that_is_free_but_still_holds_kv(
        self, make: Make, tmp_path: Path, passages: list[str], monkeypatch: Patch
    ) -> None:
        """On a GPU, PyTorch keeps it, page-locked memory too."""
        engine, emptied = make(store=tmp_path / "store"), list[str]()
        engine.generate(rag(passages), SHORT)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        for owner, name in ((torch.cuda, "empty_cache"), (torch.accelerator, "empty_host_cache")):
            monkeypatch.setattr(owner, name, lambda name=name: emptied.append(name), raising=False)
        engine.store.catalog.note_erasure("default")
        look_at_all()
        assert {*emptied} == {"empty_cache", "empty_host_cache"}


class Numbers:
    """A catalog whose number of erasures is told to it, and names of methods that fail."""

    number: int | None = 1
    fails: Container[str] = ()
    meanwhile: Callable[[], Any] = staticmethod(lambda: None)

    def _check(self, name: str) -> None:
        if name in self.fails:
            raise StoreError("the disk is gone")

    def erasures(self, namespace: str) -> int | None:
        self.meanwhile()
        self._check("erasures")
        return self.number

    def unknown_of(self, keys: Sequence[str]) -> list[str]:
        self._check("unknown_of")
        return []


class Holder:
    """Counts how often it dropped its KV, and does something else meanwhile."""

    def __init__(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        self.dropped, self.meanwhile = 0, meanwhile

    def drop_kv(self) -> None:
        self.dropped += 1
        self.meanwhile()


Watched = tuple[Erasures, Numbers, Holder]


class TestMeanwhile:
    """What happens while a holder drops its KV."""

    @pytest.fixture
    def watched(self) -> Watched:
        numbers, holder = Numbers(), Holder()
        tiers = Tiers([MemoryBackend(), MemoryBackend()])
        tiers.put("key", b"payload")
        found = Erasures(numbers, tiers)
        found.watch("default", holder)
        return found, numbers, holder

    def test_it_leaves(self, watched: Watched) -> None:
        found, numbers, holder = watched
        holder.meanwhile, numbers.number = lambda: found.unwatch(holder), 2
        found.look()
        assert not found.is_watched

    def test_the_catalog_is_another_one(self, watched: Watched) -> None:
        """Also if it says the same number."""
        found, numbers, holder = watched
        holder.meanwhile = found.doubt
        found.drop_own(holder)
        found.look()
        assert holder.dropped == 2
        holder.meanwhile, numbers.meanwhile = lambda: None, found.doubt
        found.look()
        assert holder.dropped == 3

    def test_a_catalog_that_fails_at_first(self, watched: Watched) -> None:
        """Nobody knows what was erased by the time it answers."""
        found, numbers, _ = watched
        late, numbers.fails = Holder(), {"erasures"}
        found.watch("default", late)
        numbers.fails, numbers.number = (), 0
        found.look()
        assert late.dropped == 1

    def test_an_outage_is_said_once(self, watched: Watched, caplog: Logs) -> None:
        """It is over when everything can be asked."""
        found, numbers, _ = watched
        for fails, said in (({"erasures"}, 1), ({"unknown_of"}, 1), ((), 1), ({"unknown_of"}, 2), ({"erasures"}, 2)):
            numbers.fails = fails
            found.look()
            assert caplog.text.count("what others erase") == said


class TestClock:
    def test_the_thread_looks_every_ten_seconds(self, pair: Pair, passages: list[str], monkeypatch: Patch) -> None:
        one, other = pair
        slept, mine, own_sleep = list[float](), threading.current_thread(), erasures.time.sleep

        def sleep(seconds: float) -> None:
            if threading.current_thread() is not mine:
                own_sleep(seconds)
            elif slept:
                raise InterruptedError
            else:
                slept.append(seconds)

        one.release(passages[:1])
        monkeypatch.setattr(erasures, "time", SimpleNamespace(sleep=sleep))
        with pytest.raises(InterruptedError):
            erasures._follow()
        assert slept == [LOOK_S] == [10.0] and kept(other) == (0, 0, 0)
        assert any(each.name == "cacheclip-erasures" and each.daemon for each in threading.enumerate())

    @pytest.mark.long
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
    def test_a_child_of_a_fork_has_a_thread_of_its_own(self, pair: Pair, passages: list[str]) -> None:
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
options = {"method": "epic-corrected", "chunk_context": "prefix", "memory_bytes": 1 << 28}
engine = CacheClipEngine(primary=model, auxiliary=None, store=folder, **options)
held = lambda: (engine.prefixes.stats.continued_bytes, len([*engine.store.chunk_store.tiers.backends[0].list()]))
engine.generate(sys.stdin.readline().replace("|", "\\n\\n"), SamplingParams(max_tokens=4))
print(*held(), flush=True)
sys.stdin.readline()
look_at_all()
print(*held(), flush=True)
"""


@pytest.mark.long
def test_two_processes(tiny_models: Models, make: Make, passages: list[str], tmp_path: Path) -> None:
    one = make(stored=passages, store=tmp_path / "store", auxiliary=None, method="epic-corrected")
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
