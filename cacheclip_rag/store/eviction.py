"""Who loses what when there is no room: evictions inside a transaction of the catalog."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from ..base.keys import is_key

EVERYONE = ""
"""Namespace of the row with the totals of all tenants. No tenant has an empty name."""

LEARNED = "cacheclip:learned"
"""Source of texts that were stored because they recurred in prompts. Their entries are evicted first. Callers cannot
give it to texts of theirs."""
LEARNED_ENTRIES = (
    "sources JOIN entries USING (namespace, digest) WHERE namespace = ? AND source = ? AND NOT EXISTS (SELECT 1 FROM "
    "sources AS other WHERE other.namespace = sources.namespace AND other.digest = sources.digest AND other.source != "
    "sources.source)"
)
"""Entries of a tenant's texts that have this source and no other."""

PROMPTS = bytes(16)
"""In place of the digest of a text, in entries with KV of prompts. They are evicted before all others."""

BATCH = 256
"""Entries removed in one transaction when many go, so that other processes do not wait for all of them."""

Run = Callable[..., Any]
"""``run(sql, arguments)`` inside a transaction."""


def _in_order(run: Run, tenant: str, of_prompt: bool) -> Iterator[tuple[str, int]]:
    """Keys and bytes of a tenant's entries, some of them twice, in the order in which they are evicted."""
    entries = "SELECT key, CAST(bytes AS INTEGER) FROM {} ORDER BY last_use, key"
    yield from run(entries.format("entries WHERE namespace = ? AND digest = ?"), (tenant, PROMPTS))
    if not of_prompt:
        yield from run(entries.format(LEARNED_ENTRIES), (tenant, LEARNED))
        yield from run(entries.format("entries WHERE namespace = ?"), (tenant,))


def make_room(
    run: Run,
    namespace: str,
    key: str,
    num_bytes: int,
    evict: Callable[[list[str]], None],
    *,
    most: int | None = None,
    of_prompt: bool = False,
) -> tuple[bool, int]:
    """Evict, about ``most`` entries at most, until ``num_bytes`` more fit for this tenant, in place of the entry of
    ``key``: whether they fit, and the number of entries evicted. ``of_prompt``: only KV of prompts is evicted."""
    evicted = 0

    def free(tenant: str, excess: int, keep: str) -> int:
        """Evict a tenant's least recently used entries until ``excess`` bytes are free; returns the bytes freed."""
        nonlocal evicted
        victims: dict[str, int] = {}
        room = 0
        for victim, size in _in_order(run, tenant, of_prompt):
            if room >= excess or (most is not None and len(victims) >= most):
                break
            if victim != keep and victim not in victims:
                victims[victim] = size
                room += size
        freed = 0
        if victims:
            evict([victim for victim in victims if is_key(victim)])
            for victim, size in victims.items():
                # an index that contradicts its table names entries that are not there
                if run("DELETE FROM entries WHERE key = ?", (victim,)).rowcount:
                    evicted += 1
                    freed += max(size, 1)
        return freed

    def over(tenant: str, limit: int | None) -> int:
        """Bytes above the limit, with the bytes to come."""
        if limit is None:
            return 0
        return _bytes_of(run, tenant) + num_bytes - limit

    quota = run("SELECT bytes FROM quotas WHERE namespace = ? AND typeof(bytes) = 'integer'", (namespace,)).fetchone()
    limit = run("SELECT value FROM meta WHERE name = 'max_bytes' AND typeof(value) = 'integer'").fetchone()
    quota, limit = (row[0] if row else None for row in (quota, limit))
    for keep in (key, ""):  # the key's older version goes last: it is lost if the write fails
        if (excess := over(namespace, quota)) > 0:
            free(namespace, excess, keep)
        exhausted: set[str] = set()
        while (excess := over(EVERYONE, limit)) > 0 and (most is None or evicted < most):
            largest, ahead = _largest(run, namespace, num_bytes, exhausted)
            if largest is None:
                break
            if not free(largest, min(excess, max(ahead, 1)), keep):
                exhausted.add(largest)
    return over(namespace, quota) <= 0 and over(EVERYONE, limit) <= 0, evicted


def _largest(run: Run, writing: str, num_bytes: int, without: Collection[str]) -> tuple[str | None, int]:
    """The tenant with the most bytes, if ``writing`` writes ``num_bytes`` more, and by how many bytes it is ahead of
    the next."""
    sql = "SELECT namespace, CAST(bytes AS INTEGER) FROM totals WHERE namespace != ? ORDER BY bytes DESC LIMIT ?"
    held_by = dict(run(sql, (EVERYONE, len(without) + 2)).fetchall())
    if held := _bytes_of(run, writing):
        held_by[writing] = held + num_bytes
    ranked = sorted(((size, name) for name, size in held_by.items() if name not in without), reverse=True)
    if not ranked:
        return None, 0
    return ranked[0][1], ranked[0][0] - (ranked[1][0] if len(ranked) > 1 else 0)


def _bytes_of(run: Run, namespace: str) -> int:
    row = run("SELECT CAST(bytes AS INTEGER) FROM totals WHERE namespace = ?", (namespace,)).fetchone()
    return int(row[0]) if row else 0
