"""Threads that wait for media on which many reads at once are faster than one after the other: one pool a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

_MOST = 16
"""Reads under way, of all requests of the process."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@cache
def _pool(pid: int, name: str = "cacheclip-reads", most: int = _MOST) -> ThreadPoolExecutor:
    """A forked process has no threads of its parent's."""
    return ThreadPoolExecutor(most, name)


def later(work: Callable[[], object]) -> Future[Any]:
    """Work that nobody waits for, one after the other."""
    return _pool(os.getpid(), "cacheclip-copies", 1).submit(work)


def each_in_pool(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``work`` of each item. Not to be called by work of the pool: all of its threads might wait for one another."""
    return [work(items[0])] if len(items) == 1 else [*_pool(os.getpid()).map(work, items)]


def in_order(work: Iterable[Callable[[], object]], at_once: int, is_wanted: Callable[[], bool]) -> None:
    """Begin work in order, up to ``at_once`` of it at a time, while it is wanted; one at a time is done here. Ends when
    what was begun has ended, and raises the first error."""
    running: set[Future[Any]] = set()
    ended: list[Future[Any]] = []
    try:
        for each in work:
            if not is_wanted():
                break
            if at_once == 1:
                each()
                continue
            while len(running) >= at_once:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                ended += [future for future in done if future.exception() is not None]
            running.add(_pool(os.getpid()).submit(each))
    finally:
        wait(running)
    for future in (*ended, *running):
        future.result()
