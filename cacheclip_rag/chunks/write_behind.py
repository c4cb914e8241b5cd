"""Writes chunks to the store while the next ones are computed.

The store sees the same writes in the same order as without a thread, and nobody else uses it meanwhile: a computation
ends only when what was handed over before it is written. So an error in a write comes before anything later is written,
and memory holds the KV of two computations at most. A longer queue was rejected: it holds more KV, and hides more only
where writing takes longer than computing, and then not for long.
"""

from __future__ import annotations

import contextvars
import ctypes
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import TracebackType

import torch


class WriteBehind:
    """Writes that wait for the next computation. Use it in a ``with`` block, at whose end all is written and the thread
    has ended. A block that computes once needs no thread.

    What was handed over is written also if the block raises an error. After an interruption (Ctrl-C), only the write
    that is under way is completed.
    """

    def __init__(self) -> None:
        self._writes: deque[tuple[str, Callable[[], object]]] = deque()
        """Keys and functions that write them."""
        self._is_interrupted = False
        self._thread = ThreadPoolExecutor(1, "cacheclip-write", initializer=_compute_alone)  # starts at first use

    def add(self, write: Callable[[], object], key: str = "") -> None:
        """Hand over a write, of this key of the store if it writes KV: during the next computation, or at the end of
        the block, it is called, perhaps by another thread."""
        self._writes.append((key, write))

    def awaits(self, keys: Collection[str]) -> bool:
        """Whether one of these keys is yet to be written."""
        return any(key in keys for key, _ in self._writes)

    def catch_up(self) -> bool:
        """Write now what was handed over; True if there was something."""
        was_behind = bool(self._writes)
        self._write()
        return was_behind

    @contextmanager
    def beside(self) -> Iterator[None]:
        """While the block computes, what was handed over is written. At the end of the block, all of it is.

        Raises what a write raises, also if the block fails: the write comes first.
        """
        if not self._writes:
            yield
            return
        writing = self._thread.submit(contextvars.copy_context().run, self._write)  # it may wait as long as this one
        try:
            yield
        except Exception:
            writing.result()
            raise
        writing.result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._is_interrupted = kind is not None and not issubclass(kind, Exception)
        try:
            self._write()
        finally:
            self._thread.shutdown()

    def _write(self) -> None:
        try:
            while self._writes and not self._is_interrupted:
                _, write = self._writes.popleft()
                write()
        except BaseException:
            self._writes.clear()  # as without a thread, nothing is written after an error
            raise


def _compute_alone() -> None:
    """Let torch use no other threads for this one: they would take the cores that compute. OpenMP's setting holds for
    the calling thread; torch's own would also hold for all threads that start later."""
    torch.get_num_threads()  # torch sets a thread's number when it first asks for it
    with suppress(OSError, AttributeError):  # a torch without OpenMP
        ctypes.CDLL(torch._C.__file__).omp_set_num_threads(1)
