"""How many questions are answered at once, and how many may wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .errors import RequestError

__all__ = ["Queue"]


class Queue:
    """First come, first served. Used by one event loop."""

    def __init__(self, most_running: int, most_waiting: int) -> None:
        self.running = 0
        self.waiting = 0
        self._most_waiting = most_waiting
        self._free = asyncio.Semaphore(most_running)
        self._seconds = 1.0
        """Of an answer: a mean in which later ones count more."""

    @asynccontextmanager
    async def place(self) -> AsyncIterator[float]:
        """The place of one answer; gives the seconds that it waited for it.

        Raises:
            RequestError: too many wait already (429, with ``Retry-After``).
        """
        began = time.perf_counter()
        if self._free.locked() and self.waiting >= self._most_waiting:
            seconds = max(1, math.ceil(self._seconds))
            raise RequestError(
                f"{self.running} questions are being answered and {self.waiting} wait, which is the most that this "
                f"server takes. Ask again in {seconds} s.",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(seconds)},
            )
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        started = time.perf_counter()
        try:
            yield started - began
        finally:
            self._seconds += 0.2 * (time.perf_counter() - started - self._seconds)
            self.running -= 1
            self._free.release()
