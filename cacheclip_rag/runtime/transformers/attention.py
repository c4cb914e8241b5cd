"""Exact attention over the rows and keys of a pattern's blocks (:mod:`.attention_pattern`), in the place of a model's
own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...base.errors import UnsupportedModelError
from ...store import upload
from .attention_pattern import AttentionPattern, AttentionRule, Block, PassEnded, SideBySide, causal_pattern

ATTENTION_NAME = "cacheclip"
_INPUTS = {
    *("scaling", "sliding_window", "softcap", "s_aux", "cacheclip_pattern", "cacheclip_steps"),
    *("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "position_embeddings"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
}
"""What models may pass to the attention: the first line changes it, the others do not."""
_UNMASKED = 1024
"""Keys that every row of a block sees, from which on they are multiplied apart, without a mask. For fewer keys, two
products cost more than the mask."""
_FLASH_WIDTH = 256
"""The widest heads of FlashAttention's kernel."""
_ALIGNED = 8
"""Of whose multiples a mask is wide for CUDA's kernels."""


def pattern_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """The attention function that models are given: follows the pattern if there is one, else attends causally. Raises
    UnsupportedModelError: the model passes an input on which its attention may depend in a way that is not known."""
    unknown = [name for name in kwargs.keys() - _INPUTS if kwargs[name] is not None]
    if unknown or attention_mask is not None or kwargs.get("is_causal") is False:
        _refuse(module, unknown, attention_mask)
    pattern: AttentionPattern | None = kwargs.pop("cacheclip_pattern", None)
    rule = AttentionRule(
        scaling=kwargs.get("scaling") or query.shape[-1] ** -0.5,
        window=kwargs.get("sliding_window"),
        span=span_of(module),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    if (caches := kwargs.pop("cacheclip_steps", None)) is not None:  # a decoded token of each
        rows = query.split(1, dim=2)
        layers = [cache.layers[module.layer_idx] for cache in caches]
        each = [row_attention(row, own.keys, own.values, rule) for row, own in zip(rows, layers, strict=True)]
        return torch.cat(each, dim=1), None
    if pattern is None and query.shape[2] == 1:  # a decoded token
        return row_attention(query, key, value, rule), None
    if pattern is None:
        return _causal_attention(module, query, key, value, rule, kwargs), None
    probe = pattern.probe
    layer = module.layer_idx
    if probe is not None and layer in probe.layers:
        for number, block in enumerate(probe.blocks):
            rows, keys = query[0, :, block.rows], key[0, :, block.keys]
            heads = None if probe.heads is None else probe.heads[layer]
            probe.record(layer, number, query_attention(rows, keys, block, rule, logits=probe.logits, heads=heads))
        if layer == probe.stop:
            raise PassEnded
    if pattern.last_rows == 0 and layer == pattern.last_layer:
        raise PassEnded
    return block_attention(query, key, value, pattern.blocks, rule), None


def span_of(module: Any) -> int | None:
    """Length of the chunks of a layer with chunked attention, which models do not pass."""
    kinds = getattr(module.config, "layer_types", None)
    if not kinds or kinds[module.layer_idx] != "chunked_attention":
        return None
    return int(module.config.attention_chunk_size)


def _refuse(module: torch.nn.Module, unknown: list[str], mask: Any) -> NoReturn:
    unknown += ["attention_mask"] * (mask is not None)
    raise UnsupportedModelError(
        f"{type(module).__name__} of transformers passes {', '.join(sorted(unknown)) or 'is_causal=False'} to its "
        "attention. Expected inputs whose meaning is known, because KV cannot be reused exactly otherwise. Run this "
        "model with transformers itself, without reuse."
    )


def _causal_attention(
    module: torch.nn.Module, query: Any, key: Any, value: Any, rule: AttentionRule, kwargs: dict[str, Any]
) -> Any:
    """Plain prefill from an empty cache. Uses SDPA without a mask if that is exact."""
    num_rows, num_keys = query.shape[2], key.shape[2]
    assert num_rows == num_keys, "several rows on a partly filled cache need a pattern"
    if rule.is_dense and rule.covers(num_keys):
        with sdpa_backends(query.device):
            return sdpa_attention_forward(module, query, key, value, None, **kwargs)[0]
    pattern = causal_pattern(torch.arange(num_keys), query.device)
    return block_attention(query, key, value, pattern.blocks, rule)


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[Block | SideBySide],
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention of each block's rows over its keys. Blocks cover every row once, in order. ``query``: ``(1, num_heads,
    num_rows, head_dim)``; ``key``, ``value``: ``(1, num_kv_heads, num_slots, head_dim)``, whose heads are shared in
    groups (GQA). Returns ``(1, num_rows, num_heads, head_dim)``, the layout that transformers expects."""
    num_kv_heads = key.shape[1]
    # (num_kv_heads, num_rows, groups, head_dim): a row's heads of one group are neighbours, because they see the same
    rows = query[0].unflatten(0, (num_kv_heads, -1)).transpose(1, 2).contiguous()
    # transposed, SDPA's results are contiguous, and joining contiguous tensors starts no threads
    of_blocks = [_of_block(rows[:, block.rows], key[0], value[0], block, rule).transpose(0, 1) for block in blocks]
    joined = of_blocks[0] if len(of_blocks) == 1 else torch.cat(of_blocks)
    attended: torch.Tensor = joined.unflatten(0, (-1, rows.shape[2])).transpose(1, 2)
    return attended.flatten(1, 2)[None].contiguous()  # which not all classes make it


def row_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Attention of one row, which sees all keys that its window covers: a decoded token. Shapes are those of
    :func:`block_attention`, with a batch.

    The heads of a group are the rows of one product, because they see the same keys. PyTorch's kernel for processors
    multiplies them one by one otherwise, in bfloat16 ten times as slowly."""
    rows = query.reshape(len(query), key.shape[1], -1, query.shape[-1])  # (batch, num_kv_heads, groups, head_dim)
    first = rule.first_key(key.shape[2] - 1)
    key, value = key[:, :, first:], value[:, :, first:]
    if rule.is_dense:
        with sdpa_backends(query.device):
            attended = scaled_dot_product_attention(rows, key, value, scale=rule.scaling)
    else:
        weights = _weights(rows.unsqueeze(3), key.unsqueeze(2), None, rule).squeeze(3)
        attended = weights.to(value.dtype) @ value
    return attended.flatten(1, 2).unsqueeze(1)


def query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    block: Block | SideBySide,
    rule: AttentionRule,
    *,
    logits: bool = False,
    heads: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention weights (or logits) of one block's rows: float32, in the shape that :attr:`Probe.record` takes.
    ``query``: ``(num_heads, num_rows, head_dim)``, of the block's rows; ``key``: ``(num_kv_heads, num_keys,
    head_dim)``, the block's keys; ``heads``: numbers of the query heads that are computed, default all."""
    if heads is not None and len(heads) < len(query):
        query, key, rule = _of_heads(query, key, rule, heads)
    if isinstance(block, SideBySide):
        rows, keys = block.split_rows(query, key.shape[0]).float(), block.split_keys(key).float().unsqueeze(2)
        mask = block.mask(rule, rows).unsqueeze(2)
        values = _logits(rows, keys, rule) + mask if logits else _weights(rows, keys, mask, rule)
        return values.flatten(1, 2)
    rows = query.unflatten(0, (key.shape[0], -1)).float()  # (num_kv_heads, groups, rows, head_dim)
    keys = key.float().unsqueeze(1)  # (num_kv_heads, 1, num_keys, head_dim)
    seen = _additive_mask(block, 0, rule, rows)
    if logits:
        values = _logits(rows, keys, rule)
        return (values if seen is None else values + seen).flatten(0, 1)
    return _weights(rows, keys, seen, rule).flatten(0, 1)


def _of_heads(
    query: torch.Tensor, key: torch.Tensor, rule: AttentionRule, heads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, AttentionRule]:
    """Queries of some heads, each with the keys of its group, and their rule."""
    numbers = heads.to(query.device)
    sinks = None if rule.sinks is None else rule.sinks.index_select(0, numbers.to(rule.sinks.device))
    own = numbers // (len(query) // len(key))
    return query.index_select(0, numbers), key.index_select(0, own), replace(rule, sinks=sinks)


def sdpa_backends(device: torch.device) -> AbstractContextManager[object]:
    """Context manager that chooses the kernels of scaled dot-product attention for a device.

    On CUDA the cuDNN kernel is left out: it builds a plan for every new length, and most prompts have a new length.
    """
    if device.type != "cuda":
        return nullcontext()
    kernels: AbstractContextManager[object] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return kernels


def _weights(rows: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule) -> torch.Tensor:
    """Attention weights ``(num_kv_heads, groups, num_rows, num_keys)`` float32, without the share of a sink, where no
    kernel can compute the attention or a probe asks for them."""
    logits = _logits(rows, keys, rule)
    if mask is not None:
        logits = logits + mask
    if rule.sinks is None:
        return logits.softmax(dim=-1)
    sinks = rule.sinks.float().view(*rows.shape[-4:-2], 1, 1).expand(*rows.shape[:-1], 1)
    return torch.cat((logits, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _logits(rows: torch.Tensor, keys: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """``(..., num_kv_heads, groups, num_rows, num_keys)`` of keys ``(..., num_kv_heads, 1, num_keys, head_dim)``."""
    # the rows of a group in one product: a broadcast one would copy the keys for each head
    products = rows.flatten(-3, -2) @ keys.squeeze(-3).transpose(-1, -2)
    logits: torch.Tensor = products.unflatten(-2, rows.shape[-3:-1]).float() * rule.scaling
    return logits if rule.softcap is None else (logits / rule.softcap).tanh() * rule.softcap


def _of_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block | SideBySide, rule: AttentionRule
) -> torch.Tensor:
    """Attention of one block's rows over its keys: ``(num_kv_heads, num_rows * groups, head_dim)``. ``query``:
    ``(num_kv_heads, num_rows, groups, head_dim)``, the block's rows; ``key``, ``value``: ``(num_kv_heads, num_slots,
    head_dim)``."""
    if isinstance(block, SideBySide):
        return _side_by_side(query, key[:, block.keys], value[:, block.keys], block, rule)
    skipped = rule.first_key(block.first)
    visible = slice(block.keys.start + skipped, block.keys.stop)
    keys, values = key[:, visible], value[:, visible]
    if not rule.is_dense:
        mask = _additive_mask(block, skipped, rule, query)
        weights = _weights(query.transpose(1, 2), keys.unsqueeze(1), mask, rule).to(values.dtype)
        return (weights @ values.unsqueeze(1)).transpose(1, 2).flatten(1, 2)
    rows, groups = query.flatten(1, 2), query.shape[2]
    # kernels that also return the log-sum-exp of the logits have no gradient, and want one width
    can_split = block.first >= _UNMASKED and not torch.is_grad_enabled() and values.shape[-1] == query.shape[-1]
    known = query.device.type == "cpu" or (can_split and parts_merge(query.device, query.dtype, query.shape[-1]))
    if can_split and known and rule.covers(block.keys.stop - block.keys.start):
        mask = _additive_mask(block, block.first, rule, query, groups)
        return _in_two_parts(rows, keys, values, block.first, mask, rule.scaling)
    mask = _additive_mask(block, skipped, rule, query, groups)
    with sdpa_backends(query.device):
        attended: torch.Tensor = scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=mask, scale=rule.scaling
        )
    return attended[0]


def _in_two_parts(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_unmasked: int,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Scaled dot-product attention of which the first ``num_unmasked`` keys, which every row sees, need no mask. The
    two parts are merged by their log-sum-exp, as FlashAttention merges its blocks (arXiv:2205.14135, section 3.1)."""
    (first, mass), (second, other) = (
        _with_mass(rows[None], keys[None, :, part], values[None, :, part], of_part, scale)
        for part, of_part in ((slice(num_unmasked), None), (slice(num_unmasked, None), mask))
    )
    share = torch.sigmoid(other - mass).unsqueeze(-1)
    return torch.lerp(first.float(), second.float(), share)[0].to(rows.dtype)


@cache
def parts_merge(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether two parts, merged, are the whole on this device: PyTorch does not document what its kernels return."""
    make = torch.Generator().manual_seed(0)
    rows, keys, values = (torch.randn(2, n, head_dim, generator=make).to(device, dtype) for n in (40, 200, 200))
    hidden = torch.arange(200, device=device) > torch.arange(140, 180, device=device)[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    scale = 0.3
    try:
        merged = _in_two_parts(rows, keys, values, 136, mask[:, 136:], scale).float()
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    logits = rows.float() @ keys.float().transpose(1, 2) * scale + mask.float()
    gap = (merged - logits.softmax(-1) @ values.float()).abs().max()
    return bool(gap < (1e-3 if dtype == torch.float32 else 5e-2))


def _with_mass(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a batch of 1, and the log-sum-exp of each row's logits, ``(1, num_heads, num_rows)`` float32."""
    kernels = torch.ops.aten
    if rows.device.type == "cpu":
        attended, mass = kernels._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, attn_mask=mask, scale=scale
        )
    elif mask is None and rows.dtype != torch.float32 and rows.shape[-1] <= _FLASH_WIDTH:
        attended, mass, *_ = kernels._scaled_dot_product_flash_attention(rows, keys, values, scale=scale)
    else:
        of_heads = None if mask is None else mask.expand(*rows.shape[:3], keys.shape[2])
        attended, mass, *_ = kernels._scaled_dot_product_efficient_attention(
            rows, keys, values, of_heads, True, scale=scale
        )
    return attended, mass[:, :, : rows.shape[2]]  # which a kernel may pad


def _side_by_side(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: SideBySide, rule: AttentionRule
) -> torch.Tensor:
    """Attention of each sequence's rows over its keys: ``(num_kv_heads, num_all_rows * groups, head_dim)``."""
    attended: torch.Tensor
    rows = block.split_rows(query.transpose(1, 2).flatten(0, 1), key.shape[0])
    keys, values = block.split_keys(key), block.split_keys(value)
    if rule.is_dense:
        groups, num_rows = rows.shape[2:4]
        with sdpa_backends(query.device):  # rows of all heads of a group, because they see the same keys
            attended = scaled_dot_product_attention(
                rows.flatten(2, 3), keys, values, attn_mask=block.mask(rule, query, groups), scale=rule.scaling
            ).unflatten(2, (groups, num_rows))
    else:
        weights = _weights(rows, keys.unsqueeze(2), block.mask(rule, query).unsqueeze(2), rule)
        attended = weights.to(values.dtype) @ values.unsqueeze(2)
    return attended.permute(1, 0, 3, 2, 4).flatten(1, 3)


def _additive_mask(
    block: Block, skipped: int, rule: AttentionRule, query: torch.Tensor, repeats: int = 1
) -> torch.Tensor | None:
    """Additive mask ``(num_rows * repeats, num_keys - skipped)``, each row ``repeats`` times: 0 if a row sees a key,
    else minus infinity. It has dtype and device of ``query``. None if every row sees every key."""
    num_keys = block.keys.stop - block.keys.start
    if block.first >= num_keys - 1 and skipped >= rule.first_key(num_keys - 1):
        return None

    def make() -> torch.Tensor:
        positions = upload(block.positions, query.device)
        # the kernels of a GPU copy a mask whose width they do not like
        width = num_keys - skipped + (-(num_keys - skipped) % _ALIGNED if query.device.type == "cuda" else 0)
        slots = torch.arange(skipped, skipped + width, device=query.device)
        hidden = slots[None, :] > positions[:, None]
        if (before := rule.hides(slots[None, :], positions[:, None])) is not None:
            hidden |= before
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
        return (mask.repeat_interleave(repeats, 0) if repeats > 1 else mask)[:, : num_keys - skipped]

    # layers may be on several devices
    return block.kept((skipped, rule.window, rule.span, repeats, query.dtype, query.device), make)
