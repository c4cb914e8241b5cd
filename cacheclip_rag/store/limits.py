"""What a store folder and its tenants may hold, recorded for all processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ..base.database import Database
from .eviction import BATCH, EVERYONE, make_room

_ABOVE_QUOTA = (
    "SELECT namespace FROM quotas JOIN totals USING (namespace) "
    "WHERE typeof(quotas.bytes) = 'integer' AND totals.bytes > quotas.bytes"
)


class StoreLimits:
    """Bytes that may be stored, incomplete writes included."""

    def __init__(self, database: Database) -> None:
        """``database``: of a :class:`~.catalog.Catalog`."""
        self._database = database

    @property
    def of_store(self) -> int | None:
        """Limit of the store in bytes; None: no limit."""
        rows = self._database.query("SELECT value FROM meta WHERE name = 'max_bytes' AND typeof(value) = 'integer'")
        return rows[0][0] if rows else None

    def set_of_store(self, max_bytes: int | None) -> None:
        """Record the store's limit for all processes; None removes it."""
        with self._database.transaction() as run:
            run("DELETE FROM meta WHERE name = 'max_bytes'")
            if max_bytes is not None:
                run("INSERT INTO meta VALUES ('max_bytes', ?)", (max_bytes,))

    def quota(self, namespace: str) -> int | None:
        """A tenant's limit in bytes; None: only the store's limit."""
        sql = "SELECT bytes FROM quotas WHERE namespace = ? AND typeof(bytes) = 'integer'"
        rows = self._database.query(sql, (namespace,))
        return rows[0][0] if rows else None

    def set_quota(self, namespace: str, max_bytes: int | None) -> None:
        """Record a tenant's limit; None removes it."""
        with self._database.transaction() as run:
            run("DELETE FROM quotas WHERE namespace = ?", (namespace,))
            if max_bytes is not None:
                run("INSERT INTO quotas VALUES (?, ?)", (namespace, max_bytes))

    @property
    def are_exceeded(self) -> bool:
        """Whether the store or a tenant holds more than it may."""
        total = self._database.query("SELECT CAST(bytes AS INTEGER) FROM totals WHERE namespace = ?", (EVERYONE,))
        limit = self.of_store
        return (limit is not None and bool(total) and total[0][0] > limit) or bool(
            self._database.query(f"{_ABOVE_QUOTA} LIMIT 1")
        )

    def shrink(self, evict: Callable[[list[str]], None], most_s: float = math.inf) -> int:
        """Evict until all limits hold, for instance after a limit was lowered, or for ``most_s`` seconds; returns the
        number of entries."""
        until = time.monotonic() + most_s
        count = 0
        largest = "SELECT namespace FROM totals WHERE namespace != ? ORDER BY bytes DESC LIMIT 1"
        above = [*self._database.query(_ABOVE_QUOTA), *self._database.query(largest, (EVERYONE,))]
        for (namespace,) in above:
            fits = False
            while not fits and time.monotonic() < until:
                with self._database.transaction() as run:  # in batches, because others wait
                    fits, evicted = make_room(run, namespace, "", 0, evict, most=BATCH)
                count += evicted
                if not evicted:
                    break
        return count
