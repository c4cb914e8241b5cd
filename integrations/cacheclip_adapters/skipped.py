"""What happens with a document that cannot be precomputed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def warn_skipped(text: str, sources: Sequence[str], error: Exception) -> None:
    """Say which document has no KV, and why; the index is built all the same. Prompts with it are answered as without
    this package."""
    names = ", ".join(sources) or "without an id"
    logger.warning("document %s (%r...) is not precomputed: %s", names, text[:40], error)
