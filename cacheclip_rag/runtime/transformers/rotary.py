"""Rotary position embedding as a reversible map: stored keys have no position, assembled keys are rotated.

Source: RoFormer (arXiv:2104.09864), in the half-split layout that transformers uses for every supported architecture.
All computation is in float32, with one cast at the end. Tables narrower than the head rotate its first dimensions only
(partial rotary). Layers without RoPE have no tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch

from .architectures import SUPPORTED
from .text import check_process

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


class ModelRotary:
    """The rotary module of one model, which makes its tables."""

    def __init__(
        self, model: Any, name: str, devices: Sequence[torch.device], lock: AbstractContextManager[Any]
    ) -> None:
        """``devices``: one per layer. ``lock`` is held while the module runs."""
        self._model, self._name, self._devices, self._lock = model, name, devices, lock
        self._process = os.getpid()
        config = model.config
        self._architecture = SUPPORTED[config.model_type]
        self.kinds: list[str | None] = [""] * len(devices)
        """Per layer the kind of its tables: None without RoPE, else a layer type (``""`` if all are equal)."""
        if self._architecture.rotary_per_layer_type:
            self.kinds = list(config.layer_types)
        if self._architecture.rotated_layers:
            rotated = getattr(config, self._architecture.rotated_layers)[: len(devices)]
            self.kinds = [kind if turns else None for kind, turns in zip(self.kinds, rotated, strict=True)]

    def tables(self, positions: torch.Tensor) -> list[Tables | None]:
        """Per layer the model's float32 cos and sin, each ``(num_tokens, rotary_dim)``, for positions ``(num_tokens,)``
        int64, at least one; None for layers without RoPE. Layers of the same kind share one pair of tensors."""
        by_kind = {kind: self._of_kind(kind, positions) for kind in set(self.kinds) if kind is not None}
        shared: dict[tuple[str, torch.device], Tables] = {}
        tables: list[Tables | None] = []
        for kind, device in zip(self.kinds, self._devices, strict=True):
            if kind is not None and (kind, device) not in shared:
                shared[kind, device] = by_kind[kind][0].to(device), by_kind[kind][1].to(device)
            tables.append(None if kind is None else shared[kind, device])
        return tables

    def embeddings(self, tables: Sequence[Tables | None]) -> list[Tables | None]:
        """What the module would give the model's layers, whose rows have these tables."""

        def as_model(table: torch.Tensor) -> torch.Tensor:
            width = table.shape[1] // 2 if self._architecture.half_tables else table.shape[1]
            return table[None, :, :width].to(self._dtype)

        return changed(tables, as_model)

    @cached_property
    def _dtype(self) -> torch.dtype:
        """Dtype in which the module gives tables to the layers. Not all cast them to the model's."""
        kind = next(kind for kind in self.kinds if kind is not None)
        return self._of_kind(kind, torch.zeros(1, dtype=torch.int64), self._model.dtype)[0].dtype

    def _of_kind(self, kind: str, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> Tables:
        check_process(self._name, self._process)
        rotary = self._model.base_model.rotary_emb
        device = next(rotary.buffers()).device
        probe = torch.empty(1, dtype=dtype, device=device)
        positions = positions.to(device)[None]
        with self._lock:
            cos, sin = rotary(probe, positions, kind) if kind else rotary(probe, positions)
        if self._architecture.half_tables:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return cos[0], sin[0]
