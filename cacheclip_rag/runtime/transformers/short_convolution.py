"""Layers that convolve a token's input with the few before it, in the place of attention (LFM2, LFM3).

A token's gated input, ``(hidden_size,)``, is all that such a layer needs of it later. It depends on the text before as
keys and values do in other layers, so it is kept and stored like them, without rotation: its first half as keys, its
second half as values.

The model's own module computes. It gets each run of neighbouring rows with room before it, and a cache that fills the
room with the inputs of the tokens that stand there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from .attention_pattern import CACHE_NAMES, AttentionPattern, Block, PassEnded


def install_short_convolutions(layers: Iterable[nn.Module], config: Any) -> frozenset[int]:
    """Let the convolutions of decoder layers compute rows anywhere in a cache. Returns the numbers of their layers."""
    decoder, numbers = list(layers), set()
    for number, layer in enumerate(decoder):
        for module in layer.children():
            if isinstance(getattr(module, "conv", None), nn.Conv1d):
                is_last = number == len(decoder) - 1
                module.forward = _ShortConvolution(module, number, is_last, config.num_key_value_heads)
                numbers.add(number)
    return frozenset(numbers)


class _ShortConvolution:
    """In the place of a module's ``forward``."""

    def __init__(self, module: Any, number: int, is_last: bool, num_heads: int) -> None:
        self.number, self._plain, self._is_last = number, module.forward, is_last
        self._num_before = module.conv.kernel_size[0] - 1
        self.num_heads = num_heads if module.conv.in_channels % (2 * num_heads) == 0 else 0
        """Heads into which kept inputs are divided, as other layers' keys are; 0: one, without values."""

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        """``hidden_states``: ``(1, num_rows, hidden_size)``, as the result."""
        pattern: AttentionPattern | None = kwargs.pop("cacheclip_pattern", None)
        look, states = kwargs.pop("cacheclip_look", None), kwargs.pop("cacheclip_steps", None)
        name = next((each for each in CACHE_NAMES if kwargs.get(each) is not None), None)
        if name is None:
            return self._plain(hidden_states, **kwargs)
        if look is not None:
            look.layers.add(self.number)
            pattern = look.pattern
        places = self._places(kwargs[name], hidden_states.shape[1], pattern, states)
        ends = self._is_last and pattern is not None and pattern.last_rows == 0
        inputs = _Inputs(self, kwargs[name], places, ends)
        rows, own = places.rows.to(hidden_states.device), places.own.to(hidden_states.device)
        return self._plain(hidden_states.index_select(1, rows), **{**kwargs, name: inputs}).index_select(1, own)

    def _places(self, cache: Any, num_rows: int, pattern: AttentionPattern | None, states: Any) -> _Room:
        layers: list[Any] = cache.layers[self.number : self.number + 1]  # transformers' own caches have none at first
        slots = getattr(layers[0], "slots_on_cpu", None) if layers else None
        if states is not None:
            slots = torch.tensor([each.get_seq_length() for each in layers[0].layers])
        elif slots is None:
            slots = torch.arange(num_rows) + sum(each.get_seq_length() for each in layers)
        known = getattr(cache, "room", None)  # of the layer before, mostly in the same pass
        if known is None or known[0] is not pattern or not torch.equal(known[1], slots):
            cache.room = known = pattern, slots, self._room(slots, pattern, states is not None)
        return known[2]

    def _room(self, slots: torch.Tensor, pattern: AttentionPattern | None, are_alone: bool) -> _Room:
        """``are_alone``: the rows belong to a state each."""
        num_rows = len(slots)
        firsts = _first_seen(pattern, num_rows)
        begins = torch.ones(num_rows, dtype=torch.bool)
        if not are_alone:
            begins[1:] = (slots[1:] != slots[:-1] + 1) | (firsts[1:] != firsts[:-1])
        sizes = 1 + self._num_before * begins
        rows = torch.arange(num_rows).repeat_interleave(sizes)
        before = sizes.cumsum(0)[rows] - 1 - torch.arange(len(rows))  # places from each to its row
        places = slots[rows] - before
        return _Room(rows, (before == 0).nonzero()[:, 0], places.clamp(min=0), places < firsts[rows])


class _Room(NamedTuple):
    """Rows, and the room before each run of them; all on the CPU."""

    rows: torch.Tensor
    """``(num_places,)`` int64: the row of each place, or before which it is room."""
    own: torch.Tensor
    """``(num_rows,)`` int64: each row's own place."""
    slots: torch.Tensor
    """``(num_places,)`` int64: the tokens of the places."""
    is_hidden: torch.Tensor
    """``(num_places,)`` bool: whether a place is before the first token that its row sees."""


class _Inputs:
    """The cache that a module gets."""

    def __init__(self, convolution: _ShortConvolution, cache: Any, places: _Room, ends: bool) -> None:
        self._of, self._cache, self._places, self._ends = convolution, cache, places, ends

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    def update_conv_state(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep the inputs of the rows, and give those of all places: ``(1, hidden_size, num_places)``."""
        number, places = self._of.number, self._places
        own = inputs[0].T.index_select(0, places.own.to(inputs.device))  # (num_rows, hidden_size)
        self._cache.update(*self._divided(own), number)
        if self._ends:
            raise PassEnded
        layer = self._cache.layers[number]
        layers = getattr(layer, "layers", [layer])  # one for each state that decodes
        size = len(places.rows) // len(layers)
        kept = [
            torch.cat([half[0].index_select(1, slots.to(half.device)).transpose(0, 1).flatten(1) for half in halves], 1)
            for halves, slots in zip(((e.keys, e.values) for e in layers), places.slots.split(size), strict=True)
        ]
        return torch.cat(kept).masked_fill(places.is_hidden[:, None].to(inputs.device), 0).T[None].contiguous()

    def _divided(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Inputs ``(num_rows, hidden_size)`` as keys and values, ``(1, num_heads, num_rows, width)``."""
        if not self._of.num_heads:
            return [rows[None, None], rows[None, None, :, :0]]
        return [half.unflatten(1, (self._of.num_heads, -1)).transpose(0, 1)[None] for half in rows.chunk(2, dim=1)]


def _first_seen(pattern: AttentionPattern | None, num_rows: int) -> torch.Tensor:
    """The first slot that each row sees, ``(num_rows,)`` int64."""
    firsts = torch.zeros(num_rows, dtype=torch.int64)
    for block in pattern.blocks if pattern is not None else ():
        if isinstance(block, Block):
            firsts[block.rows] = block.keys.start
        else:  # sequences of equal width
            width = (block.keys.stop - block.keys.start) // len(block.padding)
            starts = block.keys.start + width * torch.arange(len(block.padding)) + block.padding.cpu()
            firsts[block.rows] = starts.repeat_interleave((block.rows.stop - block.rows.start) // len(starts))
    return firsts
