"""Models: finding, fetching and loading weights.

``loaders`` says what is asked of a model by its name, ``checkpoints`` answers for transformers; ``load`` makes
runtimes, one per model and process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from ..runtime.base import weights_digest
    from .checkpoints import TransformersLoader, quantization_of
    from .context import is_here, known_context, knows_tools
    from .devices import DEVICE_MAPS, check_device, choose_device
    from .fingerprint import FileState, file_digest, states_of
    from .load import concrete, load_model, loader_of, register_runtime, resolve
    from .loaders import uses_tools
    from .memory import check_room, free_bytes
    from .modules import load_module

__all__ = [
    "DEVICE_MAPS",
    "FileState",
    "TransformersLoader",
    "check_device",
    "check_room",
    "choose_device",
    "concrete",
    "file_digest",
    "free_bytes",
    "is_here",
    "known_context",
    "knows_tools",
    "load_model",
    "load_module",
    "loader_of",
    "quantization_of",
    "register_runtime",
    "resolve",
    "states_of",
    "uses_tools",
    "weights_digest",
]

__getattr__ = late_names(
    __name__,
    {
        "DEVICE_MAPS": "devices",
        "FileState": "fingerprint",
        "TransformersLoader": "checkpoints",
        "check_device": "devices",
        "check_room": "memory",
        "choose_device": "devices",
        "concrete": "load",
        "file_digest": "fingerprint",
        "free_bytes": "memory",
        "is_here": "context",
        "known_context": "context",
        "knows_tools": "context",
        "load_model": "load",
        "load_module": "modules",
        "loader_of": "load",
        "quantization_of": "checkpoints",
        "register_runtime": "load",
        "resolve": "load",
        "states_of": "fingerprint",
        "uses_tools": "loaders",
        "weights_digest": "..runtime.base",
    },
)
