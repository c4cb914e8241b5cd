"""The KV connector that also hands out the KV of chunks, for an engine that ingests
(:func:`~cacheclip_vllm.encoding.encoding_options` gives the settings).

Keys and values are taken where vLLM's layers give them to their writer: after RoPE, before a layout, a dtype or scales
of the paged cache. So the paged cache is not read, and nothing here knows an attention backend.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from cacheclip_rag import CacheClipError, ConfigurationError

from .captures import CAPTURE, Captor, Capture, CapturedRows, CaptureSchedule, open_context
from .connector import CacheClipConnector, Loads
from .loading import local_heads, slots_of
from .parameters import Ready
from .prefix_blocks import salt
from .scheduling import check_request

logger = init_logger("vllm.cacheclip")


@dataclass
class Step(Loads):
    """Loads and captures of one step, from the scheduler to the workers."""

    captured: list[CapturedRows] = field(default_factory=list)


class CapturingConnector(CacheClipConnector):
    """Serves what its base serves, and requests whose ``kv_transfer_params`` name a capture (:mod:`.captures`)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._settings.exchange is None:
            raise ValueError("an engine that ingests needs exchange, a folder, in kv_connector_extra_config.")
        dtype = vllm_config.cache_config.cache_dtype
        if dtype not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")):
            raise ValueError(
                f"kv_cache_dtype is {dtype}: chunks would be computed from a rounded cache, and stored for every "
                "engine. Ingest with kv_cache_dtype='auto'; the engine that answers may have another one."
            )
        if vllm_config.load_config.load_format == "dummy":
            raise ValueError("load_format is 'dummy': chunks would be computed with weights that no model has.")
        self._schedule = CaptureSchedule()
        self._layers: dict[int, Any] = {}
        self._captor: Captor | None = None
        self._is_wrapped = False

    # -- scheduler --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        given = (request.kv_transfer_params or {}).get(CAPTURE)
        if given is None:
            super().on_new_request(request)
            return
        try:
            check_request(request)
            capture = Capture.of(given, len(request.prompt_token_ids))
            if capture.context is not None:
                self._check_context(capture)
                self._requests.keep(request.request_id, Ready(capture.start, context=capture.context))
        except (CacheClipError, ValueError, OSError) as error:
            self._requests.tell(request.request_id, "plain", str(error))
            return
        self._requests.tell(request.request_id, "computed" if capture.context is None else "cached")
        self._schedule.add(request.request_id, capture, len(request.prompt_token_ids))
        # a block that is found in the prefix cache is not computed, so not captured
        salt(request, capture.name, 0, secrets.token_bytes(32))

    def _check_context(self, capture: Capture) -> None:
        assert self._settings.exchange is not None and capture.context is not None
        with open_context(self._settings.exchange, capture.context) as context:
            found = context.model, context.num_layers, context.num_tokens
        if found != (self._runtime.fingerprint, self._runtime.num_layers, capture.start):
            raise ConfigurationError("the context was made for other weights, another dtype, or another length")

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        found = super().build_connector_meta(scheduler_output)
        return Step(found.loads, found.room, found.is_idle, self._schedule.step(scheduler_output))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._schedule.remove(request.request_id)
        return super().request_finished(request, block_ids)

    # -- worker -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        layers = self._vllm_config.compilation_config.static_forward_context
        self._layers = {extract_layer_index(name): layers[name] for name in kv_caches}
        group = get_tp_group()
        heads = local_heads(self._runtime.num_kv_heads, group.rank_in_group, group.world_size)
        copies = max(1, group.world_size // self._runtime.num_kv_heads)
        assert self._settings.exchange is not None, "it was checked"
        is_first = group.rank_in_group % copies == 0
        self._captor = Captor(self._settings.exchange, self._runtime.num_layers, heads.start, is_first)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Step)
        self._begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called behind the forward pass. Loads write too, and recompute wraps the writers itself."""
        self._end()
        super().start_load_kv(forward_context, **kwargs)

    def _end(self) -> None:
        if not self._is_wrapped:
            return
        for layer in self._layers.values():
            del layer.impl.do_kv_cache_update  # the class's own is back
        self._is_wrapped = False
        assert self._captor is not None
        for name, reason in self._captor.end():
            logger.warning("capture %s failed: %s", name, reason)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._captor is not None:
            self._captor.forget(finished_req_ids)
        found: tuple[set[str] | None, set[str] | None] = super().get_finished(finished_req_ids)
        return found

    def _begin(self, step: Step) -> None:
        if not step.captured or self._captor is None:
            return
        slots = [
            slots_of(each.block_ids, self._block_size, torch.arange(each.begin, each.end)) for each in step.captured
        ]
        self._captor.begin(step.captured, slots)
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
