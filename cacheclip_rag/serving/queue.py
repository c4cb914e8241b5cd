"""How many questions are answered at once, how many may wait, and whose turn it is."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .errors import RequestError

__all__ = ["Queue", "QueueFull"]


class QueueFull(RequestError):
    """Too many questions of a tenant wait already."""


class Queue:
    """Places for questions. Tenants are served in turn, and the questions of one tenant in the order in which they
    came. A tenant that floods the server fills its own waiting places only, and never the last running one. Used by one
    event loop."""

    def __init__(self, most_running: int, most_waiting: int, *, is_shared: bool = False) -> None:
        """
        Args:
            most_waiting: of one tenant.
            is_shared: whether there are several tenants. One place is then kept free of each of them.
        """
        self._most_running, self._most_waiting = most_running, most_waiting
        self._most_of_one = max(1, most_running - 1) if is_shared else most_running
        self._running = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Tenants with waiting questions, the next one first."""
        self._seconds = 1.0
        """Of an answer: a mean in which later ones count more."""

    @property
    def running(self) -> int:
        """Questions that have a place."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """Questions that wait for one."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[float]:
        """The place of one answer; gives the seconds that it waited for it.

        Raises:
            QueueFull: too many of the tenant's wait already (429, with ``Retry-After``).
        """
        began = time.perf_counter()
        if not self._may_run(tenant):
            await self._wait(tenant)
        else:
            self._running[tenant] += 1
        started = time.perf_counter()
        try:
            yield started - began
        finally:
            self._seconds += 0.2 * (time.perf_counter() - started - self._seconds)
            self._leave(tenant)

    def _may_run(self, tenant: str) -> bool:
        return self.running < self._most_running and self._running[tenant] < self._most_of_one

    async def _wait(self, tenant: str) -> None:
        """Wait for a place, which :meth:`_give` takes for the one who waits."""
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= self._most_waiting:
            self._check_empty(tenant)
            seconds = max(1, math.ceil(self._seconds))
            raise QueueFull(
                f"{self._running[tenant]} of your questions are being answered and {len(waiting)} wait, which is the "
                f"most that this server takes. Ask again in {seconds} s.",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(seconds)},
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._leave(tenant)  # it left when it had just got its place
            elif turn in waiting:
                waiting.remove(turn)
                self._check_empty(tenant)
            raise

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._give()

    def _give(self) -> None:
        """Give free places to those who wait, one tenant after the other."""
        while (tenant := next(filter(self._may_run, self._waiting), None)) is not None:
            waiting = self._waiting.pop(tenant)
            turn = waiting.popleft()
            if not turn.done():  # else it has just left
                self._running[tenant] += 1
                turn.set_result(None)
            if waiting:
                self._waiting[tenant] = waiting  # behind the others

    def _check_empty(self, tenant: str) -> None:
        if not self._waiting.get(tenant, True):
            del self._waiting[tenant]
