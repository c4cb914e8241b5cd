"""Checks of settings that many parts share; free of torch."""

from __future__ import annotations

from typing import Any

from .errors import ConfigurationError

__all__ = ["check_whole_number", "is_whole_number"]


def is_whole_number(value: Any) -> bool:
    """Whether this is an int, and neither True nor False, which Python counts among them."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole_number(name: str, value: Any, *, least: int = 0, most: int | None = None, of: str = "") -> None:
    """Raise ConfigurationError unless ``value``, of the setting ``name``, is a whole number within its bounds.

    Args:
        of: what it counts (``tokens``).
    """
    if is_whole_number(value) and value >= least and (most is None or value <= most):
        return
    number = f"a whole number of {of}," if of else "a whole number"
    bounds = f"from {least} to {most}" if most is not None else f"{least} or more"
    comma = "" if of or most is not None else ","
    raise ConfigurationError(f"{name} must be {number}{comma} {bounds}, got {value!r}.")
