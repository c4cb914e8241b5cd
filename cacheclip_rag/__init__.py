"""CacheClip for retrieval-augmented generation: the first token several times sooner, from precomputed chunk KV.

Importing this package loads neither torch nor transformers; the names below load what they need at first use.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from .base.late import late_names
from .base.removed import refuse_removed_modules
from .base.version import __version__

if TYPE_CHECKING:
    from cacheclip_rag.adapters.explain import explain_miss

    from .answering.options import CallOptions
    from .base.errors import (
        CacheClipError,
        CertificateError,
        ConfigurationError,
        DigestMismatchError,
        DocumentError,
        DownloadError,
        EncodingError,
        MissingExtraError,
        ModelError,
        PromptTooLongError,
        ServerError,
        StoreError,
        UnknownModelError,
        UnsupportedModelError,
    )
    from .base.sampling import SamplingParams
    from .config import EngineConfig
    from .engine import CacheClipEngine, WarmUp, get_engine
    from .fusion.answer import Answer, Event, FusionStats, TokenLogprob, Trace
    from .plan.plan import Plan
    from .prompt.segments import Chunk, Fresh, Segment
    from .prompt.tools import ToolCall, call_schema

refuse_removed_modules()

# Torch's threads (libgomp's, on Linux) spin for milliseconds after every operation, in case another follows. Where
# other programs use the same cores, a spinning thread takes the time of one that still computes. A shorter wait costs
# nothing measurable on idle cores (benchmarks/contention.py). libgomp reads the setting when torch is first imported.
if "torch" not in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"

__all__ = [
    "Answer",
    "CacheClipEngine",
    "CacheClipError",
    "CallOptions",
    "CertificateError",
    "Chunk",
    "ConfigurationError",
    "DigestMismatchError",
    "DocumentError",
    "DownloadError",
    "EncodingError",
    "EngineConfig",
    "Event",
    "Fresh",
    "FusionStats",
    "MissingExtraError",
    "ModelError",
    "Plan",
    "PromptTooLongError",
    "SamplingParams",
    "Segment",
    "ServerError",
    "StoreError",
    "TokenLogprob",
    "ToolCall",
    "Trace",
    "UnknownModelError",
    "UnsupportedModelError",
    "WarmUp",
    "__version__",
    "call_schema",
    "explain_miss",
    "get_engine",
]

_HOMES = {
    "Answer": "fusion.answer",
    "CacheClipEngine": "engine",
    "CacheClipError": "base.errors",
    "CallOptions": "answering.options",
    "CertificateError": "base.errors",
    "Chunk": "prompt.segments",
    "ConfigurationError": "base.errors",
    "DigestMismatchError": "base.errors",
    "DocumentError": "base.errors",
    "DownloadError": "base.errors",
    "EncodingError": "base.errors",
    "EngineConfig": "config",
    "Event": "fusion.answer",
    "Fresh": "prompt.segments",
    "FusionStats": "fusion.answer",
    "MissingExtraError": "base.errors",
    "ModelError": "base.errors",
    "Plan": "plan.plan",
    "PromptTooLongError": "base.errors",
    "SamplingParams": "base.sampling",
    "Segment": "prompt.segments",
    "ServerError": "base.errors",
    "StoreError": "base.errors",
    "TokenLogprob": "fusion.answer",
    "ToolCall": "prompt.tools",
    "Trace": "fusion.answer",
    "UnknownModelError": "base.errors",
    "UnsupportedModelError": "base.errors",
    "WarmUp": "engine",
    "call_schema": "prompt.tools",
    "explain_miss": "adapters.explain",
    "get_engine": "engine",
}
__getattr__ = late_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
