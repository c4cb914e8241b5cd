"""Rotary position embedding as a reversible map: stored keys have no position, assembled keys are rotated.

Source: RoFormer (arXiv:2104.09864), in the half-split layout that transformers uses for every supported architecture.
All computation is in float32, with one cast at the end. Tables narrower than the head rotate its first dimensions only
(partial rotary). Layers without RoPE have no tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each ``(num_tokens, rotary_dim)`` float32, from the model's own rotary module. They include the
attention scaling of YaRN and longrope."""

_BLOCK = 1 << 19
"""Numbers that are rotated together in host memory. Intermediate results of many more would each be new memory, whose
page faults take several times as long as the rotation."""


def changed(tables: Sequence[Tables | None], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Tables | None]:
    """The tables of all layers with ``change`` made to cos and sin. Layers that share tables share the result."""
    found: dict[int, Tables] = {}
    for each in tables:
        if each is not None and id(each[0]) not in found:
            found[id(each[0])] = change(each[0]), change(each[1])
    return [None if each is None else found[id(each[0])] for each in tables]


def rotate(keys: torch.Tensor, tables: Tables | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rotate position-free keys, ``(..., num_tokens, head_dim)`` of any float dtype, to the positions of the tables
    (None for a layer without rotary embedding). Returns keys after RoPE, computed in float32."""
    if tables is None:
        return keys.to(dtype)
    cos, sin = tables
    step = max(1, _BLOCK * len(cos) // max(1, keys.numel()))
    if len(cos) > step and keys.device.type == "cpu":
        found = torch.empty(keys.shape, dtype=dtype)
        parts = (each.split(step, -2) for each in (found, keys, cos, sin))
        for target, some, *of_some in zip(*parts, strict=True):
            target.copy_(rotate(some, (of_some[0], of_some[1])))
        return found
    keys = keys.float()
    width, half = cos.shape[-1], cos.shape[-1] // 2
    # bit-identical to x cos + rotate_half(x) sin, without the copy that rotate_half makes
    turned = keys[..., :width] * cos
    turned[..., :half] -= keys[..., half:width] * sin[..., :half]
    turned[..., half:] += keys[..., :half] * sin[..., half:]
    return (turned if width == keys.shape[-1] else torch.cat((turned, keys[..., width:]), dim=-1)).to(dtype)


def unrotate(keys: torch.Tensor, tables: Tables | None) -> torch.Tensor:
    """Inverse of :func:`rotate`: float32 keys before RoPE."""
    keys = keys.float()
    if tables is None:
        return keys
    cos, sin = tables
    width, half = cos.shape[-1], cos.shape[-1] // 2
    scaling = cos.square() + sin.square()  # the square of the attention scaling; 1 without scaling
    plain = keys[..., :width] * cos
    plain[..., :half] += keys[..., half:width] * sin[..., :half]
    plain[..., half:] -= keys[..., :half] * sin[..., half:]
    return torch.cat((plain / scaling, keys[..., width:]), dim=-1)
