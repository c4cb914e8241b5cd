"""The KV connector that also hands out the KV of chunks, for an engine that ingests
(:func:`~cacheclip_vllm.encoding.encoding_options` gives the settings).

Keys and values are taken where vLLM's layers give them to their writer: after RoPE, before a layout, a dtype or scales
of the paged cache. So the paged cache is not read, and nothing here knows an attention backend.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from cacheclip_rag import CacheClipError, ConfigurationError

from .captures import CAPTURE, Capture, CapturedRows, open_context, write_capture
from .connector import CacheClipConnector
from .loading import local_heads
from .parameters import Ready
from .prefix_blocks import salt
from .scheduling import check_request

logger = init_logger("vllm.cacheclip")


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

    # -- worker -----------------------------------------------------------------------------------------------------

    def _take_over(self, rows: CapturedRows, kv: torch.Tensor) -> None:
        if rows.keys is not None:
            super()._take_over(rows, kv)
            return
        group, num_heads = get_tp_group(), self._runtime.num_kv_heads
        heads = local_heads(num_heads, group.rank_in_group, group.world_size)
        assert self._settings.exchange is not None, "it was checked"
        if group.rank_in_group % max(1, group.world_size // num_heads) == 0:  # others have the same heads
            write_capture(self._settings.exchange, rows.name, kv, heads.start)
