"""Models: finding, fetching and loading weights.

``loaders`` says what is asked of a model by its name, ``checkpoints`` answers for transformers; ``load`` makes
runtimes, one per model and process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from ..runtime.base import weights_digest
    from .checkpoints import quantization_of
    from .context import is_here, known_context, knows_tools
    from .devices import DEVICE_MAPS, check_device, choose_device
    from .load import concrete, load_model, loader_of, register_runtime, resolve
    from .modules import load_module

__all__ = [
    "DEVICE_MAPS",
    "check_device",
    "choose_device",
    "concrete",
    "is_here",
    "known_context",
    "knows_tools",
    "load_model",
    "load_module",
    "loader_of",
    "quantization_of",
    "register_runtime",
    "resolve",
    "weights_digest",
]

__getattr__ = late_names(
    __name__,
    {
        "DEVICE_MAPS": "devices",
        "check_device": "devices",
        "choose_device": "devices",
        "concrete": "load",
        "is_here": "context",
        "known_context": "context",
        "knows_tools": "context",
        "load_model": "load",
        "load_module": "modules",
        "loader_of": "load",
        "quantization_of": "checkpoints",
        "register_runtime": "load",
        "resolve": "load",
        "weights_digest": "..runtime.base",
    },
)
