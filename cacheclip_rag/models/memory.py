"""Checks before loading whether a model fits in memory, because the system kills processes without a message."""

from __future__ import annotations

import json
import struct
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..base.errors import ModelError

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)
"""Files of cgroups (version 2, version 1) with limit, usage, and statistics of the usage."""


def check_fits(folder: Path, name: str, dtype: torch.dtype, device: str, num_weights: int | None = None) -> None:
    """Raise ModelError if the weights in ``folder`` need more memory than is free on ``device``.

    Only weights are counted, because the memory for caches and activations depends on the prompt. Nothing is checked if
    free memory is unknown, or for a device map. ``num_weights``: how many there are, if quantised ones become dense.
    """
    smaller = "" if dtype.itemsize < 4 else "dtype='bfloat16', "
    needed = weight_bytes(folder, dtype) if num_weights is None else num_weights * dtype.itemsize
    check_room(needed, name, device, f" as {str(dtype).removeprefix('torch.')}", smaller)


def check_room(needed: int, name: str, device: str, form: str = "", smaller: str = "") -> None:
    """Raise ModelError if ``needed`` bytes of weights are more than is free on ``device``. For the message: the
    ``form`` in which they are loaded, and what would make them ``smaller``."""
    free = free_bytes(device)
    if free is None or needed <= free:
        return
    raise ModelError(
        f"model {name!r} needs {needed / 2**30:.1f} GiB on {device!r}{form}, and only {free / 2**30:.1f} GiB are free "
        f"there. Use {smaller}a smaller model, or another device for one of the models."
    )


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of a checkpoint's weights in ``dtype``, from the headers of its files; 0 if they cannot be read (loading
    then reports the reason)."""
    return sum(
        prod(each["shape"]) * dtype.itemsize
        if each["dtype"] in ("F64", "F32", "F16", "BF16")  # others are quantised
        else each["data_offsets"][1] - each["data_offsets"][0]
        for each in _tensors(folder)
    )


def weights_dtype(folder: Path) -> str:
    """Dtype of most weights of a checkpoint; ``float32`` for others than 16 bits, and for headers that cannot be
    read."""
    counts = Counter[str]()
    for each in _tensors(folder):
        counts[each["dtype"]] += prod(each["shape"])
    most = max(("F32", "BF16", "F16"), key=counts.__getitem__)
    return {"BF16": "bfloat16", "F16": "float16"}.get(most, "float32")


def tensor_dtypes(folder: Path) -> dict[str, str]:
    """Dtypes of a checkpoint's tensors by name, as safetensors call them; none if a header cannot be read."""
    return {each["name"]: each["dtype"] for each in _tensors(folder)}


def _tensors(folder: Path) -> list[dict[str, Any]]:
    """Names and headers of all tensors of a checkpoint; none if one cannot be read."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            single = folder / "model.safetensors"
            names = [single.name] if single.is_file() else sorted(file.name for file in folder.glob("*.safetensors"))
        tensors = [each for name in names for each in _header(folder / name)]
        # what the callers read
        assert all(prod(each["shape"]) >= 0 and each["dtype"] + "" and each["data_offsets"][1] >= 0 for each in tensors)
        return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError, struct.error):
        return []


def _header(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError("no safetensors file")
        header = json.loads(file.read(length))
    return [{**each, "name": key} for key, each in header.items() if key != "__metadata__"]


def free_bytes(device: str) -> int | None:
    kind = device.partition(":")[0]
    if kind == "cuda" and torch.cuda.is_available():  # llama.cpp may know a GPU that torch does not
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    if kind != "cpu":
        return None
    known = [each for each in (_free_in_system(), _free_in_cgroup()) if each is not None]
    return min(known, default=None)


def _free_in_system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)}
        return sizes["MemAvailable"] + sizes.get("SwapFree", 0)
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _free_in_cgroup() -> int | None:
    """Free memory within a container's limit, in bytes. File cache counts as free."""
    for limit, used, parts in _CGROUPS:
        try:
            most = int(Path(limit).read_text())  # "max": no limit
            stat = dict(line.split() for line in Path(parts).read_text().splitlines())
            cached = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
            return max(0, most - int(Path(used).read_text()) + cached)
        except (OSError, ValueError):
            continue
    return None
