"""Rotary position embedding as a reversible map: stored keys have no position, assembled keys are rotated.

Source: RoFormer (arXiv:2104.09864). All computation is in float32, with one cast at the end. Tables narrower than the
head rotate a part of its dimensions only (partial rotary). Layers without RoPE have no tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from ...store import upload
from .text import check_process


class RotaryForm(NamedTuple):
    """Which dimensions of a key turn, and which of them together."""

    in_pairs: bool = False
    """True: neighbours (2i and 2i + 1) turn together; False: i and i + half."""
    at_end: bool = False
    """True: the head's last dimensions turn; False: its first ones. They may be all."""


class Tables(NamedTuple):
    """cos and sin, each ``(num_tokens, rotary_dim)`` float32, from the model's own rotary module, whose two halves are
    equal. They include the attention scaling of YaRN and longrope."""

    cos: torch.Tensor
    sin: torch.Tensor
    form: RotaryForm = RotaryForm()
    square: torch.Tensor | None = None
    """The square of the attention scaling, 1 without scaling, if it is known: ``cos ** 2 + sin ** 2``."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Tables:
        return Tables(change(self.cos), change(self.sin), self.form)


class Reading(NamedTuple):
    """Where a layer's tables come from."""

    module: int = 0
    """Number of the rotary module among those of the decoder."""
    kind: str = ""
    """Layer type that the module is asked for; empty: it takes none."""
    columns: str = "halves"
    """What the module's columns are: ``halves`` (each pair twice, one half after the other), ``pairs`` (each pair
    twice, side by side), ``single`` (each pair once) or ``complex`` (each pair once, as a complex number)."""
    form: RotaryForm = RotaryForm()
    is_backward: bool = False
    """Whether keys turn the other way (nanochat)."""

    def read(self, made: Any) -> Tables:
        """Tables of what the module returned."""
        if self.columns == "complex":
            cos, sin = made.real.flatten(0, -2), made.imag.flatten(0, -2)
        else:
            cos, sin = (table.flatten(0, -2) for table in made)
        if self.columns == "pairs":
            cos, sin = cos[:, ::2], sin[:, ::2]
        if self.columns != "halves":
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return Tables(cos, -sin if self.is_backward else sin, self.form)

    def written(self, table: torch.Tensor) -> torch.Tensor:
        """A table as the module would return it: the inverse of :meth:`read`."""
        half = table[:, : table.shape[1] // 2]
        return {"halves": table, "pairs": half.repeat_interleave(2, dim=1)}.get(self.columns, half)[None]


_BLOCK = 1 << 19
"""Numbers that are rotated together in host memory. Intermediate results of many more would each be new memory, whose
page faults take several times as long as the rotation."""


def changed(tables: Sequence[Tables | None], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Tables | None]:
    """The tables of all layers with ``change`` made to cos and sin. Layers that share tables share the result."""
    made: dict[int, Tables] = {}
    for each in tables:
        if each is not None and id(each) not in made:
            made[id(each)] = each.map(change)
    return [None if each is None else made[id(each)] for each in tables]


def rotate(keys: torch.Tensor, tables: Tables | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rotate position-free keys, ``(..., num_tokens, head_dim)`` of any float dtype, to the positions of the tables
    (None for a layer without rotary embedding). Returns keys after RoPE, computed in float32."""
    if tables is None:
        return keys.to(dtype)
    cos, sin, form, _ = tables
    if form != RotaryForm():
        return _to_form(rotate(_to_halves(keys, tables), Tables(cos, sin)), tables).to(dtype)
    step = max(1, _BLOCK * len(cos) // max(1, keys.numel()))
    if len(cos) > step and keys.device.type == "cpu":
        rotated = torch.empty(keys.shape, dtype=dtype)
        parts = (each.split(step, -2) for each in (rotated, keys, cos, sin))
        for target, some, *of_some in zip(*parts, strict=True):
            target.copy_(rotate(some, Tables(*of_some)))
        return rotated
    keys = keys.float()
    width, half = cos.shape[-1], cos.shape[-1] // 2
    # bit-identical to x cos + rotate_half(x) sin, without the copy that rotate_half makes
    turned = keys[..., :width] * cos
    turned[..., :half].sub_(keys[..., half:width] * sin[..., :half])  # -= would copy the half onto itself as well
    turned[..., half:].add_(keys[..., :half] * sin[..., half:])
    return (turned if width == keys.shape[-1] else torch.cat((turned, keys[..., width:]), dim=-1)).to(dtype)


def unrotate(keys: torch.Tensor, tables: Tables | None) -> torch.Tensor:
    """Inverse of :func:`rotate`: float32 keys before RoPE."""
    keys = keys.float()
    if tables is None:
        return keys
    cos, sin, form, square = tables
    if form != RotaryForm():
        return _to_form(unrotate(_to_halves(keys, tables), Tables(cos, sin)), tables)
    width, half = cos.shape[-1], cos.shape[-1] // 2
    plain = keys[..., :width] * cos
    plain[..., :half].add_(keys[..., half:width] * sin[..., :half])
    plain[..., half:].sub_(keys[..., :half] * sin[..., half:])
    plain.div_(cos.square() + sin.square() if square is None else square)
    return plain if width == keys.shape[-1] else torch.cat((plain, keys[..., width:]), dim=-1)


def _to_halves(keys: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Keys of another form with the dimensions that turn first, in halves."""
    width = tables.cos.shape[-1]
    first = keys.shape[-1] - width if tables.form.at_end else 0
    turned = keys[..., first : first + width]
    if tables.form.in_pairs:
        turned = torch.cat((turned[..., ::2], turned[..., 1::2]), dim=-1)
    return torch.cat((turned, keys[..., :first], keys[..., first + width :]), dim=-1)


def _to_form(keys: torch.Tensor, tables: Tables) -> torch.Tensor:
    """The inverse of :func:`_to_halves`."""
    width = tables.cos.shape[-1]
    turned, others = keys[..., :width], keys[..., width:]
    if tables.form.in_pairs:
        turned = torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((others, turned) if tables.form.at_end else (turned, others), dim=-1)


class ModelRotary:
    """The rotary modules of one model, which make its tables."""

    hands_tables = True
    """Whether layers may be given tables in the place of those that their model makes (:meth:`embeddings`)."""

    def __init__(
        self,
        modules: Sequence[Any],
        readings: Sequence[Reading | None],
        dtype: torch.dtype,
        name: str,
        devices: Sequence[torch.device],
        lock: AbstractContextManager[Any],
    ) -> None:
        """``readings`` and ``devices``: one per layer; None without RoPE. ``dtype``: the model's. ``lock`` is held
        while a module runs."""
        self._modules, self._dtype = modules, dtype
        self._name, self._devices, self._lock = name, devices, lock
        self._process = os.getpid()
        self.readings = list(readings)

    def tables(self, positions: torch.Tensor) -> list[Tables | None]:
        """Per layer the model's float32 cos and sin, each ``(num_tokens, rotary_dim)``, for positions ``(num_tokens,)``
        int64, at least one; None for layers without RoPE. Layers of the same kind share one pair of tensors."""
        made = {each: each.read(self._made(each, positions)) for each in set(self.readings) if each is not None}
        shared: dict[tuple[Reading, torch.device], Tables] = {}
        tables: list[Tables | None] = []
        for reading, device in zip(self.readings, self._devices, strict=True):
            if reading is None:
                tables.append(None)
                continue
            if (reading, device) not in shared:
                shared[reading, device] = made[reading].map(partial(torch.Tensor.to, device=device))
            tables.append(shared[reading, device])
        return tables

    def embeddings(self, tables: Sequence[Tables | None]) -> list[Any]:
        """What the modules would give the model's layers, whose rows have these tables."""
        written: dict[tuple[int, Reading], tuple[torch.Tensor, ...]] = {}
        for reading, each in zip(self.readings, tables, strict=True):
            if reading is not None and each is not None and (id(each), reading) not in written:
                written[id(each), reading] = tuple(reading.written(table).to(self._given) for table in each[:2])
        some = next(iter(written.values()), None)  # layers without RoPE may want some, to leave them alone
        pairs = zip(self.readings, tables, strict=True)
        return [some if reading is None else written[id(each), reading] for reading, each in pairs]

    def writes_what_is_made(self, positions: torch.Tensor) -> bool:
        """Whether :meth:`embeddings` are what the modules give the layers, bit for bit."""
        written = self.embeddings(self.tables(positions))
        pairs = {each: own for each, own in zip(self.readings, written, strict=True) if each is not None}
        made = ((self._made(reading, positions, self._dtype), own) for reading, own in pairs.items())
        return all(
            isinstance(one, tuple) and all(map(torch.equal, one, (table.to(one[0].device) for table in own)))
            for one, own in made
        )

    @cached_property
    def _given(self) -> torch.dtype:
        """Dtype in which the modules give tables to the layers. Not all cast them to the model's."""
        reading = next(reading for reading in self.readings if reading is not None)
        dtype: torch.dtype = self._made(reading, torch.zeros(1, dtype=torch.int64), self._dtype)[0].dtype
        return dtype

    def _made(self, reading: Reading, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
        check_process(self._name, self._process)
        with self._lock:
            return made_tables(self._modules[reading.module], reading.kind, positions, dtype)


def made_tables(module: Any, kind: str, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """What a rotary module returns for ``(num_tokens,)`` positions. ``dtype``: of the hidden states that it is asked
    for."""
    device = next(module.buffers()).device
    states, positions = torch.empty(1, dtype=dtype, device=device), upload(positions, device)[None]
    return module(states, positions, kind) if kind else module(states, positions)
