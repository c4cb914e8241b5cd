"""How many questions are answered at once, how many may wait, and whose turn it is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import filterfalse

from .errors import RequestError


class QueueFull(RequestError):
    """Too many questions of a tenant wait already."""


_MOST_STARTING = 4
"""Most questions whose first token has not come, beside those that pass them. Prompts are computed one by one: more of
them would only let the first tenant that asks fill the engine's queue, in which tenants are not told apart."""
_SHARE_OF_ONE = 0.75
"""Share of the KV that one of several tenants may hold."""
_BACKGROUND = 4
"""For so many questions that may start at once, one may be answered in the background."""


@dataclass(eq=False, slots=True)
class Place:
    """The place of one answer."""

    tenant: str
    num_bytes: int
    in_background: bool = False
    num_tokens: int = 0
    """Of its prompt, as far as is known."""
    rank: int = 0
    """Tokens of prompts that were done when it came, and its own."""
    given: asyncio.Future[None] | None = None
    """None: it never waited."""
    is_starting: bool = True


class Queue:
    """Places for questions, by the KV that their answers hold. Tenants are served in turn, and of a tenant's questions
    the one of the lowest rank comes first: short ones pass long ones, also those that wait for their first token, and
    no more tokens pass a question than its prompt has. A tenant that floods the server fills its own waiting places
    only, and never the last running one. Questions in the background are served in the same way, but few at once, and
    none begins while another question waits, or waits for its first token. Used by one event loop."""

    most_bytes: float = math.inf
    """Bytes of KV that running answers may hold together. An answer that needs more runs alone."""

    def __init__(
        self, most_running: int, most_waiting: int, *, is_shared: bool = False, most_starting: int = _MOST_STARTING
    ) -> None:
        """``most_running`` answers, whatever they hold; ``most_waiting`` of one tenant. With several tenants
        (``is_shared``), one place is kept free of each of them."""
        self._most_running, self._most_waiting, self._is_shared = most_running, most_waiting, is_shared
        self._most_starting = most_starting
        self._places: list[Place] = []
        """Of running answers."""
        self._waiting: dict[str, list[Place]] = {}
        """Tenants with waiting questions, the next one first."""
        self._behind: dict[str, list[Place]] = {}
        """The same for questions in the background."""
        self._done = 0
        """Tokens of prompts that have been answered, or begun to be."""
        self._seconds = 1.0
        """Of an answer: a mean in which later ones count more."""

    @property
    def running(self) -> int:
        return len(self._places)

    @property
    def waiting(self) -> int:
        return sum(map(len, (*self._waiting.values(), *self._behind.values())))

    @asynccontextmanager
    async def place(
        self,
        tenant: str,
        num_bytes: int = 0,
        *,
        num_tokens: int = 0,
        goes_on: bool = False,
        in_background: bool = False,
    ) -> AsyncIterator[Callable[[], None]]:
        """The place of one answer that needs so much KV, to a prompt of so many tokens. Gives a function to be called
        when its first token is there. Raises QueueFull: too many of the tenant's wait already (429, with
        ``Retry-After``), unless the answer is the next one of a request that ``goes_on``, whose answers so far would be
        lost."""
        place = Place(tenant, num_bytes, in_background, num_tokens, self._done + num_tokens)
        if self._may_run(place) and all(self._is_at_its_limit(_next(each)) for each in self._line(place).values()):
            self._places.append(place)
        else:
            await self._wait(place, goes_on)
        began = time.perf_counter()
        try:
            yield lambda: self._started(place)
        finally:
            self._seconds += 0.2 * (time.perf_counter() - began - self._seconds)
            self._leave(place)

    def _is_at_its_limit(self, place: Place) -> bool:
        """Whether other tenants come first, however much is free."""
        own, kept = [other for other in self._places if other.tenant == place.tenant], int(self._is_shared)
        if len(own) >= max(1, self._most_running - kept):
            return True
        if _starting_before(place, own) >= self._most_starting - kept:
            return True
        held = sum(other.num_bytes for other in own)
        return self._is_shared and held > _SHARE_OF_ONE * self.most_bytes

    def _line(self, place: Place) -> dict[str, list[Place]]:
        return self._behind if place.in_background else self._waiting

    def _may_run(self, place: Place) -> bool:
        if place.in_background:
            behind = sum(other.in_background for other in self._places)
            is_full = behind >= max(1, self._most_starting // _BACKGROUND)
            if is_full or self._waiting or any(other.is_starting for other in self._places):
                return False
        if self._is_at_its_limit(place) or self.running >= self._most_running:
            return False
        if _starting_before(place, self._places) >= self._most_starting:
            return False
        held = sum(other.num_bytes for other in self._places)
        return not self._places or held + place.num_bytes <= self.most_bytes

    async def _wait(self, place: Place, goes_on: bool) -> None:
        """Wait until :meth:`_give` takes the place."""
        tenant, line = place.tenant, self._line(place)
        waiting = line.setdefault(tenant, [])
        if len(waiting) >= self._most_waiting and not goes_on:
            _check_empty(line, tenant)
            seconds = max(1, math.ceil(self._seconds))
            running = sum(other.tenant == tenant for other in self._places)
            raise QueueFull(
                f"{running} of your questions are being answered and {len(waiting)} wait, which is the most that this "
                f"server takes. Ask again in {seconds} s.",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(seconds)},
            )
        place.given = asyncio.get_running_loop().create_future()
        waiting.append(place)
        self._give()  # it may pass those that wait
        try:
            await place.given
        except BaseException:
            if place.given.done() and not place.given.cancelled():
                self._leave(place)  # it left when it had just got its place
            elif place in waiting:
                waiting.remove(place)
                _check_empty(line, tenant)
                self._give()  # perhaps it stood before others
            raise

    def _started(self, place: Place) -> None:
        if place.is_starting:
            place.is_starting = False
            self._done += place.num_tokens
            self._give()

    def _leave(self, place: Place) -> None:
        self._places.remove(place)
        self._done += place.num_tokens * place.is_starting
        self._give()

    def _give(self) -> None:
        """Give what is free to those who wait, and what nobody wants to those in the background."""
        for line in (self._waiting, self._behind):
            self._give_to(line)

    def _give_to(self, line: dict[str, list[Place]]) -> None:
        """Give what is free to those in a line, one tenant after the other. Nobody overtakes a question that waits for
        more KV than is free: it would wait for ever."""
        while place := next(filterfalse(self._is_at_its_limit, map(_next, line.values())), None):
            tenant, waiting = place.tenant, line[place.tenant]
            assert place.given is not None, "who waits has a future"
            if not place.given.done() and not self._may_run(place):
                return
            waiting.remove(place)
            del line[tenant]
            if waiting:
                line[tenant] = waiting  # behind the others
            if not place.given.done():  # else it has just left
                self._places.append(place)
                place.given.set_result(None)


def _next(waiting: Iterable[Place]) -> Place:
    """Of a tenant's questions, the one that comes first."""
    return min(waiting, key=lambda each: each.rank)


def _starting_before(place: Place, others: Iterable[Place]) -> int:
    """Number of places without a first token whose prompts are computed before that of ``place``."""
    return sum(other.is_starting and other.rank <= place.rank for other in others)


def _check_empty(line: dict[str, list[Place]], tenant: str) -> None:
    if not line.get(tenant, True):
        del line[tenant]
