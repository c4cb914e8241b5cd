"""Runs chosen rows through vLLM's own model over its paged cache, with no code for any model or attention backend.

Rows come in runs of neighbouring positions. Each run is given to the attention backend as a sequence of its own: as
many queries as the run is long, a length that ends where the run ends, and the block table of its request. The
backend's causal mask is aligned to the bottom-right corner of each sequence, so that a row sees all positions up to
its own and no other. One sequence of all rows would let a row see later tokens. vLLM writes a layer's keys and values
before it attends, so that a run also sees what earlier runs of the pass computed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from cacheclip_rag.planning import Interval

from .loading import slots_of


class RowRunner:
    """Forward passes over rows of requests."""

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
    def run(self, requests: Sequence[tuple[torch.Tensor, Sequence[Interval], Sequence[int]]]) -> torch.Tensor:
        """Compute rows of several requests, and write their KV to the requests' blocks; returns the last layer's hidden
        states, request by request.

        Args:
            requests: of each, its prompt's ``(num_tokens,)`` token ids, the ``runs`` to compute (strictly increasing
                positions), and its blocks. Not more runs and rows in all than the engine was started for.
        """
        runner, device = self._runner, self._runner.device
        rows = [torch.cat([torch.arange(start, stop) for start, stop in runs]) for _, runs, _ in requests]
        all_runs = [run for _, runs, _ in requests for run in runs]
        lengths = torch.tensor([stop - start for start, stop in all_runs], dtype=torch.int32)
        stops = torch.tensor([stop for _, stop in all_runs], dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
        tables = pad_sequence([torch.tensor(blocks, dtype=torch.int32) for *_, blocks in requests], batch_first=True)
        request_of_run = torch.tensor([n for n, (_, runs, _) in enumerate(requests) for _ in runs])
        of_requests = zip(requests, rows, strict=True)
        slot_mapping = torch.cat([slots_of(blocks, self._block_size, own) for (*_, blocks), own in of_requests])
        positions = torch.cat(rows).to(device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=stops.to(device),
            seq_lens_cpu_upper_bound=stops,
            num_reqs=len(all_runs),
            num_actual_tokens=len(positions),
            max_query_len=int(lengths.max()),
            max_seq_len=int(stops.max()),
            block_table_tensor=tables[request_of_run].to(device),
            slot_mapping=slot_mapping.to(device),
            causal=True,
            is_prefilling=torch.ones(len(all_runs), dtype=torch.bool),
            positions=positions,
        )
        metadata, slots = {}, {}
        for group in self._groups:
            built = group.build_metadata(common)
            for name in group.layer_names:
                metadata[name], slots[name] = built, common.slot_mapping
        # int32 as in the runner: compiled models have no guards, and would read other integers as garbage
        chosen = torch.cat([ids[own] for (ids, *_), own in zip(requests, rows, strict=True)]).to(device, torch.int32)
        with set_forward_context(metadata, runner.vllm_config, num_tokens=len(positions), slot_mapping=slots):
            found: torch.Tensor = runner.get_model()(
                input_ids=chosen, positions=positions, intermediate_tensors=None, inputs_embeds=None
            )
        return found
