"""A lock for the forward passes of one model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Passes"]


class Passes:
    """Lets forward passes of one model run in parallel, except passes that need the model exclusively.

    Passes that change the model are exclusive: they set another attention function, or rotary frequencies that depend
    on the length. All passes of a model with offloaded weights are exclusive. The lock is not reentrant.
    """

    def __init__(self, *, one_at_a_time: bool) -> None:
        self._one_at_a_time = one_at_a_time
        self._changed = threading.Condition()
        self._running = 0
        self._is_exclusive = False
        """Whether the running pass is exclusive."""
        self._waiting = 0
        """Threads that wait for an exclusive pass. No other pass may start before them: on a busy server they would
        wait forever."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock for a pass that may run beside others."""
        if self._one_at_a_time:
            with self.exclusive():
                yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_exclusive)
            self._running += 1
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock for a pass beside which no other pass runs."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._running)
                self._running, self._is_exclusive = 1, True
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
            self._is_exclusive = False
            self._changed.notify_all()
