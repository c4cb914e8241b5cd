"""Exact attention over chosen rows and chosen keys, by blocks.

Transformers' mask functions assume that the queries are the last tokens of the sequence. Recomputed tokens can be
anywhere. Each sees keys at its own position and before, within the layer's sliding window if there is one, and no other
key. A plan divides the rows into blocks, and gives each block the slice of keys that its rows may see. Within a block
the mask is ``position - window < key position <= position``. Blocks also save work: early tokens are not multiplied
with later keys, sliding layers skip keys before the window, and chunks that the auxiliary model scores side by side are
not multiplied with each other.

Some methods use other positions (gaps, shared positions) or another attention over the chunks. They return a
:class:`Geometry`, and the cache carries it from prefill to the last decoded token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

__all__ = [
    "ROWS_PER_BLOCK",
    "AttentionPlan",
    "AttentionRule",
    "Block",
    "Geometry",
    "Probe",
    "SideBySide",
    "block_attention",
    "causal_plan",
    "query_attention",
    "sdpa_backends",
]

ROWS_PER_BLOCK = 64
"""Small enough that few masked keys are multiplied, large enough that the products stay efficient."""
_LONG = 4096
"""Slots from which on a block has twice as many rows: where most keys need no mask, fewer products are faster."""
_UNMASKED = 1024
"""Keys that every row of a block sees, from which on they are multiplied apart, without a mask. For fewer keys, two
products cost more than the mask."""
_MASK_BYTES = 2**26
"""Bytes of a plan's masks that layers share. More would take memory; computing each anew costs little then, because
such a pass is long."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends. The model passes these settings to the attention function."""

    scaling: float
    """Factor of the query-key products."""
    window: int | None = None
    """Sliding window: a row at position p sees positions above ``p - window``. None: all positions up to p."""
    softcap: float | None = None
    """Logits become ``softcap * tanh(logits / softcap)`` (Gemma 2). None: no soft-capping."""
    sinks: torch.Tensor | None = None
    """``(num_heads,)``: one more logit per head in the softmax, without a value (GPT-OSS). None: no sink."""

    @property
    def is_dense(self) -> bool:
        """Whether PyTorch's scaled dot-product attention can compute this rule, given a mask."""
        return self.softcap is None and self.sinks is None

    def covers(self, num_keys: int) -> bool:
        """Whether the window covers ``num_keys`` keys and hides none of them."""
        return self.window is None or self.window >= num_keys


@dataclass(frozen=True, slots=True)
class Geometry:
    """Positions of the tokens of a fused cache, if they differ from the slots.

    Slots decide visibility: a row sees its own slot and earlier slots. Positions decide rotation and sliding windows.
    """

    positions: torch.Tensor
    """``(num_prompt_tokens,)`` int64 on the CPU: position of each slot of the prompt. Generated tokens follow the
    largest of these positions."""
    contexts: torch.Tensor | None = None
    """``(num_prompt_tokens,)`` bool: slots of contexts (APE's word for chunks). All other rows attend to the contexts
    in parallel. None: ordinary attention."""
    temperature: float = 1.0
    """Divides the attention logits within the contexts."""
    scale: float = 1.0
    """Weighs the contexts against the other keys: the contexts' mass is ``Z ** (scale * temperature)``."""

    def positions_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Positions of slots, including slots of generated tokens."""
        num_tokens = len(self.positions)
        known = self.positions[slots.clamp(max=num_tokens - 1)]
        return torch.where(slots < num_tokens, known, self.positions.max() + 1 + slots - num_tokens)

    def contexts_of(self, slots: torch.Tensor) -> torch.Tensor:
        """``(num_slots,)`` bool: whether each slot belongs to a context."""
        assert self.contexts is not None
        return self.contexts[slots.clamp(max=len(self.contexts) - 1)] & (slots < len(self.contexts))


@dataclass(slots=True)
class Masks:
    """Masks that were computed already, because layers share them."""

    num_bytes: int = 0
    by_use: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)

    def keep(self, use: Any, mask: torch.Tensor) -> None:
        """Keep a mask if there is room for it."""
        if self.num_bytes + mask.nbytes <= _MASK_BYTES:
            self.num_bytes += mask.nbytes
            self.by_use[use] = mask


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of the forward pass that see one slice of keys."""

    rows: slice
    """Rows of the query tensor."""
    keys: slice
    """Slots of the key tensor."""
    positions: torch.Tensor
    """``(num_rows,)`` int64, increasing: the last slot that each row sees, counted from ``keys.start``. On the CPU if
    ``geometry`` or ``visible`` is set, because masks are made there then."""
    first: int
    """The first of ``positions`` as an int: reading it from the tensor would synchronise the accelerator."""
    geometry: Geometry | None = None
    """Set if slots and positions differ; ``keys.start`` is then 0."""
    visible: torch.Tensor | None = None
    """``(num_keys,)`` bool: keys that any row may see; None: all keys."""
    masks: Masks = field(default_factory=Masks, repr=False, compare=False)
    """Masks of all blocks of a plan."""

    @classmethod
    def of(
        cls,
        rows: slice,
        keys: slice,
        positions: torch.Tensor,
        device: torch.device | None = None,
        geometry: Geometry | None = None,
        visible: torch.Tensor | None = None,
        masks: Masks | None = None,
    ) -> Block:
        """Make a block for ``device`` from ``positions`` on the CPU."""
        first = int(positions[0])
        if geometry is None and visible is None and device is not None:
            positions = positions.to(device)
        return cls(rows, keys, positions, first, geometry, visible, Masks() if masks is None else masks)

    def kept(self, use: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One of :attr:`masks`, made if it is not there."""
        found = self.masks.by_use.get((self.rows.start, use))
        if found is None:
            found = make()
            self.masks.keep((self.rows.start, use), found)
        return found

    def is_plain(self, rule: AttentionRule) -> bool:
        """Whether slots equal positions as far as ``rule`` needs them, and one softmax covers all keys."""
        if self.visible is not None:
            return False
        return self.geometry is None or (self.geometry.contexts is None and rule.window is None)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Rows of several sequences of equal width, side by side. Each row sees its own sequence only, by slots: itself and
    what is before it. A sequence ends with its rows, and may begin with padding, which no row sees.

    One block of this kind costs as many operations as one sequence.
    """

    rows: slice
    """Rows of the query tensor: the same number for each sequence."""
    keys: slice
    """Slots of the key tensor: the same number for each sequence."""
    padding: torch.Tensor
    """``(num_sequences,)`` int64: slots of padding at the start of each sequence."""
    masks: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    """Masks that were computed already, because layers share them."""

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self.padding)

    @property
    def num_rows(self) -> int:
        """Rows of one sequence."""
        return int(self.rows.stop - self.rows.start) // self.count

    @property
    def width(self) -> int:
        """Slots of one sequence."""
        return int(self.keys.stop - self.keys.start) // self.count

    def split_rows(self, query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """``(num_heads, num_all_rows, head_dim)`` to ``(num_sequences, num_kv_heads, groups, num_rows, head_dim)``."""
        by_head: torch.Tensor = query.unflatten(0, (num_kv_heads, -1)).unflatten(2, (self.count, self.num_rows))
        return by_head.permute(2, 0, 1, 3, 4)

    def split_keys(self, key: torch.Tensor) -> torch.Tensor:
        """``(num_kv_heads, num_slots, head_dim)`` to ``(num_sequences, num_kv_heads, width, head_dim)``."""
        by_sequence: torch.Tensor = key.unflatten(1, (self.count, self.width))
        return by_sequence.transpose(0, 1)

    def mask(self, rule: AttentionRule, like: torch.Tensor) -> torch.Tensor:
        """Additive mask ``(num_sequences, 1, num_rows, width)``, with dtype and device of ``like``."""
        known = rule.window, like.dtype, like.device
        if known not in self.masks:
            slots = torch.arange(self.width)
            own = slots[-self.num_rows :, None]
            hidden = slots > own
            if rule.window is not None:
                hidden = hidden | (slots <= own - rule.window)
            unseen = hidden | (slots < self.padding[:, None, None])
            mask = torch.zeros(unseen.shape, dtype=like.dtype).masked_fill_(unseen, float("-inf"))
            self.masks[known] = mask[:, None].to(like.device)
        return self.masks[known]


class PassEnded(Exception):
    """Ends a forward pass when all that it is for is done. :meth:`ModelRuntime.run_rows` catches it."""


@dataclass(slots=True)
class Probe:
    """Reads attention weights while a pass runs."""

    layers: frozenset[int]
    """Layers whose attention weights are read."""
    blocks: Sequence[Block | SideBySide]
    """Rows whose attention weights are computed, and the keys of each."""
    record: Callable[[int, int, torch.Tensor], None]
    """Called with layer, number of the block and its weights ``(num_heads, num_rows, num_keys)`` float32. The weights
    of :class:`SideBySide` are ``(num_sequences, num_heads, num_rows, width)``."""
    stop: int | None = None
    """Last layer that is needed: the pass ends there, with :class:`PassEnded`. None: all layers run."""
    logits: bool = False
    """True: ``record`` gets attention logits instead of weights, minus infinity for hidden keys."""
    adjust: Callable[[int, int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Called before ``record`` with layer, number of the block, queries ``(num_heads, num_rows, head_dim)`` and keys
    ``(num_kv_heads, num_keys, head_dim)``, both after RoPE. The returned queries and keys are used for ``record`` only;
    the model's own attention is unchanged."""


@dataclass(slots=True)
class AttentionPlan:
    """Blocks that cover every row once, with an optional probe and row filter."""

    blocks: Sequence[Block | SideBySide]
    probe: Probe | None = None
    layer_starts: list[float] | None = None
    """Gets ``time.perf_counter()`` at the beginning of each layer; None: not recorded."""
    before_layer: Callable[[int], None] | None = None
    """Called with each layer's number before the layer runs, for instance to write its stored KV; None: nothing to
    do."""
    row_filter: Any = None
    """A :class:`~cacheclip_rag.runtime.transformers.row_filter.RowFilter`; None: all rows run in all layers."""
    last_rows: int | None = None
    """How many of the last rows need the last layer's output; the others need its KV only. 0: the pass ends when the
    last layer's KV is written. None: all rows need it."""
    kv_rows: int = 0
    """Rows whose KV of this layer was computed before, apart from the layer's output."""


def causal_plan(
    slots: torch.Tensor,
    device: torch.device | None = None,
    geometry: Geometry | None = None,
    visible: torch.Tensor | None = None,
) -> AttentionPlan:
    """Plan in which each row sees its own slot and earlier slots.

    Args:
        slots: ``(num_rows,)`` int64, strictly increasing; best on the CPU.
        device: where the attention will run; default the device of ``slots``.
        geometry: positions and contexts of a method that changes them; default slot = position.
        visible: ``(num_slots,)`` bool, keys that any row may see; default all.
    """
    blocks, masks = [], Masks()
    is_long = len(slots) > 0 and int(slots[-1]) >= _LONG
    size = 2 * ROWS_PER_BLOCK if is_long else ROWS_PER_BLOCK
    for start in range(0, len(slots), size):
        rows = slots[start : start + size]
        stop = int(rows[-1]) + 1
        if geometry is not None and geometry.contexts is not None:
            stop = max(stop, len(geometry.contexts))
        seen = None if visible is None else visible[:stop]
        blocks.append(Block.of(slice(start, start + len(rows)), slice(0, stop), rows, device, geometry, seen, masks))
    return AttentionPlan(blocks)


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[Block | SideBySide],
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention of each block's rows over its keys. Blocks cover every row once, in order.

    Args:
        query: ``(1, num_heads, num_rows, head_dim)``.
        key, value: ``(1, num_kv_heads, num_slots, head_dim)``; heads are shared in groups (GQA).

    Returns:
        ``(1, num_rows, num_heads, head_dim)``, the layout that transformers expects.
    """
    num_kv_heads = key.shape[1]
    # (num_kv_heads, num_rows, groups, head_dim): a row's heads of one group are neighbours, because they see the same
    rows = query[0].unflatten(0, (num_kv_heads, -1)).transpose(1, 2).contiguous()
    # transposed, SDPA's results are contiguous, and joining contiguous tensors starts no threads
    found = [_of_block(rows[:, block.rows], key[0], value[0], block, rule).transpose(0, 1) for block in blocks]
    joined = found[0] if len(found) == 1 else torch.cat(found)
    attended: torch.Tensor = joined.unflatten(0, (-1, rows.shape[2])).transpose(1, 2)
    return attended.flatten(1, 2)[None]


def query_attention(
    query: torch.Tensor, key: torch.Tensor, block: Block | SideBySide, rule: AttentionRule, *, logits: bool = False
) -> torch.Tensor:
    """Attention weights (or logits) of one block's rows: float32, in the shape that :attr:`Probe.record` takes.

    Args:
        query: ``(num_heads, num_rows, head_dim)``, queries of the block's rows.
        key: ``(num_kv_heads, num_keys, head_dim)``, the block's keys.
    """
    if isinstance(block, SideBySide):
        rows, keys = block.split_rows(query, key.shape[0]).float(), block.split_keys(key).float().unsqueeze(2)
        mask = block.mask(rule, rows).unsqueeze(2)
        found = _logits(rows, keys, rule) + mask if logits else _weights(rows, keys, mask, rule)
        return found.flatten(1, 2)
    rows = query.unflatten(0, (key.shape[0], -1)).float()  # (num_kv_heads, groups, rows, head_dim)
    keys = key.float().unsqueeze(1)  # (num_kv_heads, 1, num_keys, head_dim)
    seen = _additive_mask(block, 0, rule, rows) if block.is_plain(rule) else _positioned_mask(block, rule, rows)
    if logits:
        found = _logits(rows, keys, rule)
        return (found if seen is None else found + seen).flatten(0, 1)
    return _weights(rows, keys, seen, rule).flatten(0, 1)


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
    """Attention weights ``(num_kv_heads, groups, num_rows, num_keys)`` float32, without the share of a sink.

    Weights are materialised only for the rows of a probe, and for layers and blocks that no kernel can compute.
    """
    logits = _logits(rows, keys, rule)
    if mask is not None:
        logits = logits + mask
    if rule.sinks is None:
        return logits.softmax(dim=-1)
    return torch.cat((logits, _sink_logits(rows, rule.sinks)), dim=-1).softmax(dim=-1)[..., :-1]


def _logits(rows: torch.Tensor, keys: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    logits = (rows @ keys.transpose(-1, -2)).float() * rule.scaling
    return logits if rule.softcap is None else (logits / rule.softcap).tanh() * rule.softcap


def _sink_logits(rows: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """``(..., num_kv_heads, groups, num_rows, 1)``"""
    return sinks.float().view(*rows.shape[-4:-2], 1, 1).expand(*rows.shape[:-1], 1)


def _of_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block | SideBySide, rule: AttentionRule
) -> torch.Tensor:
    """Attention of one block's rows over its keys: ``(num_kv_heads, num_rows * groups, head_dim)``.

    Args:
        query: ``(num_kv_heads, num_rows, groups, head_dim)``, the block's rows.
        key, value: ``(num_kv_heads, num_slots, head_dim)``.
    """
    if isinstance(block, SideBySide):
        return _side_by_side(query, key[:, block.keys], value[:, block.keys], block, rule)
    if not block.is_plain(rule):
        of_groups = query.transpose(1, 2)
        attended = _positioned_attention(of_groups, key[:, block.keys], value[:, block.keys], block, rule)
        return attended.transpose(1, 2).flatten(1, 2)
    skipped = 0 if rule.window is None else max(0, block.first - rule.window + 1)  # before every row's window
    visible = slice(block.keys.start + skipped, block.keys.stop)
    keys, values = key[:, visible], value[:, visible]
    if not rule.is_dense:
        mask = _additive_mask(block, skipped, rule, query)
        weights = _weights(query.transpose(1, 2), keys.unsqueeze(1), mask, rule).to(values.dtype)
        return (weights @ values.unsqueeze(1)).transpose(1, 2).flatten(1, 2)
    rows, groups = query.flatten(1, 2), query.shape[2]
    if rule.covers(block.keys.stop - block.keys.start) and block.first >= _UNMASKED and _can_split(query):
        mask = _additive_mask(block, block.first, rule, query, groups)
        return _in_two_parts(rows, keys, values, block.first, mask, rule.scaling)
    mask = _additive_mask(block, skipped, rule, query, groups)
    with sdpa_backends(query.device):
        return _sdpa(rows, keys, values, mask, rule.scaling)


def _sdpa(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    found: torch.Tensor = scaled_dot_product_attention(
        rows[None], keys[None], values[None], attn_mask=mask, scale=scale
    )
    return found[0]


def _can_split(query: torch.Tensor) -> bool:
    """Whether there is a kernel that also returns the log-sum-exp of the logits. It has no gradient."""
    return query.device.type == "cpu" and not torch.is_grad_enabled()


def _in_two_parts(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_unmasked: int,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """As :func:`_sdpa`, but the first ``num_unmasked`` keys, which every row sees, need no mask. The two parts are
    merged by their log-sum-exp, as FlashAttention merges its blocks (arXiv:2205.14135, section 3.1)."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    (first, mass), (second, other) = (
        kernel(rows[None], keys[None, :, part], values[None, :, part], attn_mask=of_part, scale=scale)
        for part, of_part in ((slice(num_unmasked), None), (slice(num_unmasked, None), mask))
    )
    share = torch.sigmoid(other - mass).unsqueeze(-1)
    return torch.lerp(first.float(), second.float(), share)[0].to(rows.dtype)


def _side_by_side(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: SideBySide, rule: AttentionRule
) -> torch.Tensor:
    """Attention of each sequence's rows over its keys: ``(num_kv_heads, num_all_rows * groups, head_dim)``."""
    attended: torch.Tensor
    rows = block.split_rows(query.transpose(1, 2).flatten(0, 1), key.shape[0])
    keys, values, mask = block.split_keys(key), block.split_keys(value), block.mask(rule, query)
    if rule.is_dense:
        groups, num_rows = rows.shape[2:4]
        with sdpa_backends(query.device):  # rows of all heads of a group, because they see the same keys
            attended = scaled_dot_product_attention(
                rows.flatten(2, 3), keys, values, attn_mask=mask.repeat(1, 1, groups, 1), scale=rule.scaling
            ).unflatten(2, (groups, num_rows))
    else:
        weights = _weights(rows, keys.unsqueeze(2), mask.unsqueeze(2), rule)
        attended = weights.to(values.dtype) @ values.unsqueeze(2)
    return attended.permute(1, 0, 3, 2, 4).flatten(1, 3)


def _positioned_attention(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, rule: AttentionRule
) -> torch.Tensor:
    """Attention with a geometry: slots differ from positions, or contexts are merged by log-sum-exp (APE,
    arXiv:2502.05431)."""
    keys, values = keys.unsqueeze(1), values.unsqueeze(1)
    mask = _positioned_mask(block, rule, rows)
    geometry = block.geometry
    if geometry is None or geometry.contexts is None:
        return _weights(rows, keys, mask, rule).to(values.dtype) @ values
    of_contexts, others = (_numbers_of_keys(block, geometry, keys, inside=inside) for inside in (True, False))
    logits = _logits(rows, keys, rule) + mask
    inside = logits.index_select(-1, of_contexts) / geometry.temperature
    outside = logits.index_select(-1, others)
    if rule.sinks is not None:
        outside = torch.cat((outside, _sink_logits(rows, rule.sinks)), dim=-1)
    masses = (
        geometry.scale * geometry.temperature * inside.logsumexp(-1, keepdim=True),
        outside.logsumexp(-1, keepdim=True),
    )
    shares = torch.cat(masses, dim=-1).softmax(-1)
    weights = torch.zeros_like(logits)
    # a window may hide every context from a row: then the contexts have no weight
    weights.index_copy_(-1, of_contexts, (inside.softmax(-1) * shares[..., :1]).nan_to_num())
    weights.index_copy_(-1, others, outside.softmax(-1)[..., : len(others)] * shares[..., 1:])
    return weights.to(values.dtype) @ values


def _numbers_of_keys(block: Block, geometry: Geometry, keys: torch.Tensor, *, inside: bool) -> torch.Tensor:
    """Numbers of the keys in the contexts, or of all others, on the device of ``keys``."""

    def make() -> torch.Tensor:
        is_inside = geometry.contexts_of(torch.arange(keys.shape[-2]))
        return (is_inside if inside else ~is_inside).nonzero().flatten().to(keys.device)

    return block.kept(("keys", inside, keys.device), make)


def _positioned_mask(block: Block, rule: AttentionRule, query: torch.Tensor) -> torch.Tensor:
    """Additive mask ``(num_rows, num_keys)`` float32: causal by slots, sliding window by positions."""
    use = "positioned", rule.window, query.device  # a window of 1 equals True, hence the names
    return block.kept(use, lambda: _make_positioned_mask(block, rule).to(query.device))


def _make_positioned_mask(block: Block, rule: AttentionRule) -> torch.Tensor:
    slots = torch.arange(block.keys.stop - block.keys.start)
    row_slots = block.positions.cpu()
    hidden = slots[None, :] > row_slots[:, None]
    geometry = block.geometry
    if geometry is not None and geometry.contexts is not None:
        hidden &= ~geometry.contexts_of(slots)[None, :]
    if rule.window is not None:
        of_rows, of_keys = row_slots, slots
        if geometry is not None:
            of_rows, of_keys = geometry.positions_of(row_slots), geometry.positions_of(slots)
        hidden |= of_keys[None, :] <= of_rows[:, None] - rule.window
    if block.visible is not None:
        hidden |= ~block.visible[None, :] & (slots[None, :] != row_slots[:, None])
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _additive_mask(
    block: Block, skipped: int, rule: AttentionRule, query: torch.Tensor, repeats: int = 1
) -> torch.Tensor | None:
    """Additive mask ``(num_rows * repeats, num_keys - skipped)``, each row ``repeats`` times: 0 if a row sees a key,
    else minus infinity. It has dtype and device of ``query``. None if every row sees every key."""
    num_keys = block.keys.stop - block.keys.start
    if block.first >= num_keys - 1 and (rule.window is None or skipped + rule.window >= num_keys):
        return None

    def make() -> torch.Tensor:
        positions = block.positions.to(query.device)
        slots = torch.arange(skipped, num_keys, device=query.device)
        hidden = slots[None, :] > positions[:, None]
        if rule.window is not None:
            hidden |= slots[None, :] <= positions[:, None] - rule.window
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(repeats, 0) if repeats > 1 else mask

    # layers may be on several devices
    return block.kept((skipped, rule.window, repeats, query.dtype, query.device), make)
