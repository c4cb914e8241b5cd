"""What transformers made of a checkpoint's files: whether every tensor is there, and where the weights lie."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.errors import ModelError

_NAMES_SHOWN = 3


def check_tensors(model: Any, info: Mapping[str, Any], name: str) -> None:
    """Raise ModelError unless a loaded model has the weights of its checkpoint and no others. Transformers fills what
    is missing with random numbers, other ones in each process, and leaves out what it does not know.

    Args:
        info: the loading info of ``from_pretrained``.
    """
    mismatched = [each if isinstance(each, str) else each[0] for each in info["mismatched_keys"]]
    needed = _needed(model, info["unexpected_keys"])
    for kind, tensors in (("lacks", info["missing_keys"]), ("has other shapes of", mismatched), ("also has", needed)):
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


def check_names(model: nn.Module, tensors: Mapping[str, str], name: str) -> None:
    """Raise ModelError if a checkpoint lacks tensors, as far as their names tell. For weights that another process
    loads, perhaps quantised: their tensors have other names, but lie under the names of the model's parts.

    Args:
        model: the model without weights.
        tensors: dtype of each tensor of the checkpoint, by name.
    """
    config: Any = model.config
    layers = next(path for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    owners = [path for path, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    present = {part for tensor in tensors for part in _above(tensor)}
    known = {_in_layer(part, layers) for part in present}
    missing = [
        path
        for path in owners
        if path not in present
        # a class may have another name for a part than the checkpoint: then that of what it is part of differs too
        and _in_layer(path, layers).rpartition(".")[0] in known
        and not (path == "lm_head" and config.tie_word_embeddings)
    ]
    missing = missing or [*_incomplete(tensors, layers)] or [*_experts(tensors, config)]
    if missing:
        raise ModelError(
            f"expected all tensors of {type(model).__name__} in the weights of model {name!r}, which lack "
            f"{_listed(missing)}. Fetch the model again."
        )


def _in_layer(path: str, layers: str) -> str:
    """A path as it is called in every layer; outside the layers, the path."""
    return re.sub(rf"^{re.escape(layers)}\.\d+\.", f"{layers}.N.", path)


def _incomplete(tensors: Mapping[str, str], layers: str) -> Iterable[str]:
    """Parts of layers that lack one of the tensors which the same part has in other layers. A part may be quantised in
    some layers only."""
    kinds: dict[str, dict[str, set[str]]] = {}
    for tensor in tensors:
        path, _, kind = tensor.rpartition(".")
        if path.startswith(f"{layers}."):
            kinds.setdefault(_in_layer(path, layers), {}).setdefault(path, set()).add(kind)
    for parts in kinds.values():
        quantised = {path for path, own in parts.items() if not _is_dense(path, own, tensors)}
        for alike in (quantised, parts.keys() - quantised):
            whole = set().union(*(parts[path] for path in alike))
            yield from (f"{path}.{min(whole - parts[path])}" for path in alike if parts[path] != whole)


def _is_dense(path: str, kinds: set[str], tensors: Mapping[str, str]) -> bool:
    return kinds <= {"weight", "bias"} and tensors.get(f"{path}.weight", "F32") in ("F64", "F32", "F16", "BF16")


def _experts(tensors: Iterable[str], config: Any) -> Iterable[str]:
    """Experts that are not there, where each has tensors of its own."""
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    numbers_of: dict[str, set[int]] = {}
    for tensor in tensors:
        if each := re.match(r"(.*\.experts)\.(\d+)\.(.*)", tensor):
            numbers_of.setdefault(f"{each[1]}.N.{each[3]}", set()).add(int(each[2]))
    for place, numbers in numbers_of.items():
        yield from (place.replace(".N.", f".{number}.") for number in {*range(count)} - numbers)


def _above(tensor: str) -> Iterable[str]:
    """The paths of the modules that a tensor is part of, and the empty one."""
    while tensor:
        tensor = tensor.rpartition(".")[0]
        yield tensor


def _listed(tensors: Iterable[str]) -> str:
    names = sorted(tensors)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def copy_mapped(model: nn.Module) -> None:
    """Copy weights out of mapped files. A mapped weight changes with its file, and a file that gets shorter ends the
    process."""
    drop = drops_mapped()
    for weight in chain(model.parameters(), model.buffers()):
        if weight.device.type == "cpu" and not weight.is_mkldnn:
            weight.data, mapped = weight.data.clone(), weight.data
            drop(mapped)
    for weights in {id(each): each for each in _kept_for_a_device(model)}.values():
        weights.update({name: weight.clone() for name, weight in weights.items() if weight.device.type == "cpu"})


def drops_mapped() -> Callable[[torch.Tensor], None]:
    """What gives the memory of a weight back that was copied, if it is a part of a mapped file: the file stays mapped
    until the last one is copied, so that memory would hold all weights twice. Whoever reads it again reads the file."""
    try:
        maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:  # another system
        return lambda weight: None
    files = [[int(end, 16) for end in each[0].split("-")] for each in maps if each[-1].endswith(".safetensors")]

    def drop(weight: torch.Tensor) -> None:
        begin, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # its neighbours have the rest of their pages
        size = end - end % mmap.PAGESIZE - first
        if size > 0 and any(start <= begin and end <= stop for start, stop in files):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)

    return drop


def _kept_for_a_device(model: nn.Module) -> Iterable[MutableMapping[str, torch.Tensor]]:
    """Weights that accelerate keeps on the processor, because a device map's devices are full."""
    for module in model.modules():
        kept = getattr(getattr(getattr(module, "_hf_hook", None), "weights_map", None), "dataset", None)
        weights = getattr(kept, "state_dict", kept)
        if isinstance(weights, MutableMapping):
            yield weights
