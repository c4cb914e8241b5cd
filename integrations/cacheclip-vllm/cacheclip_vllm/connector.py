"""The KV connector: vLLM asks it for the KV of a prompt's first tokens.

vLLM is not changed. It loads this class by its module path (:func:`~cacheclip_vllm.offline.engine_options`
gives the settings) and makes one in the scheduler and one in every worker. The scheduler's decides, before a token is
scheduled, whether a request's KV can be made: a thread reads the plan, and the request waits for it. The workers' makes
the KV, behind the forward passes of other requests' steps, a pass or two in each.
Whatever fails on the way is ordinary prefill by vLLM, counted, and logged once per reason.

KV made by reuse is approximate. It must not enter vLLM's prefix cache under the hash of the exact KV, where every
later prompt with the same first tokens would find it. So the scheduler's connector gives a request hashes of its own
from the first stored chunk on (:mod:`.prefix_blocks`). If that cache holds so much exact KV that plain prefill computes
less than the plan, the request is plain.

vLLM enters the hashes of a request's blocks in that cache when all workers have reported their load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec

from cacheclip_rag.planning import load_planning

from .captures import Captor, Capture, CapturedRows, CaptureSchedule
from .kept import GONE, Keep, KeptBlocks, cut
from .loading import Loader, slots_of
from .once import WarnOnce
from .parameters import EXACT, PARAMETER, UNREADABLE, Ready, Settings, read_keep
from .prefix_blocks import PrefixBlocks
from .rows import RowRunner
from .scheduling import Load, RequestLoads, check_engine, check_request, untested, windows_cost
from .worker import model_runner

logger = init_logger("vllm.cacheclip")


_ROWS_BESIDE = 256
"""Most rows that loads compute in a step beside other requests' tokens, unless one pass has more: streams go on."""
_IDLE_WAIT_S = 0.002
"""For a plan that is being read, while nothing else is computed."""


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers in one step."""

    loads: list[Load] = field(default_factory=list)
    """Those that begin."""
    room: int = 0
    """Rows that loads may compute in the step."""
    is_idle: bool = False
    """Whether vLLM computes none."""
    captured: list[CapturedRows] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Blocks of earlier prompts that are no longer kept."""


@dataclass
class LoadTimes(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers tell the scheduler of loads that are complete."""

    read_s: dict[str, float] = field(default_factory=dict)
    """By request, the seconds in which a load waited for stored KV."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LoadTimes:
        return self  # workers wait for one another


@dataclass
class LoadCounters(KVConnectorStats):  # type: ignore[misc]
    """Numbers since they were last taken: ``fused_requests``, ``exact_requests`` (with a plan that computes more
    than plain prefill), ``plain_requests`` (with a plan that could not be used), ``failed_loads``, ``loaded_tokens``,
    ``computed_rows``, ``load_s``."""

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self.data[name] = self.data.get(name, 0) + number

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> LoadCounters:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class CacheClipConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Serves requests whose ``kv_transfer_params`` name a plan (:mod:`.requests`)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """
        Raises:
            ValueError: vLLM was started in a way in which reuse would be wrong or impossible; the message says which.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config, kv_cache_config, FullAttentionSpec)
        if role == KVConnectorRole.SCHEDULER and (never := untested(vllm_config)):
            logger.warning("reuse was never tested with: %s", "; ".join(never))
        if role == KVConnectorRole.SCHEDULER and (cost := windows_cost(vllm_config)):
            logger.warning("%s", cost)
        if (how := vllm_config.load_config.load_format) in ("pt", "npcache"):
            raise ValueError(f"load_format is {how!r}, and stored KV is known by the weights in *.safetensors.")
        config = vllm_config.model_config
        self._settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        dtype = str(config.dtype).removeprefix("torch.")
        self._runtime = load_planning(config.model, dtype=dtype, quantization=config.quantization)
        self._block_size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        scheduler = vllm_config.scheduler_config
        self._room = {"max_runs": scheduler.max_num_seqs, "max_rows": scheduler.max_num_batched_tokens}
        self._requests = RequestLoads(self._block_size)
        self._reading: dict[str, Future[Ready]] = {}
        """Plans of requests that have just come."""
        self._reader = ThreadPoolExecutor(1, "cacheclip-intake")
        self._is_idle = True
        self._blocks = PrefixBlocks(self._block_size, kv_cache_config.num_blocks, lambda: self._kv_cache_manager)
        self._counters = LoadCounters()
        self._warn_once = WarnOnce(logger)
        self._schedule = CaptureSchedule()
        self._kept = KeptBlocks(self._settings.prompt_bytes, self._runtime)
        self._keeping: dict[str, Keep] = {}
        """Of requests that no token was scheduled of."""
        # the workers'
        self._layers: dict[int, Any] = {}
        self._captor: Captor | None = None
        self._is_wrapped = False
        self._loader: Loader | None = None
        self._failed_blocks: set[int] = set()
        self._finished: set[str] = set()
        self._read_s: dict[str, float] = {}

    # -- scheduler --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Begin to read the request's plan, if it has one."""
        carried = request.kv_transfer_params
        given = carried.get(PARAMETER) if isinstance(carried, Mapping) else None  # a client may send anything
        if isinstance(given, Mapping) and "plan" not in given:  # at once: no request waits for its KV to be kept
            try:
                check_request(request)
                self._keep(request.request_id, read_keep(given, self._settings))
            except ValueError as error:
                logger.debug("the KV of request %s is not kept: %s", request.request_id, error)
        elif given is not None:
            self._reading[request.request_id] = self._reader.submit(self._read, request, given)

    def _keep(self, request_id: str, keep: Keep | None) -> None:
        if keep is not None and not self._runtime.pinned_rope:
            self._kept.follow(keep)
            self._keeping[request_id] = keep

    def _read(self, request: Any, given: Any) -> Ready:
        check_request(request)
        return Ready.of(given, request.prompt_token_ids, self._settings, self._runtime, **self._room)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Before the answer to a request's first question, its hashes may change, so that vLLM must look again."""
        reading = self._reading.get(request.request_id)
        if reading is not None:
            if self._is_idle:
                wait([reading], _IDLE_WAIT_S)
            if not reading.done():
                return None, False
            del self._reading[request.request_id]
            self._decide(request, reading)
            if self._blocks.known(request) != num_computed_tokens or not self._blocks.is_exact(request):
                return None, False
        if self._blocks.is_better_plain(request, num_computed_tokens, **self._room):
            self._counters.add(exact_requests=1)
            self._requests.leave(request.request_id, "exact", EXACT)
            return None, False
        self._blocks.see(request, num_computed_tokens)
        found = self._requests.matched(request.request_id, num_computed_tokens)
        return found, found > 0

    def _decide(self, request: Any, reading: Future[Ready]) -> None:
        """Whether the request's KV can be made, and whether that computes less than plain prefill."""
        try:
            ready = reading.result()
        except Exception as error:
            self._counters.add(plain_requests=1)
            self._requests.tell(request.request_id, "plain", str(error))
            self._warn_once("answering by plain prefill: %s", error)
            return
        assert ready.plan is not None, "a request gives a plan"
        self._keep(request.request_id, ready.keep)
        if not self._kept.holds(ready.plan):
            self._counters.add(plain_requests=1)
            self._requests.tell(request.request_id, "plain", GONE)
            return
        if not self._blocks.choose(request, ready.plan, **self._room):
            self._counters.add(exact_requests=1)
            self._requests.tell(request.request_id, "exact", EXACT)
            return
        self._requests.keep(request.request_id, ready)
        self._requests.tell(request.request_id, "cached")

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._blocks.place(request)
        keep, ids = self._keeping.pop(request.request_id, None), request.prompt_token_ids
        is_exact = not num_external_tokens and self._blocks.is_plain(request)
        if keep is not None and is_exact and self._kept.begin(request.request_id, keep, ids):
            self._schedule.add(request.request_id, Capture(request.request_id, -1), len(ids))
        if num_external_tokens > 0:
            first = self._requests.begin(request, blocks.get_block_ids()[0], num_external_tokens)
            self._counters.add(fused_requests=int(first))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        scheduled = scheduler_output.total_num_scheduled_tokens
        self._is_idle = not scheduled
        most = self._room["max_rows"] if self._is_idle else _ROWS_BESIDE
        room = max(0, min(most, self._room["max_rows"] - scheduled))
        captured = self._kept.named(self._schedule.step(scheduler_output))
        return Loads(self._requests.take(), room, self._is_idle, captured, self._kept.take_dropped())

    def update_connector_output(self, connector_output: Any) -> None:
        done, failed = connector_output.finished_recving or (), connector_output.invalid_block_ids
        times = connector_output.kv_connector_worker_meta
        self._requests.time(times.read_s if isinstance(times, LoadTimes) else {})
        for request, num_tokens in self._requests.end(done, failed):
            self._blocks.fail(request, num_tokens)
            self._kept.clear()  # some of it may be missing

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """What became of the request is in its output's ``kv_transfer_params``."""
        self._reading.pop(request.request_id, None)
        self._schedule.remove(request.request_id)
        self._kept.forget(request.request_id)
        self._keeping.pop(request.request_id, None)
        continued = self._blocks.finish(request)
        told = self._requests.finish(request.request_id)
        if told is not None and continued.num_tokens:
            told[PARAMETER].update(continued.to_dict())
            if told[PARAMETER]["reason"] == UNREADABLE:  # vLLM computed the rest, after approximate KV
                told[PARAMETER]["outcome"] = "cached"
        return False, told

    # -- worker -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        layers = self._vllm_config.compilation_config.static_forward_context
        chosen = {name: layers[name] for name in kv_caches}
        for name, layer in chosen.items():
            if not hasattr(layer.impl, "do_kv_cache_update") or getattr(layer, "kv_cache_update_bypass", False):
                raise ValueError(
                    f"layer {name} ({type(layer.impl).__name__}) writes its cache within another operation, so that no "
                    "other KV can be written. Choose another backend with --attention-backend."
                )
        runner = model_runner(self._vllm_config, self._runtime.files)
        self._layers = {extract_layer_index(name): layer for name, layer in chosen.items()}
        self._captor = Captor(self._runtime.num_layers, self._take_over)
        self._loader = Loader(
            self._layers,
            self._settings,
            self._runtime,
            lambda: RowRunner(runner, self._block_size),
            get_tp_group(),
            block_size=self._block_size,
            **self._room,
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Loads)
        rows = connector_metadata.captured
        if not rows or self._captor is None:
            return
        slots = [slots_of(each.block_ids, self._block_size, torch.arange(each.begin, each.end)) for each in rows]
        self._captor.begin(rows, slots)
        for number, layer in self._layers.items():
            layer.impl.do_kv_cache_update = self._taking(number, layer.impl.do_kv_cache_update)
        self._is_wrapped = True

    def _taking(self, number: int, write: Callable[..., None]) -> Callable[..., None]:
        """What replaces a layer's ``do_kv_cache_update`` during the step."""
        captor = self._captor
        assert captor is not None

        def update(layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: Any, slot_mapping: Any) -> None:
            captor.take(number, key, value, slot_mapping)
            write(layer, key, value, kv_cache, slot_mapping)

        return update

    def _end_capture(self) -> None:
        """Loads write too, and recompute wraps the writers itself."""
        if not self._is_wrapped:
            return
        for layer in self._layers.values():
            del layer.impl.do_kv_cache_update  # the class's own is back
        self._is_wrapped = False
        assert self._captor is not None
        for name, reason in self._captor.end():
            logger.warning("capture %s failed: %s", name, reason)

    def _take_over(self, rows: CapturedRows, kv: torch.Tensor) -> None:
        assert self._loader is not None
        self._loader.kept.update(cut(kv, rows, self._runtime))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called behind the forward pass."""
        assert self._loader is not None, "vLLM registers its caches before the first step"
        self._end_capture()
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for key in metadata.dropped:
            self._loader.kept.pop(key, None)
        for load in metadata.loads:
            self._loader.load(load)
        for load, found in self._loader.work(metadata.room, waits=metadata.is_idle):
            self._finished.add(load.request_id)
            if isinstance(found, Exception):  # vLLM computes these blocks itself then
                self._failed_blocks.update(load.failed_blocks(self._block_size))
                self._count(failed_loads=1)
                self._warn_once("loading failed, answering by plain prefill: %s", found)
                logger.debug("request %s", load.request_id, exc_info=found)
            else:
                self._read_s[load.request_id] = found.read_s
                self._count(loaded_tokens=load.stop - load.start, computed_rows=found.rows, load_s=found.seconds)

    def build_connector_worker_meta(self) -> LoadTimes | None:
        found, self._read_s = self._read_s, {}
        return LoadTimes(found) if found else None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load has ended, also because the request has: vLLM keeps its blocks until then."""
        found, self._finished = self._finished, set()
        if self._loader is not None:
            found |= self._loader.forget(finished_req_ids)
        if self._captor is not None:
            self._captor.forget(finished_req_ids)
        return None, found

    def shutdown(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._loader is not None:
            self._loader.close()

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete when :meth:`start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing of vLLM's is saved."""

    def wait_for_save(self) -> None:
        """Nothing of vLLM's is saved."""

    # -- counters ---------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> LoadCounters | None:
        """The numbers since the last call. vLLM adds up those of scheduler and workers, and logs them."""
        if self._counters.is_empty():
            return None
        found, self._counters = self._counters, LoadCounters()
        return found

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoadCounters:
        return LoadCounters(dict(data or {}))

    def _count(self, **numbers: float) -> None:
        if get_tensor_model_parallel_rank() == 0:
            self._counters.add(**numbers)
