"""Who may run a model at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Passes"]


class Passes:
    """Forward passes of one model: many at a time, except where a pass must have the model for itself.

    Alone are passes that change the model (another attention function, rotary frequencies that follow the length) and
    all passes of a model whose weights come and go with each pass (offloading). Not reentrant.
    """

    def __init__(self, *, one_at_a_time: bool) -> None:
        self._one_at_a_time = one_at_a_time
        self._changed = threading.Condition()
        self._running = 0
        self._alone = False
        """Whether the one that runs must stay alone."""
        self._waiting = 0
        """Threads that want to be alone: nobody may start before them, or they would wait forever on a busy server."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """An ordinary pass."""
        if self._one_at_a_time:
            with self.alone():
                yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._alone)
            self._running += 1
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A pass during which no other runs."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._running)
                self._running, self._alone = 1, True
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._running -= 1
            self._alone = False
            self._changed.notify_all()
