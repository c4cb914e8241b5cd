"""The claim on which recompute in vLLM's workers rests, on its kernels for CPUs: runs of rows as sequences of their own
attend exactly as rows with a causal mask do. One sequence of all rows would not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cacheclip_rag.fusion.wire import runs_of

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK = 700, 8, 2, 64, 32


def masked(query: Any, keys: Any, values: Any, mask: torch.Tensor) -> torch.Tensor:
    keys, values = (
        each.float().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1).transpose(0, 1)[None] for each in (keys, values)
    )
    found = scaled_dot_product_attention(query.float().transpose(0, 1)[None], keys, values, attn_mask=mask)
    return found[0].transpose(0, 1)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_runs_as_sequences(dtype: torch.dtype, most: float) -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    torch.manual_seed(0)
    isa = _get_attn_isa(dtype, BLOCK, HEAD_DIM, "auto")
    keys, values = (torch.randn(NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    num_blocks = -(-NUM_TOKENS // BLOCK)
    blocks = torch.randperm(num_blocks + 7)[:num_blocks]
    cache = torch.zeros(num_blocks + 7, NUM_KV_HEADS, 2 * BLOCK, HEAD_DIM, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    positions = torch.arange(NUM_TOKENS)
    slots = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)

    chosen = torch.cat([torch.randperm(NUM_TOKENS)[:90], torch.arange(300, 340), torch.tensor([NUM_TOKENS - 1])])
    rows = chosen.unique()
    runs = runs_of(rows.tolist())
    lengths = torch.tensor([stop - start for start, stop in runs])
    stops = torch.tensor([stop for _, stop in runs], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    query = torch.randn(len(rows), NUM_HEADS, HEAD_DIM).to(dtype)
    found = torch.empty_like(query)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(runs),
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        seq_lens=stops,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
        dynamic_causal=None,
        kv_cache_dtype="auto",
    )
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=found,
        query_start_loc=starts,
        seq_lens=stops,
        scale=HEAD_DIM**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=blocks.int()[None].expand(len(runs), -1).contiguous(),
        softcap=0,
        scheduler_metadata=metadata,
        s_aux=None,
    )
    exact = masked(query, keys, values, positions[None] <= rows[:, None])
    assert (found.float() - exact).abs().max() < most
    last = NUM_TOKENS - len(rows) + torch.arange(len(rows))
    bottom_right = masked(query, keys, values, positions[None] <= last[:, None])
    assert (bottom_right - exact).abs().max() > 0.5, "the twin: the mask of one sequence of all rows"
