"""A pass: which keys each row sees, in blocks of rows with a slice of the keys each, and which rows run in each layer.

Transformers' mask functions assume that the queries are the last tokens of the sequence. Recomputed tokens can be
anywhere. Each sees keys at its own position and before, within the layer's sliding window if there is one, and no other
key. A pattern divides the rows into blocks, and gives each the slice of keys that its rows may see. Within a block
the mask is ``position - window < key position <= position``. Blocks also save work: early tokens are not multiplied
with later keys, sliding layers skip keys before the window, and chunks that the auxiliary model scores side by side are
not multiplied with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch

from ...store import upload
from .rotary import Tables

_OF_ROWS = {
    **{"position_embeddings": 1, "position_ids": -1, "cache_position": 0, "per_layer_input": 1},
    "attention_scaling": 2,
}
"""Arguments of a decoder layer that have one entry per row, and the dimension of the rows."""
CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""What decoder layers call the cache, by class and version."""
ROWS_PER_BLOCK = 64
"""Small enough that few masked keys are multiplied, large enough that the products stay efficient."""
_LONG = 4096
"""Slots from which on a block has twice as many rows: where most keys need no mask, fewer products are faster."""
_ON_GPU = 512
"""Rows of a block on a GPU: those of fewer leave most of its processors without work."""
_MASK_BYTES = 2**26
"""Bytes of a pattern's masks that layers share; each layer makes the others anew. On an accelerator, whose kernels want
a mask with a row for each head of a group, those of 16,384 tokens at ratio 0.2 and 7 heads a group take 376 MB in
bfloat16: kept whole or in row blocks, they would exceed the 200 MB that one question may take beside its KV, and to
write these rows is most of the work, which stays if only one row for all heads is kept."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends. The model passes these settings to the attention function."""

    scaling: float
    """Factor of the query-key products."""
    window: int | None = None
    """Sliding window: a row at position p sees positions above ``p - window``. None: all positions up to p."""
    span: int | None = None
    """Chunked attention: a row at position p sees positions from the last multiple of ``span`` on. None: from 0 on."""
    softcap: float | None = None
    """Logits become ``softcap * tanh(logits / softcap)`` (Gemma 2). None: no soft-capping."""
    sinks: torch.Tensor | None = None
    """``(num_heads,)``: one more logit per head in the softmax, without a value (GPT-OSS). None: no sink."""

    @property
    def is_dense(self) -> bool:
        """Whether PyTorch's scaled dot-product attention can compute this rule, given a mask."""
        return self.softcap is None and self.sinks is None

    def covers(self, num_keys: int) -> bool:
        """Whether a row sees ``num_keys`` keys, all before it."""
        return min(self.window or num_keys, self.span or num_keys) >= num_keys

    def first_key(self, position: int) -> int:
        """Position of the first key that a row sees."""
        of_window = 0 if self.window is None else max(0, position - self.window + 1)
        return of_window if self.span is None else max(of_window, position // self.span * self.span)

    def hides(self, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """Which keys rows do not see, by positions that broadcast, of those before them. None: they see all."""
        hidden = None if self.window is None else keys <= rows - self.window
        if self.span is not None:
            before = keys < rows - rows % self.span
            hidden = before if hidden is None else hidden | before
        return hidden


@dataclass(slots=True)
class Masks:
    """Masks that were computed already, because layers share them."""

    num_bytes: int = 0
    by_use: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of the forward pass that see one slice of keys."""

    rows: slice
    """Rows of the query tensor."""
    keys: slice
    """Slots of the key tensor."""
    positions: torch.Tensor
    """``(num_rows,)`` int64, increasing: the last slot that each row sees, counted from ``keys.start``."""
    first: int
    """The first of ``positions`` as an int: reading it from the tensor would synchronise the accelerator."""
    masks: Masks = field(default_factory=Masks, repr=False, compare=False)
    """Masks of all blocks of a pattern."""

    @classmethod
    def of(cls, rows: slice, keys: slice, positions: torch.Tensor, device: torch.device | None = None) -> Block:
        """Make a block for ``device`` from ``positions`` on the CPU."""
        return cls(rows, keys, upload(positions, device or "cpu"), int(positions[0]))

    def kept(self, use: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One of :attr:`masks`, made if it is not there, and kept if there is room for it."""
        masks, key = self.masks, (self.rows.start, use)
        mask = masks.by_use.get(key)
        if mask is None:
            mask = make()
            if masks.num_bytes + mask.nbytes <= _MASK_BYTES:
                masks.num_bytes += mask.nbytes
                masks.by_use[key] = mask
        return mask


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

    def split_rows(self, query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """``(num_heads, num_all_rows, head_dim)`` to ``(num_sequences, num_kv_heads, groups, num_rows, head_dim)``."""
        by_head: torch.Tensor = query.unflatten(0, (num_kv_heads, -1)).unflatten(2, (len(self.padding), -1))
        return by_head.permute(2, 0, 1, 3, 4)

    def split_keys(self, key: torch.Tensor) -> torch.Tensor:
        """``(num_kv_heads, num_slots, head_dim)`` to ``(num_sequences, num_kv_heads, width, head_dim)``."""
        by_sequence: torch.Tensor = key.unflatten(1, (len(self.padding), -1))
        return by_sequence.transpose(0, 1)

    def mask(self, rule: AttentionRule, like: torch.Tensor, repeats: int = 1) -> torch.Tensor:
        """Additive mask ``(num_sequences, 1, repeats * num_rows, width)``, all rows ``repeats`` times one after the
        other, with dtype and device of ``like``."""
        known = rule.window, rule.span, repeats, like.dtype, like.device
        if known not in self.masks:
            num_rows, width = ((each.stop - each.start) // len(self.padding) for each in (self.rows, self.keys))
            slots = torch.arange(width)
            own = slots[-num_rows:, None]
            hidden = slots > own
            padding = self.padding[:, None, None]
            unseen = hidden | (slots < padding)
            if (before := rule.hides(slots - padding, own - padding)) is not None:
                unseen = unseen | before
            mask = torch.zeros(unseen.shape, dtype=like.dtype).masked_fill_(unseen, float("-inf"))
            self.masks[known] = upload(mask[:, None].repeat(1, 1, repeats, 1), like.device)
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
    of :class:`SideBySide` are ``(num_sequences, num_heads, num_rows, width)``. ``num_heads`` counts :attr:`heads`."""
    stop: int | None = None
    """Last layer that is needed: the pass ends there, with :class:`PassEnded`. None: all layers run."""
    logits: bool = False
    """True: ``record`` gets attention logits instead of weights, minus infinity for hidden keys."""
    heads: Mapping[int, torch.Tensor] | None = None
    """By layer, the query heads that are recorded, in this order; None: all heads of all :attr:`layers`."""


@dataclass(slots=True)
class AttentionPattern:
    """Blocks that cover every row once, with an optional probe."""

    blocks: Sequence[Block | SideBySide]
    probe: Probe | None = None
    before_layer: Callable[[int], None] | None = None
    """Called with each layer's number before the layer runs, for instance to write its stored KV; None: nothing to
    do."""
    last_rows: int | None = None
    """How many of the last rows need the last layer's output; the others need KV only. 0: the pass ends when the last
    KV is written. None: all rows need it."""
    last_layer: int = -1
    """The last layer that writes KV."""
    position_embeddings: Sequence[Tables | None] | None = None
    """Per layer cos and sin of the rows, as the model's own rotary module would give them, ``(1, num_rows,
    rotary_dim)``; None: the module makes them."""


def causal_pattern(slots: torch.Tensor, device: torch.device | None = None) -> AttentionPattern:
    """Pattern in which each row sees its own slot and earlier slots. ``slots``: ``(num_rows,)`` int64, strictly
    increasing, best on the CPU; ``device``: where the attention will run."""
    blocks, masks = [], Masks()
    placed = slots if device is None else upload(slots, device)  # one copy to an accelerator for all blocks
    size = rows_per_block(int(slots[-1]) + 1 if len(slots) else 0, device)
    for start in range(0, len(slots), size):
        rows = slots[start : start + size]
        own = slice(start, start + len(rows))
        blocks.append(Block(own, slice(0, int(rows[-1]) + 1), placed[own], int(rows[0]), masks))
    return AttentionPattern(blocks)


def rows_per_block(num_keys: int, device: torch.device | None) -> int:
    """Rows of one block: few, because masked products are lost; many, because every block costs calls, and a GPU works
    on many rows at once."""
    if device is not None and device.type == "cuda":
        return _ON_GPU
    return 2 * ROWS_PER_BLOCK if num_keys > _LONG else ROWS_PER_BLOCK


def install_layer_hooks(layers: Sequence[torch.nn.Module], num_writing: int) -> None:
    """Let the patterns of passes act on these layers of an unmodified model, whose own loop over layers stays in use.

    Before each layer, its stored KV is written, and rotary tables that are there already are handed on, if the pattern
    has them. Before the last layer that writes KV, rows whose output nobody needs leave the pass; the layers after the
    first ``num_writing`` read what others wrote.
    """

    def hook(number: int) -> Any:
        names = [*signature(layers[number].forward).parameters]

        def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            pattern: AttentionPattern | None = kwargs.get("cacheclip_pattern")
            if pattern is None:
                return None
            hidden, kwargs = args[0], {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}
            if number >= num_writing:
                return (hidden,), _of_last_rows(hidden, kwargs)
            if pattern.before_layer is not None:
                pattern.before_layer(number)
            if pattern.position_embeddings is not None:
                kwargs |= {"position_embeddings": pattern.position_embeddings[number], "position_ids": None}
            if number == num_writing - 1:
                hidden, kwargs = _enter_last(module, hidden, kwargs)
            return (hidden,), kwargs

        return enter

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(hook(number), with_kwargs=True)


def _enter_last(
    layer: torch.nn.Module, hidden: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Write the last layer's KV of all rows in a run that ends at its attention, then leave only the rows whose output
    is needed."""
    pattern: AttentionPattern = kwargs["cacheclip_pattern"]
    needed = pattern.last_rows
    if not needed or needed >= hidden.shape[-2] or not (pattern.blocks and isinstance(pattern.blocks[-1], Block)):
        return hidden, kwargs
    with suppress(PassEnded):
        layer.forward(hidden, **{**kwargs, "cacheclip_pattern": replace(pattern, last_rows=0)})
    hidden = hidden[..., -needed:, :]
    return hidden, _of_last_rows(hidden, kwargs)


def _of_last_rows(hidden: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A layer's arguments for the last rows of a pass alone, of which it has the hidden states."""
    count, last = hidden.shape[-2], kwargs["cacheclip_pattern"].blocks[-1]
    if count == last.rows.stop:
        return kwargs
    cache: Any = next(kwargs[name] for name in CACHE_NAMES if name in kwargs)
    slots = cache.layers[-1].slots_on_cpu[-count:]
    cache.scatter(slots)
    block = Block.of(slice(0, count), last.keys, slots - last.keys.start, hidden.device)
    cut = {name: _cut(kwargs[name], count, dim) for name, dim in _OF_ROWS.items() if name in kwargs}
    return {**kwargs, **cut, "cacheclip_pattern": AttentionPattern([block])}


def _cut(value: Any, count: int, dim: int) -> Any:
    """The last ``count`` rows."""
    if isinstance(value, tuple):
        return tuple(_cut(part, count, dim) for part in value)
    return value.narrow(dim, value.shape[dim] - count, count) if isinstance(value, torch.Tensor) else value
