"""Counted operations are those that torch counts. Hidden pairs of row and key do not count, so attention has bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.answering import Answering
from cacheclip_rag.call_options import CallOptions
from cacheclip_rag.chunks.writer import ChunkWriter
from cacheclip_rag.clock import PhaseClock
from cacheclip_rag.lab.evaluation import explaining
from cacheclip_rag.lab.evaluation.floors import block_pairs, causal_pairs, layer_shapes, linear_flops
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.attention import query_attention
from cacheclip_rag.runtime.transformers.attention_plan import (
    AttentionPlan,
    AttentionRule,
    Block,
    Geometry,
    Probe,
    SideBySide,
    causal_plan,
)
from cacheclip_rag.store.codecs import Frame
from cacheclip_rag.types import PHASES, Request
from tests.conftest import QUESTION, rag_prompt

ROWS = 120


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Torch's own counts: ``linear`` (products of matrices) and ``batched`` (attention and rotary tables)."""
    found: dict[str, int] = {}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield found
    by_name = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    found["linear"] = sum(by_name.pop(name, 0) for name in ("aten.mm", "aten.addmm"))
    found["batched"] = sum(by_name.values())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2-sliding", "phi3-sliding", "gemma3"])
def test_a_prefill_takes_the_operations_that_torch_counts(tiny_models: dict[str, str], name: str) -> None:
    runtime: Any = load_model(tiny_models[name])
    with counted() as by_torch:
        runtime.prefill(torch.arange(ROWS) % runtime.vocab_size, ROWS)
    shapes = layer_shapes(runtime.model)
    head = runtime.model.get_output_embeddings().weight.numel()
    assert sum(shape.flops(ROWS, 0) for shape in shapes) + linear_flops(head, 1) == by_torch["linear"]
    attention = sum(shape.flops(0, causal_pairs(0, ROWS, shape.window)) for shape in shapes)
    assert 0 < attention <= by_torch["batched"]
    if all(shape.window is None for shape in shapes):  # all keys are multiplied: just under two times the seen ones
        assert by_torch["batched"] <= 2.05 * attention
    else:
        unlimited = sum(shape.flops(0, causal_pairs(0, ROWS, None)) for shape in shapes)
        assert attention < unlimited


def test_rows_after_known_tokens_see_them() -> None:
    assert causal_pairs(0, 3, None) == 1 + 2 + 3
    assert causal_pairs(5, 2, None) == 6 + 7
    assert causal_pairs(5, 2, 4) == 4 + 4


BLOCKS: dict[str, Block | SideBySide] = {
    "scattered": causal_plan(torch.tensor([2, 3, 11, 29])).blocks[0],
    "side by side": SideBySide(slice(0, 6), slice(0, 30), torch.tensor([0, 4, 1])),
    "visible": causal_plan(torch.tensor([4, 9, 19]), visible=torch.arange(30) % 3 == 0).blocks[0],
    "contexts": causal_plan(
        torch.tensor([2, 9, 18, 19]),
        geometry=Geometry(torch.arange(20), contexts=(torch.arange(20) > 3) & (torch.arange(20) < 15)),
    ).blocks[0],
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", list(BLOCKS))
def test_pairs_are_those_with_attention(kind: str, window: int | None) -> None:
    block = BLOCKS[kind]
    generator = torch.Generator().manual_seed(1)
    num_rows, num_keys = (each.stop - each.start for each in (block.rows, block.keys))
    query, key = (torch.randn(1, count, 4, generator=generator) for count in (num_rows, num_keys))
    weights = query_attention(query, key, block, AttentionRule(0.5, window))
    assert block_pairs(block, window) == int((weights > 0).sum())


def test_layers_after_a_probe_do_not_count(tiny_models: dict[str, str]) -> None:
    runtime: Any = load_model(tiny_models["llama"])
    plan = causal_plan(torch.arange(8))
    plan.probe = Probe(frozenset([1]), plan.blocks, lambda *_: None, stop=1)
    found = [
        explaining._layer_flops(shape, number, 8, {"cacheclip_plan": plan})
        for number, shape in enumerate(layer_shapes(runtime.model))
    ]
    [shape, *_] = layer_shapes(runtime.model)
    assert found == [shape.flops(8, 36), shape.flops(8, 0, 36), 0]
    assert shape.flops(0, 36) == 2 * shape.flops(0, 0, 36) > 0
    assert AttentionPlan(plan.blocks).probe is None


def test_rows_whose_output_of_the_last_layer_is_not_needed(tiny_models: dict[str, str]) -> None:
    runtime: Any = load_model(tiny_models["llama"])
    cache = runtime.prefill(torch.arange(40), 100)[0]
    shapes, found = layer_shapes(runtime.model), list[int]()
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, n=number: found.append(
                explaining._layer_flops(shapes[n], n, args[0].shape[1], kwargs)
            ),
            with_kwargs=True,
        )
        for number, layer in enumerate(runtime.model.base_model.layers)
    ]
    with counted() as by_torch:
        runtime.extend(cache, torch.arange(40, 90), 40)
    for hook in hooks:
        hook.remove()
    head = runtime.model.get_output_embeddings().weight.numel()
    pairs = causal_pairs(40, 50, None)
    attention = sum(
        shape.flops(0, each) for shape, each in zip(shapes, [pairs] * (len(shapes) - 1) + [90], strict=True)
    )
    assert sum(found) + linear_flops(head, 1) - attention == by_torch["linear"]


@pytest.fixture
def explained(
    engine: CacheClipEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[CacheClipEngine, dict[str, Any], dict[str, Request]]:
    monkeypatch.setattr(explaining, "_ENOUGH_S", 0.0)
    engine.precompute(chunks)
    engine = CacheClipEngine(engine.config, prefix_cache_bytes=0)
    options = CallOptions(SamplingParams(max_tokens=1), question=QUESTION)
    requests = {
        name: Request(rag_prompt(chunks), engine.make_method(name), options)
        for name in ("full", "direct", "cacheclip", "cacheblend")
    }
    seconds = {name: dict.fromkeys(PHASES, 1.0) for name in requests}
    Answering(engine.parts, ChunkWriter(engine.parts), ()).prefill(requests["cacheclip"])  # reads shared prefixes
    return engine, explaining.explain(engine, requests, seconds, before_read=lambda: None), requests


def kv_bytes(engine: CacheClipEngine, key: str) -> int:
    """Bytes of an entry's payload after its header."""
    data, num_bytes = engine.store.store.tiers.head(key, 1 << 14)
    return num_bytes - Frame.parse(data, key, num_bytes=num_bytes).start


def test_work_of_each_phase(explained: Any, chunks: list[str]) -> None:
    engine, found, requests = explained
    answering = Answering(engine.parts, ChunkWriter(engine.parts), ())
    for name, phases in found["methods"].items():
        assert tuple(phases) == PHASES
        with counted() as by_torch:
            stats = answering.prefill(requests[name]).stats
        flops = phases["select"]["flops"] + phases["recompute"]["flops"]
        assert by_torch["linear"] < flops <= by_torch["linear"] + by_torch["batched"], name
        runtime = engine.primary
        of_token = 2 * runtime.num_layers * runtime.num_kv_heads * runtime.head_dim * runtime.dtype.itemsize
        reused = stats.chunk_tokens + stats.prefix_tokens
        assert phases["assemble"]["bytes"] == reused * of_token and bool(reused) == (name != "full")
        assert phases["lookup"]["flops"] is None and phases["lookup"]["floor_s"] > 0
        rendered = runtime.render_chat([{"role": "user", "content": requests[name].prompt}])
        assert phases["lookup"]["bytes"] == len(rendered.encode())
        for phase, row in phases.items():
            assert (row["gap"] is None) == (not row["floor_s"]), phase
            if row["gap"] is not None:
                assert row["gap"] * row["floor_s"] == pytest.approx(1.0)
        assert phases["recompute"]["operations"] > 0
    methods = found["methods"]
    sizes = [
        [kv_bytes(engine, caches.key(text)) for text in chunks]
        for caches in engine.chunk_caches(engine.context_of("cacheclip"))
    ]
    assert methods["direct"]["read"]["bytes"] == sum(sizes[0])
    assert methods["cacheclip"]["read"]["bytes"] == sum(sizes[0]) + sum(sizes[1][1:])  # the first chunk is exact
    assert methods["direct"]["select"]["flops"] == methods["full"]["read"]["bytes"] == 0
    assert methods["cacheclip"]["select"]["flops"] > 0
    assert methods["full"]["recompute"]["flops"] > methods["cacheblend"]["recompute"]["flops"]
    assert found["processor"] and found["threads"] == torch.get_num_threads()
    rates = found["rates"]
    assert all(rates[f"{name}_bytes_per_s"] > 0 for name in ("copy", "read", "tokenize"))
    assert all(each["flops_per_s"] > 0 for each in rates["matmul"])
    assert len({(each["model"], each["rows"]) for each in rates["matmul"]}) == len(rates["matmul"])


class Tally(TorchDispatchMode):
    """Counts all tensor operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Tallied(PhaseClock):
    """Counts a phase's operations as the clock does its seconds: what is added between its begin and its end."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally
        self.operations = dict.fromkeys(PHASES, 0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.tally.count
        yield
        self.operations[name] += self.tally.count - before

    @contextmanager
    def phase_within(self, name: str, outer: str) -> Iterator[None]:
        before = self.tally.count
        yield
        self.operations[name] += self.tally.count - before
        self.operations[outer] -= self.tally.count - before


def test_operations_of_each_phase(explained: Any) -> None:
    engine, found, requests = explained
    answering = Answering(engine.parts, ChunkWriter(engine.parts), ())
    by_method = {}
    for name, phases in found["methods"].items():
        with Tally() as tally:
            clock = Tallied(tally)
            answering.prefill(requests[name], clock)
        by_method[name] = clock.operations
        assert {phase: row["operations"] for phase, row in phases.items()} == clock.operations, name
    assert by_method["full"]["select"] == by_method["full"]["assemble"] == 0
    assert by_method["direct"]["select"] < by_method["cacheblend"]["select"] < by_method["cacheclip"]["select"]
    layers = engine.primary.num_layers
    assert layers < by_method["direct"]["assemble"] <= by_method["cacheclip"]["assemble"]


def test_nothing_stays_behind(explained: Any) -> None:
    engine, _, _ = explained
    assert "find" not in vars(engine.store.store.tiers)
    for runtime in (engine.primary, engine.auxiliary):
        assert not runtime.model.get_output_embeddings()._forward_pre_hooks
        assert all(len(layer._forward_pre_hooks) == 1 for layer in runtime.model.base_model.layers)  # the engine's
