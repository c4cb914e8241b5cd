"""Methods for checkpoints that were trained to read chunks apart. With any other model their answers suffer."""

from __future__ import annotations

import logging
from functools import cache

from ...errors import ConfigurationError

__all__ = ["check_no_context", "warn_untuned"]

logger = logging.getLogger(__name__)


@cache
def warn_untuned(method: str, how: str) -> None:
    """Say, once per process, that a method's answers are only as good as a checkpoint trained for it."""
    logger.warning(
        "method %r is made for checkpoints trained %s; with any other, answers suffer. Set tuned=True for one that is.",
        method,
        how,
    )


def check_no_context(method: str, chunk_context: str | None) -> None:
    """Raise ConfigurationError if a method that encodes its chunks in its own way is given a chunk context."""
    if chunk_context is not None:
        raise ConfigurationError(
            f"method {method!r} encodes chunks without anything before them, got chunk_context={chunk_context!r}. "
            "Leave it out."
        )
