"""An answer waits for no other process that uses the catalog; what is to be recorded is recorded later."""

import gc
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing import FakeRuntime

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.base import database
from cacheclip_rag.base.database import ANSWER_WAIT_S, waiting_at_most
from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.models import register_runtime
from tests.store.samples import is_intact, key, opened, path_of, put, run, totals_are_right, verify

TEXTS = [f"Page {n} says that the keeper of lighthouse number {n} wrote down the hour and the wind." for n in range(4)]
SHORT = SamplingParams(max_tokens=2)
HOLDS = {
    "writing": ["BEGIN IMMEDIATE"],
    "alone": ["PRAGMA locking_mode = EXCLUSIVE", "BEGIN EXCLUSIVE", "UPDATE meta SET value = value"],
}


@contextmanager
def held(folder: Path, kind: str = "writing") -> Iterator[None]:
    """Another process has the catalog until the block ends."""
    gc.collect()
    other = sqlite3.connect(folder / "catalog.sqlite3", isolation_level=None)
    for statement in HOLDS[kind]:
        other.execute(statement)
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


kinds = pytest.mark.parametrize("kind", HOLDS)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which statements waited. More than a second ends the test."""
    found: list[float] = []

    class Clock:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def sleep(seconds: float) -> None:
            found.append(seconds)
            assert sum(found) <= 3 * ANSWER_WAIT_S + 0.02 < 1, "an answer waits"

    monkeypatch.setattr(database, "time", Clock)
    return found


def engine(folder: Path, **options: Any) -> CacheClipEngine:
    register_runtime("fake", FakeRuntime)
    settings = {"primary": "fake:primary", "auxiliary": None, "method": "direct", "prefix_cache_bytes": 0}
    return CacheClipEngine(**{**settings, "store": folder, **options})


def prompt(*numbers: int) -> str:
    return "\n\n".join([TEXTS[number] for number in numbers] + ["What does the keeper write?"])


class TestAnswers:
    @pytest.mark.some(2)
    @kinds
    def test_of_a_new_process(self, tmp_path: Path, kind: str, waited: list[float]) -> None:
        """It opens the store, finds a killed writer's traces, and has chunks to store."""
        first = engine(tmp_path)
        first.precompute(TEXTS[:2])
        first.close()
        del first
        program = f"""
store = opened(Path({str(tmp_path)!r}))
store.catalog.announcements.finish = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
put(store, 6)
"""
        assert run(program).returncode == -9
        with held(tmp_path, kind):
            asked = engine(tmp_path, max_bytes=10**8)
            answer = asked.generate(prompt(0, 1, 2), SHORT, documents=TEXTS)
            assert answer.text and (answer.stats.hits == 2 or kind == "alone")
            asked.close()

    @pytest.mark.some(2)
    @kinds
    def test_of_a_process_in_use(self, tmp_path: Path, kind: str, waited: list[float]) -> None:
        """A damaged payload, uses, two missing chunks: the later answer stores them."""
        asked = engine(tmp_path, on_miss="store", memory_bytes=0)
        asked.precompute({TEXTS[0]: [("node", "document")], TEXTS[1]: []})
        assert asked.generate(prompt(0, 1), SHORT).stats.hits == 2
        next(tmp_path.glob("kv/*/*.kv")).write_bytes(b"damaged")
        if kind == "alone":
            asked.close()
        with held(tmp_path, kind):
            for _ in range(2):
                waited.clear()
                assert asked.generate(prompt(0, 1, 2, 3), SHORT, documents={TEXTS[2]: [("two", "d")]}).text
        waited.clear()
        asked.generate(prompt(0), SHORT)
        asked.generate(prompt(0), SHORT)
        assert asked.generate(prompt(0, 1, 2, 3), SHORT, documents=TEXTS).stats.hits >= 3
        asked.close()
        assert verify(tmp_path).is_clean

    def test_reads_do_not_wait_for_a_thread_that_waits(self, tmp_path: Path) -> None:
        """Another thread of this process that stores chunks is patient, and must not hold what readers need."""
        store = opened(tmp_path)
        put(store, 1)
        if store.catalog.database._connection is not None:
            store.close()
        begun = threading.Event()

        def write() -> None:
            begun.set()
            put(store, 2)

        writing = threading.Thread(target=write)
        with held(tmp_path):
            writing.start()
            begun.wait()
            time.sleep(0.05)
            assert is_intact(store, 1) and writing.is_alive()
        writing.join(30)
        assert is_intact(store, 2)


class TestLater:
    def test_uses_are_recorded(self, tmp_path: Path) -> None:
        store = opened(tmp_path, 2 * 4096)
        put(store, 1, 2)
        with held(tmp_path):
            assert is_intact(store, 1)
            store.flush()
        put(store, 3)
        assert is_intact(store, 1) and store.get(key(2)) is None

    def test_a_write_that_could_not_be_recorded_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its payload is complete; nothing counts twice."""
        store, tiers = opened(tmp_path), None
        put(store, 1)
        tiers = store.chunk_store.tiers
        write = tiers.put
        other = sqlite3.connect(tmp_path / "catalog.sqlite3", isolation_level=None, check_same_thread=False)
        monkeypatch.setattr(tiers, "put", lambda key, data: (write(key, data), other.execute("BEGIN IMMEDIATE")))
        with waiting_at_most(0.02):
            put(store, 2)
        assert store.get(key(2)) is None and path_of(tmp_path, 2).exists()
        other.execute("ROLLBACK")
        other.close()
        monkeypatch.setattr(tiers, "put", write)
        put(store, 3)
        assert all(is_intact(store, number) for number in (1, 2, 3)) and totals_are_right(store)
        assert not store.catalog.announcements.writers() and verify(tmp_path).is_clean

    def test_a_block_within_waits_no_longer(self, tmp_path: Path, waited: list[float]) -> None:
        store = opened(tmp_path)
        put(store, 1)
        with held(tmp_path), waiting_at_most(0.1):
            for _ in range(5):
                with pytest.raises(StoreError), waiting_at_most(10):
                    put(store, 2)
        assert 0.05 < sum(waited) < 0.11
