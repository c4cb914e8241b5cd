"""What transformers made of a checkpoint's files: whether every tensor is there, and where the weights lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from ...base.errors import ModelError

_NAMES_SHOWN = 3


def check_tensors(model: Any, found: Mapping[str, Any], name: str) -> None:
    """Raise ModelError unless a loaded model has the weights of its checkpoint and no others. Transformers fills what
    is missing with random numbers, other ones in each process, and leaves out what it does not know.

    Args:
        found: the loading info of ``from_pretrained``.
    """
    mismatched = [each if isinstance(each, str) else each[0] for each in found["mismatched_keys"]]
    needed = _needed(model, found["unexpected_keys"])
    for kind, tensors in (("lacks", found["missing_keys"]), ("has other shapes of", mismatched), ("also has", needed)):
        if tensors:
            raise ModelError(
                f"expected the tensors of {type(model).__name__} in the weights of model {name!r}, which {kind} "
                f"{_listed(tensors)}. Fetch the model again, or use the version of transformers that it was saved with."
            )


def _needed(model: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Tensors that belong to a part of the model. Others are heads, towers or layers that it does not have."""
    modules = dict(model.named_modules())
    outer = {id(model), id(getattr(model, "base_model", model))}

    def is_needed(tensor: str) -> bool:
        owner = tensor
        while owner:
            owner = owner.rpartition(".")[0]
            if owner in modules:
                return id(modules[owner]) not in outer and not isinstance(modules[owner], nn.ModuleList)
        return False

    return [tensor for tensor in unexpected if is_needed(tensor)]


def check_layers(model: nn.Module, tensors: Iterable[str], name: str) -> None:
    """Raise ModelError if a checkpoint has a part of some layers and lacks it in others. For weights that another
    process loads, perhaps quantised: their tensors have other names, but lie under the names of the model's parts.

    Args:
        model: the model without weights.
        tensors: names of the checkpoint's tensors.
    """
    present = {part for tensor in tensors for part in _above(tensor)}
    layers = next(path for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    parts: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if path.startswith(f"{layers}.") and any(True for _ in module.parameters(recurse=False)):
            parts.setdefault(path.removeprefix(f"{layers}.").partition(".")[2], []).append(path)
    missing = [
        path
        for paths in parts.values()
        if any(path in present for path in paths)  # else the class has another name for it than the checkpoint
        for path in paths
        if path not in present
    ]
    if missing:
        raise ModelError(
            f"expected the same tensors in all layers of model {name!r}, got none of {_listed(missing)}. Fetch the "
            "model again."
        )


def _above(tensor: str) -> Iterable[str]:
    """The paths of the modules that a tensor is part of."""
    while tensor := tensor.rpartition(".")[0]:
        yield tensor


def _listed(tensors: Iterable[str]) -> str:
    names = sorted(tensors)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def copy_mapped(model: nn.Module) -> None:
    """Copy weights out of mapped files. A mapped weight changes with its file, and a file that gets shorter ends the
    process."""
    for weight in chain(model.parameters(), model.buffers()):
        if weight.device.type == "cpu" and not weight.is_mkldnn:
            weight.data = weight.data.clone()
    for weights in {id(each): each for each in _kept_for_a_device(model)}.values():
        weights.update({name: weight.clone() for name, weight in weights.items() if weight.device.type == "cpu"})


def _kept_for_a_device(model: nn.Module) -> Iterable[MutableMapping[str, torch.Tensor]]:
    """Weights that accelerate keeps on the processor, because a device map's devices are full."""
    for module in model.modules():
        kept = getattr(getattr(getattr(module, "_hf_hook", None), "weights_map", None), "dataset", None)
        found = getattr(kept, "state_dict", kept)
        if isinstance(found, MutableMapping):
            yield found
