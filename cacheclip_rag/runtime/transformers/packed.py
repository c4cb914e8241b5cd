"""Linear layers whose weights lie in the blocked order that oneDNN multiplies fastest, on x86 processors.

With weights row by row, as checkpoints have them, oneDNN reorders them in every product. For the one row of a decoded
token, this takes longer than to read them. The products of packed weights are the same, bit for bit.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn

from ...base.machine import computes_bfloat16

__all__ = ["pack_weights"]

_TRIM_BYTES = 2**28
"""Packed bytes after which freed memory is given back to the system."""


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of a loaded model's linear layers where that is faster: bfloat16 on an x86 processor that
    multiplies it. The weights as they were are dropped, except those that embeddings share. A shared weight is packed
    at its layer's first pass, because a model that only scores chunks never uses it.

    No gradient goes through packed layers.
    """
    if not (computes_bfloat16() and platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()):
        return
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    num_bytes = 0
    for module in model.modules():
        # neither subclasses, which multiply otherwise, nor layers whose weights accelerate moves
        if type(module) is not nn.Linear or hasattr(module, "_hf_hook") or not _packs(module.weight):
            continue
        is_shared = users[id(module.weight)] > 1
        module.__class__ = PackedLinear
        if not is_shared:
            num_bytes += PackedLinear.packed(module).nbytes  # type: ignore[arg-type]
        if num_bytes >= _TRIM_BYTES:
            num_bytes = 0
            _trim()
    if num_bytes:
        _trim()


def _packs(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _trim() -> None:
    """Give freed memory back to the system. Transformers loads weights in threads, whose freed memory no other thread
    uses."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class PackedLinear(nn.Linear):
    """A linear layer that packs its weight at its first pass, if it is not packed yet."""

    def packed(self) -> Any:
        """The packed weight."""
        if not self.weight.is_mkldnn:
            # two threads may both do it: their results are equal
            weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
            self.weight = nn.Parameter(weight, requires_grad=False)
        return self.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed(), self.bias, "none", [], "")
        return found
