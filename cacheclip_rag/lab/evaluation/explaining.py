"""What each phase of the time to the first token could take at best on this machine, for ``cacheclip bench --explain``.

One run per method, not timed, counts each phase's work: operations of matrix products (:mod:`.floors`) while tokens are
selected and computed, bytes while KV is read and assembled, bytes of the prompt's text while it is looked up, and
dispatched tensor operations. The floor is this work at the fastest rates that the machine reaches in this process:
products with the model's own weights, a copy, a read of the store's files, the primary's tokenizer on the same text.
Work that is not counted, such as finding stored texts in ``lookup`` and copying the auxiliary model's KV in ``select``,
is part of the gap.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from ...answering import Answering
from ...chunks.writer import ChunkWriter
from ...clock import PhaseClock
from ...engine import CacheClipEngine
from ...machine import processor_name, unit_name
from ...progress import progress_bar
from ...runtime.base import Runtime
from ...runtime.transformers.attention_plan import AttentionPlan
from ...runtime.transformers.cache import cache_of
from ...runtime.transformers.model import ModelRuntime
from ...store import ReadBuffer, Sink, Tiers
from ...types import PHASES, FusionStats, Request
from .floors import LayerShape, block_pairs, causal_pairs, layer_shapes, linear_flops, linear_layers

__all__ = ["explain"]

_ENOUGH_S = 0.3
"""Seconds after which a rate counts as measured."""
_LEAST_CALLS = 5
_MOST_COPIED = 1 << 28
"""Most bytes that are copied at once, to measure how fast copies are."""


def explain(
    engine: CacheClipEngine,
    requests: Mapping[str, Request],
    phases_s: Mapping[str, Mapping[str, float]],
    *,
    before_read: Callable[[], None],
) -> dict[str, Any]:
    """Run each request once more, and compare measured seconds with what the machine can do.

    Args:
        requests: one per method, by name.
        phases_s: measured seconds per phase, by method.
        before_read: called before the store's files are read to measure how fast that is.

    Returns:
        ``processor``, ``device``, ``threads``, ``dtype``; ``rates`` with ``matmul`` (per model and number of rows),
        ``copy_bytes_per_s``, ``read_bytes_per_s`` and ``tokenize_bytes_per_s``; and ``methods``, by name and phase
        ``seconds``, ``flops``, ``bytes``, ``floor_s``, ``operations`` and ``gap`` (seconds divided by the floor). None:
        does not apply.
    """
    answering = Answering(engine.parts, ChunkWriter(engine.parts), ())
    tiers = engine.store.store.tiers
    found: dict[str, _Work] = {}
    with progress_bar("explaining", len(requests), "methods") as advance:
        for number, (name, request) in enumerate(requests.items(), 1):
            found[name] = _counted(answering, request, engine, tiers)
            advance(number)
    rates = _Rates(engine.primary)
    keys = dict.fromkeys(key for work in found.values() for key in work.keys)
    rates.read = _read_rate(tiers, [*keys], before_read)
    rates.tokenize = _tokenize_rate(engine.primary, next(work.text for work in found.values()))
    rates.copy = _copy_rate(engine.primary, max(work.bytes["assemble"] for work in found.values()))
    methods = {name: _phases(work, phases_s[name], rates) for name, work in found.items()}
    return {
        "processor": processor_name(),
        "device": unit_name(engine.primary.device),
        "threads": torch.get_num_threads(),
        "dtype": str(engine.primary.dtype).removeprefix("torch."),
        "rates": rates.to_dict(),
        "methods": methods,
    }


@dataclass(slots=True)
class _Work:
    """What one run did, by phase."""

    flops: dict[str, Counter[tuple[ModelRuntime, int]]] = field(default_factory=lambda: {p: Counter() for p in PHASES})
    """By model and number of rows, because few rows run at the memory's speed."""
    bytes: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    keys: list[str] = field(default_factory=list)
    """Payloads that were read from the store."""
    text: str = ""
    """Of the prompt, which every answer must tokenise once."""
    known: bool = True
    """Whether the layers of all models could be watched."""


class _Watch(PhaseClock):
    """Knows which phase is running."""

    phase_now: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._within(name):
            yield

    @contextmanager
    def phase_within(self, name: str, outer: str) -> Iterator[None]:
        with self._within(name):
            yield

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        before, self.phase_now = self.phase_now, name
        try:
            yield
        finally:
            self.phase_now = before


class _Operations(TorchDispatchMode):
    """Counts tensor operations by phase, views included."""

    def __init__(self, watch: _Watch, work: _Work) -> None:
        super().__init__()
        self._watch, self._work = watch, work
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._watch.phase_now is not None and not self.paused:
            self._work.operations[self._watch.phase_now] += 1
        return func(*args, **(kwargs or {}))


def _counted(answering: Answering, request: Request, engine: CacheClipEngine, tiers: Tiers) -> _Work:
    """The work of one prefill."""
    watch, work = _Watch(), _Work()
    models: list[Runtime] = [engine.primary]
    if request.method is not None and request.method.needs_auxiliary and engine.auxiliary is not None:
        models.append(engine.auxiliary)
    with ExitStack() as stack:
        operations = _Operations(watch, work)
        for runtime in dict.fromkeys(models):
            if isinstance(runtime, ModelRuntime):
                stack.enter_context(_watched(runtime, watch, work, operations))
        stack.enter_context(_watched_reads(tiers, watch, work))
        stack.enter_context(operations)
        prefilled = answering.prefill(request, watch)
    work.known = all(isinstance(runtime, ModelRuntime) for runtime in models)
    work.text = "".join(span.segment.text for span in prefilled.layout.spans)
    work.bytes["lookup"] = len(work.text.encode())
    work.bytes["assemble"] = _assembled_bytes(engine.primary, prefilled.stats)
    return work


def _assembled_bytes(runtime: Runtime, stats: FusionStats) -> int:
    """Bytes of the KV that was written into the cache before the recompute."""
    of_token = 2 * runtime.num_layers * runtime.num_kv_heads * runtime.head_dim * runtime.dtype.itemsize
    return (stats.prefix_tokens + stats.chunk_tokens) * of_token


@contextmanager
def _watched(runtime: ModelRuntime, watch: _Watch, work: _Work, operations: _Operations) -> Iterator[None]:
    """Add the FLOPs of every layer that ``runtime`` runs to the phase in which it runs."""
    shapes = layer_shapes(runtime.model)

    def enter(number: int, shape: LayerShape) -> Callable[..., None]:
        def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if watch.phase_now is None:
                return
            operations.paused = True
            rows = args[0].shape[1]
            work.flops[watch.phase_now][runtime, rows] += _layer_flops(shape, number, rows, kwargs)
            operations.paused = False

        return count

    def enter_head(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if watch.phase_now is not None and isinstance(module, torch.nn.Linear):
            rows = args[0].shape[1]
            work.flops[watch.phase_now][runtime, rows] += linear_flops(module.in_features * module.out_features, rows)

    hooks = [runtime.model.get_output_embeddings().register_forward_pre_hook(enter_head)]
    for number, (layer, shape) in enumerate(zip(runtime.model.base_model.layers, shapes, strict=True)):
        hooks.append(layer.register_forward_pre_hook(enter(number, shape), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layer_flops(shape: LayerShape, number: int, rows: int, kwargs: Mapping[str, Any]) -> int:
    """Operations of layer ``number``, called with ``kwargs``; 0 after the last layer that a probe needs."""
    plan: AttentionPlan | None = kwargs.get("cacheclip_plan")
    if plan is None:
        state = cache_of(kwargs)
        known = 0 if state is None else state.get_seq_length(number)
        return shape.flops(rows, causal_pairs(known, rows, shape.window))
    probe, scored = plan.probe, 0
    if probe is not None and number in probe.layers:
        scored = sum(block_pairs(block, shape.window) for block in probe.blocks)
    if probe is not None and probe.stop is not None and number >= probe.stop:
        return shape.flops(rows, 0, scored) if number == probe.stop else 0
    attending = sum(block_pairs(block, shape.window) for block in plan.blocks)
    return linear_flops(shape.before_attention, plan.kv_rows) + shape.flops(rows, attending, scored)


@contextmanager
def _watched_reads(tiers: Tiers, watch: _Watch, work: _Work) -> Iterator[None]:
    """Add chunk KV that is read, on any thread, to ``work``. The request's own thread reads other KV, too: the shared
    prefix."""
    find, read_part, own = tiers.find, tiers.read_part, threading.get_ident()
    keys: dict[str, None] = {}

    def found_whole(key: str, sink: Sink) -> Any:
        found = find(key, sink)
        if found is not None and (watch.phase_now == "read" or threading.get_ident() != own):
            keys[key] = None
            work.bytes["read"] += memoryview(found[0]).nbytes
        return found

    def found_part(key: str, start: int, target: memoryview) -> int:
        count = read_part(key, start, target)
        keys[key] = None
        work.bytes["read"] += count
        return count

    tiers.find, tiers.read_part = found_whole, found_part  # type: ignore[method-assign]
    try:
        yield
    finally:
        del tiers.find, tiers.read_part
        work.keys.extend(keys)


# -- what the machine can do --------------------------------------------------------------------------------------


class _Rates:
    """Measured rates; those of products are measured when they are first asked for."""

    read: float | None = None
    """Bytes per second, of the store's files."""
    copy: float | None = None
    """Bytes per second."""
    tokenize: float | None = None
    """Bytes of text per second."""

    def __init__(self, primary: Runtime) -> None:
        self.primary = primary
        self._matmul: dict[tuple[ModelRuntime, int], float] = {}

    def matmul(self, runtime: ModelRuntime, rows: int) -> float:
        """FLOP/s of ``rows`` rows times the layers' weights."""
        if (runtime, rows) not in self._matmul:
            self._matmul[runtime, rows] = _matmul_rate(runtime, rows)
        return self._matmul[runtime, rows]

    def to_dict(self) -> dict[str, Any]:
        matmul = []
        for (runtime, rows), rate in self._matmul.items():
            outputs, inputs = _projections(runtime)[0].shape
            shape = {"rows": rows, "inputs": inputs, "outputs": outputs}
            matmul.append({"model": runtime.name, **shape, "flops_per_s": rate})
        of_bytes = {f"{name}_bytes_per_s": getattr(self, name) for name in ("copy", "read", "tokenize")}
        return {"matmul": matmul, **of_bytes}


def _phases(work: _Work, seconds: Mapping[str, float], rates: _Rates) -> dict[str, dict[str, Any]]:
    found = {}
    for phase in PHASES:
        flops = num_bytes = floor = None
        if phase in ("select", "recompute") and work.known:
            flops = work.flops[phase].total()
            floor = sum(count / rates.matmul(*key) for key, count in work.flops[phase].items())
        elif phase in ("lookup", "read", "assemble"):
            num_bytes = work.bytes[phase]
            rate = {"lookup": rates.tokenize, "read": rates.read, "assemble": rates.copy}[phase]
            floor = num_bytes / rate if rate else 0.0
        found[phase] = {
            "seconds": seconds[phase],
            "flops": flops,
            "bytes": num_bytes,
            "floor_s": floor,
            "operations": work.operations[phase],
            "gap": seconds[phase] / floor if floor else None,
        }
    return found


def _projections(runtime: ModelRuntime) -> list[torch.Tensor]:
    """The largest weights of each decoder layer, hidden times intermediate size, on the first layer's device."""
    layers = [[each.weight for each in linear_layers(layer)] for layer in runtime.model.base_model.layers]
    found = [max(weights, key=torch.numel) for weights in layers]
    return [weight for weight in found if weight.device == found[0].device]


@torch.inference_mode()
def _matmul_rate(runtime: ModelRuntime, rows: int) -> float:
    """FLOP/s of one product per layer in turn: no cache holds all weights, as in a forward pass."""
    weights = cycle(_projections(runtime))
    first = next(weights)
    x = torch.randn(rows, first.shape[1], device=first.device).to(first.dtype)
    seconds = _least_s(lambda: linear(x, next(weights)), first.device)
    return linear_flops(first.numel(), rows) / seconds


def _copy_rate(runtime: Runtime, num_bytes: int) -> float | None:
    """Bytes per second from the CPU's memory to the model's."""
    if not num_bytes:
        return None
    source = torch.ones(min(num_bytes, _MOST_COPIED), dtype=torch.uint8)
    target = torch.empty_like(source, device=runtime.device)
    return source.numel() / _least_s(lambda: target.copy_(source), runtime.device)


def _tokenize_rate(runtime: Runtime, text: str) -> float | None:
    """Bytes of text per second of the bare tokenizer, which gives ids and nothing else."""
    if not text:
        return None
    seconds = _least_s(lambda: runtime.tokenizer(text, add_special_tokens=False, verbose=False), torch.device("cpu"))
    return len(text.encode()) / seconds


def _read_rate(tiers: Tiers, keys: list[str], before: Callable[[], None]) -> float | None:
    """Bytes per second of payloads read in turn into the same memory."""
    if not keys:
        return None
    sink, rates = _Reused(), []
    for _ in range(3):
        before()
        started = time.perf_counter()
        payloads = (tiers.find(key, sink) for key in keys)
        num_bytes = sum(memoryview(found[0]).nbytes for found in payloads if found is not None)
        rates.append(num_bytes / (time.perf_counter() - started))
    return max(rates)


class _Reused(Sink):
    """Takes every payload into the same memory."""

    def __init__(self) -> None:
        self._buffer = ReadBuffer()

    def allocate(self, num_bytes: int) -> memoryview:
        return self._buffer.allocate(num_bytes)


def _least_s(call: Callable[[], object], device: torch.device) -> float:
    """Least seconds of a call, after one that is not counted: other load only adds to it."""
    seconds: list[float] = []
    call()
    while len(seconds) < _LEAST_CALLS or sum(seconds) < _ENOUGH_S:
        _synchronise(device)
        started = time.perf_counter()
        call()
        _synchronise(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
