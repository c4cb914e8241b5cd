"""Names of the groupings and the bounds of their settings; free of torch, so that settings are checked at once."""

from __future__ import annotations

from ..checks import is_whole_number
from ..errors import ConfigurationError

__all__ = ["GROUPING_NAMES", "check_grouping"]

GROUPING_NAMES = ("window_score", "vote_sliding", "v1_literal", "sentence")


def check_grouping(mode: str, window: int, threshold: int) -> None:
    """Raise ConfigurationError unless mode, window and threshold make sense together."""
    if mode not in GROUPING_NAMES:
        raise ConfigurationError(f"grouping must be one of {', '.join(GROUPING_NAMES)}, got {mode!r}.")
    if not (is_whole_number(window) and is_whole_number(threshold) and 0 <= threshold < window):
        raise ConfigurationError(
            f"expected window >= 1 and 0 <= threshold < window, got window={window}, threshold={threshold}."
        )
