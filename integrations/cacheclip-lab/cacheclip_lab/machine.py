"""What computes here, because measured seconds hold for one processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheclip_rag.plugins import processor_name

if TYPE_CHECKING:
    import torch


def unit_name(device: torch.device) -> str:
    """Name of the GPU or the CPU that computes on ``device``."""
    if device.type != "cuda":
        return processor_name()
    import torch

    return torch.cuda.get_device_name(device)
