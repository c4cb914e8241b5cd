"""Reading while computing changes no bit of an answer: however slow the store is, and whatever fails in it."""

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cacheclip_testing.throttled import ThrottledBackend

from cacheclip_rag import SamplingParams
from cacheclip_rag.methods import preset
from cacheclip_rag.store import (
    Backend,
    Catalog,
    ChunkStore,
    DiskBackend,
    MemoryBackend,
    ReadAgain,
    ReadAhead,
    TenantStore,
    Tiers,
    ahead as module,
)
from cacheclip_rag.store.codecs import Frame
from tests.conftest import CHUNKS, SENTENCES, Logs, Models, Patch, rag_prompt, raising, some_of
from tests.fusion.cases import make_engine

METHODS = ("cacheclip", "epic-corrected", "epic", "direct")
"""Methods with an auxiliary and a correction, with a correction alone, with neither, and one that chooses nothing."""
Before = Callable[[str, int, int], None]
PROMPT = rag_prompt(CHUNKS)


class Slow:
    """An engine whose store does what a test says before each read."""

    def __init__(self, folder: Path, models: tuple[str, str], *, memory: int | None = None, **options: Any) -> None:
        in_parts = options.pop("in_parts", True)
        self.disk = DiskBackend(folder)
        self.throttled = ThrottledBackend(self.disk, before_read=self._before, in_parts=in_parts)
        near = [] if memory is None else [MemoryBackend(memory)]
        self.store = ChunkStore(Catalog(folder), Tiers([*near, self.throttled]))
        self.engine = make_engine(*models, prefix_cache_bytes=0, method="cacheclip", store=self.store, **options)
        self.hook: Before | None = None
        self.reads: list[tuple[str, int, int]] = []

    def _before(self, key: str, start: int, num_bytes: int) -> None:
        self.reads.append((key, start, num_bytes))
        if self.hook is not None:
            self.hook(key, start, num_bytes)

    def hold(self) -> threading.Event:
        """Hold every read behind a header until the event is set."""
        released = threading.Event()
        self.hook = lambda _, start, __: start and released.wait(20)
        return released

    def ask(self, method: str = "cacheclip", prompt: str = PROMPT, ratio: float = 0.3) -> Any:
        self.reads.clear()
        return answered(self.engine, method, prompt, ratio, self.reads.clear)

    def keys(self, role: str, method: str = "cacheclip") -> list[str]:
        """Keys of the chunks in the order in which they are read."""
        kv_sources = self.engine.parts.kv_sources(preset(method))
        if role == "primary":
            return [kv_sources.primary.key(text) for text in CHUNKS]
        assert kv_sources.auxiliary is not None
        caches = kv_sources.auxiliary.caches
        return [caches.key(text) for text in sorted(CHUNKS, key=lambda text: len(caches.tokenize(text)))]


class RealThread(threading.Thread):
    """A thread of a test, which starts whatever the test forbids."""

    begin = threading.Thread.start


def no_threads(monkeypatch: Patch, after: int = 0) -> Callable[[], int]:
    """Let only ``after`` more threads start, as at the system's limit. Returns a function that says how many are left:
    negative once one more was asked for."""
    start, left = threading.Thread.start, after

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return lambda: left


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "cacheclip-read"] == []


@pytest.fixture(autouse=True)
def one_layer_at_a_time(monkeypatch: Patch) -> None:
    """Tiny models' layers would be read together."""
    monkeypatch.setattr(Backend, "least_read", 1)


@pytest.fixture
def models(tiny_models: Models) -> tuple[str, str]:
    return tiny_models["llama"], tiny_models["auxiliary"]


@pytest.fixture
def slow(models: tuple[str, str], tmp_path: Path) -> Slow:
    return Slow(tmp_path / "store", models)


def answered(
    engine: Any, method: str, prompt: str, ratio: float = 0.3, stored: Callable[[], Any] = lambda: None
) -> Any:
    """Prefill of a prompt by a method whose chunks are stored before."""
    made = at_ratio(method, ratio)
    engine.precompute(CHUNKS)
    if made.context is not None:
        engine._writer.precompute(CHUNKS, made.context)
    stored()
    with torch.inference_mode():
        return engine.prefill(prompt, SamplingParams(max_tokens=1), method=made)


def at_ratio(name: str, ratio: float = 0.3) -> Any:
    method = preset(name)
    return method.at(ratio) if method.has_ratio else method


def in_memory(models: tuple[str, str], **options: Any) -> Any:
    """The same engine on a store in memory, which reads everything at once and uses no thread."""
    engine = make_engine(*models, prefix_cache_bytes=0, method="cacheclip", **options)
    return lambda method, prompt=PROMPT: answered(engine, method, prompt)


def assert_same(found: Any, expected: Any) -> None:
    assert found.stats.hits == expected.stats.hits
    assert found.stats.recomputed_tokens == expected.stats.recomputed_tokens
    assert torch.equal(found.logits, expected.logits)
    for ours, theirs in zip(found.cache.layers, expected.cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


class TestDelays:
    @pytest.mark.some(3)
    @some_of(3, codec=("float32", "int8"), in_parts=(True, False), method=METHODS)
    def test_answers_are_the_same(
        self, models: tuple[str, str], tmp_path: Path, method: str, codec: str, in_parts: bool
    ) -> None:
        options = {"codec": codec}
        expected = in_memory(models, **options)(method)
        slow = Slow(tmp_path / "store", models, in_parts=in_parts, **options)
        choice = random.Random(f"{method}{codec}{in_parts}")
        slow.hook = lambda *_: time.sleep(choice.choice((0, 0, 0.001, 0.005)))
        assert_same(slow.ask(method), expected)
        assert any(num_bytes > 0 for *_, num_bytes in slow.reads) == in_parts

    @pytest.mark.some(3)
    @pytest.mark.parametrize("seed", range(6))
    def test_any_layout(self, models: tuple[str, str], tmp_path: Path, seed: int) -> None:
        """Chunks in any order, twice, cut off, with text between them."""
        choice = random.Random(seed)
        parts = [choice.choice(CHUNKS) for _ in range(choice.randint(1, 5))]
        parts = [part[: choice.randint(len(part) // 2, len(part))] if choice.random() < 0.3 else part for part in parts]
        prompt = rag_prompt(
            [f"{part}\n{choice.choice(SENTENCES)}" if choice.random() < 0.4 else part for part in parts]
        )
        slow = Slow(tmp_path / "store", models)
        slow.hook = lambda *_: time.sleep(choice.choice((0, 0.002)))
        for method in ("cacheclip", "epic"):
            assert_same(slow.ask(method, prompt), in_memory(models)(method, prompt))

    @pytest.mark.parametrize("primary", ["gemma3", "qwen2-sliding", "gpt-oss", "llama-rope-dynamic"], indirect=True)
    def test_any_kind_of_model(self, primary: str, tiny_models: Models, tmp_path: Path) -> None:
        models = primary, tiny_models["auxiliary"]
        slow = Slow(tmp_path / "store", models)
        slow.hook = lambda *_: time.sleep(0.001)
        for method in ("cacheclip", "direct"):
            assert_same(slow.ask(method), in_memory(models)(method))

    def test_layers_run_before_the_last_one_is_read(self, slow: Slow) -> None:
        """The last layer of the primary is read only when its first one has run."""
        slow.ask()
        key = slow.keys("primary")[-1]
        frame = Frame.parse(slow.disk.get_many([key])[key], key)
        last = key, frame.start + (frame.shape[0] - 1) * frame.layer_size
        has_run, waited = threading.Event(), list[bool]()
        layer = slow.engine.primary.model.base_model.layers[0]  # type: ignore[attr-defined]
        slow.hook = lambda key, start, _: (key, start) != last or waited.append(has_run.wait(20))
        with layer.register_forward_hook(lambda *_: has_run.set()):
            slow.ask()
        assert waited == [True]

    def test_the_primary_is_read_after_the_auxiliary_and_while_it_scores(self, slow: Slow) -> None:
        slow.ask()
        order = [key for key, *_ in slow.reads]
        primary, auxiliary = set(slow.keys("primary")), set(slow.keys("auxiliary"))
        first = next(number for number, key in enumerate(order) if key in primary)
        assert auxiliary.isdisjoint(order[first:])
        assert len(auxiliary & set(order[:first])) == len(CHUNKS) - 1, "the first chunk is exact"

    @pytest.mark.parametrize(("ratio", "is_used"), [(0.0, False), (0.3, True)])
    def test_at_ratio_0_the_auxiliary_is_neither_read_nor_run(self, slow: Slow, ratio: float, is_used: bool) -> None:
        """As the controller predicts it. Else it is read up to its last scored layer."""
        slow.ask()
        ran, runtime = list[Any](), slow.engine.parts.models.auxiliary_caches.runtime
        with runtime.model.get_input_embeddings().register_forward_hook(lambda *passed: ran.append(1)):
            slow.ask(ratio=ratio)
        read, auxiliary = [key for key, *_ in slow.reads], slow.keys("auxiliary")
        assert {*read} >= {*slow.keys("primary")[1:]}
        assert bool({*read} & {*auxiliary}) is bool(ran) is is_used
        heads = slow.engine.parts.kv_sources(preset("cacheclip")).auxiliary.heads  # type: ignore[union-attr]
        layers = runtime.num_layers if heads is None else max(heads.layers) + 1
        assert read.count(auxiliary[0]) == layers * is_used

    def test_waiting_counts_as_reading_and_phases_add_up(self, slow: Slow) -> None:
        slow.hook = lambda *_: time.sleep(0.02)
        stats = slow.ask().stats
        assert stats.phases_s["read"] > 0.1 and min(stats.phases_s.values()) > -1e-3
        assert sum(stats.phases_s.values()) <= stats.ttft_s + 1e-3

    def test_what_memory_holds_needs_no_thread(
        self, models: tuple[str, str], tmp_path: Path, monkeypatch: Patch
    ) -> None:
        slow = Slow(tmp_path / "store", models, memory=1 << 26)
        expected = slow.ask()
        slow.store.tiers.drop_copies([*slow.keys("primary"), *slow.keys("auxiliary")])
        assert_same(slow.ask(), expected)  # read in parts, and copied to memory
        assert slow.reads
        monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
        assert_same(slow.ask(), expected)
        assert not slow.reads


def damage(slow: Slow, key: str, layer: int) -> None:
    """Change one byte of a layer on the medium."""
    data = bytearray(slow.disk.get_many([key])[key])
    frame = Frame.parse(bytes(data), key)
    data[frame.start + layer * frame.layer_size + 3] ^= 1
    slow.disk.path_of(key).write_bytes(data)


class TestFailures:
    @pytest.mark.some(3)
    @some_of(2, method=("cacheclip", "epic"), layer=(0, -1), number=(0, 1, len(CHUNKS) - 1))
    def test_a_damaged_chunk_becomes_text(
        self, slow: Slow, caplog: Logs, method: str,
        number: int, layer: int,
    ) -> None:  # fmt: skip
        """As if it had been known before anything was computed; a damage of the last layer is found late."""
        slow.ask(method)
        key = slow.keys("primary", method)[number]
        data = slow.disk.get_many([key])[key]
        damage(slow, key, layer % slow.engine.primary.num_layers)
        slow.throttled.has_parts = False  # type: ignore[misc]
        expected = self.asked(slow, method)
        assert (expected.stats.hits, expected.stats.misses) == (len(CHUNKS) - 1, 1)
        slow.throttled.has_parts = True  # type: ignore[misc]
        self.restore(slow, key, bytes(data))
        damage(slow, key, layer % slow.engine.primary.num_layers)
        caplog.clear()
        found = self.asked(slow, method)
        assert_same(found, expected)
        assert found.missing == (CHUNKS[number],) and "is damaged" in caplog.text
        assert slow.disk.head(key, 1) is None, "it is removed"

    @staticmethod
    def asked(slow: Slow, method: str) -> Any:
        with torch.inference_mode():
            return slow.engine.prefill(PROMPT, SamplingParams(max_tokens=1), method=at_ratio(method))

    @staticmethod
    def restore(slow: Slow, key: str, data: bytes) -> None:
        slow.disk.put(key, data)
        slow.store.catalog.record(slow.store.entry_of(slow.store.header(key)))  # type: ignore[arg-type]

    @pytest.mark.parametrize("number", [0, 1, len(CHUNKS) - 1])
    def test_a_damaged_chunk_of_the_auxiliary_is_computed(
        self, models: tuple[str, str], tmp_path: Path, caplog: Logs, number: int
    ) -> None:
        slow = Slow(tmp_path / "store", models, codec="float32")
        expected = slow.ask()
        damage(slow, slow.keys("auxiliary")[number], 0)
        found = self.asked(slow, "cacheclip")
        assert found.stats.recomputed_tokens == expected.stats.recomputed_tokens and "is damaged" in caplog.text
        assert float((found.logits - expected.logits).abs().max()) < 1e-5

    @pytest.mark.some(2)
    @pytest.mark.parametrize("number", [0, 1, len(CHUNKS) - 1])
    @pytest.mark.parametrize("is_lasting", [True, False])
    def test_a_read_that_fails(self, slow: Slow, caplog: Logs, number: int, is_lasting: bool) -> None:
        """Once: the payload is read again. Always: a miss that stays stored."""
        expected = slow.ask()
        key = slow.keys("primary")[number]
        failed: list[int] = []

        def hook(asked: str, start: int, num_bytes: int) -> None:
            if asked == key and (start or num_bytes < 0) and (is_lasting or not failed) and len(slow.reads) > 10:
                failed.append(start)
                raise OSError("the medium is gone")

        slow.hook = hook
        found = self.asked(slow, "cacheclip")
        slow.hook = None
        assert failed
        if is_lasting:
            assert (found.stats.hits, found.stats.misses) == (len(CHUNKS) - 1, 1)
            assert "cannot be read now" in caplog.text
        else:
            assert_same(found, expected)
        assert_same(self.asked(slow, "cacheclip"), expected)

    def test_a_payload_that_is_replaced_between_two_parts(self, slow: Slow) -> None:
        """By one with another codec: nothing of both is mixed."""
        expected = slow.ask("epic")
        key = slow.keys("primary", "epic")[1]
        kv = slow.engine.store.get(key)
        assert kv is not None
        tensor, done = kv.tensor(), list[int]()

        def hook(asked: str, start: int, num_bytes: int) -> None:
            if asked == key and num_bytes > 0 and start > num_bytes and not done:
                done.append(start)
                slow.engine.store.put(key, tensor + 1, "float32", text=CHUNKS[1])

        slow.hook = hook
        found = self.asked(slow, "epic")
        slow.hook = None
        assert done and not torch.equal(found.logits, expected.logits)
        assert_same(found, self.asked(slow, "epic"))

    @pytest.mark.parametrize("method", ["cacheclip", "epic"])
    def test_an_error_in_the_thread_reaches_the_caller(self, slow: Slow, method: str) -> None:
        slow.ask(method)
        slow.hook = raising(ZeroDivisionError("a bug of the backend"))
        with pytest.raises(ZeroDivisionError, match="a bug of the backend"):
            self.asked(slow, method)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("method", ["cacheclip", "epic"])
    @pytest.mark.parametrize("allowed", [0, 1])
    def test_threads_that_cannot_start(self, slow: Slow, monkeypatch: Patch, method: str, allowed: int) -> None:
        """With ``cacheclip``, the auxiliary's thread starts the primary's, after the last layer was waited for."""
        slow.ask(method)
        left, errors = no_threads(monkeypatch, after=allowed), list[Any]()

        def ask() -> None:
            try:
                self.asked(slow, method)
                errors.append(None)
            except RuntimeError as error:
                errors.append(error)

        asking = RealThread(target=ask, daemon=True)
        asking.begin()
        asking.join(60)
        assert errors, "the request waits for ever"
        assert left() < 0 or allowed, "a thread was asked for"
        if left() < 0:
            assert "can't start new thread" in str(errors[0])

    @pytest.mark.parametrize("where", ["select", "recompute"])
    def test_a_request_that_ends_early(self, slow: Slow, monkeypatch: Patch, where: str) -> None:
        """Interrupted while the store is read: the thread has ended, and no file stays open."""
        slow.ask()
        slow.hook = lambda *_: time.sleep(0.01)

        interrupt = raising(KeyboardInterrupt())

        if where == "select":
            monkeypatch.setattr(type(preset("cacheclip")), "score", interrupt)
        else:
            monkeypatch.setattr(type(slow.engine.primary), "run_slots", interrupt)
        opened = len([*Path("/proc/self/fd").iterdir()]) if Path("/proc/self/fd").is_dir() else 0
        with pytest.raises(KeyboardInterrupt):
            self.asked(slow, "cacheclip")
        assert not [t for t in threading.enumerate() if t.name == "cacheclip-read"]
        if opened:
            assert len([*Path("/proc/self/fd").iterdir()]) <= opened


class TestReadAhead:
    def test_a_missing_key_and_nothing_to_read(self, slow: Slow) -> None:
        slow.ask()
        keys = ["0" * 64, slow.keys("primary")[0]]
        with ReadAhead(slow.engine.store, keys) as reading:
            kv = reading.kv(1)
            assert reading.kv(0) is None and kv is not None
            reading.wait(kv.shape[0] - 1)
            expected = slow.engine.store.get(keys[1])
            assert expected is not None and torch.equal(kv.tensor(), expected.tensor())
        with ReadAhead(TenantStore(slow.store, "other"), keys[1:]) as reading:
            assert reading.kv(0) is None, "it is another tenant's"
        with ReadAhead(slow.engine.store, []) as reading:
            reading.wait(5)
        slow.reads.clear()
        with ReadAhead(slow.engine.store, slow.keys("primary")):
            pass
        assert not slow.reads, "closed before it began"

    def test_it_says_when_given_kv_is_stale(self, slow: Slow) -> None:
        slow.ask()
        key = slow.keys("primary")[0]
        damage(slow, key, 1)
        released = slow.hold()
        with ReadAhead(slow.engine.store, [key]) as reading:
            first = reading.kv(0)
            released.set()
            with pytest.raises(ReadAgain):
                reading.wait(10**6)
            assert first is not None and reading.kv(0) is None
            reading.wait(0)

    @pytest.mark.parametrize("at_once", [1, 4])
    def test_a_damaged_layer_is_seen_at_once(self, slow: Slow, monkeypatch: Patch, at_once: int) -> None:
        """Though the reading goes on only when this layer is used."""
        slow.ask()
        for owner, name, value in (
            (module, "_AHEAD_BYTES", 0),
            (module, "_LEAST_AHEAD", 0),
            (slow.engine.store.chunk_store.tiers, "reads_at_once", at_once),
        ):
            monkeypatch.setattr(owner, name, value)
        keys = slow.keys("primary")
        damage(slow, keys[0], 0)
        seen = threading.Event()

        def wait() -> None:
            with pytest.raises(ReadAgain):
                reading.wait(0)
            seen.set()

        given = slow.hold()
        with ReadAhead(slow.engine.store, keys, once=True) as reading:
            assert all(reading.kv(number) for number in range(len(keys)))
            given.set()
            threading.Thread(target=wait, daemon=True).start()
            assert seen.wait(10)

    def test_layers_that_are_used_once_take_memory_once(self, slow: Slow, monkeypatch: Patch) -> None:
        """Reading stays a few layers ahead, and what is done with is given back."""
        slow.ask()
        monkeypatch.setattr(module, "_AHEAD_BYTES", 0)
        monkeypatch.setattr(module, "_LEAST_AHEAD", 0)
        monkeypatch.setattr(slow.engine.store.chunk_store.tiers, "least_read", 1)
        keys = slow.keys("primary")
        expected = [kv.tensor() for kv in slow.engine.store.get_each(keys) if kv is not None]
        assert len(expected) == len(keys) > 1
        with ReadAhead(slow.engine.store, keys, once=True) as reading:
            found = [reading.kv(number) for number in range(len(keys))]
            num_layers = expected[0].shape[0]
            for layer in range(num_layers):
                reading.wait(layer)
                for kv, exact in zip(found, expected, strict=True):
                    assert kv is not None and torch.equal(kv.layer(layer).tensor(), exact[layer])
                time.sleep(0.02)
                assert all(count in (layer + 1, module._ALL) for count in reading._ready.values()), "not further"
                reading.done(layer)
            used = reading.busy_s()
            assert 0 < used <= time.perf_counter()
        if hasattr(mmap, "MADV_DONTNEED"):
            for kv in found:
                assert kv is not None
                frame = kv.frame
                pages = (frame.start + num_layers * frame.layer_size) // mmap.PAGESIZE * mmap.PAGESIZE
                assert not np.frombuffer(frame.data, np.uint8)[:pages].any(), "given back"
