"""Exact attention over chosen rows and chosen keys, by blocks.

Transformers' own mask makers assume that the queries are the last tokens of the sequence. Recomputed tokens are not:
they sit anywhere, and each may see keys at its own position and before (within the layer's sliding window, if it has
one), and nothing else. A plan states that as blocks of rows, each with the slice of keys it may look at; within a block
the mask is ``position - window < key position <= position``. Blocks also save work: a block of early tokens never
multiplies with late keys, a sliding layer never with keys out of reach, and chunks scored side by side by the auxiliary
model never with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

__all__ = [
    "AttentionPlan",
    "AttentionRule",
    "Block",
    "block_attention",
    "causal_plan",
    "query_attention_mass",
    "sdpa_backends",
]

_ROWS_PER_BLOCK = 128
"""Small enough that few masked keys are multiplied, large enough that the products stay efficient."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends, as its model hands it to the attention function."""

    scaling: float
    """Factor of the query-key products."""
    window: int | None = None
    """Sliding window: a row at position p sees positions above ``p - window``. None: everything before it."""
    softcap: float | None = None
    """Logits are squashed to ``softcap * tanh(logits / softcap)`` (Gemma 2). None: left as they are."""
    sinks: torch.Tensor | None = None
    """``(num_heads,)``: one more logit per head in the softmax, with no value behind it (GPT-OSS). None: no sink."""

    @property
    def is_dense(self) -> bool:
        """Whether stock scaled dot-product attention computes it, given the right mask."""
        return self.softcap is None and self.sinks is None

    def reaches(self, num_keys: int) -> bool:
        """Whether the window covers ``num_keys`` keys, so that it hides none of them."""
        return self.window is None or self.window >= num_keys


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of the forward pass that look at one slice of keys, in which slots follow each other like positions."""

    rows: slice
    """Rows of the query tensor."""
    keys: slice
    """Slots of the key tensor."""
    positions: torch.Tensor
    """``(num_rows,)`` int64, increasing: for each row the last slot, counted from ``keys.start``, that it may see."""
    first: int
    """The first of ``positions``, as a number: asking the tensor would make an accelerator wait."""

    @classmethod
    def of(cls, rows: slice, keys: slice, positions: torch.Tensor, device: torch.device | None = None) -> Block:
        """Block with ``positions`` given on the CPU, to be used on ``device``."""
        return cls(rows, keys, positions.to(device or positions.device), int(positions[0]))


@dataclass(slots=True)
class AttentionPlan:
    """Blocks that cover every row once; optionally one layer whose attention is recorded instead of applied."""

    blocks: Sequence[Block]
    probe_layer: int | None = None
    """Layer at which attention mass is recorded; its attention output is not computed (zeros are returned)."""
    masses: list[torch.Tensor] = field(default_factory=list)
    """Filled at ``probe_layer``: per block ``(num_keys,)`` float32, mean over heads and rows."""


def causal_plan(positions: torch.Tensor, device: torch.device | None = None) -> AttentionPlan:
    """Plan for rows at the given absolute positions over keys stored in position order (slot = position).

    Args:
        positions: ``(num_rows,)`` int64, strictly increasing; best on the CPU.
        device: where the attention will run; default that of ``positions``.
    """
    blocks = []
    for start in range(0, len(positions), _ROWS_PER_BLOCK):
        rows = positions[start : start + _ROWS_PER_BLOCK]
        blocks.append(Block.of(slice(start, start + len(rows)), slice(0, int(rows[-1]) + 1), rows, device))
    return AttentionPlan(blocks)


def block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Block], rule: AttentionRule
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
        skipped = 0 if rule.window is None else max(0, block.first - rule.window + 1)  # out of every row's reach
        reach = slice(block.keys.start + skipped, block.keys.stop)
        # A key head is shared by its group through a stride of 0: no copy, unlike repeat_interleave.
        keys = key[0, :, reach].unsqueeze(1).expand(-1, groups, -1, -1)
        values = value[0, :, reach].unsqueeze(1).expand(-1, groups, -1, -1)
        mask = _additive_mask(block, skipped, rule, query)
        if rule.is_dense:
            with sdpa_backends(query.device):
                attended = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=rule.scaling)
        else:
            attended = _weights(rows, keys, mask, rule).to(values.dtype) @ values
        output[0, block.rows] = attended.flatten(0, 1).transpose(0, 1)
    return output


def query_attention_mass(query: torch.Tensor, key: torch.Tensor, block: Block, rule: AttentionRule) -> torch.Tensor:
    """Attention of one block's rows on each of its keys, averaged over heads and rows: ``(num_keys,)`` float32."""
    num_kv_heads = key.shape[1]
    rows = query[0, :, block.rows].unflatten(0, (num_kv_heads, -1)).float()  # (num_kv_heads, groups, rows, head_dim)
    keys = key[0, :, block.keys].float().unsqueeze(1)  # (num_kv_heads, 1, num_keys, head_dim)
    mass: torch.Tensor = _weights(rows, keys, _additive_mask(block, 0, rule, rows), rule).mean(dim=(0, 1, 2))
    return mass


def sdpa_backends(device: torch.device) -> AbstractContextManager[object]:
    """The kernels of scaled dot-product attention to use on a device, in a ``with`` block.

    On CUDA the cuDNN kernel is left out: it builds a plan for every new length, which prompts always have. All that
    remain take the mask as it is.
    """
    if device.type != "cuda":
        return nullcontext()
    kernels: AbstractContextManager[object] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return kernels


def _weights(rows: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule) -> torch.Tensor:
    """Attention weights ``(num_kv_heads, groups, num_rows, num_keys)`` float32, a sink's share left out.

    The only place where they are materialised: for the auxiliary's question, and for layers that no kernel computes.
    """
    logits = (rows @ keys.transpose(-1, -2)).float() * rule.scaling
    if rule.softcap is not None:
        logits = (logits / rule.softcap).tanh() * rule.softcap
    if mask is not None:
        logits = logits + mask
    if rule.sinks is None:
        return logits.softmax(dim=-1)
    sinks = rule.sinks.float().view(*rows.shape[:2], 1, 1).expand(*rows.shape[:3], 1)
    return torch.cat((logits, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _additive_mask(block: Block, skipped: int, rule: AttentionRule, query: torch.Tensor) -> torch.Tensor | None:
    """``(num_rows, num_keys - skipped)``: 0 where a row sees a key, minus infinity elsewhere (additive: right
    everywhere), dtype and device as ``query``. None when every row sees every key."""
    num_keys = block.keys.stop - block.keys.start
    if block.first >= num_keys - 1 and (rule.window is None or skipped + rule.window >= num_keys):
        return None
    positions = block.positions.to(query.device)  # a layer may sit on another device than the first
    slots = torch.arange(skipped, num_keys, device=query.device)
    hidden = slots[None, :] > positions[:, None]
    if rule.window is not None:
        hidden |= slots[None, :] <= positions[:, None] - rule.window
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
