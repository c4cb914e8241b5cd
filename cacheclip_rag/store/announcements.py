"""Writes that are announced before their payload is there: their bytes count at once, and what a killed process leaves
can be found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any

from ..base.database import Database
from ..base.errors import StoreError
from ..base.keys import is_key
from .codecs import FrameError
from .entries import Entry, correct, next_row, record
from .eviction import BATCH, Run, make_room

_DROPPED = "-"
"""Before the key of a write whose tenant was dropped while it went on."""


class Announcements:
    """The writes of a catalog that have not ended."""

    def __init__(self, database: Database) -> None:
        """``database``: of a :class:`~.catalog.Catalog`."""
        self._database = database

    def reserve(
        self,
        namespace: str,
        key: str,
        num_bytes: int,
        writer: str,
        evict: Callable[[list[str]], None],
        *,
        of_prompt: bool = False,
    ) -> tuple[int | None, int]:
        """Make room for a payload and announce its write: the number of the write, or None if there is no room, and the
        number of entries evicted. ``evict`` is called inside the transaction, so that their room cannot be taken twice.

        A tenant above its quota loses its own least recently used entries. Above the store's limit, the tenant with the
        most bytes loses its least recently used ones, so that one tenant's flood evicts none of the others. The write
        must end with :meth:`finish` or :meth:`abandon`. ``of_prompt``: only KV of prompts is evicted."""
        with self._database.transaction() as run:
            holder = run("SELECT namespace FROM entries WHERE key = ?", (key,)).fetchone()
            if holder is not None and holder[0] != namespace:
                raise StoreError(f"the key {key[:12]}… belongs to another tenant. Make keys with chunk_key.")
            fits, evicted = make_room(run, namespace, key, num_bytes, evict, of_prompt=of_prompt)
            if not fits and not of_prompt and run("SELECT 1 FROM writes").fetchone() is None:
                raise StoreError(
                    "no room for a chunk cache, though nothing else is being written: the catalog contradicts itself. "
                    "Run cacheclip store repair."
                )
            if not fits:
                return None, evicted
            sql = "INSERT INTO writes (key, namespace, bytes, writer) VALUES (?, ?, ?, ?)"
            return run(sql, (key, namespace, num_bytes, writer)).lastrowid, evicted

    def finish(self, number: int, measure: Callable[[], Entry | None], discard: Callable[[], None]) -> None:
        """End a write whose payload is complete. ``measure`` looks at the medium: another process may have replaced or
        deleted the payload meanwhile. If the tenant was dropped meanwhile, ``discard`` deletes it instead."""
        with self._database.transaction() as run:
            write = run("SELECT key FROM writes WHERE id = ?", (number,)).fetchone()
            dropped = str(write[0] if write is not None else "").removeprefix(_DROPPED)
            # who wrote the key after the tenant was dropped keeps it
            again = run("SELECT 1 FROM entries WHERE key = ?", (dropped,)).fetchone() is not None
            if write is not None and not is_key(write[0]) and not again:
                discard()
            elif (entry := measure()) is not None:
                record(run, entry)
            run("DELETE FROM writes WHERE id = ?", (number,))  # its bytes count until now

    def abandon(self, number: int) -> None:
        """End a write that left no payload."""
        self._database.execute("DELETE FROM writes WHERE id = ?", (number,))

    def drop(self, namespace: str) -> None:
        """The tenant was dropped: its writes that are going on count until their payloads are deleted."""
        mark = "UPDATE writes SET key = ? || key WHERE namespace = ? AND substr(key, 1, 1) != ?"
        self._database.execute(mark, (_DROPPED, namespace, _DROPPED))

    def writers(self) -> list[str]:
        """Processes with writes that are not complete."""
        return [writer for (writer,) in self._database.query("SELECT DISTINCT writer FROM writes")]

    def settle(
        self,
        writers: Collection[str],
        measure: Callable[[str], Entry | None],
        evict: Callable[[list[str]], None],
        until: float = math.inf,
    ) -> int:
        """End the writes of killed processes, until ``until`` by :func:`time.monotonic`; returns how many there were. A
        write for which ``measure`` raises OSError, MemoryError or FrameError stays announced."""
        count, last = 0, -1
        sql = "SELECT id, key, writer FROM writes WHERE id > ? ORDER BY id LIMIT ?"
        while rows := self._database.query(sql, (last, 4 * BATCH)):
            last = next_row(last, rows[-1][0])
            ended = [(number, key) for number, key, writer in rows if writer in writers]
            for first in range(0, len(ended), BATCH):
                if time.monotonic() > until:
                    return count
                with self._database.transaction() as run:
                    for number, key in ended[first : first + BATCH]:
                        count += _settle(run, number, key, measure, evict)
        return count

    def is_being_written(self, key: str) -> bool:
        """Whether a process has announced to write a key, be it for a tenant that was dropped meanwhile."""
        return bool(self._database.query("SELECT 1 FROM writes WHERE key IN (?, ?)", (key, _DROPPED + key)))

    def is_announced(self, key: str) -> bool:
        """Whether a process has announced to write a key, or has recorded it."""
        sql = "SELECT 1 FROM writes WHERE key IN (?, ?) UNION ALL SELECT 1 FROM entries WHERE key = ?"
        return bool(self._database.query(sql, (key, _DROPPED + key, key)))


def _settle(
    run: Run, number: int, key: Any, measure: Callable[[str], Entry | None], evict: Callable[[list[str]], None]
) -> bool:
    """End a write of a killed process; False if it stays announced."""
    dropped = str(key).removeprefix(_DROPPED)
    if run("SELECT 1 FROM writes WHERE id = ?", (number,)).fetchone() is None:
        return False  # another process ended it
    try:
        if is_key(key):
            correct(run, key, measure)
        elif is_key(dropped) and not run("SELECT 1 FROM entries WHERE key = ?", (dropped,)).fetchone():
            evict([dropped])
    except (OSError, MemoryError, FrameError):
        return False
    return bool(run("DELETE FROM writes WHERE id = ?", (number,)).rowcount)
