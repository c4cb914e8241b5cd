"""CacheClip for retrieval-augmented generation: the first token several times sooner, from precomputed chunk KV.

Importing this package loads neither torch nor transformers; the names below load what they need at first use.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from .base.names import late_names, refuse_removed_modules
from .base.version import __version__

if TYPE_CHECKING:
    from .answering.options import CallOptions as CallOptions
    from .base.errors import (
        CacheClipError as CacheClipError,
        CertificateError as CertificateError,
        ConfigurationError as ConfigurationError,
        DigestMismatchError as DigestMismatchError,
        DocumentError as DocumentError,
        DownloadError as DownloadError,
        EncodingError as EncodingError,
        MissingExtraError as MissingExtraError,
        ModelError as ModelError,
        PromptTooLongError as PromptTooLongError,
        ServerError as ServerError,
        StoreError as StoreError,
        UnknownModelError as UnknownModelError,
        UnsupportedModelError as UnsupportedModelError,
    )
    from .base.sampling import SamplingParams as SamplingParams
    from .config import EngineConfig as EngineConfig
    from .engine import CacheClipEngine as CacheClipEngine, WarmUp as WarmUp, get_engine as get_engine
    from .fusion.answer import (
        Answer as Answer,
        Event as Event,
        FusionStats as FusionStats,
        TokenLogprob as TokenLogprob,
        Trace as Trace,
    )
    from .plan.plan import Plan as Plan
    from .prompt.segments import Chunk as Chunk, Fresh as Fresh, Segment as Segment
    from .prompt.tools import ToolCall as ToolCall, call_schema as call_schema

refuse_removed_modules()

# Torch's threads (libgomp's, on Linux) spin for milliseconds after every operation, in case another follows. Where
# other programs use the same cores, a spinning thread takes the time of one that still computes. A shorter wait costs
# nothing measurable on idle cores (benchmarks/contention.py). libgomp reads the setting when torch is first imported.
if "torch" not in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"


__getattr__, _LATE = late_names(
    __name__,
    {
        "answering.options": "CallOptions",
        "base.errors": (
            "CacheClipError CertificateError ConfigurationError DigestMismatchError DocumentError DownloadError "
            "EncodingError MissingExtraError ModelError PromptTooLongError ServerError StoreError "
            "UnknownModelError UnsupportedModelError"
        ),
        "base.sampling": "SamplingParams",
        "config": "EngineConfig",
        "engine": "CacheClipEngine WarmUp get_engine",
        "fusion.answer": "Answer Event FusionStats TokenLogprob Trace",
        "plan.plan": "Plan",
        "prompt.segments": "Chunk Fresh Segment",
        "prompt.tools": "ToolCall call_schema",
    },
)
__all__ = ["__version__", *_LATE]


def __dir__() -> list[str]:
    return sorted(__all__)
