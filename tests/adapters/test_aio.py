"""The bridge from blocking iterators to asynchronous ones."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator

import pytest

from cacheclip_rag.adapters.aio import iterate_in_thread


class Counter:
    """Counts up, slowly and for ever; knows who advanced it and whether it was closed."""

    def __init__(self, delay_s: float = 0.005) -> None:
        self.delay_s, self.made, self.threads, self.closed = delay_s, 0, set[threading.Thread](), threading.Event()

    def iterate(self) -> Iterator[int]:
        try:
            while True:
                self.threads.add(threading.current_thread())
                time.sleep(self.delay_s)
                self.made += 1
                yield self.made
        finally:
            self.threads.add(threading.current_thread())
            self.closed.set()


async def test_items_arrive_in_order_made_with_the_callers_context_variables() -> None:
    tenant = contextvars.ContextVar("tenant", default="nobody")
    tenant.set("alice")
    items = [*range(100), None, 1, None]

    def make() -> Iterator[object]:
        yield from items
        yield tenant.get()

    assert [item async for item in iterate_in_thread(make)] == [*items, "alice"]


async def test_errors_come_after_the_items_before_them() -> None:
    def failing() -> Iterator[int]:
        yield from (1, 2)
        raise KeyError("third")

    def cannot_be_made() -> Iterator[int]:
        raise LookupError("no such model")

    stream = iterate_in_thread(failing)
    assert [await anext(stream), await anext(stream)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        await anext(stream)
    with pytest.raises(LookupError, match="no such model"):
        await anext(iterate_in_thread(cannot_be_made))


async def test_the_loop_stays_responsive() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    stream = iterate_in_thread(Counter(delay_s=0.2).iterate)
    await anext(stream)
    await stream.aclose()
    ticking.cancel()
    assert ticks > 5


async def test_one_thread_works_from_the_first_item_until_the_stream_is_closed() -> None:
    counter = Counter()
    stream, unused = iterate_in_thread(counter.iterate), iterate_in_thread(counter.iterate)
    await asyncio.sleep(0.03)
    assert counter.made == 0
    await unused.aclose()
    assert [await anext(stream) for _ in range(5)] == [1, 2, 3, 4, 5]
    await stream.aclose()
    assert await asyncio.to_thread(counter.closed.wait, 5)
    made = counter.made
    await asyncio.sleep(0.05)
    assert counter.made == made and len(counter.threads) == 1 and threading.main_thread() not in counter.threads


async def test_cancelling_the_consumer_stops_the_worker() -> None:
    counter = Counter()

    async def consume() -> None:
        async for _ in iterate_in_thread(counter.iterate):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(counter.closed.wait, 5)


async def test_many_streams_at_once_leave_the_loops_own_threads_free() -> None:
    streams = [iterate_in_thread(Counter().iterate) for _ in range(40)]
    assert await asyncio.gather(*map(anext, streams)) == [1] * 40
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5) == "free"
    for stream in streams:
        await stream.aclose()


def test_a_loop_that_ends_leaves_no_worker_behind() -> None:
    counter = Counter()

    async def take_one() -> int:
        return await anext(iterate_in_thread(counter.iterate))

    assert asyncio.run(take_one()) == 1
    assert counter.closed.wait(5)
