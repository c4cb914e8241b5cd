"""Runs chosen rows through vLLM's own model over its paged cache, with no code for any model or attention backend.

Rows come in runs of neighbouring positions. Each run is given to the attention backend as a sequence of its own: as
many queries as the run is long, a length that ends where the run ends, and the block table of the one request. The
backend's causal mask is aligned to the bottom-right corner of each sequence, so that a row sees all positions up to
its own and no other. One sequence of all rows would let a row see later tokens. vLLM writes a layer's keys and values
before it attends, so that a run also sees what earlier runs of the pass computed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from ..fusion.wire import Interval
from .stored import slots_of


class RowRunner:
    """Forward passes over rows of one request."""

    def __init__(self, runner: Any, block_size: int) -> None:
        """``runner``: vLLM's model runner, with its caches."""
        self._runner, self._block_size = runner, block_size
        self._groups = [self._own(group) for groups in runner.attn_groups for group in groups]

    def _own(self, group: Any) -> Any:
        """The attention group with metadata builders of its own: the runner's keep buffers that the step under way
        uses."""
        own = copy.copy(group)
        block_size = group.kernel_block_size or group.kv_cache_spec.block_size
        own.create_metadata_builders(self._runner.vllm_config, self._runner.device, block_size)
        return own

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, runs: Sequence[Interval], block_ids: Sequence[int]) -> torch.Tensor:
        """Compute the rows of ``runs`` of a prompt's ``(num_tokens,)`` token ids, and write their KV to the request's
        blocks; returns the last layer's hidden states. ``runs``: strictly increasing positions, not more than the
        engine was started for."""
        runner, device = self._runner, self._runner.device
        rows = torch.cat([torch.arange(start, stop) for start, stop in runs])
        lengths = torch.tensor([stop - start for start, stop in runs], dtype=torch.int32)
        stops = torch.tensor([stop for _, stop in runs], dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
        table = torch.tensor(block_ids, dtype=torch.int32).to(device)
        positions = rows.to(device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=stops.to(device),
            seq_lens_cpu_upper_bound=stops,
            num_reqs=len(runs),
            num_actual_tokens=len(rows),
            max_query_len=int(lengths.max()),
            max_seq_len=int(stops.max()),
            block_table_tensor=table[None].expand(len(runs), -1).contiguous(),
            slot_mapping=slots_of(block_ids, self._block_size, rows).to(device),
            causal=True,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
            positions=positions,
        )
        metadata, slots = {}, {}
        for group in self._groups:
            built = group.build_metadata(common)
            for name in group.layer_names:
                metadata[name], slots[name] = built, common.slot_mapping
        # int32 as in the runner: compiled models have no guards, and would read other integers as garbage
        chosen = ids[rows].to(device, torch.int32)
        with set_forward_context(metadata, runner.vllm_config, num_tokens=len(rows), slot_mapping=slots):
            found: torch.Tensor = runner.get_model()(
                input_ids=chosen, positions=positions, intermediate_tensors=None, inputs_embeds=None
            )
        return found
