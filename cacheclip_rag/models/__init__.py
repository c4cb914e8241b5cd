"""Models: finding, fetching and loading weights.

``loaders`` says what is asked of a model by its name, ``checkpoints`` answers for transformers; ``load`` makes
runtimes, one per model and process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.names import late_names

if TYPE_CHECKING:
    from ..base.keys import weights_digest as weights_digest
    from .checkpoints import TransformersLoader as TransformersLoader, quantization_of as quantization_of
    from .devices import DEVICE_MAPS as DEVICE_MAPS, check_device as check_device, choose_device as choose_device
    from .fingerprint import FileState as FileState, file_digest as file_digest, states_of as states_of
    from .load import (
        concrete as concrete,
        is_here as is_here,
        known_context as known_context,
        knows_tools as knows_tools,
        load_model as load_model,
        loader_of as loader_of,
        register_runtime as register_runtime,
        resolve as resolve,
        unload_models as unload_models,
    )
    from .loaders import uses_tools as uses_tools
    from .memory import check_room as check_room, free_bytes as free_bytes, tensor_dtypes as tensor_dtypes


__getattr__, __all__ = late_names(
    __name__,
    {
        "..base.keys": "weights_digest",
        "checkpoints": "TransformersLoader quantization_of",
        "devices": "DEVICE_MAPS check_device choose_device",
        "fingerprint": "FileState file_digest states_of",
        "load": (
            "concrete is_here known_context knows_tools load_model loader_of register_runtime resolve unload_models"
        ),
        "loaders": "uses_tools",
        "memory": "check_room free_bytes tensor_dtypes",
    },
)
