"""By which angles llama.cpp rotates keys.

No call tells them, and files state them in many ways (base, scaling, YaRN, factors for each frequency, other ones in
layers with a window). So they are measured: a token that sees only itself has the same keys before rotation wherever it
stands, so that its keys at two positions differ by the rotation alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheclip_rag.runtime import Tables, rotate

from .written import WrittenKV

_STEP = 8
"""From one measured position to the next: what is known by then tells the number of whole turns."""
_LAST = 1 << 15
"""llama.cpp's angles are float32, and rounded more at later positions."""
_TOLERANCE = 1e-2
"""Largest difference of keys, relative to their length, to what the angles say: they are float16."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Layers whose keys are rotated alike."""

    layers: tuple[int, ...]
    """As numbered in :class:`.written.WrittenKV`."""
    angles: torch.Tensor
    """``(rotary_dim / 2,)`` float64: radians per position."""
    head_dim: int
    in_pairs: bool
    """Neighbouring numbers are rotated together, not those half a head apart."""

    def tables(self, positions: torch.Tensor) -> Tables:
        """cos and sin at ``(num_tokens,)`` positions, each ``(num_tokens, rotary_dim)`` float32."""
        turned = positions.double()[:, None] * self.angles
        both = torch.cat([turned, turned], dim=-1)
        return Tables(both.cos().float(), both.sin().float())

    def heads(self, keys: torch.Tensor) -> torch.Tensor:
        """``(num_layers * num_heads, num_tokens, head_dim)`` of ``(num_layers, num_tokens, num_heads * head_dim)``, in
        halves."""
        found: torch.Tensor = keys.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).flatten(0, 1)
        if self.in_pairs:
            width = 2 * len(self.angles)
            halves = found[..., :width].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
            found = torch.cat([halves, found[..., width:]], dim=-1)
        return found

    def rows(self, heads: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`heads`."""
        if self.in_pairs:
            width = 2 * len(self.angles)
            pairs = heads[..., :width].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            heads = torch.cat([pairs, heads[..., width:]], dim=-1)
        found: torch.Tensor = heads.unflatten(0, (len(self.layers), -1)).transpose(1, 2).flatten(2)
        return found


def measured_positions(last: int) -> list[int]:
    """0, and positions below ``last`` at which tokens are computed to know the rotation."""
    found = [0, 1]
    while found[-1] * _STEP < min(last, _LAST):
        found.append(found[-1] * _STEP)
    return found


def measured_rotations(
    found: Sequence[Sequence[WrittenKV]], positions: Sequence[int], *, rotary_dim: int, head_dim: int, in_pairs: bool
) -> list[Rotation] | None:
    """The rotations of all layers; None if keys change otherwise than by rotation.

    Args:
        found: of each position, the KV of some tokens that each stand there alone.
    """
    sizes = [found[0][0].size(layer)[0] for layer in range(found[0][0].num_layers)]
    if any(size % head_dim for size in sizes) or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        return None
    rotations = list[Rotation]()
    for layer in range(len(sizes)):
        form = Rotation((layer,), torch.zeros(rotary_dim // 2), head_dim, in_pairs)
        # (num_positions, num_heads, num_tokens, head_dim)
        keys = torch.stack([form.heads(torch.cat([kv.take([layer], False) for kv in there], 1)) for there in found])
        angles = _angles(keys.double(), positions, rotary_dim)
        alike = next((n for n, each in enumerate(rotations) if _are_equal(each.angles, angles, positions[-1])), None)
        if alike is None:
            rotations.append(Rotation((layer,), angles, head_dim, in_pairs))
        else:
            known = rotations[alike]
            mean = (known.angles * len(known.layers) + angles) / (len(known.layers) + 1)
            rotations[alike] = Rotation((*known.layers, layer), mean, head_dim, in_pairs)
    for each in rotations:
        for position, there in zip(positions, found, strict=True):
            first, moved = (
                each.heads(torch.cat([kv.take(each.layers, False) for kv in kvs], 1)).float()
                for kvs in (found[0], there)
            )
            expected = rotate(first, each.tables(torch.full((first.shape[1],), position)))
            if bool(((moved - expected).norm(dim=-1) > _TOLERANCE * first.norm(dim=-1)).any()):
                return None
    return rotations


def are_alike(moved: WrittenKV, computed: WrittenKV) -> bool:
    """Whether the KV of a token is the same in all layers, but for rounding."""
    pairs = [
        [kv.take([layer], is_value).float() for kv in (moved, computed)]
        for layer in range(computed.num_layers)
        for is_value in (False, True)
    ]
    return all(float((one - other).norm()) <= _TOLERANCE * float(other.norm()) for one, other in pairs)


def _angles(keys: torch.Tensor, positions: Sequence[int], rotary_dim: int) -> torch.Tensor:
    """Radians per position of each pair of numbers. Long keys count more: they are rounded least."""
    half = rotary_dim // 2
    numbers = torch.complex(keys[..., :half], keys[..., half:rotary_dim])
    turns = (numbers[:1].conj() * numbers).sum(dim=(1, 2)).angle()
    found = torch.zeros(half, dtype=torch.float64)
    for position, turn in list(zip(positions, turns, strict=True))[1:]:
        whole = ((found * position - turn) / (2 * math.pi)).round()
        found = (turn + 2 * math.pi * whole) / position
    return found


def _are_equal(one: torch.Tensor, other: torch.Tensor, last: int) -> bool:
    return bool(((one - other).abs().median() * last) < 0.1)
