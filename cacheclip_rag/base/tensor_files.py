"""Small files of tensors with a header, written atomically: head sets, results of training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .paths import atomic_path

READ_ERRORS = (OSError, SafetensorError, ValueError, KeyError, TypeError, AssertionError)
"""What reading a damaged file, and taking its contents apart, may raise."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, str]) -> None:
    """Write one safetensors file atomically."""
    with atomic_path(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=dict(header))


def read_tensors(path: Path, *, version: int | None = None) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and header of a file, whose ``format`` must be ``version`` if that is given. Raises
    :data:`READ_ERRORS`."""
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata() or {})
        if version is not None and header.get("format") != str(version):
            raise ValueError(f"its format is {header.get('format')}, this version reads {version}")
        # copies: tensors in a mapped file would change with it
        return {name: file.get_tensor(name).clone() for name in file.keys()}, header  # noqa: SIM118 (not a dict)
