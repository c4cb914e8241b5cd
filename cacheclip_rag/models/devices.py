"""Devices that torch can put a model on."""

from __future__ import annotations

from ..base.errors import ConfigurationError, MissingExtraError, first_line

DEVICE_MAPS = ("balanced", "balanced_low_0", "sequential")
"""Device maps: accelerate spreads the layers over all devices."""


def choose_device(device: str) -> str:
    """``device``; for ``auto``, the best that this torch can use."""
    import torch

    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() and _works("mps") else "cpu"


def _works(device: str) -> bool:
    """Whether a device computes attention as it is done here."""
    import torch

    try:
        rows = torch.ones(1, 2, 4, 8, device=device, dtype=torch.bfloat16)
        return bool(torch.nn.functional.scaled_dot_product_attention(rows, rows, rows).isfinite().all())
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def check_device(device: str) -> None:
    """Raise ConfigurationError unless torch can put a model there."""
    import torch

    if device in DEVICE_MAPS:
        try:
            import accelerate  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("accelerate (for a device map)", "gguf") from error
        return
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"device {device!r} is not one this torch can use ({first_line(error)}). "
            f"Use 'auto', 'cpu', 'cuda' where there is a GPU, or one of {', '.join(DEVICE_MAPS)} to spread the layers."
        ) from error


def has_device(device: str) -> bool:
    """Whether this torch can put a model there."""
    try:
        check_device(device)
    except (ConfigurationError, MissingExtraError):
        return False
    return True
