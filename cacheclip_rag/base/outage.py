"""A warning that is given once per outage, not at every call that fails meanwhile."""

from __future__ import annotations

import logging


class OutageWarning:
    """Warns at the first failure, and again at the first one after something worked."""

    def __init__(self, logger: logging.Logger, message: str) -> None:
        """``message``: what does not work meanwhile, with one ``%s`` for the error."""
        self._logger, self._message = logger, message
        self._given = False

    def failed(self, error: Exception) -> None:
        if not self._given:
            self._logger.warning(self._message, error)
        self._given = True

    def worked(self) -> None:
        self._given = False
