"""CacheClip for retrieval-augmented generation: the first token several times sooner, from precomputed chunk KV.

Importing this package loads neither torch nor transformers; the names below load what they need at first use.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import CacheClipEngine, get_engine
    from .errors import CacheClipError
    from .prompt.segments import Chunk, Fresh
    from .sampling import SamplingParams
    from .types import Answer, Event, FusionStats, Plan

__version__ = "0.1.0"

# Torch's threads (libgomp's, on Linux) spin for milliseconds after every operation, in case another follows. Where
# other programs use the same cores, a spinning thread takes the time of one that still computes. A shorter wait costs
# nothing measurable on idle cores (benchmarks/contention.py). libgomp reads the setting when torch is first imported.
if "torch" not in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"

__all__ = [
    "Answer",
    "CacheClipEngine",
    "CacheClipError",
    "Chunk",
    "EngineConfig",
    "Event",
    "Fresh",
    "FusionStats",
    "Plan",
    "SamplingParams",
    "__version__",
    "get_engine",
]

_HOMES = {
    "Answer": "types",
    "CacheClipEngine": "engine",
    "CacheClipError": "errors",
    "Chunk": "prompt.segments",
    "EngineConfig": "config",
    "Event": "types",
    "Fresh": "prompt.segments",
    "FusionStats": "types",
    "Plan": "types",
    "SamplingParams": "sampling",
    "get_engine": "engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
