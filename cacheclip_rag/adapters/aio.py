"""Turns a blocking iterator into an asynchronous iterator, so that a model never runs in the event loop's thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from typing import TypeVar

from ..answering.turns import Waiter
from ..base.errors import is_panic
from ..fusion.answer import Answer, Event, last_answer

T = TypeVar("T")


async def iterate_in_thread(
    make_iterator: Callable[[], Iterator[T]], *, joins: bool = False, in_background: bool = False
) -> AsyncGenerator[T, None]:
    """Yield the items of ``make_iterator()``. A separate thread makes, advances and closes the iterator.

    The thread is not from the loop's pool, because a few long answers would block the pool. It starts when the first
    item is requested, and does not wait for a slow consumer, because items are small. It has the caller's context
    variables. Closing this generator early (or cancelling its consumer) stops the thread before its next item and
    closes the iterator, without waiting, unless it ``joins`` the thread: whoever limits how many threads compute counts
    those, too, whose consumers have left. A question that still waits for its turn leaves the queue. Prompts of others
    go before those ``in_background``.

    Raises:
        Whatever making or advancing the iterator raises, after the items that came before.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[str, T | BaseException | None]] = asyncio.Queue()
    caller, ended = Waiter(in_background=in_background), asyncio.Event()

    def send(kind: str, value: T | BaseException | None = None) -> None:
        with suppress(RuntimeError):  # the loop is closed, so the consumer is gone
            loop.call_soon_threadsafe(items.put_nowait, (kind, value))

    def work() -> None:
        try:
            if not caller.has_left:
                with caller.asking():
                    _send_all(make_iterator(), caller, lambda item: send("item", item))
        except BaseException as error:  # raised again in the consumer
            send("error", RuntimeError(f"a library failed: {error}") if is_panic(error) else error)
        else:
            send("end")
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    # the thread is not joined: it may be in a long step when the consumer leaves; errors arrive through the queue
    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="cacheclip-stream").start()
    try:
        while True:
            kind, value = await items.get()
            if kind == "item":
                yield value  # type: ignore[misc]
            elif kind == "error":
                raise value  # type: ignore[misc]
            else:
                return
    finally:
        caller.leave()
        if joins:
            await ended.wait()


async def answer_in_thread(events: Callable[[], Iterator[Event]]) -> Answer:
    """The answer of a stream of events, by :func:`iterate_in_thread`. A cancelled call stops before the next token."""
    async with aclosing(iterate_in_thread(events)) as arriving:
        return last_answer([event async for event in arriving])


def _send_all(iterator: Iterator[T], caller: Waiter, send: Callable[[T], None]) -> None:
    """Send the items until the consumer is gone, then close the iterator in this thread."""
    try:
        for item in iterator:
            send(item)
            if caller.has_left:
                return
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
