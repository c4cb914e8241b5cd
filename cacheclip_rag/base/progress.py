"""Progress of long work on stderr: a bar in a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

Advance = Callable[[float], None]
"""Called with the total amount done so far, in the bar's unit."""
_SPEED_OVER_S = 86400.0
"""Seconds over which the speed is measured. With rich's default of 30, slow steps leave no measured speed."""
_LINE_EVERY_S = 10.0
"""Seconds between two lines without a terminal. Shorter work prints no line."""


@contextmanager
def progress_bar(
    title: str, total: float | None, unit: str = "bytes", *, done: int = 0, get_time: Callable[[], float] | None = None
) -> Iterator[Advance]:
    """Show a bar with time left, or lines (``precomputing: 120 of 345 chunks, 0:01:20 left``) where stderr is not a
    terminal.

    Args:
        total: total amount; None if unknown.
        unit: ``bytes`` (sizes and speed) or any noun (``chunks``).
        done: amount done by an earlier run, which does not count for the speed.
        get_time: monotonic clock in seconds; None: the system's.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title, total, unit, done, get_time or time.monotonic)
        return
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    bar = Progress(*columns, console=console, speed_estimate_period=_SPEED_OVER_S, get_time=get_time)
    with bar:
        task = bar.add_task(title, total=total, completed=done)

        def advance(done: float) -> None:
            bar.update(task, completed=done)

        yield advance


def _lines(title: str, total: float | None, unit: str, begun: float, get_time: Callable[[], float]) -> Advance:
    """``begun``: amount done before."""
    start = last = get_time()

    def advance(done: float) -> None:
        nonlocal last
        now = get_time()
        if now - last < _LINE_EVERY_S:
            return
        last = now
        scale, noun = 1.0, unit
        if unit == "bytes":
            scale, noun = (1e3, "kB") if total is not None and total < 1e7 else (1e6, "MB")
        of, left = "", ""
        if total is not None:
            of = f" of {total / scale:.0f}"
            if (total - begun) / 100 < done - begun < total - begun:  # before it, nobody knows
                left = f", {timedelta(seconds=round((total - done) * (now - start) / (done - begun)))} left"
        print(f"{title}: {done / scale:.0f}{of} {noun}{left}", file=sys.stderr, flush=True)

    return advance
