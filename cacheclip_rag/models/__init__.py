"""Models: finding, fetching and loading weights.

``packaged`` fetches models from the package index; ``load`` makes runtimes, one per model and process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from ..runtime.base import weights_digest
    from .context import knows_tools
    from .load import concrete, load_model, register_runtime, resolve
    from .packaged.catalogue import PACKAGED_MODELS, packaged_name
    from .packaged.pull import pull_gguf

__all__ = [
    "PACKAGED_MODELS",
    "concrete",
    "knows_tools",
    "load_model",
    "packaged_name",
    "pull_gguf",
    "register_runtime",
    "resolve",
    "weights_digest",
]

__getattr__ = late_names(
    __name__,
    {
        "PACKAGED_MODELS": "packaged.catalogue",
        "concrete": "load",
        "knows_tools": "context",
        "load_model": "load",
        "packaged_name": "packaged.catalogue",
        "pull_gguf": "packaged.pull",
        "register_runtime": "load",
        "resolve": "load",
        "weights_digest": "..runtime.base",
    },
)
