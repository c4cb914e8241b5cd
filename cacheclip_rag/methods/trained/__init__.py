"""Methods for checkpoints trained to read chunks separately. With other models their answers are worse."""

from __future__ import annotations

import logging
from functools import cache

from ...errors import ConfigurationError

__all__ = ["check_no_context", "warn_untuned"]

logger = logging.getLogger(__name__)


@cache
def warn_untuned(method: str, how: str) -> None:
    """Warn, once per process, that a method needs a checkpoint trained for it."""
    logger.warning(
        "method %r needs a checkpoint trained %s; other models answer worse with it. Set tuned=True for such a model.",
        method,
        how,
    )


def check_no_context(method: str, chunk_context: str | None) -> None:
    """Raise ConfigurationError if ``chunk_context`` is set for a method that encodes chunks without context."""
    if chunk_context is not None:
        raise ConfigurationError(
            f"method {method!r} encodes chunks without anything before them, got chunk_context={chunk_context!r}. "
            "Leave it out."
        )
