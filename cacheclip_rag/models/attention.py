"""Exact attention over chosen rows and chosen keys, by blocks.

Transformers' own mask makers assume that the queries are the last tokens of the sequence. Recomputed tokens are not:
they sit anywhere, and each may see keys at its own position and before, and nothing else. A plan states that as blocks
of rows, each with the slice of keys it may look at; within a block the mask is ``key position <= query position``.
Blocks also save work: a block of early tokens never multiplies with late keys, and chunks scored side by side by the
auxiliary model never multiply with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["AttentionPlan", "Block", "block_attention", "causal_plan", "query_attention_mass"]

_ROWS_PER_BLOCK = 128
"""Small enough that few masked keys are multiplied, large enough that the products stay efficient."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of the forward pass that look at one contiguous slice of keys."""

    rows: slice
    """Rows of the query tensor."""
    keys: slice
    """Slots of the key tensor."""
    positions: torch.Tensor
    """``(num_rows,)`` int64: for each row the last slot, counted from ``keys.start``, that it may see."""


@dataclass(slots=True)
class AttentionPlan:
    """Blocks that cover every row once; optionally one layer whose attention is recorded instead of applied."""

    blocks: Sequence[Block]
    probe_layer: int | None = None
    """Layer at which attention mass is recorded; its attention output is not computed (zeros are returned)."""
    masses: list[torch.Tensor] = field(default_factory=list)
    """Filled at ``probe_layer``: per block ``(num_keys,)`` float32, mean over heads and rows."""


def causal_plan(positions: torch.Tensor) -> AttentionPlan:
    """Plan for rows at the given absolute positions over keys stored in position order (slot = position).

    Args:
        positions: ``(num_rows,)`` int64, strictly increasing.
    """
    blocks = []
    for start in range(0, len(positions), _ROWS_PER_BLOCK):
        rows = positions[start : start + _ROWS_PER_BLOCK]
        blocks.append(Block(slice(start, start + len(rows)), slice(0, int(rows[-1]) + 1), rows))
    return AttentionPlan(blocks)


def block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Block], scaling: float
) -> torch.Tensor:
    """Attention of each block's rows over its keys.

    Args:
        query: ``(1, num_heads, num_rows, head_dim)``.
        key, value: ``(1, num_kv_heads, num_slots, head_dim)``; heads are shared in groups (GQA).

    Returns:
        ``(1, num_rows, num_heads, head_dim)``, the layout transformers expects of an attention function.
    """
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    output = query.new_empty(1, num_rows, num_heads, head_dim)
    for block in blocks:
        rows = query[0, :, block.rows].unflatten(0, (num_kv_heads, groups))  # (num_kv_heads, groups, rows, head_dim)
        # A key head is shared by its group through a stride of 0: no copy, unlike repeat_interleave.
        keys = key[0, :, block.keys].unsqueeze(1).expand(-1, groups, -1, -1)
        values = value[0, :, block.keys].unsqueeze(1).expand(-1, groups, -1, -1)
        mask = _additive_mask(block, query.dtype)
        attended = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
        output[0, block.rows] = attended.flatten(0, 1).transpose(0, 1)
    return output


def query_attention_mass(query: torch.Tensor, key: torch.Tensor, block: Block, scaling: float) -> torch.Tensor:
    """Softmax attention of one block's rows on each of its keys, averaged over heads and rows: ``(num_keys,)`` float32.

    This is the only place where attention weights are materialised: question rows by one chunk's keys.
    """
    num_kv_heads = key.shape[1]
    rows = query[0, :, block.rows].unflatten(0, (num_kv_heads, -1)).float()  # (num_kv_heads, groups, rows, head_dim)
    keys = key[0, :, block.keys].float().unsqueeze(1)  # (num_kv_heads, 1, num_keys, head_dim)
    logits = rows @ keys.transpose(-1, -2) * scaling + _visibility(block, rows.dtype)
    mass: torch.Tensor = logits.softmax(dim=-1).mean(dim=(0, 1, 2))
    return mass


def _additive_mask(block: Block, dtype: torch.dtype) -> torch.Tensor | None:
    """None when every row sees every key of the block, else :func:`_visibility`."""
    if int(block.positions[0]) >= block.keys.stop - block.keys.start - 1:
        return None
    return _visibility(block, dtype)


def _visibility(block: Block, dtype: torch.dtype) -> torch.Tensor:
    """``(num_rows, num_keys)``: 0 where ``slot <= position``, minus infinity elsewhere (additive: right everywhere)."""
    slots = torch.arange(block.keys.stop - block.keys.start, device=block.positions.device)
    hidden = slots[None, :] > block.positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
