"""Loads of one worker without vLLM: what stands in its paged cache afterwards is what an engine of ours assembled.

In vLLM's place: a paged cache that is a tensor, and rows that are taken from the engine's own cache instead of being
computed.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cacheclip_shared.care import create
from cacheclip_testing.plugin import CHUNKS
from cacheclip_vllm import layers_ahead, loading
from cacheclip_vllm.captures import write_context
from cacheclip_vllm.loading import Loader, local_heads
from cacheclip_vllm.parameters import Settings
from cacheclip_vllm.passes import passes
from cacheclip_vllm.planner import Planner
from cacheclip_vllm.scheduling import Load
from cacheclip_vllm.worker import _telling, model_runner
from vllm_worker import BLOCK, METHODS, Worker, Writer

from cacheclip_rag import CacheClipEngine, ModelError
from cacheclip_rag.models.fingerprint import file_states
from cacheclip_rag.planning import StoredInterval, load_planning
from cacheclip_rag.store import StoreReader, joined


class Stream:
    """A device's stream: how much of each stream was queued before what it does now."""

    def __init__(self) -> None:
        self.before: Counter[int] = Counter()

    def work(self) -> Counter[int]:
        """Queue some work; what has happened when it has ended."""
        self.before[id(self)] += 1
        return self.before.copy()

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(before=self.before.copy(), query=lambda: True)

    def wait_event(self, event: SimpleNamespace) -> None:
        self.before |= event.before

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


class Device:
    """In place of PyTorch's module of a device that copies while it computes."""

    def __init__(self) -> None:
        self.main = self.now = Stream()
        self.Stream = Stream

    def current_stream(self) -> Stream:
        return self.now

    @contextmanager
    def stream(self, chosen: Stream) -> Iterator[None]:
        self.now = chosen
        yield
        self.now = self.main


class TestLoads:
    @pytest.mark.parametrize("method", METHODS)
    def test_at_once(self, made: dict[str, Any], method: str) -> None:
        worker = Worker(made, method)
        assert worker.load() == sum(stop - start for start, stop in worker.plan.computed)
        worker.check()
        assert bool(worker.rows.runs) == bool(worker.plan.computed)

    @pytest.mark.some(4)
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("start", [32, 80, 160])
    def test_behind_what_vllm_has(self, made: dict[str, Any], method: str, start: int) -> None:
        """Nothing before is written, though a chunk's correction needs rows of it."""
        worker = Worker(made, method)
        worker.load(start)
        worker.check(start)

    def test_nothing_is_computed_behind_the_last_computed_row(self, made: dict[str, Any]) -> None:
        worker = Worker(made, "direct")
        start = worker.plan.computed[-1][1] + BLOCK
        assert start < worker.plan.num_ready and worker.load(start) == 0 and not worker.rows.runs
        worker.check(start)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_kv_before_chunks(self, made: dict[str, Any], tmp_path: Path, rank: int) -> None:
        """From a file, in the order of the request's blocks, the heads of one of two workers."""
        worker, model = Worker(made, "direct", rank, 2), made["runtime"]
        whole = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in worker.cache.layers])
        name = write_context(tmp_path, whole[:, :, :, : len(worker.ids)], model.fingerprint)
        worker.loader._settings, worker.loader._group = Settings(exchange=tmp_path), SimpleNamespace(world_size=1)
        start, stop = 5, worker.plan.num_ready
        for where, gone in ((tmp_path, False), (tmp_path / "none", True)):
            worker.loader._settings = Settings(exchange=where)
            worker.loader.load(Load("a", worker.block_ids, start, stop, context=name))
            ((_, found),) = worker.loader.work(10**6, waits=True)
            assert isinstance(found, FileNotFoundError) if gone else found.rows == 0
            worker.check(start)
        worker.loader.close()

    def test_entries_of_two_codecs(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        """Those in between stay as they were stored before, more precisely; a shared store holds both."""
        create(place := f"file://{tmp_path}/shared")
        options = {"primary": tiny_models["llama"], "auxiliary": None, "store": place, "method": "epic"}
        exact = CacheClipEngine(**options, codec="float32")
        exact.precompute(CHUNKS[1:2])
        engine = CacheClipEngine(**options, codec="int8", prefix_cache_bytes=0)
        engine.precompute(CHUNKS)
        made = {"engine": engine, "planner": Planner(**options, codec="int8"), "store": place}
        worker = Worker({**made, "runtime": load_planning(tiny_models["llama"])}, "corrected")
        worker.load()
        worker.check()
        for parts in (exact, engine, made["planner"]):
            parts.close()  # a thread follows a shared store

    @pytest.mark.parametrize("rank", [0, 1])
    def test_heads_of_one_of_two_workers(
        self, made: dict[str, Any], rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reduced = []
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda count, group: reduced.append(count.tolist()))
        worker = Worker(made, "corrected", rank, 2)
        read, get = list[Any](), StoreReader.get
        monkeypatch.setattr(StoreReader, "get", lambda *given, **by: read.append(get(*given, **by)) or read[-1])
        worker.load()
        worker.check()
        assert reduced == [[0, 0]] and {kv.shape[2] for kv in read} == {1}, "other heads are not read"

    def test_another_worker_cannot_read(self, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        failure = torch.tensor([0, 1], dtype=torch.int32)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda count, group: count.add_(failure))
        worker = Worker(made, "epic", 0, 2)
        with pytest.raises(RuntimeError, match="another tensor-parallel worker"):
            worker.load()
        assert not worker.rows.runs and not any(layer.written for layer in worker.layers.values())

    def test_several_loads_share_steps(self, made: dict[str, Any]) -> None:
        """In the order in which they came, no more of them than a step has room for, and one pass in any case."""
        worker = Worker(made, "epic", max_rows=60)
        count = len(passes(worker.plan, 0, **worker.room))
        names = ["a", "b", "c"]
        for name in names:
            worker.loader.load(Load(name, worker.block_ids, 0, worker.plan.num_ready, plan=worker.plan))
        assert count > 1 and worker.loader.forget(["b", "another"]) == {"b"}
        done = [[load.request_id for load, _ in worker.loader.work(1, waits=True)] for _ in range(2 * count)]
        assert done == [*[[]] * (count - 1), ["a"]] + [*[[]] * (count - 1), ["c"]]
        assert len(worker.rows.runs) == 2 * count
        worker.check()

    @pytest.mark.some(2)
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("fails", [False, True])
    def test_several_loads_share_passes(self, made: dict[str, Any], method: str, fails: bool) -> None:
        """Each with blocks of its own, the second behind what vLLM has of it; no more of them than a pass has room for.
        What fails, fails for all of a pass."""
        worker = Worker(made, method)
        if fails:
            worker.rows.bypassed = 1
        starts, count = {"a": 0, "b": 80, "c": 0, "d": 160}, len(worker.block_ids)
        planned = {name: passes(worker.plan, start, max_runs=99, max_rows=999) for name, start in starts.items()}
        rows = {name: sum(b - a for one in each for a, b in one.runs) for name, each in planned.items()}
        worker.loader._max_rows = rows["a"] + rows["b"]
        blocks = {name: tuple(range(n * count, n * count + count)) for n, name in enumerate(starts)}
        worker.block_ids = blocks["a"]
        for name, start in starts.items():
            worker.loader.load(Load(name, blocks[name], start, worker.plan.num_ready, plan=worker.plan))
        wait([each for load in worker.loader._queue for each in (load.entries or {}).values()])
        found = [*worker.loader.work(10**6, waits=True)]
        together = [len(runs) for runs in worker.rows.runs]
        assert [load.request_id for load, _ in found] == [*starts]
        assert together == ([2, 2] if worker.plan.computed else [])
        if fails and worker.plan.computed:
            assert all(isinstance(each, RuntimeError) for _, each in found)
            return
        assert [each.rows for _, each in found] == [*rows.values()]
        worker.check(0, *((starts[name], blocks[name]) for name in "bcd"))

    def test_a_step_does_not_wait_for_what_is_being_read(
        self, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, get = threading.Event(), StoreReader.get

        def late(*args: Any, **options: Any) -> Any:
            assert gate.wait(60)
            return get(*args, **options)

        monkeypatch.setattr(StoreReader, "get", late)
        worker = Worker(made, "epic")
        worker.loader.load(Load("a", worker.block_ids, 0, worker.plan.num_ready, plan=worker.plan))
        assert [*worker.loader.work(999, waits=False)] == [] and not worker.rows.runs
        gate.set()
        ((load, found),) = worker.loader.work(999, waits=True)
        assert load.request_id == "a" and isinstance(found, loading.Loaded) and found.read_s > 0
        worker.check()

    @pytest.mark.some(4)
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("planted", ["", "wait_event", "wait_stream"])
    def test_a_layer_is_copied_beside_the_one_before(
        self, made: dict[str, Any], method: str, planted: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a stream of its own; read when it is there, and kept until it was read."""
        device, log = Device(), list[tuple[str, int]]()
        ends = dict[str, dict[int, Any]](made={}, read={})
        layer, update = StoredInterval.layer, Writer.do_kv_cache_update
        monkeypatch.setattr(torch, "get_device_module", lambda _: device)
        for module in (layers_ahead, joined):
            monkeypatch.setattr(module, "COPIES_BESIDE", ("cpu",))
        worker = Worker(made, method, max_rows=60)
        numbers = {id(each): number for number, each in worker.layers.items()}

        def making(stored: StoredInterval, number: int, heads: slice) -> Any:
            assert device.now is not device.main and device.now.before >= ends["read"].get(number - 2, Counter())
            ends["made"][number] = device.now.work()
            log.append(("made", number))
            return layer(stored, number, heads)

        def writing(writer: Writer, of: Any, *given: Any) -> None:
            number = numbers[id(of)]
            if number in ends["made"]:  # the first pass may have no stored KV
                assert device.now is device.main and device.main.before >= ends["made"][number]
                ends["read"][number] = device.main.work()
                log.append(("read", number))
            update(writer, of, *given)

        monkeypatch.setattr(StoredInterval, "layer", making)
        monkeypatch.setattr(Writer, "do_kv_cache_update", writing)
        if planted:
            monkeypatch.setattr(Stream, planted, lambda *_: None)
            with pytest.raises(AssertionError, match="before"):
                worker.load()
            return
        worker.load()
        worker.check()
        last = len(worker.layers) - 1
        assert last > 1 and all(log.index(("made", n + 1)) < log.index(("read", n)) for n in range(last))
        assert len(worker.loader._copied) == 1 and device.main.before >= ends["made"][last]

    def test_what_is_read_ahead_is_limited(self, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loading, "_AHEAD_BYTES", 1)
        worker = Worker(made, "epic")
        for name in ("a", "b"):
            worker.loader.load(Load(name, worker.block_ids, 0, worker.plan.num_ready, plan=worker.plan))
        assert [each.entries is not None for each in worker.loader._queue] == [True, False]
        assert [load.request_id for load, _ in worker.loader.work(9999, waits=True)] == ["a", "b"]

    def test_what_fits_another_model_only(self, made: dict[str, Any]) -> None:
        worker = Worker(made, "epic")
        pieces = [replace(piece, num_tokens=piece.num_tokens) for piece in worker.plan.pieces]
        pieces[-1] = replace(pieces[-1], first=pieces[-1].first + 1)
        worker.plan = replace(worker.plan, pieces=tuple(pieces))
        with pytest.raises(ValueError, match="which does not fit the plan"):
            worker.load()
        layers = {number + 1: layer for number, layer in worker.layers.items()}
        with pytest.raises(ValueError, match="vLLM has attention layers"):
            Loader(layers, Settings(), made["runtime"], Any, None, block_size=1, max_runs=1, max_rows=1)


@pytest.mark.parametrize(
    ("num_heads", "size", "heads"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (6, 3, [range(2), range(2, 4), range(4, 6)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
    ],
)
def test_heads_of_workers(num_heads: int, size: int, heads: list[range]) -> None:
    found = [local_heads(num_heads, rank, size) for rank in range(size)]
    assert [range(each.start, each.stop) for each in found] == heads


class TestWorker:
    class Base:
        """In place of vLLM's worker."""

        def __init__(self, folder: Path, *, changes: bool = False) -> None:
            self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(folder)))
            self.folder, self.changes = folder, changes

        def load_model(self) -> str:
            self.model_runner = Runner()
            if self.changes:
                os.utime(self.folder / "model.safetensors")
            return "loaded"

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_text("{}")
        return tmp_path

    def test_tells_its_model_runner(self, folder: Path) -> None:
        several = [_telling(self.Base)(folder) for _ in range(2)]
        assert [each.load_model() for each in several] == ["loaded"] * 2
        for each in several:
            assert model_runner(each.model_runner.vllm_config, file_states(folder)) is each.model_runner
        with pytest.raises(ValueError, match="worker class of this package"):
            model_runner(SimpleNamespace(model_config=object()), file_states(folder))
        config = several.pop().model_runner.vllm_config
        del each
        with pytest.raises(ValueError, match="worker class of this package"):
            model_runner(config, file_states(folder))  # its engine is gone

    def test_its_weights_are_those_of_the_fingerprint(self, folder: Path) -> None:
        worker = _telling(self.Base)(folder)
        worker.load_model()
        replaced = folder / "new"
        replaced.write_text("{}")
        replaced.rename(folder / "model.safetensors")
        config = worker.model_runner.vllm_config
        config.model_config = worker.vllm_config.model_config
        with pytest.raises(ValueError, match=r"changed after vLLM loaded .* Start vLLM again"):
            model_runner(config, file_states(folder))

    def test_files_that_change_while_it_loads(self, folder: Path) -> None:
        with pytest.raises(ModelError, match="changed while it was loaded"):
            _telling(self.Base)(folder, changes=True).load_model()

    def test_several_connectors(self, folder: Path) -> None:
        """vLLM gives each of them a copy of its config."""
        worker = _telling(self.Base)(folder)
        worker.load_model()
        own = worker.model_runner.vllm_config
        copied = copy.copy(own)
        assert model_runner(copied, file_states(folder)) is worker.model_runner
        copied.kv_transfer_config = SimpleNamespace(kv_connector="CacheClipConnector")
        own.kv_transfer_config = SimpleNamespace(kv_connector="MultiConnector")
        with pytest.raises(ValueError, match="MultiConnector is not supported"):
            model_runner(copied, file_states(folder))

    def test_shifts_positions_until_it_is_told_otherwise(self, folder: Path) -> None:
        worker = _telling(self.Base)(folder)
        worker.load_model()
        model = worker.model_runner.get_model()
        seen = []
        for by in (0, 3, 17, 0):
            worker.shift_positions(by)
            seen.append(model(positions=torch.tensor([0, 5])).tolist())
        assert seen == [[0, 5], [3, 8], [17, 22], [0, 5]]


class Runner:
    def __init__(self) -> None:
        transfer = SimpleNamespace(kv_connector="CacheClipConnector")
        self.vllm_config = SimpleNamespace(model_config=object(), kv_transfer_config=transfer)
        self._model = Positions()

    def get_model(self) -> torch.nn.Module:
        return self._model


class Positions(torch.nn.Module):
    def forward(self, *, positions: torch.Tensor) -> torch.Tensor:
        return positions
