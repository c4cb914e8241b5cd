"""Finds llama-cpp-python, whose low-level calls are llama.cpp's own, and turns llama.cpp's log into Python's."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from functools import lru_cache
from typing import Any

from cacheclip_rag import MissingExtraError

logger = logging.getLogger(__name__)

TRIED_VERSIONS = ("0.3.36",)
"""Versions of llama-cpp-python with which the tests passed."""
_LEVELS = {2: logging.INFO, 3: logging.WARNING}
"""By llama.cpp's level: it warns of what is no fault here, such as a context that is not the model's. Others: debug."""

_ERROR = 4
errors: deque[str] = deque(maxlen=16)
"""What llama.cpp has called an error, the latest last. Its calls tell no reason."""


@lru_cache(maxsize=1)
def library() -> Any:
    """The module of llama.cpp's calls.

    Raises:
        MissingExtraError: llama-cpp-python is not installed, or lacks calls that are needed.
    """
    try:
        import llama_cpp.llama_cpp as found
    except ImportError as error:
        what = "llama-cpp-python (which runs GGUF files; it builds in about ten minutes)"
        raise MissingExtraError(what, "llama-cpp") from error
    if not hasattr(found, "LLAMA_STATE_SEQ_VERSION") or not hasattr(found, "llama_memory_seq_add"):
        raise MissingExtraError(f"llama-cpp-python {TRIED_VERSIONS[0]} or newer (the one here is older)", "llama-cpp")
    import llama_cpp

    if llama_cpp.__version__ not in TRIED_VERSIONS:
        logger.warning(
            "llama-cpp-python %s was never tried, only %s. Run cacheclip certify before you trust its answers.",
            llama_cpp.__version__,
            ", ".join(TRIED_VERSIONS),
        )
    found.llama_log_set(_log_callback(found), ctypes.c_void_p(0))
    found.llama_backend_init()
    return found


def library_version() -> str:
    """Version of llama-cpp-python, and that of the states which llama.cpp writes: KV of another one is not read."""
    import llama_cpp

    return f"{llama_cpp.__version__}-{library().LLAMA_STATE_SEQ_VERSION}"


@lru_cache(maxsize=1)
def _log_callback(found: Any) -> Any:
    """Called by llama.cpp with each line; kept for the life of the process."""

    @found.llama_log_callback  # type: ignore[untyped-decorator]
    def log(level: int, text: bytes, _: object) -> None:
        line = text.decode(errors="replace").rstrip()
        if level == _ERROR:
            errors.append(line.partition(": ")[2].removeprefix("error loading model: "))
        logger.log(_LEVELS.get(level, logging.DEBUG), "%s", line)

    return log
