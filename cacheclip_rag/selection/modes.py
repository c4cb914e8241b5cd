"""Names of the groupings and the bounds of their settings; free of torch, so that settings are checked at once."""

from __future__ import annotations

from ..checks import check_whole_number
from ..errors import ConfigurationError

__all__ = ["GROUPING_NAMES", "check_grouping"]

GROUPING_NAMES = ("window_score", "vote_sliding", "v1_literal", "sentence")
_WITH_THRESHOLD = ("vote_sliding", "v1_literal")


def check_grouping(mode: str, window: int, threshold: int) -> None:
    """Raise ConfigurationError unless mode, window and threshold make sense, and together if the mode uses a
    threshold."""
    if mode not in GROUPING_NAMES:
        raise ConfigurationError(f"grouping must be one of {', '.join(GROUPING_NAMES)}, got {mode!r}.")
    check_whole_number("window", window, least=1, of="tokens")
    check_whole_number("threshold", threshold, of="tokens")
    if mode in _WITH_THRESHOLD and threshold >= window:
        raise ConfigurationError(
            f"expected a threshold below the window for grouping {mode!r}, got threshold={threshold} and "
            f"window={window}. Lower it: no window can hold more chosen tokens than it has."
        )
