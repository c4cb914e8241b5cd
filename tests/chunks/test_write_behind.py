"""Chunks are written while the next ones are computed: the same store as one after the other, and the same errors."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing.fake import FakeRuntime

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.base.errors import ConfigurationError, EncodingError, StoreError
from cacheclip_rag.chunks.batches import in_batches
from cacheclip_rag.models.load import register_runtime
from tests.conftest import SENTENCES
from tests.store.samples import verify

TEXTS = SENTENCES[:4]
PATIENCE_S = 20.0
Make = Callable[..., CacheClipEngine]


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Batches of one text; and no thread that writes when the test ends."""
    monkeypatch.setattr("cacheclip_rag.chunks.batches._TEXTS", 1)
    yield
    assert not writers()


def writers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cacheclip-write")]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Engines of fake models."""
    register_runtime("fake", FakeRuntime)
    models = {"primary": "fake:one", "auxiliary": "fake:two", "method": "direct", "chunk_context": "prefix"}
    return lambda **options: CacheClipEngine(**{**models, "store": str(tmp_path / "store"), **options})


class Watched:
    """What an engine computes and writes, in order. Hooks may wait or raise."""

    def __init__(self, engine: CacheClipEngine, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        """``compute ROLE NUMBER`` and ``write ROLE NUMBER``; numbers are those of ``TEXTS``."""
        self.by_thread: list[str] = []
        """What another thread than the caller's wrote."""
        self.before_compute: Callable[[str], object] = lambda event: None
        self.before_write: Callable[[str], object] = lambda event: None
        models = engine.chunk_caches()
        for caches in models:
            _ = caches.prefix.kv
        each = [(number, text, caches) for number, text in enumerate(TEXTS) for caches in models]
        numbers = {(caches.runtime.name, caches.tokenize(text).ids): number for number, text, caches in each}
        names = {caches.key(text): f"{caches.runtime.name} {number}" for number, text, caches in each}
        tiers, caller = engine.store.chunk_store.tiers, threading.current_thread()
        put = tiers.put

        def watched_put(key: str, data: Any) -> None:
            event = f"write {names[key]}"
            self.events.append(event)
            if threading.current_thread() is not caller:
                self.by_thread.append(event)
            self.before_write(event)
            put(key, data)

        def watch(runtime: Any) -> None:
            encode_many = runtime.encode_many

            def watched_encode(chunks: Sequence[Any], context: torch.Tensor | None = None) -> list[torch.Tensor]:
                for ids in chunks:
                    self.events.append(f"compute {runtime.name} {numbers[runtime.name, ids]}")
                self.before_compute(self.events[-1])
                found: list[torch.Tensor] = encode_many(chunks, context)
                return found

            patch.setattr(runtime, "encode_many", watched_encode)

        for runtime in {id(caches.runtime): caches.runtime for caches in models}.values():
            watch(runtime)
        patch.setattr(tiers, "put", watched_put)

    @property
    def written(self) -> list[str]:
        return [event.removeprefix("write ") for event in self.events if event.startswith("write")]

    @property
    def computed(self) -> list[str]:
        return [event.removeprefix("compute ") for event in self.events if event.startswith("compute")]


IN_TURN = ["one 0", "two 0", "one 1", "two 1", "one 2", "two 2", "one 3", "two 3"]
"""What is computed and written, batch by batch of one text."""


def payloads(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "kv").rglob("*.kv")}


@pytest.mark.some(2)
@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_the_store_is_the_same_bit_for_bit(tiny_models: Any, tmp_path: Path, monkeypatch: Any, codec: str) -> None:
    """As if each batch was computed and stored by itself, in turn."""
    monkeypatch.setattr("cacheclip_rag.chunks.batches._TEXTS", 3)
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    codecs = {"dtype": "bfloat16", "codec": codec}
    behind, in_turn = (CacheClipEngine(**models, **codecs, store=str(tmp_path / name)) for name in "ab")
    assert behind.precompute(SENTENCES[:8]) == 8
    batches = list(in_batches(SENTENCES[:8], str))
    assert [len(batch) for batch in batches] == [3, 3, 2]
    prefixes = [caches.prefix.kv if caches.prefix.kv.shape[3] else None for caches in in_turn.chunk_caches()]
    for batch in batches:
        for caches, prefix in zip(in_turn.chunk_caches(), prefixes, strict=True):
            encoded = caches.runtime.encode_many([caches.tokenize(text).ids for text in batch], prefix)
            for text, kv in zip(batch, encoded, strict=True):
                in_turn.store.put(caches.key(text), kv, codec, text=text)
    found = payloads(tmp_path / "a")
    assert len(found) >= 16 and found == payloads(tmp_path / "b")
    assert behind.store.keys() == in_turn.store.keys(), "also in the order of use"


def test_writes_run_beside_the_next_computation(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computation but the first waits for the write of what was computed before it, and that write for it."""
    engine = make()
    watched, meeting = Watched(engine, monkeypatch), threading.Barrier(2, timeout=PATIENCE_S)
    watched.before_compute = lambda event: meeting.wait() if event != "compute one 0" else None
    watched.before_write = lambda event: meeting.wait() if event != "write two 3" else None
    assert engine.precompute(TEXTS) == 4
    assert watched.computed == watched.written == IN_TURN, "in the same order as without a thread"
    assert watched.by_thread == [f"write {name}" for name in IN_TURN[:-1]], "beside the last one, nothing is computed"
    assert all(engine.is_stored(text) for text in TEXTS)


def test_at_most_one_batch_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    watched, waiting = Watched(engine, monkeypatch), []
    begun = threading.Event()

    def compute(event: str) -> None:
        waiting.append(len(watched.computed) - 1 - len(watched.written))
        begun.set()

    def write(event: str) -> None:  # slow: each write waits until the next computation has begun
        if event != "write two 3":
            assert begun.wait(PATIENCE_S)
        begun.clear()

    watched.before_compute, watched.before_write = compute, write
    engine.precompute(TEXTS)
    assert max(waiting) <= 1 and len(waiting) == 8


def test_one_batch_of_one_model_needs_no_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(auxiliary=None)
    watched = Watched(engine, monkeypatch)
    watched.before_write = lambda event: writers() and pytest.fail("there is a thread")
    assert engine.precompute(TEXTS[:1]) == 1 and watched.written == ["one 0"] and not watched.by_thread


def test_who_waits_for_batches_hears_of_them_when_they_are_stored(make: Make) -> None:
    engine = make()
    engine.precompute(TEXTS[1:2])
    heard: list[tuple[int, int, list[bool]]] = []

    def stored(num_texts: int, computed: int) -> None:
        is_there = [engine.is_stored(text) and engine.texts.index.known(text) for text in TEXTS]
        heard.append((num_texts, computed, is_there))

    assert engine.precompute(TEXTS, stored=stored) == 3
    assert [each[:2] for each in heard] == [(1, 1), (1, 0), (1, 1), (1, 1)]
    assert [is_there[: number + 1] for number, (*_, is_there) in enumerate(heard)] == [[True] * n for n in range(1, 5)]


def test_torch_computes_alone_in_the_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that help the thread would take the cores that compute; the caller's and later ones are not changed."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine, found = make(), set()
        watched = Watched(engine, monkeypatch)
        watched.before_write = lambda event: found.add((event == "write two 3", torch.get_num_threads()))
        engine.precompute(TEXTS)
        later = threading.Thread(target=lambda: found.add(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == {(False, 1), (True, 2), 2} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class TestWhatWaits:
    """A text that is yet to be written, or that a write may evict."""

    def test_a_text_again_is_not_computed_again(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make()
        watched = Watched(engine, monkeypatch)
        assert engine.precompute([TEXTS[0], TEXTS[0], TEXTS[1], TEXTS[0]]) == 2
        assert watched.computed == watched.written == IN_TURN[:4]

    def test_what_a_write_evicts_is_computed_again(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make(auxiliary=None)
        engine.precompute(TEXTS[:2])
        engine.store.chunk_store.set_limit(engine.store.chunk_store.stats().bytes)  # the prefix and two texts
        watched = Watched(engine, monkeypatch)
        assert engine.precompute([TEXTS[2], TEXTS[3], TEXTS[0]]) == 3, "the last one was stored, the third evicts it"
        assert watched.written == ["one 2", "one 3", "one 0"] and engine.is_stored(TEXTS[0])

    def test_a_prefix_is_written_after_what_came_before(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the primary, which needs it for the second text only."""
        first = make(auxiliary=None)
        first.precompute(TEXTS[:1])
        prefix = first.parts.models.primary_caches(first.context_of()).prefix.key
        first.store.delete([prefix])
        engine, put, keys = make(), first.store.chunk_store.tiers.last.put, []
        monkeypatch.setattr(engine.store.chunk_store.tiers, "put", lambda key, data: keys.append(key) or put(key, data))
        assert engine.precompute(TEXTS[:2]) == 2
        primary, auxiliary = engine.chunk_caches()
        of_auxiliary = [auxiliary.prefix.key, auxiliary.key(TEXTS[0])]
        assert keys == [*of_auxiliary, prefix, primary.key(TEXTS[1]), auxiliary.key(TEXTS[1])]


class TestErrors:
    def test_a_full_disk(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make()
        watched = Watched(engine, monkeypatch)

        def fail(event: str) -> None:
            if event == "write two 1":
                raise OSError(28, "No space left on device")

        watched.before_write = fail
        with pytest.raises(StoreError, match=r"could not write a chunk cache of .* MB: .*No space left on device.*"):
            engine.precompute({text: [(str(number), "")] for number, text in enumerate(TEXTS)})
        assert watched.written == IN_TURN[:4] and watched.by_thread[-1] == "write two 1", "nothing after it"
        assert watched.computed == IN_TURN[:5], "what was computed beside it is lost"
        assert engine.texts.texts() == TEXTS[:1], "the sources of those that are stored for both models"
        watched.before_write = lambda event: None
        assert engine.precompute(TEXTS) == 3 and all(engine.is_stored(text) for text in TEXTS)

    def test_numbers_that_the_codec_refuses(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make(codec="int8", auxiliary=None)
        kv = engine.primary.encode([1, 2])
        monkeypatch.setattr(engine.primary, "encode_many", lambda chunks, context=None: [kv * float("nan")])
        with pytest.raises(ConfigurationError, match="cannot be stored with codec int8"):
            engine.precompute(TEXTS)
        assert not engine.is_stored(TEXTS[0])

    def test_an_error_of_a_write_comes_before_one_of_the_next_computation(self, make: Make, monkeypatch: Any) -> None:
        engine = make()
        watched, failed = Watched(engine, monkeypatch), threading.Event()

        def compute(event: str) -> None:
            if event == "compute one 1":
                raise ModuleNotFoundError("of the computation")

        def write(event: str) -> None:
            if event == "write two 0" and failed.is_set():
                raise ValueError("of the write")

        watched.before_compute, watched.before_write = compute, write
        with pytest.raises(ModuleNotFoundError, match="of the computation"):
            engine.precompute(TEXTS)
        assert watched.written == IN_TURN[:2] and engine.texts.index.known(TEXTS[0]), "what came before is stored"
        assert engine.release(TEXTS) == 1
        failed.set()
        with pytest.raises(ValueError, match="of the write"):
            engine.precompute(TEXTS)

    def test_some_texts_that_cannot_be_computed(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cacheclip_rag.chunks.batches._TEXTS", 2)
        engine, calls = make(), []
        real = engine.primary.encode_many

        def encode_many(chunks: Sequence[Any], context: torch.Tensor | None = None) -> list[torch.Tensor]:
            calls.append(len(chunks))
            found: list[Any] = real(chunks, context)
            if len(calls) == 2:
                raise EncodingError("one chunk failed", [None, found[1]])
            return found

        monkeypatch.setattr(engine.primary, "encode_many", encode_many)
        heard: list[tuple[int, int]] = []
        with pytest.raises(EncodingError, match="one chunk failed"):
            engine.precompute(TEXTS, stored=lambda *numbers: heard.append(numbers))
        primary, auxiliary = engine.chunk_caches()
        assert primary.held(TEXTS) == {*TEXTS} - {TEXTS[2]} and auxiliary.held(TEXTS) == {*TEXTS[:2]}
        assert heard == [(2, 2)]


class TestInterruptions:
    """By Ctrl-C. The write that is under way is completed, those after it are dropped."""

    def check(self, engine: CacheClipEngine, folder: Path, stored: int, left: int) -> None:
        """So many entries, with each model's prefix; for ``left`` texts a second call computes something."""
        assert not writers()
        engine.close()
        assert verify(folder).entries == stored and verify(folder).is_clean
        assert not [path for path in (folder / "tmp").rglob("*") if path.is_file()]
        assert engine.precompute(TEXTS) == left and all(engine.is_stored(text) for text in TEXTS)

    def test_while_it_computes(self, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        engine = make(auxiliary=None)
        monkeypatch.setattr("cacheclip_rag.chunks.batches._TEXTS", 2)
        writing, leaving = threading.Event(), threading.Event()
        shutdown = ThreadPoolExecutor.shutdown

        def watched_shutdown(thread: ThreadPoolExecutor) -> None:
            leaving.set()
            shutdown(thread)

        def compute(event: str) -> None:
            if event == "compute one 3":
                assert writing.wait(PATIENCE_S)
                raise KeyboardInterrupt

        def write(event: str) -> None:
            writing.set()
            assert leaving.wait(PATIENCE_S)

        with monkeypatch.context() as patch:
            patch.setattr(ThreadPoolExecutor, "shutdown", watched_shutdown)
            watched = Watched(engine, patch)
            watched.before_compute, watched.before_write = compute, write
            with pytest.raises(KeyboardInterrupt):
                engine.precompute(TEXTS)
        assert watched.written == watched.computed[:1] == ["one 0"]
        self.check(engine, tmp_path / "store", stored=2, left=3)

    def test_while_it_waits_for_a_write(self, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        engine, caller, waiting = make(), threading.main_thread().ident, threading.Event()
        result = Future.result

        def watched_result(future: Future[None]) -> None:
            waiting.set()
            result(future)

        def write(event: str) -> None:
            if event == "write one 1":
                assert waiting.wait(PATIENCE_S) and caller is not None
                signal.pthread_kill(caller, signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", watched_result)
            watched = Watched(engine, patch)
            watched.before_compute, watched.before_write = lambda event: waiting.clear(), write
            before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
            try:
                with pytest.raises(KeyboardInterrupt):
                    engine.precompute(TEXTS)
            finally:
                signal.signal(signal.SIGINT, before)
        assert watched.written == IN_TURN[:3]
        self.check(engine, tmp_path / "store", stored=5, left=3)
