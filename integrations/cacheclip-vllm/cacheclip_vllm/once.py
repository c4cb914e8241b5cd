"""Warnings for errors that many requests may cause. Each error is a warning once, and then goes to the debug log."""

from __future__ import annotations

import logging

_MOST = 1000
"""Errors that are warned of: requests can make up new ones."""


class WarnOnce:
    """Logs errors, each as a warning at its first time only, and none as a warning any more after many."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._known: set[str] = set()

    def __call__(self, message: str, error: Exception, *, traced: bool = False) -> None:
        """``message``: what follows from the error, with one ``%s`` for it. ``traced``: the warning has the
        traceback."""
        text = f"{type(error).__name__}: {error}"
        is_new = text not in self._known and len(self._known) < _MOST
        if is_new:
            self._known.add(text)
        level = logging.WARNING if is_new else logging.DEBUG
        self._logger.log(level, message, text, exc_info=error if traced and is_new else None)
