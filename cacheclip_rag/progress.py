"""Progress bars for long work: on stderr, silent when stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Advance", "progress_bar"]

Advance = Callable[[float], None]
"""Call with the absolute amount done so far, in the bar's unit."""


@contextmanager
def progress_bar(title: str, total: float | None, unit: str = "bytes") -> Iterator[Advance]:
    """Show a bar with time left. ``unit`` is ``bytes`` (sizes and speed) or any noun (``chunks``)."""
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
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)

        def advance(done: float) -> None:
            bar.update(task, completed=done)

        yield advance
