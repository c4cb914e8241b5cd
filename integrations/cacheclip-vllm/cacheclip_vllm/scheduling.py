"""What the scheduler's connector keeps of requests: which have KV to be made, where it goes, and what became of it.

vLLM's objects come in as arguments, and nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from cacheclip_rag.planning import FusionPlan
from cacheclip_rag.runtime import DTYPES

from .parameters import PARAMETER, UNREADABLE, Ready

_DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that keep no KV of their own."""


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of one request whose KV is to be made."""

    request_id: str
    block_ids: tuple[int, ...]
    start: int
    """First token. Earlier ones are in vLLM's own prefix cache, made by the same plan."""
    stop: int
    plan: FusionPlan | None = None
    context: str | None = None
    """Without a plan, the file that holds the KV."""

    def failed_blocks(self, block_size: int) -> tuple[int, ...]:
        """Blocks whose KV is not there if the load fails."""
        return self.block_ids[self.start // block_size : -(-self.stop // block_size)]


class RequestLoads:
    """Requests whose KV can be made, from their arrival to their end.

    Loads are asynchronous: vLLM gives a request its blocks, and lets it wait until all workers have reported its load.
    Only then do other requests find these blocks in the prefix cache.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ready: dict[str, Ready] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._loading: dict[str, tuple[Load, Any]] = {}
        """Loads that are not reported, each with its request."""
        self._new: list[Load] = []
        """Those that no worker knows of."""

    def keep(self, request_id: str, ready: Ready) -> None:
        """Take on a request whose KV can be made."""
        self._ready[request_id] = ready

    def tell(self, request_id: str, outcome: str, reason: str | None = None) -> None:
        """What a request's output says of it, if nothing else becomes of it."""
        self._outcomes[request_id] = {"outcome": outcome, "reason": reason}

    def leave(self, request_id: str, outcome: str, reason: str) -> None:
        """Leave a request that was kept to plain prefill."""
        del self._ready[request_id]
        self.tell(request_id, outcome, reason)

    def matched(self, request_id: str, num_computed_tokens: int) -> int:
        """Tokens beyond vLLM's own prefix cache whose KV can be made."""
        ready = self._ready.get(request_id)
        return 0 if ready is None else max(ready.num_ready - num_computed_tokens, 0)

    def begin(self, request: Any, block_ids: Sequence[int], num_tokens: int) -> bool:
        """vLLM has found blocks for so many tokens, which are to be loaded. Returns whether it is the request's first
        load: a preempted request asks again."""
        request_id = request.request_id
        ready, is_first = self._ready[request_id], bool(self._outcomes[request_id]["outcome"] == "cached")
        start = ready.num_ready - num_tokens
        load = Load(request_id, tuple(block_ids), start, ready.num_ready, ready.plan, ready.context)
        self._loading[request_id] = load, request
        self._new.append(load)
        if is_first:
            self.tell(request_id, "fused")
        return is_first

    def take(self) -> list[Load]:
        """The loads that began since the last call."""
        found, self._new = self._new, []
        return found

    def time(self, read_s: Mapping[str, float]) -> None:
        """Workers have waited for the KV of these requests for so many seconds. Of several loads, the first counts: a
        preempted request loads again after its first token."""
        for request_id, seconds in read_s.items():
            self._outcomes.get(request_id, {}).setdefault("read_s", seconds)

    def end(self, done: Iterable[str], failed: Set[int]) -> list[tuple[Any, int]]:
        """Loads were reported, and some blocks have no KV. Returns the requests whose load failed, and from which token
        on vLLM computes them: vLLM itself has seen to that, and does not ask for them again."""
        found = []
        for request_id, (load, request) in [*self._loading.items()] if failed else ():
            if not failed & {*load.failed_blocks(self._block_size)}:
                continue
            self.leave(request_id, "plain", UNREADABLE)
            stats = request.prefill_stats
            if stats is not None:  # no token was made so far; vLLM would count the failed ones as cached
                stats.set(stats.num_prompt_tokens, min(stats.num_local_cached_tokens, load.start), 0)
            found.append((request, load.start))
        for request_id in done:
            self._loading.pop(request_id, None)
        return found

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """What became of a request, for its output's ``kv_transfer_params``. Only now is its plan no longer needed."""
        self._ready.pop(request_id, None)
        self._loading.pop(request_id, None)
        outcome = self._outcomes.pop(request_id, None)
        return None if outcome is None else {PARAMETER: outcome}


def check_engine(vllm_config: Any, kv_cache_config: Any, full_attention: type[Any]) -> None:
    """Raise ValueError if vLLM was started in a way in which reuse would be wrong or impossible. ``full_attention``:
    vLLM's class of caches that keep all blocks."""
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
        "LoRA is not supported, because recompute in a step of an adapter's request would use the adapter: start a "
        "vLLM for adapters without this connector": vllm_config.lora_config is not None,
        "sleep mode and weight transfer are not supported, because other weights than those of the stored chunks may "
        "be loaded meanwhile: leave enable_sleep_mode and weight_transfer_config out": (
            model.enable_sleep_mode or getattr(vllm_config, "weight_transfer_config", None) is not None
        ),
        "a revision would be another model than that which chunks were computed with: give vLLM its folder": (
            model.revision not in (None, "main")
        ),
        "a quantization_config alone is not part of the keys of stored chunks: give quantization, a name": (
            model.quantization is None and getattr(model, "quantization_config", None) is not None
        ),
        "models that decode by diffusion, or attend to later tokens, are not supported": (
            getattr(vllm_config, "diffusion_config", None) is not None
            or getattr(vllm_config.attention_config, "use_non_causal", False)
        ),
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
        ] = not isinstance(spec, full_attention)
    found = [reason for reason, holds in refused.items() if holds]
    if found:
        raise ValueError(f"CacheClip cannot be used with this vLLM: {'; '.join(found)}.")


def untested(vllm_config: Any) -> list[str]:
    """What is on in an engine and was never tried with reuse."""
    draft, cache, parallel = vllm_config.speculative_config, vllm_config.cache_config, vllm_config.parallel_config
    model = vllm_config.model_config
    dtype = str(cache.cache_dtype)
    offload = getattr(vllm_config, "offload_config", None)
    features = (
        (parallel, ("enable_expert_parallel", "enable_eplb", "enable_elastic_ep", "enable_dbo")),
        (parallel, ("enable_fault_tolerance", "worker_extension_cls")),
        (cache, ("kv_sharing_fast_prefill", "kv_offloading_size", "kv_cache_dtype_skip_layers")),
        (vllm_config.scheduler_config, ("scheduler_cls",)),
        (model, ("model_class_overrides",)),
        (getattr(offload, "uva", None), ("cpu_offload_gb",)),
        (getattr(offload, "prefetch", None), ("offload_group_size",)),
    )
    on = {name: bool(getattr(each, name, None)) for each, names in features for name in names}
    on |= {
        f"{parallel.tensor_parallel_size} tensor parallel ranks (2 were)": parallel.tensor_parallel_size > 2,
        "data parallel ranks": parallel.data_parallel_size > 1,
        "several nodes": getattr(parallel, "nnodes", 1) > 1,
        "vLLM's V2 model runner (VLLM_USE_V2_MODEL_RUNNER=0 takes the tested one)": vllm_config.use_v2_model_runner,
        f"speculative decoding by {draft and draft.method}": draft is not None and draft.method != "ngram",
        f"kv_cache_dtype {dtype}": dtype not in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", *DTYPES),
        "vLLM's models of transformers (model_impl)": model.model_impl == "transformers",
        "a device other than a CPU": vllm_config.device_config.device_type != "cpu",
    }
    return [name for name, is_on in on.items() if is_on]


def windows_cost(vllm_config: Any) -> str | None:
    """What it costs that vLLM's hybrid KV cache manager is off beside a connector of one group of caches; None: this
    model has no layers with a window."""
    config, longest = vllm_config.model_config.hf_text_config, vllm_config.model_config.max_model_len
    kinds, window = getattr(config, "layer_types", None) or (), getattr(config, "sliding_window", None)
    count = sum(kind == "sliding_attention" for kind in kinds)
    if not count or not window or window >= longest:
        return None
    times = len(kinds) * longest / ((len(kinds) - count) * longest + count * window)
    return (
        f"vLLM's hybrid KV cache manager is off beside this connector: {count} of {len(kinds)} layers have a window of "
        f"{window} tokens, and keep all. A prompt of {longest} tokens takes {times:.1f} times the cache"
    )


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
        "it is a streaming session": bool(getattr(request, "resumable", False)),
        "it asks not to read a prefix cache": bool(request.skip_reading_prefix_cache),
        "it pools instead of generating": params is None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError("; ".join(found))
