"""Linear layers whose weights lie in the blocked order that oneDNN multiplies fastest, on x86 processors.

In bfloat16, torch multiplies with oneDNN, which reorders weights that lie row by row, as in checkpoints, in every
product. For the one row of a decoded token, this takes longer than to read them. The products of packed weights are the
same, bit for bit.

In float32, torch multiplies with MKL, which uses half of what AMD's processors have. oneDNN's sums are in another
order: they differ by the rounding of float32.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...base.machine import computes_bfloat16, processor_name
from .weight_files import drops_mapped

_LEAST_NUMBERS = 2**18
"""Of a weight in float32: for smaller ones, MKL takes less time."""
_TRIM_BYTES = 2**28
"""Packed bytes after which freed memory is given back to the system."""


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of a loaded model's linear layers where that is faster: bfloat16 on an x86 processor that
    multiplies it, and large weights in float32 on AMD's. The weights as they were are dropped.

    Weights that embeddings share stay there. A second copy is made in bfloat16 only, at the layer's first pass, because
    a model that only scores chunks never uses it.

    No gradient goes through packed layers.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return
    drop = drops_mapped()
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    num_bytes = 0
    for module in model.modules():
        # neither subclasses, which multiply otherwise, nor layers whose weights accelerate moves or torchao quantised
        if type(module) is not nn.Linear or hasattr(module, "_hf_hook") or type(module.weight) is not nn.Parameter:
            continue
        if not _gains(module.weight):
            continue
        weight, is_shared = module.weight, users[id(module.weight)] > 1
        module.__class__ = PackedLinear
        if not is_shared:
            num_bytes += PackedLinear.pack(module).nbytes  # type: ignore[arg-type]
            drop(weight)
        if num_bytes >= _TRIM_BYTES:
            num_bytes = 0
            _trim()
    if num_bytes:
        _trim()


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the weights lie as they did, whatever passes have packed meanwhile."""
    weights = [(module, module.weight) for module in model.modules() if isinstance(module, PackedLinear)]
    try:
        yield
    finally:
        for module, weight in weights:
            module.weight = weight


def _gains(weight: torch.Tensor) -> bool:
    if weight.dtype == torch.float32:
        gains = weight.numel() >= _LEAST_NUMBERS and "AMD" in processor_name()
    else:
        gains = weight.dtype == torch.bfloat16 and computes_bfloat16()
    return gains and weight.device.type == "cpu"


def _trim() -> None:
    """Give freed memory back to the system. Transformers loads weights in threads, whose freed memory no other thread
    uses."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class PackedLinear(nn.Linear):
    """A linear layer that multiplies with oneDNN."""

    def pack(self) -> Any:
        """Replace the weight by a packed one, which is returned. Two threads may do it at once: theirs are equal."""
        weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        self.weight = nn.Parameter(weight, requires_grad=False)
        return weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if weight.dtype == torch.bfloat16 and not weight.is_mkldnn:
            weight = self.pack()
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, self.bias, "none", [], "")
        return product
