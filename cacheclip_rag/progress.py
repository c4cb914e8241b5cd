"""Progress bars for long work: on stderr, silent when stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Advance", "progress_bar"]

Advance = Callable[[float], None]
"""Call with the absolute amount done so far, in the bar's unit."""
_SPEED_OVER_S = 86400.0
"""Seconds whose speed tells the time left. rich's own 30 forget the step before a slow one, and with it any speed."""


@contextmanager
def progress_bar(
    title: str,
    total: float | None,
    unit: str = "bytes",
    *,
    done: int = 0,
    get_time: Callable[[], float] | None = None,
) -> Iterator[Advance]:
    """Show a bar with time left.

    Args:
        total: amount in all; None if nobody knows.
        unit: ``bytes`` (sizes and speed) or any noun (``chunks``).
        done: amount done before, by an earlier run: no measure of this one's speed.
        get_time: seconds on a clock that never goes back; None for the system's.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    bar = Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=_SPEED_OVER_S,
        get_time=get_time,
    )
    with bar:
        task = bar.add_task(title, total=total, completed=done)

        def advance(done: float) -> None:
            bar.update(task, completed=done)

        yield advance
