"""The KV connector: vLLM asks it for the KV of a prompt's first tokens.

vLLM is not changed. It loads this class by its module path (:func:`~cacheclip_rag.vllm.offline.engine_options`
gives the settings) and makes one in the scheduler and one in every worker. The scheduler's decides, before a token is
scheduled, whether a request's KV can be made. The workers' makes it. Whatever fails on the way is ordinary prefill by
vLLM, counted, and logged once per reason.

KV made by reuse is approximate. It must not enter vLLM's prefix cache under the hash of the exact KV, where every
later prompt with the same first tokens would find it. So the scheduler's connector salts the hashes of a request by the
digest of its plan, whatever the client sent.

vLLM enters the hashes of a request's blocks in that cache when it schedules their load, and leaves them there when the
load fails, because it will compute these blocks. A request that leaves before that would leave blocks with hashes and
without KV. So the scheduler's connector takes the blocks of failed loads out of the cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ..base.errors import CacheClipError
from ..models.load import load_planning
from ..runtime.base import DTYPES
from .loading import Load, Loader
from .once import WarnOnce
from .parameters import PARAMETER, UNREADABLE, Ready, Settings
from .worker import model_runner

__all__ = ["CacheClipConnector", "LoadCounters", "Loads", "check_request", "salt"]

logger = init_logger("vllm.cacheclip")

_DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that keep no KV of their own."""


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """The loads of one step, from the scheduler to the workers."""

    loads: list[Load] = field(default_factory=list)


@dataclass
class LoadCounters(KVConnectorStats):  # type: ignore[misc]
    """Numbers since they were last taken: ``fused_requests``, ``plain_requests`` (with a plan that could not be
    used), ``failed_loads``, ``loaded_tokens``, ``computed_rows``, ``load_s``."""

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
        check_engine(vllm_config, kv_cache_config)
        config = vllm_config.model_config
        self._settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        dtype = str(config.dtype).removeprefix("torch.")
        self._runtime = load_planning(config.model, dtype=dtype, quantization=config.quantization)
        self._block_size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        scheduler = vllm_config.scheduler_config
        self._room = {"max_runs": scheduler.max_num_seqs, "max_rows": scheduler.max_num_batched_tokens}
        self._counters = LoadCounters()
        self._warn_once = WarnOnce(logger)
        # the scheduler's
        self._ready: dict[str, Ready] = {}
        self._requests: dict[str, Any] = {}
        """vLLM's own requests, of those in ``_ready``."""
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._scheduled: dict[str, int] = {}
        """Tokens to load in this step, by request."""
        self._loading: dict[str, tuple[Load, int]] = {}
        """A request's last load, and the tokens of its answer before it."""
        # the workers'
        self._loader: Loader | None = None
        self._failed_blocks: set[int] = set()

    # -- scheduler --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Decide whether the request's KV can be made. If so, its hashes in the prefix cache are its own from here."""
        carried = request.kv_transfer_params
        given = carried.get(PARAMETER) if isinstance(carried, Mapping) else None  # a client may send anything
        if given is None:
            return
        try:
            check_request(request)
            ready = Ready.of(given, request.prompt_token_ids, self._settings, self._runtime, **self._room)
        except (CacheClipError, ValueError, OSError) as error:
            self._counters.add(plain_requests=1)
            self._outcomes[request.request_id] = {"outcome": "plain", "reason": str(error)}
            self._warn_once("answering by plain prefill: %s", error)
            return
        self._keep(request, ready)
        self._outcomes[request.request_id] = {"outcome": "cached", "reason": None}
        salt(request, ready.digest)

    def _keep(self, request: Any, ready: Ready) -> None:
        """Take on a request whose KV can be made."""
        self._ready[request.request_id] = ready
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        ready = self._ready.get(request.request_id)
        return (0 if ready is None else max(ready.num_ready - num_computed_tokens, 0)), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._scheduled[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        for request_id in scheduler_output.preempted_req_ids or ():
            self._forget_unreported(request_id)
        placed: dict[str, tuple[list[int], int]] = {
            new.req_id: (new.block_ids[0], new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            if request_id in cached.resumed_req_ids:  # after a preemption, which took its blocks
                placed[request_id] = cached.new_block_ids[number][0], cached.num_computed_tokens[number]
        found = Loads()
        for request_id, num_tokens in self._scheduled.items():
            ready, (block_ids, stop) = self._ready[request_id], placed[request_id]
            load = Load(request_id, tuple(block_ids), stop - num_tokens, stop, ready.plan, ready.context)
            found.loads.append(load)
            self._loading[request_id] = load, self._requests[request_id].num_output_tokens
            if self._outcomes[request_id]["outcome"] == "cached":  # not again after a preemption
                self._counters.add(fused_requests=1)
            self._outcomes[request_id] = {"outcome": "fused", "reason": None}
        self._scheduled.clear()
        return found

    def update_connector_output(self, connector_output: Any) -> None:
        failed = connector_output.invalid_block_ids
        for request_id, request in self._requests.items() if failed else ():
            (blocks,) = self._kv_cache_manager.get_block_ids(request_id)
            first = next((number for number, block in enumerate(blocks) if block in failed), None)
            if first is not None:
                self._kv_cache_manager.evict_blocks(set(blocks[first:]))
                self._fall_back(request, first * self._block_size)

    def _fall_back(self, request: Any, start: int) -> None:
        """vLLM computes the request's tokens from ``start`` on. Where requests with the same plan share failed blocks,
        it would have only the first of them do so, which may leave before it has."""
        request.num_computed_tokens = min(request.num_computed_tokens, start)
        self._outcomes[request.request_id] = {"outcome": "plain", "reason": UNREADABLE}
        stats = request.prefill_stats
        if stats is not None:  # no token was made so far; vLLM would count the failed ones as cached
            stats.set(stats.num_prompt_tokens, min(stats.num_local_cached_tokens, start), 0)

    def _forget_unreported(self, request_id: str, block_ids: Sequence[int] = ()) -> None:
        """Take a request's blocks out of the prefix cache if their load may fail without our knowing.

        A report comes after its step. Where steps are scheduled ahead of reports, the request may be gone by then. A
        token of its answer since the load says that the load was reported.

        Args:
            block_ids: its blocks now; those of the load may be other requests' already, which lose a hash then, and
                nothing else.
        """
        load, num_output_tokens = self._loading.pop(request_id, (None, 0))
        if load is not None and self._requests[request_id].num_output_tokens == num_output_tokens:
            first = load.start // self._block_size
            self._kv_cache_manager.evict_blocks({*load.block_ids[first:], *block_ids[first:]})

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """What became of the request is in its output's ``kv_transfer_params``. Only now is its plan no longer needed:
        a preempted request asks for it again."""
        self._forget_unreported(request.request_id, block_ids)
        self._ready.pop(request.request_id, None)
        self._scheduled.pop(request.request_id, None)
        self._requests.pop(request.request_id, None)
        outcome = self._outcomes.pop(request.request_id, None)
        return False, None if outcome is None else {PARAMETER: outcome}

    # -- worker -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        layers = self._vllm_config.compilation_config.static_forward_context
        chosen = {name: layers[name] for name in kv_caches}
        for name, layer in chosen.items():
            if not hasattr(layer.impl, "do_kv_cache_update"):
                raise ValueError(
                    f"the attention backend of layer {name} ({type(layer.impl).__name__}) writes its cache within "
                    "attention, so that no other KV can be written. Choose another one with --attention-backend."
                )
        runner = None if self._settings.store is None else model_runner(self._vllm_config)
        self._loader = Loader(chosen, self._settings, self._runtime, runner, block_size=self._block_size, **self._room)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._loader is not None, "vLLM registers its caches before the first step"
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for load in metadata.loads:
            began = time.perf_counter()
            try:
                rows = self._loader.load(load)
            except Exception as error:  # vLLM computes these blocks itself then
                self._failed_blocks.update(load.failed_blocks(self._block_size))
                self._count(failed_loads=1)
                self._warn_once("loading failed, answering by plain prefill: %s", error)
                logger.debug("request %s", load.request_id, exc_info=True)
            else:
                seconds = time.perf_counter() - began
                self._count(loaded_tokens=load.stop - load.start, computed_rows=rows, load_s=seconds)

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


def salt(request: Any, digest: str) -> None:
    """Give the request's tokens hashes of their own in vLLM's prefix cache, whatever the client sent."""
    request.cache_salt = f"{request.cache_salt or ''}|{PARAMETER}:{digest}"
    request.block_hashes.clear()
    request.update_block_hashes()


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError if vLLM was started in a way in which reuse would be wrong or impossible."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    transfer, draft = vllm_config.kv_transfer_config, vllm_config.speculative_config
    refused = {
        "kv_load_failure_policy must be 'recompute', or a request fails where plain prefill would answer it": (
            transfer.kv_load_failure_policy != "recompute"
        ),
        "models with MLA keep no keys after RoPE": model.use_mla,
        "models with several KV cache groups (hybrid models) are not supported": (
            len(kv_cache_config.kv_cache_groups) != 1
        ),
        "pipeline parallelism is not supported: leave pipeline_parallel_size at 1": parallel.pipeline_parallel_size > 1,
        "context parallelism is not supported: leave decode_context_parallel_size and prefill_context_parallel_size "
        "at 1": parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "mixture-of-experts models under data parallelism are not supported, because all ranks must run every pass": (
            parallel.data_parallel_size > 1 and model.is_moe
        ),
        "multimodal models are not supported": model.is_multimodal_model,
        f"drafters with KV of their own are not supported; use one of {', '.join(_DRAFTERS_WITHOUT_KV)}": (
            draft is not None and draft.method not in _DRAFTERS_WITHOUT_KV
        ),
        "hf_overrides would change the model that chunks were computed with": bool(model.hf_overrides),
        "hf_config_path would be another config than that of the model that chunks were computed with": (
            model.hf_config_path not in (None, model.model)
        ),
        f"the dtype must be one of {', '.join(DTYPES)}, got {model.dtype}": (
            str(model.dtype).removeprefix("torch.") not in DTYPES
        ),
    }
    if not any(refused.values()):
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        refused[
            "vLLM keeps not all blocks of this model's prompts (a sliding window in every layer, or layers of several "
            "kinds)"
        ] = not isinstance(spec, FullAttentionSpec)
    found = [reason for reason, holds in refused.items() if holds]
    if found:
        raise ValueError(f"CacheClip cannot be used with this vLLM: {'; '.join(found)}.")


def check_request(request: Any) -> None:
    """Raise ValueError for a request whose KV must be vLLM's own."""
    params = request.sampling_params
    reasons = {
        "LoRA changes the KV": request.lora_request is not None,
        "it has multimodal inputs": bool(getattr(request, "mm_features", None)),
        "it has embeddings instead of token ids": request.prompt_token_ids is None
        or getattr(request, "prompt_embeds", None) is not None,
        "it asks for logprobs of the prompt, which only plain prefill computes": (
            params is not None and params.prompt_logprobs is not None
        ),
        "it asks not to read a prefix cache": bool(request.skip_reading_prefix_cache),
        "it pools instead of generating": params is None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError("; ".join(found))
