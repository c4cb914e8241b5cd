"""One worker without vLLM. In vLLM's place: a paged cache that is a tensor, and rows that are taken from the engine's
own cache instead of being computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cacheclip_lab.variants import RANDOM
from cacheclip_testing.plugin import CHUNKS, rag_prompt
from cacheclip_vllm import Planner
from cacheclip_vllm.loading import Loader, local_heads, slots_of
from cacheclip_vllm.parameters import Settings
from cacheclip_vllm.scheduling import Load

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.methods import preset
from cacheclip_rag.planning import load_planning

BLOCK = 16
BLOCKS = 128
METHODS = {"direct": preset("direct"), "epic": preset("epic"), "corrected": replace(RANDOM, correction=0.5).at(0.3)}


class Writer:
    """A layer's writer: keys and values by slot, as vLLM's backends get them."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        assert key.shape == value.shape and len(slot_mapping) == len(key)
        kv_cache[0, slot_mapping], kv_cache[1, slot_mapping] = key, value
        layer.written.append(slot_mapping.tolist())


class Rows:
    """In place of vLLM's model: keys and values of the rows are those that the engine computed."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.runs: list[Any] = []
        self.bypassed: int | None = None
        """A layer that writes its cache by other means."""

    def run(self, requests: Any) -> None:
        rows = [torch.cat([torch.arange(start, stop) for start, stop in runs]) for _, runs, _ in requests]
        for (ids, *_), own in zip(requests, rows, strict=True):
            assert ids[own].tolist() == self.worker.ids[own].tolist()
        self.runs.append([runs for _, runs, _ in requests])
        slots = torch.cat([slots_of(blocks, BLOCK, own) for (*_, blocks), own in zip(requests, rows, strict=True)])
        for number, layer in self.worker.layers.items():
            if number == self.bypassed:
                continue
            key, value = (each[torch.cat(rows)] for each in self.worker.expected(number))
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)


class Worker:
    """One worker of ``size``, with a plan of a prompt and the engine's KV of this prompt."""

    def __init__(self, made: dict[str, Any], method: str, rank: int = 0, size: int = 1, **room: int) -> None:
        self.plan = made["planner"].plan(rag_prompt(CHUNKS), method=METHODS[method]).fusion
        made["engine"].prefixes.clear()
        prefilled = made["engine"].prefill(rag_prompt(CHUNKS), method=METHODS[method])
        runtime = made["runtime"]
        self.cache, self.ids = prefilled.cache, prefilled.layout.ids
        self.heads = local_heads(runtime.num_kv_heads, rank, size)
        shape = (2, BLOCKS * BLOCK, self.heads.stop - self.heads.start, runtime.head_dim)
        caches = [torch.full(shape, float("nan")) for _ in range(runtime.num_layers)]
        self.layers = {n: SimpleNamespace(impl=Writer(), kv_cache=kv, written=[]) for n, kv in enumerate(caches)}
        self.rows = Rows(self)
        group = SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=None)
        settings = Settings(made["store"])
        self.room = {"max_runs": 99, "max_rows": 999, **room}
        make_rows: Any = lambda: self.rows  # noqa: E731
        self.loader = Loader(self.layers, settings, runtime, make_rows, group, block_size=BLOCK, **self.room)
        count = -(-len(self.ids) // BLOCK)
        self.block_ids = tuple(torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3))[:count].tolist())

    def expected(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the engine has, ``(num_tokens, num_heads, head_dim)``."""
        layer = self.cache.layers[number]
        return tuple(each[0, self.heads, : len(self.ids)].transpose(0, 1) for each in (layer.keys, layer.values))  # type: ignore[return-value]

    def load(self, start: int = 0) -> int:
        self.loader.load(Load("a", self.block_ids, start, self.plan.num_ready, plan=self.plan))
        ((_, found),) = self.loader.work(10**6, waits=True)
        if isinstance(found, Exception):
            raise found
        return found.rows

    def check(self, start: int = 0, *more: tuple[int, Sequence[int]]) -> None:
        """All positions from ``start`` to the end of the plan are there, and no slot of another position. ``more``: of
        other loads, where they start, and their blocks."""
        loads = ((start, self.block_ids), *more)
        positions = torch.cat([torch.arange(first, self.plan.num_ready) for first, _ in loads])
        slots = torch.cat([slots_of(of, BLOCK, torch.arange(first, self.plan.num_ready)) for first, of in loads])
        for number, layer in self.layers.items():
            for found, expected in zip(layer.kv_cache, self.expected(number), strict=True):
                torch.testing.assert_close(found[slots], expected[positions], atol=2e-5, rtol=1e-4)
                others = torch.ones(len(found), dtype=torch.bool).index_fill(0, slots, False)
                assert bool(found[others].isnan().all())
            assert "do_kv_cache_update" not in vars(layer.impl), "the class's own writer is back"


@pytest.fixture(scope="module")
def made(tiny_models: dict[str, str], tmp_path_factory: Any) -> dict[str, Any]:
    store = tmp_path_factory.mktemp("store")
    options = {"primary": tiny_models["llama"], "auxiliary": None, "store": str(store), "codec": "float32"}
    engine = CacheClipEngine(**options, method="epic", prefix_cache_bytes=0)
    engine.precompute(CHUNKS)
    engine.warm_up()
    planner = Planner(**options, method="epic")
    return {"engine": engine, "planner": planner, "runtime": load_planning(tiny_models["llama"]), "store": store}
